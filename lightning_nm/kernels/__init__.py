"""GEMM kernels: how a product with an N:M operand is executed."""

from lightning_nm.kernels.base import GemmKernel, GemmKey, GemmName
from lightning_nm.kernels.cusparselt import CuSparseLtKernel
from lightning_nm.kernels.cusparselt_direct import CuSparseLtDirectKernel
from lightning_nm.kernels.cutlass import CutlassKernel
from lightning_nm.kernels.patterns import two_four_reason
from lightning_nm.kernels.registry import KernelRegistry
from lightning_nm.kernels.router import Router, routing
from lightning_nm.kernels.simulated import SimulatedSparseKernel
from lightning_nm.kernels.two_four import TwoFourKernel

__all__ = [
    "CuSparseLtDirectKernel",
    "CuSparseLtKernel",
    "CutlassKernel",
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
