"""Which weights of a model are masked, and how their modules are exchanged."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_nm.functional import is_nm
from lightning_nm.functional.select import masked
from lightning_nm.nn.adapters import FUSED_PATHS, Adapter, WeightSpec, adapted_class, find_adapter
from lightning_nm.nn.adapters.base import original_class
from lightning_nm.nn.adapters.experts import holds_matrices
from lightning_nm.nn.layer import LayerSpec, NMLayer
from lightning_nm.nn.weight import (
    ConvLayout,
    Layout,
    cuts_in_forward,
    gather,
    is_sharded,
    known_size,
    layer_name,
    misfit,
    parameter_key,
    plain_name,
)
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import Schedule

if TYPE_CHECKING:  # for the types only
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that are equal but for the numbers in their names, which become ranges.

    Args:
        rows: A name and further cells, which must be equal in the rows that are joined.

    Example:
        >>> grouped([("blocks.0.up", "2:4"), ("head", "-"), ("blocks.1.up", "2:4"), ("blocks.3.up", "2:4")])
        [('blocks.{0,1,3}.up x3', '2:4'), ('head', '-')]
    """
    # (template, *cells) -> the numbers of each row, in the order of their places in the template
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, *cells in rows:
        template, numbers = _split_numbers(name)
        groups.setdefault((template, *cells), []).append(numbers)
    joined: list[tuple[str, ...]] = []
    for (template, *cells), members in groups.items():
        for name in _joined_names(template, members):
            joined.append((name, *cells))
    return joined


def _split_numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with "#" in the place of each number, and the numbers."""
    template = []
    numbers = []
    for part in name.split("."):
        if part.isdigit():
            template.append("#")
            numbers.append(part)
        else:
            template.append(part)
    return ".".join(template), tuple(numbers)


def _joined_names(template: str, members: list[tuple[str, ...]]) -> list[str]:
    """Return one name with ranges for all members of a group, or the name of each member."""
    numbers_by_place = []
    for numbers in zip(*members, strict=True):
        numbers_by_place.append(sorted(set(numbers), key=int))
    combinations = math.prod(len(numbers) for numbers in numbers_by_place)
    if combinations != len(members):
        # The ranges would promise layers that are not there.
        return [_fill(template, numbers) for numbers in members]
    name = _fill(template, [_range(numbers) for numbers in numbers_by_place])
    if len(members) > 1:
        name += f" x{len(members)}"
    return [name]


def _fill(template: str, numbers: Iterable[str]) -> str:
    """Put numbers, or ranges of them, into the places of a template."""
    remaining = iter(numbers)
    parts = template.split(".")
    return ".".join(next(remaining) if part == "#" else part for part in parts)


def _range(numbers: Sequence[str]) -> str:
    """Write sorted numbers as one, as ``{first..last}`` without gaps, or as a list in braces."""
    if len(numbers) == 1:
        return numbers[0]
    first = int(numbers[0])
    last = int(numbers[-1])
    has_gaps = last - first + 1 != len(numbers)
    # "{0,1}" reads better than "{0..1}".
    if has_gaps or len(numbers) == 2:
        between_braces = ",".join(numbers)
    else:
        between_braces = f"{first}..{last}"
    return "{" + between_braces + "}"


def quoted(group: str) -> str:
    """Put a name that :func:`grouped` wrote in quotes, and the number of names behind it in parentheses.

    Example:
        >>> quoted("blocks.{0,1,3}.up x3"), quoted("head")
        ("'blocks.{0,1,3}.up' (3)", "'head'")
    """
    name, separator, count = group.rpartition(" x")
    if separator and count.isdigit():
        return f"'{name}' ({count})"
    return f"'{group}'"


SkipFirstLast = bool | Literal["first", "last"]
"""Which of the first convolution and the last linear layer stay dense: both, none, or one of them."""

Trained = Callable[[nn.Parameter], bool]
"""Whether a weight is trained."""


def parse_skip_first_last(value: Any) -> tuple[bool, bool]:
    """Return whether the first convolution, and whether the last linear layer stays dense.

    Raises:
        ValueError: If the value is neither a bool nor ``"first"`` nor ``"last"``.

    Example:
        >>> parse_skip_first_last(True), parse_skip_first_last("last")
        ((True, True), (False, True))
    """
    if isinstance(value, bool):
        return value, value
    if value in ("first", "last"):
        return value == "first", value == "last"
    raise ValueError(f"skip_first_last={value!r} is unknown: use True, False, 'first' or 'last'")


def first_and_last(
    candidates: Sequence[Candidate],
    is_trained: Trained | None,
    saved: Mapping[str, str] | None,
    continued: Collection[str] = (),
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """Return the layers to leave dense by module name, with the reason.

    They are the first convolution and the last linear layer in the order in which the model registers its modules.

    Args:
        candidates: The weights of known kinds, in the order of registration.
        is_trained: Layers that are not trained do not count, unless no layer of their kind is trained.
        saved: What this function returned when the training began, if it goes on from a saved state: it stays. In the
            place of a layer that is not in the model any more, because it was renamed, the present one counts.
        continued: Names of layers for which the saved state has masks.
        skip_first: Whether to leave the first convolution dense.
        skip_last: Whether to leave the last linear layer dense.
    """
    found = {}
    convolutions = _eligible(candidates, "convolution", is_trained)
    if skip_first and convolutions:
        found[convolutions[0].module_name] = "first convolution"
    linears = _eligible(candidates, "linear", is_trained)
    if skip_last and linears:
        found[linears[-1].module_name] = "last linear layer"
    if saved is None:
        return found
    still_skipped = _still_skipped(saved, candidates, skip_first=skip_first, skip_last=skip_last)
    present = {candidate.module_name for candidate in candidates}
    lost = {reason for name, reason in saved.items() if name not in present}
    for name, reason in found.items():
        if reason in lost and name not in continued:
            still_skipped[name] = reason
    return still_skipped


def _still_skipped(
    saved: Mapping[str, str],
    candidates: Sequence[Candidate],
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """Return the saved layers, less those that the settings no longer leave dense."""
    roles = {candidate.module_name: candidate.adapter.role for candidate in candidates}
    found = {}
    for name, reason in saved.items():
        if name not in roles:
            continue
        role = roles[name]
        if role == "convolution" and not skip_first:
            continue
        if role == "linear" and not skip_last:
            continue
        found[name] = reason
    return found


def _eligible(
    candidates: Sequence[Candidate], role: str, is_trained: Trained | None
) -> list[Candidate]:
    """Return the candidates among which the first or the last one is looked for."""
    found = [candidate for candidate in candidates if candidate.adapter.role == role]
    if role == "linear":
        # The output projection of an attention layer is inside a block, never the output layer.
        found = [
            candidate for candidate in found if not candidate.module_name.endswith(".out_proj")
        ]
    if is_trained is None:
        return found
    # Fine-tuning trains a new head behind frozen layers; where all are frozen, all count.
    trained = [candidate for candidate in found if is_trained(candidate.weight)]
    return trained or found


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


@dataclass(frozen=True)
class Candidate:
    """A weight of a module of a known kind.

    Example:
        >>> from lightning_nm.nn import NMLinear
        >>> Candidate("head", "head", nn.Linear(8, 4), NMLinear, WeightSpec("weight")).weight.shape
        torch.Size([4, 8])
    """

    name: str
    module_name: str
    module: nn.Module
    adapter: type[Adapter]
    spec: WeightSpec

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as the module's attribute."""
        return getattr(self.module, self.spec.parameter)

    def spec_in(self, conv_layout: ConvLayout) -> WeightSpec:
        """:attr:`spec` with the blocks of convolutions in another order."""
        specs = {spec.parameter: spec for spec in self.adapter.specs(self.module, conv_layout)}
        return specs[self.spec.parameter]

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are looked up."""
        return self.adapter.role == "embedding"


@dataclass(frozen=True)
class _Holder:
    """A module that holds a parameter under a name; no candidate if no adapter knows how to mask it there."""

    module_name: str
    parameter: str
    candidate: Candidate | None

    @property
    def names(self) -> tuple[str, str]:
        """The names by which globs find it."""
        return self.module_name, layer_name(self.module_name, self.parameter)

    @property
    def key(self) -> str:
        """The parameter's key in the state dict."""
        return parameter_key(self.module_name, self.parameter)


