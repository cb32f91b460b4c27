"""What the layers of a packed model hold, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_nm.export.packed_model import required_weights
from lightning_nm.export.patterns import pattern_of
from lightning_nm.nn.packed import PackedLayer, places_and_reasons
from lightning_nm.nn.weight import Layout, parameter_key, plain_name


class HeldWeight(NamedTuple):
    """A weight of a packed layer.

    Attributes:
        name: Its key in the dense state dict.
        pattern: Its pattern; ``"dense"`` of an embedding in int8.
        form: What is held: ``"packed"`` as in files, the layout of a kernel by the kernel's name, or ``"dense"``. Of
            values in int8: ``"packed int8"``, ``"cpu-int8"``, or ``"dense, of int8"``, in the dtype of the inputs.
        bytes: Bytes that are held.
        dense_bytes: Bytes of the dense weight.
    """

    name: str
    pattern: str
    form: str
    bytes: int
    dense_bytes: int


class NotPacked(NamedTuple):
    """A weight, or a module with weights, that no packed layer holds.

    Attributes:
        name: Its key in the dense state dict, or the module's name.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class PackedSummary:
    """The weights of a packed model; ``str()`` gives a table.

    Attributes:
        weights: Those of packed layers.
        not_packed: The others of layers that could be N:M.
        not_int8: Those of `weights` whose values are not int8, and why, if others are.
    """

    weights: tuple[HeldWeight, ...]
    not_packed: tuple[NotPacked, ...] = ()
    not_int8: tuple[NotPacked, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that all of them hold."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense weights."""
        return sum(weight.dense_bytes for weight in self.weights)

    def __str__(self) -> str:
        total = HeldWeight(f"{len(self.weights)} weights", "", "", self.bytes, self.dense_bytes)
        rows = [("weight", "pattern", "held as", "bytes", "of dense")]
        for each in (*self.weights, total):
            rows.append((*each[:3], f"{each.bytes}", f"{each.bytes / each.dense_bytes:.3f}"))
        left = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([*map(str.ljust, row[:3], left), *map(str.rjust, row[3:], left[3:])]).rstrip()
            for row in rows
        ]
        lines += [f"{name}  not int8: {reason}" for name, reason in self.not_int8]
        lines += [f"{name}  not packed: {reason}" for name, reason in self.not_packed]
        return "\n".join(lines)


def packed_summary(model: nn.Module) -> PackedSummary:
    """What each packed layer of a model holds now, its share of the dense weight's memory, and what is not packed.

    With ``kernels="auto"`` a layer whose dense product is faster holds the dense weight from then on, see
    :func:`lightning_nm.pack`: look again after the model has run.

    Raises:
        ValueError: If no layer is packed.

    Example::

        >>> import torch
        >>> from lightning_nm import pack
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        >>> model[0].weight.data.zero_()[:, ::16] = 1
        >>> print(packed_summary(pack(model, kernels="reference")))
        weight     pattern  held as  bytes  of dense
        0.weight   1:16     packed     576     0.070
        1 weights                      576     0.070
    """
    held = {plain_name(name): weight for name, weight in required_weights(model)}
    rows = tuple(
        HeldWeight(name, str(weight.pattern), weight.form, weight.nbytes, weight.dense_nbytes)
        for name, weight in held.items()
    )
    # Those that keep their values while others are int8.
    some_int8 = any(weight.is_int8 for weight in held.values())
    not_int8 = tuple(
        NotPacked(name, f"it was packed in {str(weight.dtype).removeprefix('torch.')}")
        for name, weight in held.items()
        if some_int8 and not weight.is_int8
    )
    return PackedSummary(rows, tuple(_not_packed(model)), not_int8)


def _not_packed(model: nn.Module) -> Iterator[NotPacked]:
    places, reasons = places_and_reasons(model)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    packed = {name: module for name, module in modules.items() if isinstance(module, PackedLayer)}
    partly: dict[str, nn.Module] = dict(packed)  # layers that may hold dense weights, too
    for name, reason in reasons.items():
        parent = name.rpartition(".")[0]
        if name in packed:
            continue
        if parent not in packed:
            yield NotPacked(name, reason)
        elif name in modules:
            # Such as `out_proj` of an attention whose other projections are packed.
            partly[name] = modules[name]
    for name, module in partly.items():
        for parameter, tensor in module._parameters.items():
            # bias_k and bias_v of attention have three axes, and are no matrices.
            if tensor is not None and tensor.dim() > 1 and not parameter.startswith("bias_"):
                yield NotPacked(parameter_key(name, parameter), _why_dense(tensor, [Layout.PLAIN]))
    for name, place in places.items():
        yield NotPacked(name, _why_dense(place.weight, place.layouts))


def _why_dense(weight: nn.Parameter, layouts: list[Layout]) -> str:
    """Why a weight is dense that a packed layer could hold."""
    if weight.is_meta:
        return "it has no values, it is on the meta device"
    found = pattern_of(weight, None, layouts)
    if found.pattern is None:
        return found.reason
    return f"it is {found.pattern}, but was left dense by `exclude` or `pattern`, or is dense in the file"
