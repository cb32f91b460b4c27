"""Export by ExecuTorch: int8 programs for Arm's Ethos-U85, which runs 2:4 weights faster, and for CPUs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
