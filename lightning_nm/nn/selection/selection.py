"""Which weights of a model are masked, and why the others are not. Nothing is changed here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.schedule import Schedule
from lightning_nm.nn.adapters import Adapter, WeightSpec, find_adapter
from lightning_nm.nn.adapters.base import original_class
from lightning_nm.nn.adapters.experts import holds_matrices
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import ConvLayout, known_size, misfit, row_sizes
from lightning_nm.nn.layer.names import layer_name, plain_name
from lightning_nm.nn.layer.sharding import cuts_in_forward, gather
from lightning_nm.nn.layer.spec import LayerSpec
from lightning_nm.nn.selection.first_last import Trained, first_and_last
from lightning_nm.nn.selection.low_rank import KeepsMask, is_low_rank
from lightning_nm.nn.selection.ties import Candidate, Ties
from lightning_nm.nn.selection.unmaskable import matrices, quantised, unmaskable

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


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
        layout=weight_spec.layout,
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
    out, depth = row_sizes(candidate.weight.shape, spec.layout)
    # The groups of a layer of experts are its experts, whose sizes the user knows as plain in and out.
    is_grouped = spec.groups > 1 and not spec.layout.startswith("experts")
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