class Ties:
    """Which modules of a model hold the same weight.

    Embeddings and one layer with a product may be masked together, as one layer, if one of them is named. It has the
    name of the layer with the product, whichever was named.

    Args:
        model: The model.
        candidates: Its weights of known kinds.
        named: Names in ``include``.

    Example:
        >>> from lightning_nm.nn import NMEmbedding, NMLinear
        >>> model = nn.ModuleDict({"tokens": nn.Embedding(4, 8), "head": nn.Linear(8, 4)})
        >>> model["head"].weight = model["tokens"].weight
        >>> tokens = Candidate("tokens", "tokens", model["tokens"], NMEmbedding, WeightSpec("weight"))
        >>> head = Candidate("head", "head", model["head"], NMLinear, WeightSpec("weight"))
        >>> ties = Ties(model, [tokens, head], ["tokens"])
        >>> ties.joins(tokens), ties.joins(head)
        (True, False)
    """

    def __init__(
        self, model: nn.Module, candidates: Sequence[Candidate], named: Collection[str]
    ) -> None:
        known = {(id(each.module), each.spec.parameter): each for each in candidates}
        self._named = set(named)
        # id of a parameter -> every module that holds it, in the model's order
        self._holders: dict[int, list[_Holder]] = {}
        for name, module in model.named_modules():
            for parameter, weight in module._parameters.items():
                if weight is None:
                    continue
                candidate = known.get((id(module), parameter))
                holder = _Holder(plain_name(name), parameter, candidate)
                self._holders.setdefault(id(weight), []).append(holder)

    def _holders_of(self, candidate: Candidate) -> list[_Holder]:
        """Return every module that holds a candidate's weight; none if the weight is not stored."""
        weight = candidate.module._parameters.get(candidate.spec.parameter)
        return self._holders.get(id(weight), [])

    def _others(self, candidate: Candidate) -> list[_Holder]:
        """Return the other modules that hold a candidate's weight."""
        holders = self._holders_of(candidate)
        return [holder for holder in holders if holder.candidate is not candidate]

    def names(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the names by which globs find a candidate: also the others' if one of them is in ``include``."""
        own = (candidate.module_name, candidate.name)
        # Who names one of the modules in `include` means the weight, and so every module that holds it.
        every = [*own]
        for holder in self._others(candidate):
            every += holder.names
        return own if self._named.isdisjoint(every) else tuple(every)

    def is_named(self, candidate: Candidate) -> bool:
        """Whether ``include`` names it, or a module that holds its weight, too."""
        return not self._named.isdisjoint(self.names(candidate))

    def tied(self, candidate: Candidate) -> list[Candidate]:
        """Return the other candidates that are masked with it."""
        if not self.is_named(candidate) or self._fault(candidate):
            return []
        return _candidates_in(self._others(candidate))

    def joins(self, candidate: Candidate) -> bool:
        """Whether it is masked as a part of another candidate: the one with the product, else the first."""
        if not self.tied(candidate):
            return False
        members = _candidates_in(self._holders_of(candidate))
        for member in members:
            if not member.is_embedding:
                return member is not candidate
        # Embeddings alone.
        return members[0] is not candidate

    def why_not(self, candidate: Candidate) -> str:
        """Return why a shared weight is not masked; empty if it may be."""
        others = self._others(candidate)
        fault = self._fault(candidate)
        # Whoever names one of them knows of both; then only a fault counts.
        if not others or self.is_named(candidate):
            return fault
        reason = f"its weight is shared with '{others[0].key}', which would change with it"
        if not fault:
            reason += ": if `include` has the exact name of one, both are masked"
        return reason

    def why_dense(self, candidate: Candidate) -> str:
        """Return why an embedding that is not named stays dense; empty for other candidates."""
        if not candidate.is_embedding or self.is_named(candidate):
            return ""
        others = self._others(candidate)
        shared = f", and shares its weight with '{others[0].key}'" if others else ""
        return f"a lookup, not a product{shared}: it is masked only if `include` has its exact name, without wildcards"

    def _fault(self, candidate: Candidate) -> str:
        """Why a shared weight cannot be masked even if it is named; empty if it can, or is not shared."""
        others = self._others(candidate)
        if not others:
            return ""
        # A module that no adapter knows would go on to read the dense weight.
        for holder in others:
            if holder.candidate is None:
                return f"its weight is shared with '{holder.key}', which cannot be masked"
        members = _candidates_in(self._holders_of(candidate))
        # Any number of embeddings may join a layer with a product, but no second such layer.
        if sum(not member.is_embedding for member in members) > 1:
            return f"its weight is shared with '{others[0].key}', which would change with it"
        # An embedding looks up plain rows of the whole weight.
        if is_sharded(candidate.weight):
            return f"its weight is sharded, and shared with '{others[0].key}'"
        if any(member.spec.layout != Layout.PLAIN for member in members):
            return f"its weight is shared with '{others[0].key}', along whose rows other blocks lie"
        return ""


def _candidates_in(holders: Sequence[_Holder]) -> list[Candidate]:
    """Return the candidates among the modules that hold a weight."""
    return [holder.candidate for holder in holders if holder.candidate is not None]


_MOST_SHOWN = 8  # modules that the warning names


class KeepsMask(nn.Module):
    """Mixed into a module with a low-rank adapter whose delta is masked: merging keeps the zeros of the base weight.

    Example:
        >>> class Masked(KeepsMask, nn.Linear):
        ...     pass
        >>> module = Masked(4, 2)
        >>> module.nm_mask = module.weight != 0
        >>> module.nm_mask.shape
        torch.Size([2, 4])
    """

    nm_mask: Tensor
    """Bool, of the base weight's shape: its nonzeros."""


def masked_delta(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, scaling: float) -> Tensor:
    r""":math:`y = s \, x (M \odot (B A))^T`, without keeping a tensor of the weight's shape for the backward pass.

    With G = dY^T X, the gradients are :math:`dA = s \, B^T (M \odot G)`, :math:`dB = s \, (M \odot G) A^T` and
    :math:`dX = s \, dY (M \odot (B A))`. B A is made again in the backward pass.

    Args:
        x: ``[..., in]``, floating point; under autocast it is cast, and the delta is after it was made.
        a: A, ``[rank, in]``.
        b: B, ``[out, rank]``, of the dtype of A.
        mask: M, bool ``[out, in]``.
        scaling: s.

    Returns:
        ``[..., out]`` in the dtype that ``F.linear`` would return.
    """
    device = x.device.type
    # Float64 is left alone, as autocast leaves it.
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        x_ti = x.reshape(-1, x.shape[-1])
        y_to = _MaskedDelta.apply(x_ti, a, b, mask, scaling)
        return y_to.view(*x.shape[:-1], y_to.shape[-1])


def _delta(a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float) -> Tensor:
    """Return the masked change of the base weight, ``[out, in]``."""
    return masked((b_or @ a_ri) * scaling, mask_oi)


class _MaskedDelta(torch.autograd.Function):
    """The product with the delta, which is made twice instead of saved.

    Letters name dimensions: t tokens, i inputs, o outputs, r rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ti: Tensor, a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x_ti, a_ri, b_or, mask_oi)
        ctx.scaling = scaling
        # A and B keep their own dtype, often float32, until their product is made. The delta has no name of its own
        # in that dtype: its memory is given back before the product.
        return F.linear(x_ti, _delta(a_ri, b_or, mask_oi, scaling).to(x_ti.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy_to,) = grads
        x_ti, a_ri, b_or, mask_oi = ctx.saved_tensors
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        dx_ti = da_ri = db_or = None
        if needs_x:
            dx_ti = dy_to @ _delta(a_ri, b_or, mask_oi, ctx.scaling).to(x_ti.dtype)
        if needs_a or needs_b:
            # The gradient of the unmasked product B A.
            grad_oi = (dy_to.t() @ x_ti).to(a_ri.dtype)
            grad_oi = masked(grad_oi, mask_oi)
            grad_oi = grad_oi * ctx.scaling
            da_ri = b_or.t() @ grad_oi
            db_or = grad_oi @ a_ri.t()
        return dx_ti, da_ri, db_or, None, None


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module holds low-rank adapters, by the names of its parts."""
    # peft calls them lora_A, lora_B, lora_embedding_A and so on.
    return any(name.startswith("lora_") for name, _ in module.named_children())


def warn_of_adapters(model: nn.Module, patterns: Sequence[NMPattern]) -> None:
    """Warn of base weights that are N:M by one of the patterns, and would not be with their adapters merged."""
    found = []
    for name, module in model.named_modules():
        if _breaks_when_merged(module, patterns):
            found.append(plain_name(name))
    if not found:
        return
    shown = ", ".join(found[:_MOST_SHOWN])
    if len(found) > _MOST_SHOWN:
        shown += f" and {len(found) - _MOST_SHOWN} more"
    warnings.warn(
        f"low-rank adapters lie on N:M weights, which will not be N:M once they are merged: {shown}. "
        "Call lightning_nm.integrations.peft.mask_adapters(model) before training",
        stacklevel=3,  # the attach() of the sparsifier
    )


def _breaks_when_merged(module: Any, patterns: Sequence[NMPattern]) -> bool:
    """Whether merging the adapters of a module would fill the zeros of an N:M base weight."""
    if not is_low_rank(module) or isinstance(module, KeepsMask):
        return False
    base = getattr(module, "base_layer", None)
    weight = getattr(base, "weight", None)
    # No process can look at the blocks of a sharded weight alone.
    if not isinstance(weight, Tensor) or is_sharded(weight):
        return False
    if weight.dim() < 2 or not weight.is_floating_point():
        return False
    rows = weight.detach()
    # peft's name for a base weight [in, out]
    if getattr(module, "fan_in_fan_out", False):
        rows = rows.t()
    return any(_is_sparse(rows, pattern) for pattern in patterns)


def _is_sparse(rows: Tensor, pattern: NMPattern) -> bool:
    """Whether a weight ``[out, in, ...]`` is N:M along its inputs, and not all zeros."""
    if rows.shape[1] % pattern.m != 0:
        return False
    # A weight of zeros is N:M by any pattern, and says nothing.
    return is_nm(rows, pattern, dim=1) and bool(rows.any())


@dataclass(frozen=True)
class Rule:
    """A pattern, a method and an estimator, and the layers that get them.

    ``include`` holds globs over module names; ``None`` matches every layer. ``dgrad`` draws the backward weight of the
    forward one, if it is not ``None``.

    Example:
        >>> from lightning_nm.methods import ASP
        >>> rule = Rule(("encoder.*",), NMPattern(2, 4), ASP())
        >>> rule.matches("encoder.0"), rule.matches("decoder.0")
        (True, False)
    """

    include: tuple[str, ...] | None
    pattern: NMPattern
    method: Method
    estimator: GradientEstimator | None = None
    conv_layout: ConvLayout = "channels"
    dgrad: GradientEstimator | None = None
    schedule: Schedule | None = None
    """A dense start, a ramp of patterns to ``pattern``, and a dense end."""

    def matches(self, *names: str) -> bool:
        """Whether one of the layer's names matches."""
        return self.include is None or any(_matches_any(name, self.include) for name in names)


@dataclass
class Selection:
    """The outcome of a selection.

    Attributes:
        layers: The masked layers, in the model's order.
        skipped: Why each other weight is dense, by name; frozen layers are in it, too.
        sizes: The size of every weight of a known kind, in the model's order.
        frozen: Layers that will be masked once an optimizer trains them.
        first_last: The first and the last layer by module name, with the reason to leave them dense.

    Example:
        >>> from lightning_nm.methods import ASP
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> selection = select(model, [Rule(None, NMPattern(2, 4), ASP())])
        >>> [layer.name for layer in selection.layers], selection.skipped
        (['0'], {'1': 'last linear layer'})
    """

    layers: list[NMLayer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    frozen: list[NMLayer] = field(default_factory=list)
    first_last: dict[str, str] = field(default_factory=dict)

    def unfreeze(self, layers: Collection[NMLayer]) -> None:
        """Move frozen layers, which are trained now, to the masked ones."""
        position = {name: place for place, name in enumerate(self.sizes)}
        self.frozen = [layer for layer in self.frozen if layer not in layers]
        # Both in place: others hold this list.
        self.layers += layers
        self.layers.sort(key=lambda layer: position[layer.name])
        for layer in layers:
            del self.skipped[layer.name]

    def replaced(self, model: nn.Module) -> list[str]:
        """Masked and frozen layers whose module is no longer in the model."""
        present = {id(module) for module in model.modules()}
        layers = (*self.layers, *self.frozen)
        return [layer.name for layer in layers if id(layer.spec.module) not in present]


FROZEN = "frozen: it is masked once it requires a gradient and is in an optimizer; at once if `include` names it"

NOT_HELD = (
    "in no optimizer: it is masked, frozen or not, once it is in one; at once if `include` names it"
)
"""The same for a method that does not train the weight."""

NO_MATRICES = "parameters of the module itself are no matrices"
"""Of a module without an adapter that holds a class token, positions or the like."""


def select(
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str] = (),
    *,
    skip_first: bool = True,
    skip_last: bool = True,
    seed: int = 0,
    is_trained: Trained | None = None,
    is_held: Trained | None = None,
    continued: Collection[str] = (),
    saved_first_last: Mapping[str, str] | None = None,
) -> Selection:
    """Choose the weights to mask; the first rule that matches a layer decides.

    A glob without wildcards names a layer: it must be maskable, and neither ``skip_first``, ``skip_last`` nor
    ``is_trained`` holds it back. Embeddings and tied weights are masked by name alone.

    Args:
        model: Any module; it is not changed.
        rules: Tried in order.
        exclude: Globs over module names that stay dense.
        skip_first: Leave the first convolution dense.
        skip_last: Leave the last linear layer dense.
        seed: Base of the layers' random choices.
        is_trained: Layers for which it is false stay dense and wait; ``None`` masks frozen layers, too.
        is_held: The same for layers whose method does not train the weight; ``is_trained`` by default.
        continued: Names of layers that are masked all the same, because a saved state has masks for them.
        saved_first_last: ``Selection.first_last`` of the training that goes on from a saved state; by default they are
            the first convolution and the last linear layer that are trained, in the order of registration.

    Raises:
        ValueError: If a glob matches nothing, a named layer cannot be masked, no layer is left to mask, a weight holds
            a NaN, or a layer is masked already. The message names the layer.
    """
    selection = Selection()
    named = _names_in(rules)
    candidates = list(candidates_of(model, selection, "channels"))
    ties = Ties(model, candidates, named)
    if is_trained is not None and is_held is not None:
        is_trained = _by_method(candidates, rules, ties, is_trained, is_held)
    # Before the globs are checked, so that one that matches embeddings alone is refused with the reason.
    candidates = _leave_out_lookups(candidates, ties, selection)
    _check_globs(model, rules, exclude, candidates, selection)
    selection.first_last = first_and_last(
        candidates,
        is_trained,
        saved_first_last,
        continued,
        skip_first=skip_first,
        skip_last=skip_last,
    )

    fsdp_modules = [
        (plain_name(name), module)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]
    for candidate in candidates:
        if ties.joins(candidate):
            continue  # the candidate that it is tied to stands for both
        selection.sizes[candidate.name] = known_size(candidate.weight)
        rule = _first_match(rules, ties.names(candidate))
        if rule is None:
            selection.skipped[candidate.name] = "not in `include`"
            continue
        # A saved state has masks for it: it stays masked, even if it is frozen or the last layer now.
        is_continued = candidate.name in continued
        wrappers = _wrappers_around(candidate, fsdp_modules)
        reason = _why_left_out(candidate, ties, exclude, selection, is_continued=is_continued)
        layer = None
        if not reason:
            # Only now: a weight with a fault may have no shape yet.
            layer, reason = _plan(candidate, rule, ties, seed, wrappers)
        if layer is None:
            if ties.is_named(candidate):
                raise ValueError(_named_but_dense(candidate, rule, reason))
            selection.skipped[candidate.name] = reason
            continue
        is_frozen = is_trained is not None and not is_trained(candidate.weight)
        if is_frozen and not is_continued and not ties.is_named(candidate):
            selection.frozen.append(layer)
            selection.skipped[layer.name] = FROZEN if rule.method.trains_weight else NOT_HELD
        else:
            refuse_nan(layer)
            selection.layers.append(layer)
    if not selection.layers and not selection.frozen:
        raise ValueError("no layer can be masked. " + _advice(selection))
    return selection


def _names_in(rules: Sequence[Rule]) -> set[str]:
    """Return the globs without wildcards: each names one layer, which must then be maskable."""
    named = set()
    for rule in rules:
        for glob in rule.include or ():
            if not any(character in glob for character in "*?["):
                named.add(glob)
    return named


def _leave_out_lookups(
    candidates: Sequence[Candidate], ties: Ties, selection: Selection
) -> list[Candidate]:
    """Return the candidates without embeddings that nobody names, which become skipped layers."""
    for candidate in candidates:
        reason = ties.why_dense(candidate)
        if reason:
            selection.skipped[candidate.name] = reason
    return [candidate for candidate in candidates if candidate.name not in selection.skipped]


def _first_match(rules: Sequence[Rule], names: Sequence[str]) -> Rule | None:
    """Return the first rule that matches one of a layer's names."""
    for rule in rules:
        if rule.matches(*names):
            return rule
    return None


def _by_method(
    candidates: Sequence[Candidate],
    rules: Sequence[Rule],
    ties: Ties,
    is_trained: Trained,
    is_held: Trained,
) -> Trained:
    """Return whether an optimizer trains a layer, of whose weight the method may need no training."""
    only_held = set()
    for candidate in candidates:
        rule = _first_match(rules, ties.names(candidate))
        if rule is not None and not rule.method.trains_weight:
            only_held.add(id(candidate.weight))

    def by_method(parameter: nn.Parameter) -> bool:
        return is_held(parameter) if id(parameter) in only_held else is_trained(parameter)

    return by_method


def _why_left_out(
    candidate: Candidate,
    ties: Ties,
    exclude: Sequence[str],
    selection: Selection,
    *,
    is_continued: bool,
) -> str:
    """Why a weight is not masked whatever its rule says; empty if it may be.

    Raises:
        ValueError: If another sparsifier has masked it.
    """
    if any(_matches_any(name, exclude) for name in ties.names(candidate)):
        return "in `exclude`"
    is_held_back = candidate.module_name in selection.first_last
    if is_held_back and not is_continued and not ties.is_named(candidate):
        return selection.first_last[candidate.module_name]
    # Checked late: a second sparsifier may exclude what the first one has masked.
    for holder in (candidate, *ties.tied(candidate)):
        refuse_masked(candidate.name, holder.module, holder.spec.parameter)
    return _fault_of_weight(candidate) or ties.why_not(candidate)


def _wrappers_around(
    candidate: Candidate, fsdp_modules: Sequence[tuple[str, FSDPModule]]
) -> list[Any]:
    """Return the FSDP modules that hold a candidate's module, or are it."""
    path = f"{candidate.module_name}."
    wrappers: list[Any] = []
    for name, wrapper in fsdp_modules:
        # The model itself has no name, and holds every module.
        if not name or path.startswith(f"{name}."):
            wrappers.append(wrapper)
    return wrappers


def _plan(
    candidate: Candidate, rule: Rule, ties: Ties, seed: int, wrappers: list[Any]
) -> tuple[NMLayer | None, str]:
    """Return the masked layer of a weight; or ``None`` and why neither of its GEMMs would gain by the rule."""
    cuts = cuts_in_forward(candidate.weight, fsdp=bool(wrappers))
    if cuts and not candidate.adapter.tensor_parallel:
        return None, (
            "sharded while it runs, as tensor parallelism does, which only linear layers can be; under FSDP, give "
            "the module that fully_shard was given, not a part of it"
        )
    weight_spec = candidate.spec_in(rule.conv_layout)
    forward_reason, dgrad_reason = _eligibility(candidate, weight_spec, rule.pattern, cuts)
    method = rule.method
    forward_gains = method.sparse_forward and not forward_reason
    wants_dgrad = method.sparse_dgrad or rule.dgrad is not None
    dgrad_gains = wants_dgrad and not dgrad_reason
    wants_masks = method.sparse_forward or method.sparse_dgrad
    gains_nothing = wants_masks and not forward_gains and not dgrad_gains
    # With an estimator its wgrad can gain, but who names a layer wants its weights masked.
    needs_masks = rule.estimator is None or ties.is_named(candidate)
    if gains_nothing and needs_masks:
        needed = [forward_reason, dgrad_reason] if wants_dgrad else [forward_reason]
        return None, "; ".join(reason for reason in needed if reason)
    tied = [(other.module, other.spec.parameter) for other in ties.tied(candidate)]
    layer_spec = LayerSpec(
        candidate.name,
        candidate.module,
        weight_spec.parameter,
        rule.pattern,
        method,
        # The gradient of an embedding is a sum over tokens, and no product of dY.
        None if candidate.is_embedding else rule.estimator,
        layout=Layout(weight_spec.layout),
        # Nor does a dgrad block cross the rows of two processes.
        groups=weight_spec.groups * cuts.get(0, 1),
        forward_reason=forward_reason,
        dgrad_reason=dgrad_reason,
        tensor_parallel=bool(cuts),
        dgrad=rule.dgrad,
        schedule=rule.schedule,
        tied=tuple(tied),
    )
    return NMLayer(layer_spec, seed=seed, wrappers=wrappers), ""


def _named_but_dense(candidate: Candidate, rule: Rule, reason: str) -> str:
    """Return the message for a layer that `include` names though it cannot be masked."""
    message = f"layer '{candidate.name}' is named by `include` but cannot be masked: {reason}"
    if rule.estimator is not None:
        message += "; a rule with `method: dense` gives it N:M gradients alone"
    return message


def candidates_of(model: nn.Module, selection: Selection, conv_layout: str) -> Iterator[Candidate]:
    """Yield every weight of a known layer kind; other modules that own a matrix become skipped layers."""
    # Start of the names of its parts -> module with low-rank adapters.
    low_rank: dict[str, nn.Module] = {}
    # Child -> class that reads the child's weight without calling it.
    read_by: dict[str, str] = {}
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        if is_low_rank(module):
            low_rank[f"{name}." if name else ""] = module
        kind = original_class(module)
        known_reason = unmaskable(kind)
        quantised_reason = quantised(module)
        found = find_adapter(kind)
        if found is None:
            if isinstance(module, parametrize.ParametrizationList):
                continue  # the module that it belongs to has the reason
            if quantised_reason or matrices(module):
                reason = quantised_reason or known_reason
                if not reason and not any(map(_is_matrix, matrices(module))):
                    reason = NO_MATRICES
                if not reason:
                    reason = f"no adapter for {kind.__name__}{_hint(module)}"
                selection.skipped[name] = reason
            continue
        adapter, handled = found
        reason = quantised_reason or _fault_of_module(module, kind, adapter, handled)
        if not reason and name in read_by:
            reason = f"read, not called, by {read_by[name]}"
        if not reason:
            reason = _fault_around(name, module, low_rank)
        if reason:
            selection.skipped[name] = reason
            # The module is not adapted, so it goes on to read its children without calling them.
            for child in adapter.reads_children:
                read_by[f"{name}.{child}".lstrip(".")] = kind.__name__
            continue
        for spec in adapter.specs(module, conv_layout):
            yield Candidate(layer_name(name, spec.parameter), name, module, adapter, spec)


def _fault_of_module(
    module: nn.Module, kind: type[nn.Module], adapter: type[Adapter], handled: type[nn.Module]
) -> str:
    """Why an adapter must not take a module of this class; empty if it may."""
    # A class may say so itself: the layers of a packed model do.
    stated = getattr(kind, "nm_unmaskable", "") or adapter.refusal(module)
    if stated:
        return stated
    # Many libraries have a class called Linear: its module tells whose it is.
    class_path = f"{kind.__module__}.{kind.__name__}"
    if kind.forward is nn.Module.forward:
        return f"{class_path} has no forward: other modules read its weights"
    if kind.forward is not handled.forward and not adapter.wraps_forward:
        return f"{class_path} has a forward of its own"
    # The hooks of accelerate leave one in the dict of an instance.
    if "forward" in vars(module):
        return f"this {class_path} has a forward of its own, assigned to the instance"
    return ""


def _fault_around(name: str, module: nn.Module, low_rank: Mapping[str, nn.Module]) -> str:
    """Why a module cannot be masked inside what holds or computes its weight; empty if it can."""
    for start, wrapper in low_rank.items():
        if name.startswith(start):
            return _in_low_rank(wrapper)
    if parametrize.is_parametrized(module):
        return "parametrized: its weight is computed, not stored"
    return ""


def _is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter of two or more dimensions may be multiplied; not so ``[1, ...]``, as of positions."""
    return len(parameter) > 1 and parameter.numel() > max(parameter.shape)


def _hint(module: nn.Module) -> str:
    """Return what to do about a module without an adapter that may hold experts; empty if it holds none."""
    for parameter in module._parameters.values():
        # A parameter [1, ...] is one position or the like, not one expert.
        if holds_matrices(parameter) and len(parameter) > 1:
            return "; if it holds experts' weights, multiply by them with nm_grouped_linear, and call register_experts"
    return ""


def _in_low_rank(module: nn.Module) -> str:
    """Why the parts of a module with low-rank adapters are not masked here."""
    if isinstance(module, KeepsMask):
        return "inside a low-rank adapter that keeps the zeros of its base weight"
    way = "for a base that is N:M, lightning_nm.integrations.peft.mask_adapters keeps it so"
    return f"inside a low-rank adapter: the merged weight would not be N:M; {way}"


def refuse_masked(name: str, module: nn.Module, parameter: str) -> None:
    """Refuse a weight that another sparsifier has masked, by a ``ValueError``."""
    if isinstance(module, Adapter) and parameter in module.nm_layers:
        raise ValueError(
            f"layer '{name}' is masked already: detach the other sparsifier, give the two disjoint `include`, or use "
            "one callback with `rules`"
        )


def refuse_nan(layer: NMLayer) -> None:
    """Refuse a weight that holds NaN by a ``ValueError``, because no masks can be chosen for it."""
    # All processes decide alike, whoever holds the shard with the NaN.
    if gather(torch.isnan(layer.param.detach()).any()):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds NaN: load or initialise it before masking"
        )


def _fault_of_weight(candidate: Candidate) -> str:
    """Return why the tensor of a weight cannot be masked; empty if it can."""
    stored = candidate.module._parameters
    parameter = candidate.spec.parameter
    weight = stored.get(parameter)
    if weight is None and f"{parameter}_orig" in stored:
        return "pruned by torch.nn.utils.prune: call prune.remove(module, name) first"
    if weight is None:
        return "its weight is computed, not stored (weight norm or the like)"
    # Also one whose weight was loaded: in its first call it takes another class, and would lose that of its adapter.
    if nn.parameter.is_lazy(weight) or isinstance(candidate.module, LazyModuleMixin):
        return "lazy: it has its shape and class only after its first batch: run one before the training to mask it"
    if weight.is_meta:
        return "on the meta device: give it memory and values (to_empty and reset_parameters) before masking"
    # With CPUOffloadPolicy the shards lie on the CPU, while the mesh is of GPUs.
    if isinstance(weight, DTensor) and weight.device.type != weight.device_mesh.device_type:
        return f"FSDP keeps it on the {weight.device.type}, where no product is made: leave out its CPUOffloadPolicy"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if weight.dim() < 2:
        return (
            f"its weight is flat, {tuple(weight.shape)}, as FSDP1 keeps weights in parts: use FSDP2, fully_shard in "
            "configure_model and ModelParallelStrategy"
        )
    # A row of such a weight has no input channels to choose among.
    groups = getattr(candidate.module, "groups", 1)
    if groups > 1 and weight.shape[1] == 1:
        return "depthwise convolution: one input channel per filter"
    return ""


def _eligibility(
    candidate: Candidate, spec: WeightSpec, pattern: NMPattern, cuts: Mapping[int, int]
) -> tuple[str, str]:
    """Why the forward and the dgrad GEMM cannot be N:M, if the dimensions are cut into so many parts; else empty."""
    layout = Layout(spec.layout)
    out, depth = layout.row_sizes(candidate.weight.shape)
    # The groups of a layer of experts are its experts, whose sizes the user knows as plain in and out.
    is_grouped = spec.groups > 1 and not layout.has_experts
    per_group = "/group" if is_grouped else ""
    forward = misfit(f"in{per_group}", depth, pattern.m, cuts.get(1, 1))
    if candidate.is_embedding:
        return forward, "tokens have no gradient"
    dgrad = misfit(f"out{per_group}", out // spec.groups, pattern.m, cuts.get(0, 1))
    return forward, dgrad


def _check_globs(
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str],
    candidates: Sequence[Candidate],
    selection: Selection,
) -> None:
    """Refuse globs that match nothing, by a ``ValueError`` that says what to write instead."""
    layer_names: list[str] = []
    for candidate in candidates:
        layer_names += (candidate.module_name, candidate.name)
    layer_names = list(dict.fromkeys(layer_names))  # without duplicates, in order
    modules = {plain_name(name): module for name, module in model.named_modules()}
    for option, glob in _globs_of(rules, exclude):
        allowed = list(layer_names)
        # Excluding a module without layers does no harm; including one is a mistake.
        if option == "`exclude`":
            allowed += modules
        if not any(fnmatchcase(name, glob) for name in allowed):
            raise ValueError(_no_match(option, glob, layer_names, modules, selection.skipped))


def _globs_of(rules: Sequence[Rule], exclude: Sequence[str]) -> list[tuple[str, str]]:
    """Return every glob behind the name of the option that holds it."""
    # The last rule is the one of the settings themselves, which have no `rules` entry.
    *special, general = rules
    globs = []
    for place, rule in enumerate(special):
        for glob in rule.include or ():
            globs.append((f"`include` of rules[{place}]", glob))
    for glob in general.include or ():
        globs.append(("`include`", glob))
    for glob in exclude:
        globs.append(("`exclude`", glob))
    return globs


def _no_match(
    option: str,
    glob: str,
    layer_names: Sequence[str],
    modules: Mapping[str, nn.Module],
    skipped: Mapping[str, str],
) -> str:
    """Return the message for a glob that matches no layer: the likeliest mistake first."""
    # Of a module without an adapter, its name has the reason for all of its weights.
    for name in (glob, glob.rpartition(".")[0]):
        if name in skipped:
            return f"layer '{glob}' is named by {option} but cannot be masked: {skipped[name]}"
    matched = [f"'{name}': {why}" for name, why in skipped.items() if fnmatchcase(name, glob)]
    if matched:
        shown = "; ".join(matched[:5])
        if len(matched) > 5:
            shown += f"; and {len(matched) - 5} more"
        return f"{option} '{glob}' matches only layers that cannot be masked: {shown}"
    if glob in modules:
        kind = type(modules[glob]).__name__
        if any(name.startswith(f"{glob}.") for name in layer_names):
            return f"{option} names '{glob}', a {kind}: write '{glob}.*' for its layers"
        return f"{option} names '{glob}', a {kind}, which cannot be masked"
    stem = glob.removesuffix(".weight")
    if stem != glob and any(fnmatchcase(name, stem) for name in (*layer_names, *modules)):
        return (
            f"{option} '{glob}' names a parameter, and layers are named by their modules: drop '.weight' and "
            f"write '{stem}'"
        )
    return f"{option} '{glob}' matches no layer; {_closest(glob, layer_names)}"


def _closest(glob: str, layer_names: Sequence[str]) -> str:
    """Return the names that are most like a glob, or some names if none is."""
    close = difflib.get_close_matches(glob, layer_names, n=3, cutoff=0.4) or layer_names[:5]
    if not close:
        return "the model has no maskable layer"
    return f"layers are named like {', '.join(repr(name) for name in close)}"


def _matches_any(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def _advice(selection: Selection) -> str:
    """Return why nothing is left to mask."""
    if not selection.skipped:
        return "The model has no linear, convolution or attention layer."
    # A shape that does not fit, "in 10 % 4 != 0", is the reason that a user can least guess: it comes first.
    misfits = []
    others = []
    for name, reason in selection.skipped.items():
        shown = f"'{name}': {reason}"
        if "%" in reason:
            misfits.append(shown)
        else:
            others.append(shown)
    reasons = "; ".join([*misfits, *others][:10])
    return f"Every layer was left out: {reasons}. See `include`, `exclude`, `pattern` and `skip_first_last`."


def as_globs(value: Any, option: str) -> tuple[str, ...] | None:
    """Read ``None``, one glob or a list of globs; anything else is a ``TypeError``."""
    if value is None:
        return None
    globs = tuple(value) if isinstance(value, (list, tuple, set)) else (value,)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`{option}` takes globs over module names, for example ['encoder.*'], not {value!r}"
        )
    return tuple(map(plain_name, globs))


# Key in a module's dict for the attributes that switch its fused paths, as they were: name -> value.
_FAST_PATH = "_nm_fast_path"


def install(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Swap the classes of the layers' modules, and switch off fused paths that would bypass them."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            _adapt(module)
            vars(module)["nm_layers"][parameter] = layer
    # A second pass: whether a parent is needed shows once its children are adapted.
    for module in model.modules():
        if _needed_around(module):
            _adapt(module)
    for module in model.modules():
        if _holds_masks(module):
            _switch_off_fused_paths(module)


def _switch_off_fused_paths(module: nn.Module) -> None:
    """Set the attributes that keep torch from reading the weights of a module's parts in one kernel."""
    for kind, attribute, off in FUSED_PATHS:
        if not isinstance(module, kind):
            continue
        saved = vars(module).setdefault(_FAST_PATH, {})
        # Another sparsifier may have switched it off: what was saved first is the module's own value.
        if attribute not in saved:
            saved[attribute] = getattr(module, attribute)
            setattr(module, attribute, off)


def uninstall(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Give the layers' modules their classes back; what other sparsifiers installed stays."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            if isinstance(module, Adapter):
                module.nm_layers.pop(parameter, None)
    # Children come after their parents, which may be needed around them.
    for module in reversed(list(model.modules())):
        if isinstance(module, Adapter) and not module.nm_layers and not _needed_around(module):
            module.__class__ = type(module).nm_base  # type: ignore[assignment]
            del module.nm_layers
    for module in model.modules():
        if _FAST_PATH in vars(module) and not _holds_masks(module):
            saved = vars(module).pop(_FAST_PATH)
            for attribute, value in saved.items():
                setattr(module, attribute, value)


def _adapt(module: nn.Module) -> None:
    """Swap the class of a module, unless that was done before."""
    if not isinstance(module, Adapter):
        module.__class__ = adapted_class(type(module))
        # Past any __setattr__ of the module's own class.
        vars(module)["nm_layers"] = {}


def _needed_around(module: nn.Module) -> bool:
    """Whether a module must be adapted for the sake of its children."""
    found = find_adapter(type(module))
    if found is None:
        return False
    adapter, _ = found
    return adapter.needed_around(module)


def _holds_masks(module: nn.Module) -> bool:
    """Whether a module or a part of it is adapted."""
    return any(isinstance(part, Adapter) for part in module.modules())
