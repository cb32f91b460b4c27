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

# Parameter classes of bitsandbytes: their values are floating point until they are moved to the device.
_QUANTISED_CLASSES = ("Int8Params", "Params4bit")

# The dtypes that quantised values are packed into.
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def unmaskable(kind: type[nn.Module]) -> str:
    """Return why no weight of a module class is masked; empty if nothing is known about it."""
    for base, reason in _KINDS.items():
        if issubclass(kind, base):
            return reason
    return ""


def quantised(module: nn.Module) -> str:
    """Return what shows that a module's weight is quantised; empty if nothing does.

    That is an integer or 8-bit floating parameter, a quantised tensor class, a buffer that holds a quantised weight, or
    a class of ``torch.ao`` that packs its weight.
    """
    # Some libraries keep the quantised weight in a buffer; other buffers may hold integers for other reasons.
    buffers = [buffer for name, buffer in module._buffers.items() if "weight" in name]
    for tensor in (*matrices(module), *_known_matrices(buffers)):
        found = _quantised_as(tensor)
        if found:
            return f"quantised: its weight is {found}"
    kind = type(module)
    is_of_torch = kind.__module__.startswith("torch.ao.nn.") and "quantized" in kind.__module__
    # Its weight is a method, which unpacks an object that is no tensor.
    if is_of_torch and hasattr(kind, "weight"):
        return f"quantised: {kind.__module__}.{kind.__name__} packs its weight"
    return ""


def matrices(module: nn.Module) -> list[Tensor]:
    """Return the module's own parameters of two or more dimensions."""
    return _known_matrices(module._parameters.values())


def _known_matrices(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors of two or more dimensions; those without a shape yet do not count."""
    found = []
    for tensor in tensors:
        if tensor is None or nn.parameter.is_lazy(tensor):
            continue
        if tensor.dim() > 1:
            found.append(tensor)
    return found


def _quantised_as(tensor: Tensor) -> str:
    """Return the class or the dtype that shows that a tensor is quantised; empty if nothing does."""
    name = type(tensor).__name__
    if name in _QUANTISED_CLASSES:
        return name
    # torchao's tensor classes are held by an ordinary parameter.
    wrapped = type(tensor.data)
    if wrapped.__module__.startswith("torchao."):
        return wrapped.__name__
    dtype = tensor.dtype
    is_8_bit_float = dtype.is_floating_point and dtype.itemsize < 2
    return str(dtype) if dtype in _INTEGERS or is_8_bit_float else ""
