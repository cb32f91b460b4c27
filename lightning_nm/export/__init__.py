"""Check the files that a training saves, and make others of them: packed, dense, for other runtimes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
