"""Precision plugins that route the GEMMs of masked layers, and the strategy ``nm_ddp``; for Fabric in ``fabric``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
