"""How kernels are chosen, and the errors for modes and arguments that were removed."""

from __future__ import annotations

from collections.abc import Iterable

MODES = ("auto", "sparse", "reference")

_REMOVED = {
    "mode": "pass the mode as kernels=",
    "gpu": "times are measured on the device, not predicted: leave it out",
}


def refuse_removed(owner: str, arguments: Iterable[str]) -> None:
    """Refuse arguments that are unknown, or were removed.

    Raises:
        TypeError: Naming the replacement of a removed argument.
    """
    for name in arguments:
        advice = f" was removed: {_REMOVED[name]}" if name in _REMOVED else " is unknown"
        raise TypeError(f"{owner}: the argument {name!r}{advice}")


def check_mode(kernels: object) -> None:
    """Refuse a mode that does not exist.

    Raises:
        ValueError: Naming the modes, and for a removed mode its replacement.
    """
    if kernels in MODES:
        return
    modes = "'auto' (measured), 'sparse' or 'reference'"
    if isinstance(kernels, str) and (kernels == "heuristic" or kernels.startswith("replay")):
        raise ValueError(f"kernels={kernels!r} was removed: use {modes}")
    if not isinstance(kernels, str):
        raise ValueError(f"kernels={kernels!r} is the mode, {modes}: pass a list of kernels as backends=")
    raise ValueError(f"kernels={kernels!r} is unknown: use {modes}")
