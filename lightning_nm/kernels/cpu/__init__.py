"""Kernels for CPUs: a small C library, the layouts of its sparse matrices, and the kernels that the router takes."""

from lightning_nm.kernels.cpu.int8 import CpuInt8Kernel, Int8Layout
from lightning_nm.kernels.cpu.kernels import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.cpu.layouts import CsrLayout, PermuteLayout

__all__ = [
    "CpuCsrKernel",
    "CpuInt8Kernel",
    "CpuPermuteKernel",
    "CsrLayout",
    "Int8Layout",
    "PermuteLayout",
]
