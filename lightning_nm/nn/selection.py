"""Which weights of a model are masked, the one reason why each other weight is dense, and how modules are exchanged.

Two functions decide: :func:`_why_module` on the modules, then :func:`_why_weight` on the weights of those that an
adapter takes. The first of their lines that applies gives the reason.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_nm.functional import is_nm
from lightning_nm.nn.adapters import Adapter, WeightSpec, adapted_class, find_adapter
from lightning_nm.nn.adapters.adapter import original_class
from lightning_nm.nn.adapters.attention import switch_fused_paths
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
from lightning_nm.spelling import some_of

if TYPE_CHECKING:  # for the types only
    from lightning_nm.estimators.estimator import GradientEstimator
    from lightning_nm.methods.base import Method

SkipFirstLast = bool | Literal["first", "last"]
"""Which of the first convolution and the last linear layer stay dense: both, none, or one of them."""

Trained = Callable[[nn.Parameter], bool]
"""Whether a weight is trained."""

NO_MATRICES = "parameters of the module itself are no matrices"
"""Of a module without an adapter that holds a class token, positions or the like."""


NOT_INCLUDED = "not in `include`"
"""Of a layer that no rule matches."""


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
        return self.include is None or _match(names, self.include)


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
        # `sizes` has every weight in the model's order.
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
        is_held: The same for layers whose method does not train the weight.
        continued: Names of layers that are masked all the same, because a saved state has masks for them.
        saved_first_last: ``Selection.first_last`` of the training that goes on from a saved state; by default they are
            the first convolution and the last linear layer that are trained, in the order of registration.

    Raises:
        ValueError: If a glob matches nothing, a named layer cannot be masked, no layer is left to mask, a weight holds
            a NaN, or a layer is masked already. The message names the layer.
    """
    candidates, skipped = candidates_of(model)
    selection = Selection(skipped=skipped)
    _complete(candidates, model, rules, exclude)
    # Before the globs are checked, so that one that matches embeddings alone is refused with the reason.
    for candidate in candidates:
        if candidate.is_embedding and not candidate.is_named:
            other = candidate.shared_with
            shared = f", and shares its weight with '{other}'" if other else ""
            skipped[candidate.name] = (
                f"a lookup, not a product{shared}: it is masked only if `include` has its exact name, without wildcards"
            )
    candidates = [candidate for candidate in candidates if candidate.name not in skipped]
    _check_globs(model, rules, exclude, candidates, skipped)

    def trains_weight(candidate: Candidate) -> bool:
        return candidate.rule is None or candidate.rule.method.trains_weight

    def is_frozen(candidate: Candidate) -> bool:
        decides = is_trained if trains_weight(candidate) else is_held
        return decides is not None and not decides(candidate.weight)

    selection.first_last = _first_and_last(
        candidates, is_frozen, saved_first_last, continued, (skip_first, skip_last)
    )
    for candidate in candidates:
        if candidate.joins:
            continue  # the candidate that it is tied to stands for both
        selection.sizes[candidate.name] = known_size(candidate.weight)
        # A saved state has masks for it: it stays masked, even if it is frozen or the last layer now.
        is_free = not candidate.is_named and candidate.name not in continued
        if is_free:
            candidate.held_back = selection.first_last.get(candidate.module_name, "")
        reason = _why_weight(candidate)
        if not reason:
            spec = _layer_spec(candidate)
            reason = _why_misfit(spec, candidate.is_named)
        if reason:
            if candidate.is_named:
                fault = (
                    f"layer '{candidate.name}' is named by `include` but cannot be masked: {reason}"
                )
                if candidate.rule is not None and candidate.rule.estimator is not None:
                    fault += "; a rule with `method: dense` gives it N:M gradients alone"
                raise ValueError(fault)
            skipped[candidate.name] = reason
            continue
        layer = NMLayer(spec, seed=seed, wrappers=candidate.fsdp)
        if is_free and is_frozen(candidate):
            selection.frozen.append(layer)
            state, until = "in no optimizer", "masked, frozen or not, once it is in one"
            if trains_weight(candidate):
                state, until = "frozen", "masked once it requires a gradient and is in an optimizer"
            skipped[layer.name] = f"{state}: it is {until}; at once if `include` names it"
        else:
            # Not of frozen layers: they are asked when they are masked, and may get other weights until then.
            refuse_nan(layer)
            selection.layers.append(layer)
    if not selection.layers and not selection.frozen:
        if not skipped:
            raise ValueError(
                "no layer can be masked. The model has no linear, convolution or attention layer."
            )
        # A shape that does not fit, "in 10 % 4 != 0", is the reason that a user can least guess: it comes first. What
        # `include` does not name, the user has left out: it comes last.
        ordered = sorted(
            skipped.items(), key=lambda row: ("%" not in row[1], row[1] == NOT_INCLUDED)
        )
        reasons = some_of([f"'{name}': {reason}" for name, reason in ordered], 10)
        raise ValueError(
            f"no layer can be masked. Every layer was left out: {reasons}. See `include`, `exclude`, `pattern` and "
            "`skip_first_last`."
        )
    return selection


