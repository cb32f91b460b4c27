"""The operators that the weight of a module of experts knows: its products, and what selects and turns its parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.nn.adapters.experts.weight import ExpertWeight, Part, handles
from lightning_nm.nn.layer.layout import row_sizes

# Products ------------------------------------------------------------------------------------------------------------


def _product(x: Tensor, part: Part, bias: Tensor | None = None) -> Any:
    """``x @ part``, the batch dimensions broadcast as by ``torch.matmul``."""
    use, weight = part.use, part.use.weight
    if not _contracts_in(part):
        return NotImplemented
    _, depth = row_sizes(weight.shape, part.layer.spec.layout)
    if x.shape[-1] != depth:
        raise RuntimeError(
            f"layer '{part.layer.name}' takes an input of {depth} features, not one of shape {tuple(x.shape)}"
        )
    if isinstance(part.experts, int):
        return use.product(part.experts, x, bias, part.dtype)
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    batch, tokens = torch.broadcast_shapes(rows.shape[:-2], part.leading), rows.shape[-2]
    flat = rows.expand(*batch, *rows.shape[-2:]).reshape(-1, depth)
    if part.experts is None and batch == part.leading:
        made = use.grouped(flat, [tokens] * len(weight), part.dtype)
    else:
        experts = _indices(part).expand(batch).reshape(-1).repeat_interleave(tokens)
        made = use.by_index(flat, experts, part.dtype)
    made = made.view(*batch, tokens, made.shape[1])
    return made.squeeze(-2) if x.dim() == 1 else made


def _contracts_in(part: Part) -> bool:
    """Whether ``x @ part`` contracts the axis of the forward blocks; refuse another one where gradients are needed."""
    if part.contracts_in or not torch.is_grad_enabled():
        return part.contracts_in
    raise _wrong_axis(part)


def _wrong_axis(part: Part) -> ValueError:
    transposed = part.layer.spec.layout == "experts-transposed"
    held, other = ("in, out", "out, in") if transposed else ("out, in", "in, out")
    kind = getattr(type(part.layer.module), "nm_base", type(part.layer.module)).__name__
    return ValueError(
        f"layer '{part.layer.name}' is masked as [experts, {held}], but a product contracts its other axis: if it is "
        f"[experts, {other}], call lightning_nm.nn.register_experts({kind}, transposed={not transposed}) before"
    )


def _flip(part: Part) -> Part:
    return part._replace(flipped=not part.flipped)


def _indices(part: Part) -> Tensor:
    """The experts of a part that is not one expert's."""
    if isinstance(part.experts, Tensor):
        return part.experts
    return torch.arange(len(part.use.weight), device=part.use.weight.device)


@handles(
    *(getattr(place, name) for name in ("matmul", "mm", "bmm", "mv") for place in (torch, Tensor))
)
@handles(Tensor.__matmul__)
def _matmul(a: Tensor, b: Tensor, /) -> Any:
    if not isinstance(a, ExpertWeight):
        return _product(a, b._nm)  # type: ignore[attr-defined]
    if isinstance(b, ExpertWeight):
        return NotImplemented
    made = _product(b if b.dim() == 1 else b.mT, _flip(a._nm))
    return made if made is NotImplemented or b.dim() == 1 else made.mT


@handles(Tensor.__rmatmul__)
def _right_matmul(b: Tensor, a: Tensor, /) -> Any:
    return _matmul(a, b)


@handles(torch.addmm, torch.baddbmm)
def _add_matmul(input: Tensor, a: Tensor, b: Tensor, /) -> Any:
    made = NotImplemented if isinstance(input, ExpertWeight) else _matmul(a, b)
    return made if made is NotImplemented else input + made


@handles(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, ExpertWeight) or isinstance(input, ExpertWeight):
        return NotImplemented
    if not isinstance(weight._nm.experts, int):  # torch refuses it
        return NotImplemented
    return _product(input, _flip(weight._nm), bias)


