"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system: it keeps most of the dense weights and layouts that were made.

    Of a model of 190 MB, packed 2:4 to 145 MB, a process held 236 MB before it and 150 MB after it.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
