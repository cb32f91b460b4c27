"""The methods, one file per paper, and their short names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_nm.methods.asp import ASP
from lightning_nm.methods.bame import BAME
from lightning_nm.methods.base import Dense, MaskMethod, Method
from lightning_nm.methods.bi_mask import BiMask
from lightning_nm.methods.ste import SRSTE, STE
from lightning_nm.methods.transposable import TransposableMask

__all__ = [
    "ASP",
    "BAME",
    "SRSTE",
    "STE",
    "BiMask",
    "Dense",
    "MaskMethod",
    "Method",
    "MethodName",
    "TransposableMask",
    "resolve_method",
]

MethodName = Literal["dense", "ste", "sr-ste", "asp", "transposable", "bi-mask", "bame"]

_CLASSES: tuple[type[Method], ...] = (Dense, STE, SRSTE, ASP, TransposableMask, BiMask, BAME)
_BY_NAME: dict[str, type[Method]] = dict(zip(get_args(MethodName), _CLASSES, strict=True))


def resolve_method(method: MethodName | Method | Any) -> Method:
    """Make a method from its short name; an object is returned as it is.

    Raises:
        ValueError: If no method has this name.
        TypeError: If the object is not a :class:`Method`.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        if method not in _BY_NAME:
            raise ValueError(
                f"method {method!r} does not exist: use one of {', '.join(map(repr, _BY_NAME))} or an object"
            )
        return _BY_NAME[method]()
    raise TypeError(f"method must be a short name or a Method, not {method!r}")