@handles(
    getattr(torch, "_grouped_mm", None),
    getattr(F, "grouped_mm", None),
    "transformers.grouped_mm_fallback",
)
def _grouped_mm(
    a: Tensor,
    b: Tensor,
    /,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Any:
    if (
        not isinstance(b, ExpertWeight)
        or isinstance(a, ExpertWeight)
        or bias is not None
        or out_dtype is not None
    ):
        return NotImplemented
    part = b._nm
    with torch.autocast(
        a.device.type, enabled=False
    ):  # as torch's own, which autocast does not know
        if a.dim() == 3 and offs is None:
            return _product(a, part)
        if a.dim() != 2 or offs is None or part.experts is not None:
            return NotImplemented
        if not _contracts_in(part):
            return NotImplemented
        counts = [end - start for start, end in pairwise([0, *offs.tolist()])]
        return part.use.grouped(a, counts, part.dtype)


@handles(torch.einsum)
def _einsum(equation: str, /, *operands: Any) -> Any:
    """Two operands, of which the weight is ``[experts, a, b]`` or one expert's ``[a, b]``, one of them contracted."""
    tensors = (
        operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    )
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in equation or len(terms) != 2 or len(tensors) != 2:
        return NotImplemented
    (x, w), (named, held) = tensors, terms
    if isinstance(x, ExpertWeight):
        (x, w), (named, held) = (w, x), (held, named)
    if isinstance(x, ExpertWeight) or len(held) != len(w._nm.leading) + 2 or len(held) > 3:
        return NotImplemented
    leading, axes = held[:-2], held[-2:]
    contracted = [axis for axis in axes if axis in named and axis not in result]
    kept = [axis for axis in axes if axis in result and axis not in named]
    others = [axis for axis in named if axis not in held]
    distinct = all(len(set(term)) == len(term) for term in (named, held, result))
    if (
        not distinct
        or [len(contracted), len(kept)] != [1, 1]
        or set(result) != {*leading, *others, *kept}
    ):
        return NotImplemented
    experts = [axis for axis in leading if axis in named]
    order = [*experts, *others, *contracted]
    x = x.permute([named.index(axis) for axis in order])
    sizes = x.shape[len(experts) : -1]
    x = x.flatten(len(experts), -2) if others else x.unsqueeze(-2)
    made = _product(x, w._nm if axes[0] == contracted[0] else _flip(w._nm))
    if made is NotImplemented:
        return made
    made = made.unflatten(-2, sizes) if others else made.squeeze(-2)
    order = [*leading, *others, *kept]
    return made.permute([order.index(axis) for axis in result])


# Parts ---------------------------------------------------------------------------------------------------------------


@handles(Tensor.__getitem__)
def _getitem(weight: ExpertWeight, index: Any, /) -> Any:
    part = weight._nm
    whole = len(part.leading)
    given = list(index) if isinstance(index, tuple) else [index]
    while given and (
        given[-1] is Ellipsis or (isinstance(given[-1], slice) and given[-1] == slice(None))
    ):
        given.pop()
    if not given:
        return weight
    if len(given) > whole or any(
        each is None or each is Ellipsis or isinstance(each, bool) for each in given
    ):
        return NotImplemented
    if isinstance(given[0], Tensor) and given[0].dtype == torch.bool and given[0].dim() > whole:
        return NotImplemented
    if part.experts is None and len(given) == 1 and _is_integer(given[0]):
        return _one_expert(part, int(given[0]))
    found = _indices(part)[tuple(given)]
    return _of(part, int(found) if found.dim() == 0 else found)


def _is_integer(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype != torch.bool
    return isinstance(index, int) or hasattr(index, "__index__")


def _one_expert(part: Part, index: int) -> ExpertWeight:
    number = len(part.use.weight)
    if not -number <= index < number:
        raise IndexError(f"layer '{part.layer.name}' has {number} experts, none at {index}")
    return _of(part, index % number)


def _of(part: Part, experts: int | Tensor) -> ExpertWeight:
    return ExpertWeight.of(part._replace(experts=experts))


@handles(torch.select, Tensor.select)
@handles(torch.index_select, Tensor.index_select)
def _select(weight: ExpertWeight, dim: int, index: Any, /) -> Any:
    return _getitem(weight, index) if dim == 0 else NotImplemented


@handles(torch.unbind, Tensor.unbind)
def _unbind(weight: ExpertWeight, dim: int = 0, /) -> Any:
    return (
        tuple(_getitem(weight, k) for k in range(weight._nm.leading[0]))
        if dim == 0 and weight._nm.leading
        else (NotImplemented)
    )


@handles(Tensor.__iter__)
def _iter(weight: ExpertWeight, /) -> Any:
    found = _unbind(weight)
    return found if found is NotImplemented else iter(found)


def _turned(weight: ExpertWeight, dims: Iterable[int]) -> Any:
    """The weight with its dimensions in this order."""
    part = weight._nm
    number = len(part.leading) + 2
    order, same = [dim % number for dim in dims], list(range(number))
    if order == same:
        return weight
    return (
        ExpertWeight.of(_flip(part))
        if order == [*same[:-2], same[-1], same[-2]]
        else NotImplemented
    )


@handles(
    *(
        getattr(place, name)
        for name in ("transpose", "swapaxes", "swapdims")
        for place in (torch, Tensor)
    )
)
def _transpose(weight: ExpertWeight, first: int, second: int, /) -> Any:
    order = list(range(len(weight._nm.leading) + 2))
    order[first], order[second] = order[second], order[first]
    return _turned(weight, order)


@handles(torch.permute, Tensor.permute)
def _permute(weight: ExpertWeight, /, *dims: Any) -> Any:
    return _turned(weight, dims[0] if len(dims) == 1 else dims)


@handles(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _matrix_transpose(weight: ExpertWeight, /, *_: Any) -> Any:
    return ExpertWeight.of(_flip(weight._nm))


@handles(torch.t, Tensor.t, Tensor.T.__get__)  # type: ignore[attr-defined]
def _t(weight: ExpertWeight, /, *_: Any) -> Any:
    return NotImplemented if weight._nm.leading else ExpertWeight.of(_flip(weight._nm))


@handles(Tensor.contiguous)
def _contiguous(weight: ExpertWeight, /, **_: Any) -> Any:
    return weight


@handles(Tensor.to)
def _to(weight: ExpertWeight, /, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return NotImplemented
    own = weight._nm.use.weight.device
    if device is not None and (device.type != own.type or device.index not in (None, own.index)):
        return NotImplemented
    return weight if dtype is None else _cast(weight, dtype)


def _cast(weight: ExpertWeight, dtype: torch.dtype) -> Any:
    part = weight._nm
    own = part.use.weight.dtype
    if dtype == (part.dtype or own):
        return weight
    if part.dtype is not None or not dtype.is_floating_point:
        return NotImplemented
    return ExpertWeight.of(part._replace(dtype=dtype))


@handles(Tensor.type_as)
def _type_as(weight: Tensor, other: Tensor, /) -> Any:
    return _cast(weight, other.dtype) if isinstance(weight, ExpertWeight) else NotImplemented


for _name, _dtype in (("float", torch.float32), ("double", torch.float64), ("half", torch.float16)):
    handles(getattr(Tensor, _name))(lambda weight, /, dtype=_dtype: _cast(weight, dtype))
handles(Tensor.bfloat16)(lambda weight, /: _cast(weight, torch.bfloat16))
