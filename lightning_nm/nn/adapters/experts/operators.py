"""The operators that the weight of a module of experts knows: its products, and what selects and turns its parts.

Each function stands in for the operators in its decorator and has their arguments. It returns ``NotImplemented`` for
arguments that it does not know; the operator then runs on the values of W_F.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.nn.adapters.experts.weight import ExpertWeight, Part, handles
from lightning_nm.nn.layer.layout import row_sizes

_SPELLINGS = (torch, Tensor)
"""Most operators are a function and a method."""

# Products ------------------------------------------------------------------------------------------------------------


def _product(x: Tensor, part: Part, bias: Tensor | None = None) -> Any:
    """Return ``x @ part``, the batch dimensions broadcast as by ``torch.matmul``."""
    if not _contracts_in(part):
        return NotImplemented
    use = part.use
    _, inputs = row_sizes(use.weight.shape, part.layer.spec.layout)
    if x.shape[-1] != inputs:
        raise RuntimeError(
            f"layer '{part.layer.name}' takes an input of {inputs} features, not one of shape {tuple(x.shape)}"
        )
    if isinstance(part.experts, int):
        return use.product(part.experts, x, bias, part.dtype)
    # As torch.matmul: a vector is a matrix of one row, which the result then loses.
    is_vector = x.dim() == 1
    rows = x.unsqueeze(0) if is_vector else x
    tokens = rows.shape[-2]
    batch = torch.broadcast_shapes(rows.shape[:-2], part.leading)
    flat = rows.expand(*batch, tokens, inputs).reshape(-1, inputs)  # [batch x tokens, in]
    if part.experts is None and batch == part.leading:
        # Every expert has the same number of tokens, and they are sorted by expert.
        made = use.grouped(flat, [tokens] * len(use.weight), part.dtype)
    else:
        experts = _indices(part).expand(batch).reshape(-1).repeat_interleave(tokens)
        made = use.by_index(flat, experts, part.dtype)
    made = made.view(*batch, tokens, made.shape[1])
    if is_vector:
        made = made.squeeze(-2)
    return made


def _contracts_in(part: Part) -> bool:
    """Whether ``x @ part`` contracts the axis of the forward blocks; refuse another one where gradients are needed."""
    if part.contracts_in or not torch.is_grad_enabled():
        return part.contracts_in
    raise _wrong_axis(part)


def _wrong_axis(part: Part) -> ValueError:
    """Return the error for a weight that is held in the other order than the layer was told."""
    transposed = part.layer.spec.layout == "experts-transposed"
    if transposed:
        held, other = "in, out", "out, in"
    else:
        held, other = "out, in", "in, out"
    module_class = type(part.layer.spec.module)
    # The class that the user wrote, also of packed modules, which are no adapters.
    kind = getattr(module_class, "nm_base", module_class).__name__
    return ValueError(
        f"layer '{part.layer.name}' is masked as [experts, {held}], but a product contracts its other axis: if it is "
        f"[experts, {other}], call lightning_nm.nn.register_experts({kind}, transposed={not transposed}) before"
    )


def _flip(part: Part) -> Part:
    """Return the part with its last two dimensions swapped."""
    return part._replace(flipped=not part.flipped)


def _indices(part: Part) -> Tensor:
    """Return the experts of a part that is not one expert's, as int64 indices."""
    if isinstance(part.experts, Tensor):
        return part.experts
    return torch.arange(len(part.use.weight), dtype=torch.int64, device=part.use.weight.device)


def _spellings(*names: str) -> list[Any]:
    """Return the functions and the methods of these names."""
    found = []
    for name in names:
        for place in _SPELLINGS:
            found.append(getattr(place, name))
    return found


@handles(*_spellings("matmul", "mm", "bmm", "mv"))
@handles(Tensor.__matmul__)
def _matmul(a: Tensor, b: Tensor, /) -> Any:
    if not isinstance(a, ExpertWeight):
        return _product(a, b._nm)  # type: ignore[attr-defined]
    if isinstance(b, ExpertWeight):
        return NotImplemented
    # W x = (x^T W^T)^T
    if b.dim() == 1:
        return _product(b, _flip(a._nm))
    made = _product(b.mT, _flip(a._nm))
    return made if made is NotImplemented else made.mT


@handles(Tensor.__rmatmul__)
def _right_matmul(b: Tensor, a: Tensor, /) -> Any:
    return _matmul(a, b)


