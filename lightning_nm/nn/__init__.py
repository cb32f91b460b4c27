"""Masked layers: one weight and its masks, the layer kinds, and the GEMMs that they run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
