"""The handle registry: operators of compiled graphs take tensors and integers, so other objects go by number."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_numbers = count(1)
# Weak: a number keeps no object alive, and a graph that outlives its router is refused by `lookup`.
_objects: WeakValueDictionary[int, HasHandle] = WeakValueDictionary()


class HasHandle:
    """An object with an integer handle, by which :func:`lookup` returns it; a copy has a handle of its own.

    Example::

        >>> class Scale(HasHandle):
        ...     pass
        >>> scale = Scale()
        >>> lookup(scale.handle) is scale
        True
    """

    handle: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object and register it."""
        # Not in __init__: copying and unpickling do not call that, and would share the handle.
        made = super().__new__(cls)
        made.handle = next(_numbers)
        _objects[made.handle] = made
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take another object's state, but not its handle."""
        for name, value in state.items():
            if name != "handle":
                self.__dict__[name] = value


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
