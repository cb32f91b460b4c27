"""GEMM kernels: how a product with an N:M operand is executed."""

from lightning_nm.kernels.api import GemmKernel, GemmKey, GemmName
from lightning_nm.kernels.gpu.cusparselt import CuSparseLtKernel
from lightning_nm.kernels.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels.gpu.two_four import TwoFourKernel, two_four_reason
from lightning_nm.kernels.router.registry import KernelRegistry
from lightning_nm.kernels.router.router import Router, routing

__all__ = [
    "CuSparseLtKernel",
    "GemmKernel",
    "GemmKey",
    "GemmName",
    "KernelRegistry",
    "Router",
    "SimulatedSparseKernel",
    "TwoFourKernel",
    "routing",
    "two_four_reason",
]
