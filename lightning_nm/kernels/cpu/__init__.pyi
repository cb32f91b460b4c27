from .int8 import CpuInt8Kernel as CpuInt8Kernel
from .int8 import Int8Layout as Int8Layout
from .kernels import CpuCsrKernel as CpuCsrKernel
from .kernels import CpuPermuteKernel as CpuPermuteKernel
from .layouts import CsrLayout as CsrLayout
from .layouts import PermuteLayout as PermuteLayout