def candidates_of(model: nn.Module) -> tuple[list[Candidate], dict[str, str]]:
    """Return every weight of a known layer kind; and why other modules that own a matrix are dense, by their names."""
    candidates = []
    skipped = {}
    # Why modules are dense for the sake of others: start of the names of a module's parts, and the name of a child.
    low_rank: dict[str, str] = {}
    read_by: dict[str, str] = {}
    # Parents come before their parts: what they say of a part is known when the part comes.
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        if is_low_rank(module):
            low_rank[f"{name}." if name else ""] = _in_low_rank(module)
        # Another sparsifier may have adapted the module: its own class decides.
        kind = original_class(module)
        found = find_adapter(kind)
        if found is None:
            reason = _why_unknown(module, kind)
            if reason:
                skipped[name] = reason
            continue
        adapter, handled = found
        reason = (
            _why_module(module, kind, adapter, handled)
            or read_by.get(name, "")
            or next((why for start, why in low_rank.items() if name.startswith(start)), "")
        )
        if not reason and parametrize.is_parametrized(module):
            reason = "parametrized: its weight is computed, not stored"
        if reason:
            skipped[name] = reason
            # The module is not adapted, so it goes on to read its children without calling them.
            for child in adapter.reads_children:
                read_by[f"{name}.{child}".lstrip(".")] = f"read, not called, by {kind.__name__}"
            continue
        # No rule is known yet, and so no layout of convolutions: _layer_spec() asks again.
        for spec in adapter.specs(module, "channels"):
            weight_name = layer_name(name, spec.parameter)
            candidates.append(Candidate(weight_name, name, module, adapter, spec))
    return candidates, skipped


def _why_module(
    module: nn.Module, kind: type[nn.Module], adapter: type[Adapter], handled: type[nn.Module]
) -> str:
    """Why the weights of a module that an adapter knows stay dense, by the module alone; empty if nothing says so.

    Args:
        module: The module.
        kind: Its class, as it was before it was adapted.
        adapter: The adapter.
        handled: The class that the adapter handles.
    """
    # A class may say so itself: the layers of a packed model do.
    reason = _quantised(module) or getattr(kind, "nm_unmaskable", "") or adapter.refusal(module)
    if reason:
        return reason
    # Many libraries have a class called Linear: its module tells whose it is.
    path = f"{kind.__module__}.{kind.__name__}"
    if kind.forward is nn.Module.forward:
        return f"{path} has no forward: other modules read its weights"
    # The swapped class would run the adapter's forward in place of this one.
    if kind.forward is not handled.forward and not adapter.wraps_forward:
        return f"{path} has a forward of its own"
    # The hooks of accelerate leave one in the dict of an instance.
    if "forward" in vars(module):
        return f"this {path} has a forward of its own, assigned to the instance"
    return ""


_KINDS: dict[type[nn.Module], str] = {
    nn.Bilinear: "a bilinear layer: its weight has three dimensions, and no N:M GEMM is defined for it",
    nn.RNNBase: "a recurrent layer: a fused operator reads all of its weights at once, past any mask",
    nn.RNNCellBase: "a recurrent cell: a fused operator reads both of its weights at once, past any mask",
}

