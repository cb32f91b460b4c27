"""Small real data sets and models for the README's commands and the notebooks. Nothing here depends on sparsity."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
