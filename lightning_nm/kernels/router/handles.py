"""The handle registry: operators of compiled graphs take tensors and integers, so other objects go by number."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_numbers = count(1)
_objects: WeakValueDictionary[int, HasHandle] = WeakValueDictionary()


class HasHandle:
    """An object with an integer handle, by which :func:`lookup` returns it; a copy has a handle of its own."""

    handle: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object and register it."""
        made = super().__new__(cls)
        made.handle = next(_numbers)
        _objects[made.handle] = made
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take another object's state, but not its handle."""
        self.__dict__.update({name: value for name, value in state.items() if name != "handle"})


def lookup(handle: int) -> Any:
    """Return the object with this handle.

    Raises:
        RuntimeError: If it no longer exists.
    """
    try:
        return _objects[handle]
    except KeyError:
        raise RuntimeError(
            f"object {handle} of a compiled graph is gone: keep model and router until the backward pass is over"
        ) from None