@handles(torch.addmm, torch.baddbmm)
def _add_matmul(input: Tensor, a: Tensor, b: Tensor, /) -> Any:
    if isinstance(input, ExpertWeight):
        return NotImplemented
    made = _matmul(a, b)
    return made if made is NotImplemented else input + made


@handles(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, ExpertWeight) or isinstance(input, ExpertWeight):
        return NotImplemented
    # Torch refuses a weight of three dimensions; let it say so.
    if not isinstance(weight._nm.experts, int):
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
    if not isinstance(b, ExpertWeight) or isinstance(a, ExpertWeight):
        return NotImplemented
    if bias is not None or out_dtype is not None:
        return NotImplemented
    part = b._nm
    # As torch's own operator, which autocast does not know.
    with torch.autocast(a.device.type, enabled=False):
        # [experts, tokens, in]: a batch of products.
        if a.dim() == 3 and offs is None:
            return _product(a, part)
        # [tokens, in], sorted by expert, with the end of each expert's tokens in `offs`.
        if a.dim() != 2 or offs is None or part.experts is not None:
            return NotImplemented
        if not _contracts_in(part):
            return NotImplemented
        ends = offs.tolist()
        counts = [end - start for start, end in pairwise((0, *ends))]
        return part.use.grouped(a, counts, part.dtype)


@handles(torch.einsum)
def _einsum(equation: str, /, *operands: Any) -> Any:
    """Two operands, of which the weight is ``[experts, a, b]`` or one expert's ``[a, b]``, one of them contracted."""
    # torch.einsum also takes the operands as one list.
    is_listed = len(operands) == 1 and isinstance(operands[0], (list, tuple))
    tensors = operands[0] if is_listed else operands
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in equation:
        return NotImplemented
    if len(terms) != 2 or len(tensors) != 2:
        return NotImplemented
    x, w = tensors
    x_axes, w_axes = terms
    if isinstance(x, ExpertWeight):
        x, w = w, x
        x_axes, w_axes = w_axes, x_axes
    if isinstance(x, ExpertWeight):
        return NotImplemented
    # An equation that does not fit the weight is torch's to refuse.
    if len(w_axes) > 3 or len(w_axes) != len(w._nm.leading) + 2:
        return NotImplemented
    leading = w_axes[:-2]  # the axis of the experts, or nothing
    matrix_axes = w_axes[-2:]
    contracted = [axis for axis in matrix_axes if axis in x_axes and axis not in result]
    kept = [axis for axis in matrix_axes if axis in result and axis not in x_axes]
    others = [axis for axis in x_axes if axis not in w_axes]  # of the tokens
    # A diagonal ("ii"), or a sum over an axis that is not contracted, is no product of matrices.
    for term in (x_axes, w_axes, result):
        if len(set(term)) != len(term):
            return NotImplemented
    if len(contracted) != 1 or len(kept) != 1:
        return NotImplemented
    if set(result) != {*leading, *others, *kept}:
        return NotImplemented
    # x becomes [experts, tokens, in], without the first where all experts get the same tokens.
    experts = [axis for axis in leading if axis in x_axes]
    order = [*experts, *others, *contracted]
    x = x.permute([x_axes.index(axis) for axis in order])
    sizes = x.shape[len(experts) : -1]
    if others:
        x = x.flatten(len(experts), -2)
    else:
        x = x.unsqueeze(-2)  # one token
    # _product contracts the first of the two matrix axes.
    is_first = matrix_axes[0] == contracted[0]
    made = _product(x, w._nm if is_first else _flip(w._nm))
    if made is NotImplemented:
        return made
    if others:
        made = made.unflatten(-2, sizes)
    else:
        made = made.squeeze(-2)
    order = [*leading, *others, *kept]
    return made.permute([order.index(axis) for axis in result])


# Parts ---------------------------------------------------------------------------------------------------------------


@handles(Tensor.__getitem__)
def _getitem(weight: ExpertWeight, index: Any, /) -> Any:
    part = weight._nm
    dimensions = len(part.leading)
    indices = list(index) if isinstance(index, tuple) else [index]
    while indices and _takes_all(indices[-1]):
        indices.pop()
    if not indices:
        return weight
    # Rows or columns of the matrices, too, are chosen: that is no longer a part of known form.
    if len(indices) > dimensions:
        return NotImplemented
    for each in indices:
        if each is None or each is Ellipsis or isinstance(each, bool):
            return NotImplemented
    first = indices[0]
    # A mask over entries chooses no whole matrices.
    is_mask = isinstance(first, Tensor) and first.dtype == torch.bool
    if is_mask and first.dim() > dimensions:
        return NotImplemented
    if part.experts is None and len(indices) == 1 and _is_integer(first):
        return _one_expert(part, int(first))
    found = _indices(part)[tuple(indices)]
    return _of(part, int(found) if found.dim() == 0 else found)


