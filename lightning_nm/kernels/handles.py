"""Objects by number: operators of a compiled graph take tensors and numbers, nothing else."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_numbers = count(1)
_objects: WeakValueDictionary[int, Handled] = WeakValueDictionary()


class Handled:
    """An object with a number of its own, by which :func:`find` returns it; copies have others."""

    handle: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object and give it its number."""
        made = super().__new__(cls)
        made.handle = next(_numbers)
        _objects[made.handle] = made
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take another object's state, but not its number."""
        self.__dict__.update({name: value for name, value in state.items() if name != "handle"})


def find(handle: int) -> Any:
    """Return the object with this number.

    Raises:
        RuntimeError: If it is gone.
    """
    try:
        return _objects[handle]
    except KeyError:
        raise RuntimeError(
            f"object {handle} of a compiled graph is gone: keep model and router until the backward pass is over"
        ) from None