# Parameter classes of bitsandbytes: their values are floating point until they are moved to the device.
_QUANTISED_CLASSES = ("Int8Params", "Params4bit")

# The dtypes that quantised values are packed into.
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _why_unknown(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module without an adapter is dense; empty if it owns no matrix, and so needs no reason."""
    if isinstance(module, parametrize.ParametrizationList):
        return ""  # the module that it belongs to has the reason
    quantised = _quantised(module)
    owned = _matrices(module._parameters.values())
    if quantised or not owned:
        return quantised
    for base, reason in _KINDS.items():
        if issubclass(kind, base):
            return reason
    # A parameter [1, ...] is one position or the like: it is not multiplied, and no expert.
    if not any(len(each) > 1 and each.numel() > max(each.shape) for each in owned):
        return NO_MATRICES
    reason = f"no adapter for {kind.__name__}"
    if any(holds_matrices(each) and len(each) > 1 for each in owned):
        reason += (
            "; if it holds experts' weights, multiply by them with nm_grouped_linear, and call "
            "register_experts"
        )
    return reason


def _matrices(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors of two or more dimensions; those without a shape yet do not count."""
    return [
        each
        for each in tensors
        if each is not None and not nn.parameter.is_lazy(each) and each.dim() > 1
    ]


def _quantised(module: nn.Module) -> str:
    """What shows that a module's weight is quantised: a parameter, a buffer or the class; empty if nothing does."""
    # Some libraries keep the quantised weight in a buffer; other buffers may hold integers for other reasons.
    buffers = [buffer for name, buffer in module._buffers.items() if "weight" in name]
    for tensor in _matrices([*module._parameters.values(), *buffers]):
        # torchao's tensor classes are held by an ordinary parameter.
        wrapped = type(tensor.data)
        dtype = tensor.dtype
        if type(tensor).__name__ in _QUANTISED_CLASSES:
            found = type(tensor).__name__
        elif wrapped.__module__.startswith("torchao."):
            found = wrapped.__name__
        elif dtype in _INTEGERS or (dtype.is_floating_point and dtype.itemsize < 2):
            found = str(dtype)
        else:
            continue
        return f"quantised: its weight is {found}"
    kind = type(module)
    is_of_torch = kind.__module__.startswith("torch.ao.nn.") and "quantized" in kind.__module__
    # Its weight is a method, which unpacks an object that is no tensor.
    if is_of_torch and hasattr(kind, "weight"):
        return f"quantised: {kind.__module__}.{kind.__name__} packs its weight"
    return ""


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module holds low-rank adapters, by the names of its parts."""
    # peft calls them lora_A, lora_B, lora_embedding_A and so on.
    return any(name.startswith("lora_") for name, _ in module.named_children())


def _in_low_rank(wrapper: nn.Module) -> str:
    """Why the parts of a module with low-rank adapters are not masked here."""
    if hasattr(wrapper, "nm_mask"):  # by mask_adapters
        return "inside a low-rank adapter that keeps the zeros of its base weight"
    way = "for a base that is N:M, lightning_nm.integrations.peft.mask_adapters keeps it so"
    return f"inside a low-rank adapter: the merged weight would not be N:M; {way}"


_Holder = tuple[str, str, Any]
"""Name of a module that holds a parameter, the parameter's name there, and the candidate; ``None`` if no adapter knows
how to mask it there."""


@dataclass(eq=False)
class Candidate:
    """A weight of a module of a known kind, and what the rows ask of it; the fields with defaults are filled in later.

    Embeddings and one layer with a GEMM that hold the same weight may be masked together, as one layer, if one of
    them is named. It has the name of the layer with the GEMM, whichever was named.
    """

    name: str
    module_name: str
    module: nn.Module
    adapter: type[Adapter]
    spec: WeightSpec

    rule: Rule | None = None
    """The first rule that matches one of its names."""
    is_named: bool = False
    """Whether ``include`` names it without wildcards, or another module that holds its weight."""
    is_excluded: bool = False
    held_back: str = ""
    """Why it stays dense as the first or the last layer."""
    shared_with: str = ""
    """The state-dict key of its weight in the first other module that holds it."""
    tie_fault: str = ""
    """Why a shared weight cannot be masked even if it is named."""
    partners: Sequence[Candidate] = ()
    """The other candidates that are masked with it."""
    joins: bool = False
    """Whether it is masked as a part of another candidate: the one with the GEMM, else the first embedding."""
    fsdp: list[Any] = field(default_factory=list)
    """The FSDP modules that hold its module, or are it."""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as the module's attribute."""
        return getattr(self.module, self.spec.parameter)

    @property
    def stored(self) -> Any:
        """The parameter as the module stores it, ``None`` if it does not."""
        return self.module._parameters.get(self.spec.parameter)

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are looked up."""
        return self.adapter.role == "embedding"

    @property
    def cuts(self) -> dict[int, int]:
        """How many parts each dimension is cut into while the module runs."""
        return cuts_in_forward(self.weight, fsdp=bool(self.fsdp))


def _complete(
    candidates: Sequence[Candidate],
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str],
) -> None:
    """Fill in what the candidates need to know of the model and of the settings."""
    known = {(id(each.module), each.spec.parameter): each for each in candidates}
    holders: dict[int, list[_Holder]] = {}  # by the id of the parameter
    fsdp_modules: list[tuple[str, Any]] = []
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        if isinstance(module, FSDPModule):
            fsdp_modules.append((name, module))
        for parameter, weight in module._parameters.items():
            holder = name, parameter, known.get((id(module), parameter))
            holders.setdefault(id(weight), []).append(holder)
    # Globs without wildcards: each names one layer, which must then be maskable.
    globs = [glob for rule in rules for glob in rule.include or ()]
    named = {glob for glob in globs if not any(character in glob for character in "*?[")}
    for candidate in candidates:
        own = [] if candidate.stored is None else holders[id(candidate.stored)]
        others = [holder for holder in own if holder[2] is not candidate]
        names = [candidate.module_name, candidate.name]
        # Who names one of the modules in `include` means the weight, and so every module that holds it.
        every = [*names]
        for module_name, parameter, _ in others:
            every += (module_name, layer_name(module_name, parameter))
        candidate.is_named = not named.isdisjoint(every)
        if candidate.is_named:
            names = every
        candidate.rule = next((rule for rule in rules if rule.matches(*names)), None)
        candidate.is_excluded = _match(names, exclude)
        # With the dot at the end, an FSDP module matches itself and its parts, but no name that only begins alike.
        path = f"{candidate.module_name}."
        # The model itself has no name, and holds every module.
        candidate.fsdp = [
            wrapper for name, wrapper in fsdp_modules if not name or path.startswith(f"{name}.")
        ]
        if not others:
            continue
        candidate.shared_with = parameter_key(*others[0][:2])
        candidate.tie_fault = _tie_fault(candidate, own)
        if candidate.is_named and not candidate.tie_fault:
            members = [member for *_, member in own]
            products = [member for member in members if not member.is_embedding]
            candidate.partners = [member for *_, member in others]
            candidate.joins = (products or members)[0] is not candidate


def _match(names: Iterable[str], globs: Iterable[str]) -> bool:
    """Whether one of the globs matches one of the names."""
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _tie_fault(candidate: Candidate, holders: Sequence[_Holder]) -> str:
    """Why a shared weight cannot be masked even if it is named; empty if it can."""
    # A module that no adapter knows would go on to read the dense weight.
    for module_name, parameter, member in holders:
        if member is None:
            return f"its weight is shared with '{parameter_key(module_name, parameter)}', which cannot be masked"
    shared = f"shared with '{candidate.shared_with}'"
    members = [member for *_, member in holders]
    # Any number of embeddings may join a layer with a GEMM, but no second such layer.
    if sum(not member.is_embedding for member in members) > 1:
        return f"its weight is {shared}, which would change with it"
    # An embedding looks up plain rows of the whole weight.
    if is_sharded(candidate.weight):
        return f"its weight is sharded, and {shared}"
    if any(member.spec.layout != Layout.PLAIN for member in members):
        return f"its weight is {shared}, along whose rows other blocks lie"
    return ""


_ENDS = (("convolution", 0, "first convolution"), ("linear", -1, "last linear layer"))
"""Role of an adapter, which layer of that role stays dense, and the reason."""


def _first_and_last(
    candidates: Sequence[Candidate],
    is_frozen: Callable[[Candidate], bool],
    saved: Mapping[str, str] | None,
    continued: Collection[str],
    skipped: tuple[bool, bool],
) -> dict[str, str]:
    """Return the layers to leave dense by module name, with the reason.

    They are the first convolution and the last linear layer in the order in which the model registers its modules.

    Args:
        candidates: The weights of known kinds, in the order of registration.
        is_frozen: Such layers do not count, unless all layers of their role are.
        saved: What this function returned when the training began, if it goes on from a saved state: it stays. In the
            place of a layer that is not in the model any more, because it was renamed, the present one counts.
        continued: Names of layers for which the saved state has masks.
        skipped: Whether to leave the first convolution, and the last linear layer dense.
    """
    roles = {candidate.module_name: candidate.adapter.role for candidate in candidates}
    before = saved or {}
    lost = {reason for name, reason in before.items() if name not in roles}
    masked = {role for (role, *_), is_skipped in zip(_ENDS, skipped, strict=True) if not is_skipped}
    # By name and role: version 0.2 had other reasons.
    found = {
        name: reason
        for name, reason in before.items()
        if name in roles and roles[name] not in masked
    }
    for role, place, reason in _ENDS:
        if role in masked:
            continue
        layers = [candidate for candidate in candidates if candidate.adapter.role == role]
        if role == "linear":
            # The output projection of an attention layer is inside a block, never the output layer.
            layers = [layer for layer in layers if not layer.module_name.endswith(".out_proj")]
        # Fine-tuning trains a new head behind frozen layers; where all are frozen, all count.
        layers = [layer for layer in layers if not is_frozen(layer)] or layers
        if layers:
            name = layers[place].module_name
            # A layer that has saved masks was not left dense when the training began.
            if saved is None or (reason in lost and name not in continued):
                found[name] = reason
    return found


def _layer_spec(candidate: Candidate) -> LayerSpec:
    """The decisions on a weight that no line of :func:`_why_weight` leaves dense."""
    rule = candidate.rule
    assert rule is not None
    specs = candidate.adapter.specs(candidate.module, rule.conv_layout)
    spec = next(each for each in specs if each.parameter == candidate.spec.parameter)
    # Only linear layers have cuts here, see _why_weight(): of `out` in dimension 0, and of `in` in dimension 1.
    cuts = candidate.cuts
    layout = Layout(spec.layout)
    out, depth = layout.row_sizes(candidate.weight.shape)
    # The groups of a layer of experts are its experts, whose sizes the user knows as plain in and out.
    per_group = "/group" if spec.groups > 1 and not layout.has_experts else ""
    dgrad_reason = "tokens have no gradient"
    if not candidate.is_embedding:
        out_of_group = out // spec.groups
        dgrad_reason = misfit(f"out{per_group}", out_of_group, rule.pattern.m, cuts.get(0, 1))
    return LayerSpec(
        candidate.name,
        candidate.module,
        spec.parameter,
        rule.pattern,
        rule.method,
        # The gradient of an embedding is a sum over tokens, and no GEMM of dY.
        None if candidate.is_embedding else rule.estimator,
        layout=layout,
        # Nor does a dgrad block cross the rows of two processes.
        groups=spec.groups * cuts.get(0, 1),
        forward_reason=misfit(f"in{per_group}", depth, rule.pattern.m, cuts.get(1, 1)),
        dgrad_reason=dgrad_reason,
        tensor_parallel=bool(cuts),
        dgrad=rule.dgrad,
        schedule=rule.schedule,
        tied=tuple((other.module, other.spec.parameter) for other in candidate.partners),
    )


def _why_misfit(spec: LayerSpec, is_named: bool) -> str:
    """Why neither of a weight's GEMMs would gain by its rule; empty if one does, or none needs its masks."""
    method = spec.method
    wants_masks = method.sparse_forward or method.sparse_dgrad
    # With an estimator its wgrad can gain, but who names a layer wants its weights masked.
    needs_masks = spec.estimator is None or is_named
    if spec.maskable or spec.may_draw_backward or not wants_masks or not needs_masks:
        return ""
    wants_dgrad = method.sparse_dgrad or spec.dgrad is not None
    reasons = [spec.forward_reason, spec.dgrad_reason if wants_dgrad else ""]
    return "; ".join(filter(None, reasons))


def _why_weight(candidate: Candidate) -> str:
    """Why a weight stays dense, whether or not its blocks fit; empty if nothing says so. Lines rely on those before."""
    if candidate.rule is None:
        return NOT_INCLUDED
    if candidate.is_excluded:
        return "in `exclude`"
    if candidate.held_back:
        return candidate.held_back
    # Not earlier: a second sparsifier may exclude the weights that the first one has masked.
    for each in (candidate, *candidate.partners):
        refuse_masked(candidate.name, each.module, each.spec.parameter)
    module, stored = candidate.module, candidate.stored
    if stored is None:
        if f"{candidate.spec.parameter}_orig" in module._parameters:
            return "pruned by torch.nn.utils.prune: call prune.remove(module, name) first"
        return "its weight is computed, not stored (weight norm or the like)"
    # Also one whose weight was loaded: in its first call it takes another class, and would lose that of its adapter.
    if nn.parameter.is_lazy(stored) or isinstance(module, LazyModuleMixin):
        return "lazy: it has its shape and class only after its first batch: run one before the training to mask it"
    if stored.is_meta:
        return "on the meta device: give it memory and values (to_empty and reset_parameters) before masking"
    # With CPUOffloadPolicy the shards lie on the CPU, while the mesh is of GPUs.
    device = stored.device.type
    if isinstance(stored, DTensor) and device != stored.device_mesh.device_type:
        return (
            f"FSDP keeps it on the {device}, where no GEMM is made: leave out its CPUOffloadPolicy"
        )
    if not stored.is_floating_point():
        return f"its weight is {stored.dtype}"
    if stored.dim() < 2:
        return (
            f"its weight is flat, {tuple(stored.shape)}, as FSDP1 keeps weights in parts: use FSDP2, fully_shard "
            "in configure_model and ModelParallelStrategy"
        )
    # A row of such a weight has no input channels to choose among.
    if getattr(module, "groups", 1) > 1 and stored.shape[1] == 1:
        return "depthwise convolution: one input channel per filter"
    # Whoever names one of the modules that share a weight knows of both; then only a fault counts.
    if candidate.is_named and candidate.tie_fault:
        return candidate.tie_fault
    if candidate.shared_with and not candidate.is_named:
        reason = f"its weight is shared with '{candidate.shared_with}', which would change with it"
        if not candidate.tie_fault:
            reason += ": if `include` has the exact name of one, both are masked"
        return reason
    if candidate.cuts and not candidate.adapter.tensor_parallel:
        return (
            "sharded while it runs, as tensor parallelism does, which only linear layers can be; under FSDP, give the "
            "module that fully_shard was given, not a part of it"
        )
    return ""


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


def _check_globs(
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str],
    candidates: Sequence[Candidate],
    skipped: Mapping[str, str],
) -> None:
    """Refuse globs that match nothing, by a ``ValueError`` that says what to write instead."""
    names = [name for each in candidates for name in (each.module_name, each.name)]
    layer_names = list(dict.fromkeys(names))  # without duplicates, in order
    modules = {plain_name(name): module for name, module in model.named_modules()}
    options = [(f"`include` of rules[{place}]", rule.include) for place, rule in enumerate(rules)]
    # The last rule is the one of the settings themselves, which have no `rules` entry.
    options[-1] = "`include`", rules[-1].include
    for option, globs in (*options, ("`exclude`", exclude)):
        # Excluding a module without layers does no harm; including one is a mistake.
        names = [*layer_names, *modules] if option == "`exclude`" else layer_names
        for glob in globs or ():
            if not _match(names, [glob]):
                raise ValueError(_no_match(option, glob, layer_names, modules, skipped))


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
        return f"{option} '{glob}' matches only layers that cannot be masked: {some_of(matched, 5)}"
    if glob in modules:
        kind = type(modules[glob]).__name__
        if any(name.startswith(f"{glob}.") for name in layer_names):
            return f"{option} names '{glob}', a {kind}: write '{glob}.*' for its layers"
        return f"{option} names '{glob}', a {kind}, which cannot be masked"
    stem = glob.removesuffix(".weight")
    if stem != glob and _match((*layer_names, *modules), [stem]):
        return (
            f"{option} '{glob}' names a parameter, and layers are named by their modules: drop '.weight' and "
            f"write '{stem}'"
        )
    # The names that are most like it, or some names if none is.
    # 0.4 is below difflib's default of 0.6: a distant name helps more than none.
    close = difflib.get_close_matches(glob, layer_names, n=3, cutoff=0.4) or layer_names[:5]
    shown = "the model has no maskable layer"
    if close:
        shown = f"layers are named like {', '.join(map(repr, close))}"
    return f"{option} '{glob}' matches no layer; {shown}"


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


