from .int8_kernel import CpuInt8Kernel as CpuInt8Kernel
from .int8_kernel import Int8Layout as Int8Layout
from .kernels import CpuCsrKernel as CpuCsrKernel
from .kernels import CpuPermuteKernel as CpuPermuteKernel
from .kernels import CsrLayout as CsrLayout
from .kernels import PermuteLayout as PermuteLayout
