"""GEMM kernels: how a GEMM with an N:M operand is executed."""

import lazy_loader

# The names are those of `__init__.pyi`. The file of a name is imported when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