def warn_of_adapters(model: nn.Module, patterns: Sequence[NMPattern]) -> None:
    """Warn of base weights that are N:M by one of the patterns, and would not be with their adapters merged."""
    found = []
    for name, module in model.named_modules():
        if _breaks_when_merged(module, patterns):
            found.append(plain_name(name))
    if found:
        warnings.warn(
            "low-rank adapters lie on N:M weights, which will not be N:M once they are merged: "
            f"{some_of(found)}. Call lightning_nm.integrations.peft.mask_adapters(model) before training",
            stacklevel=3,  # the attach() of the sparsifier
        )


def _breaks_when_merged(module: Any, patterns: Sequence[NMPattern]) -> bool:
    """Whether merging the adapters of a module would fill the zeros of an N:M base weight."""
    # By the names that peft gives: it need not be installed.
    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    if not isinstance(weight, Tensor) or not is_low_rank(module) or hasattr(module, "nm_mask"):
        return False
    # No process can look at the blocks of a sharded weight alone.
    if is_sharded(weight) or weight.dim() < 2 or not weight.is_floating_point():
        return False
    rows = weight.detach()
    if getattr(module, "fan_in_fan_out", False):  # peft's name for a base weight [in, out]
        rows = rows.t()
    fitting = [pattern for pattern in patterns if rows.shape[1] % pattern.m == 0]
    # A weight of zeros is N:M by any pattern, and says nothing.
    return any(is_nm(rows, pattern, dim=1) for pattern in fitting) and bool(rows.any())


