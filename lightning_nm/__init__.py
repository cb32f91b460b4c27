"""N:M sparse training for PyTorch Lightning."""

from typing import Any

import lazy_loader

__version__ = "0.3.0"

_find, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    """Import the command line's class when it is asked for: its packages take a while, and are in an extra."""
    if name != "NMLightningCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _find(name)


# All others at once: command lines find classes by their short names once they are imported.
globals().update({name: _find(name) for name in _names if name != "NMLightningCLI"})
