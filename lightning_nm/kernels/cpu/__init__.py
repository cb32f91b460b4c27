"""Kernels for CPUs: a small C library, the layouts of its sparse matrices, and the kernels that the router takes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
