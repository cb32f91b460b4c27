"""Import a class by its path."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def find_modules_here() -> None:
    """Let modules of the current folder be imported, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_class(path: str, option: str, kind: type) -> Any:
    """Import a class by its path; modules in the working folder can be imported, too.

    Args:
        path: Such as ``train.Net``.
        option: Of the command line, for messages.
        kind: What the class must be derived from.

    Raises:
        ValueError: If it cannot be imported, or is no such class.
    """
    module, _, name = path.rpartition(".")
    find_modules_here()
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option} {path}: {error}; give a class as module.Class, from this folder"
        ) from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{option} {path}: is no {kind.__name__}")
    return found