def install(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Swap the classes of the layers' modules, and switch off fused paths that would bypass them."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            _adapt(module)
            # All modules that hold the weight have one layer, and so the same masks.
            vars(module)["nm_layers"][parameter] = layer
    _adapt_around(model)


def uninstall(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Give the layers' modules their classes back; what other sparsifiers installed stays."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            if isinstance(module, Adapter):
                # The class goes back in _adapt_around(), once no layer is left in the module.
                module.nm_layers.pop(parameter, None)
    _adapt_around(model)


def _adapt(module: nn.Module) -> None:
    """Swap the class of a module, unless that was done before."""
    if not isinstance(module, Adapter):
        module.__class__ = adapted_class(type(module))
        # Past any __setattr__ of the module's own class.
        vars(module)["nm_layers"] = {}


def _adapt_around(model: nn.Module) -> None:
    """Adapt what is needed around the modules with masks, and nothing else; switch off the fused paths around them."""
    # Children come after their parents, which may be needed around them.
    for module in reversed(list(model.modules())):
        found = find_adapter(type(module))
        if found is not None and found[0].needed_around(module):
            _adapt(module)
        elif vars(module).get("nm_layers") == {}:  # those of packed modules are made when asked for
            module.__class__ = original_class(module)
            del vars(module)["nm_layers"]
    switch_fused_paths(model)
