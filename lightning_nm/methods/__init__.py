"""The methods, one file per paper, and their short names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_nm.methods.asp import ASP
from lightning_nm.methods.bame import BAME
from lightning_nm.methods.base import Dense, MaskMethod, Method
from lightning_nm.methods.bi_mask import BiMask
from lightning_nm.methods.cast import CAST
from lightning_nm.methods.decaying import DecayingMask
from lightning_nm.methods.lbc import LBC
from lightning_nm.methods.mask_logits import MaskLogits
from lightning_nm.methods.maxq import MaxQ
from lightning_nm.methods.rigl import RigL
from lightning_nm.methods.s_ste import SSTE
from lightning_nm.methods.slope import SLoPe
from lightning_nm.methods.ste import SRSTE, STE
from lightning_nm.methods.step import STEP
from lightning_nm.methods.transposable import TransposableMask
from lightning_nm.spelling import did_you_mean, not_given

__all__ = [
    "ASP",
    "BAME",
    "CAST",
    "LBC",
    "SRSTE",
    "SSTE",
    "STE",
    "STEP",
    "BiMask",
    "DecayingMask",
    "Dense",
    "MaskLogits",
    "MaskMethod",
    "MaxQ",
    "Method",
    "MethodName",
    "RigL",
    "SLoPe",
    "TransposableMask",
    "resolve_method",
]

MethodName = Literal[
    "dense",
    "ste",
    "sr-ste",
    "s-ste",
    "step",
    "decaying",
    "asp",
    "transposable",
    "bi-mask",
    "slope",
    "bame",
    "rigl",
    "cast",
    "lbc",
    "maxq",
    "mask-logits",
]
"""The short names; each is the ``short_name`` of a class in this package."""


_BY_NAME: dict[str, type[Method]] = {
    value.short_name: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Method) and value.short_name
}
assert sorted(_BY_NAME) == sorted(get_args(MethodName)), (
    "MethodName and the classes' short names differ"
)


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
            names = ", ".join(map(repr, get_args(MethodName)))
            meant = did_you_mean(method, _BY_NAME)
            raise ValueError(
                f"method {method!r} does not exist: use one of {names} or an object{meant}"
            )
        return _BY_NAME[method]()
    raise TypeError(f"method must be a short name or a Method{not_given(method)}")
