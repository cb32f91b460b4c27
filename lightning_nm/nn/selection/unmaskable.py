"""Module kinds whose weights are never masked, and why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_KINDS: dict[type[nn.Module], str] = {
    nn.Bilinear: "a bilinear layer: its weight has three dimensions, and no N:M product is defined for it",
    nn.RNNBase: "a recurrent layer: a fused operator reads all of its weights at once, past any mask",
    nn.RNNCellBase: "a recurrent cell: a fused operator reads both of its weights at once, past any mask",
}
_QUANTISED = (
    "Int8Params",
    "Params4bit",
)  # of bitsandbytes: floating point until they are moved to the device
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def unmaskable(kind: type[nn.Module]) -> str:
    """Why no weight of a module class is masked; empty if nothing is known about it."""
    return next((reason for base, reason in _KINDS.items() if issubclass(kind, base)), "")


def quantised(module: nn.Module) -> str:
    """What shows that a module's weight is quantised; empty if nothing does.

    That is an integer or 8-bit floating parameter, a quantised tensor class, a buffer that holds a quantised weight, or
    a class of ``torch.ao`` that packs its weight.
    """
    kind = type(module)
    for tensor in (
        *matrices(module),
        *_tensors(b for name, b in module._buffers.items() if "weight" in name),
    ):
        if found := _quantised(tensor):
            return f"quantised: its weight is {found}"
    if (
        kind.__module__.startswith("torch.ao.nn.")
        and "quantized" in kind.__module__
        and hasattr(kind, "weight")
    ):
        return f"quantised: {kind.__module__}.{kind.__name__} packs its weight"
    return ""


def matrices(module: nn.Module) -> list[Tensor]:
    """The module's own parameters of two or more dimensions."""
    return _tensors(module._parameters.values())


def _tensors(found: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in found if t is not None and not nn.parameter.is_lazy(t) and t.dim() > 1]


def _quantised(tensor: Tensor) -> str:
    name = type(tensor).__name__
    held = type(tensor.data)  # of a parameter that wraps a tensor class
    if name in _QUANTISED:
        return name
    if held.__module__.startswith("torchao."):
        return held.__name__
    dtype = tensor.dtype
    return (
        str(dtype) if dtype in _INTEGERS or (dtype.is_floating_point and dtype.itemsize < 2) else ""
    )