def _takes_all(index: Any) -> bool:
    """Whether an index at the end chooses everything, as if it were left out."""
    # Slices are compared only with slices: a tensor would compare entry by entry.
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_integer(index: Any) -> bool:
    """Whether an index chooses one expert."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype != torch.bool
    return isinstance(index, int) or hasattr(index, "__index__")


def _one_expert(part: Part, index: int) -> ExpertWeight:
    """Return the part of one expert, which a negative index counts from the last."""
    number = len(part.use.weight)
    if not -number <= index < number:
        raise IndexError(f"layer '{part.layer.name}' has {number} experts, none at {index}")
    return _of(part, index % number)


def _of(part: Part, experts: int | Tensor) -> ExpertWeight:
    """Return the part of other experts."""
    return ExpertWeight.of(part._replace(experts=experts))


@handles(torch.select, Tensor.select)
@handles(torch.index_select, Tensor.index_select)
def _select(weight: ExpertWeight, dim: int, index: Any, /) -> Any:
    return _getitem(weight, index) if dim == 0 else NotImplemented


@handles(torch.unbind, Tensor.unbind)
def _unbind(weight: ExpertWeight, dim: int = 0, /) -> Any:
    leading = weight._nm.leading
    if dim != 0 or not leading:
        return NotImplemented
    return tuple(_getitem(weight, k) for k in range(leading[0]))


@handles(Tensor.__iter__)
def _iter(weight: ExpertWeight, /) -> Any:
    found = _unbind(weight)
    return found if found is NotImplemented else iter(found)


def _turned(weight: ExpertWeight, dims: Iterable[int]) -> Any:
    """Return the weight with its dimensions in this order, if only the last two change places."""
    part = weight._nm
    number = len(part.leading) + 2
    order = [dim % number for dim in dims]
    same = list(range(number))
    if order == same:
        return weight
    if order == [*same[:-2], same[-1], same[-2]]:
        return ExpertWeight.of(_flip(part))
    return NotImplemented


@handles(*_spellings("transpose", "swapaxes", "swapdims"))
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
    # Of one matrix alone: T reverses all dimensions of a larger tensor, and t refuses it.
    return NotImplemented if weight._nm.leading else ExpertWeight.of(_flip(weight._nm))


@handles(Tensor.contiguous)
def _contiguous(weight: ExpertWeight, /, **_: Any) -> Any:
    # Only shape, dtype and device of this tensor are ever read.
    return weight


@handles(Tensor.to)
def _to(weight: ExpertWeight, /, *args: Any, **kwargs: Any) -> Any:
    try:
        # Tensor.to takes devices, dtypes and tensors in many orders: torch's own parser knows them all.
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return NotImplemented
    if device is not None and not _is_on(weight._nm.use.weight.device, device):
        return NotImplemented
    return weight if dtype is None else _cast(weight, dtype)


def _is_on(own: torch.device, device: torch.device) -> bool:
    """Whether a tensor on `own` need not move to be on `device`."""
    return device.type == own.type and device.index in (None, own.index)


def _cast(weight: ExpertWeight, dtype: torch.dtype) -> Any:
    """Return the part with the dtype that its products shall have."""
    part = weight._nm
    if dtype == (part.dtype or part.use.weight.dtype):
        return weight
    # A second cast rounds what the first has rounded, which one dtype cannot tell.
    if part.dtype is not None or not dtype.is_floating_point:
        return NotImplemented
    return ExpertWeight.of(part._replace(dtype=dtype))


@handles(Tensor.type_as)
def _type_as(weight: Tensor, other: Tensor, /) -> Any:
    return _cast(weight, other.dtype) if isinstance(weight, ExpertWeight) else NotImplemented


@handles(Tensor.float)
def _float(weight: ExpertWeight, /) -> Any:
    return _cast(weight, torch.float32)


@handles(Tensor.double)
def _double(weight: ExpertWeight, /) -> Any:
    return _cast(weight, torch.float64)


@handles(Tensor.half)
def _half(weight: ExpertWeight, /) -> Any:
    return _cast(weight, torch.float16)


@handles(Tensor.bfloat16)
def _bfloat16(weight: ExpertWeight, /) -> Any:
    return _cast(weight, torch.bfloat16)
