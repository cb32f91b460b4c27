"""GEMM kernels: how a product with an N:M operand is executed."""

from lightning_nm.kernels.api import GemmKernel, GemmKey, GemmName
from lightning_nm.kernels.gpu.cusparselt import CuSparseLtKernel
from lightning_nm.kernels.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels.gpu.two_four import TwoFourKernel, two_four_reason
from lightning_nm.kernels.router import Router, routing
from lightning_nm.kernels.tuner import KernelRegistry

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
