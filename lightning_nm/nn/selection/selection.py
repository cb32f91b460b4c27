"""Which weights of a model are masked, and why the others are not. Nothing is changed here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.nn.adapters import Adapter, WeightSpec, adapter_of, adapters_by_parameters
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import ConvLayout, row_sizes
from lightning_nm.nn.layer.names import layer_name, plain_name
from lightning_nm.nn.layer.sharding import cuts_in_forward, gather
from lightning_nm.nn.layer.spec import LayerSpec
from lightning_nm.nn.selection.first_last import Trained, first_and_last, head_hint
from lightning_nm.nn.selection.low_rank import KeepsMask, is_low_rank
from lightning_nm.nn.selection.ranges import expanded
from lightning_nm.nn.selection.ties import Candidate, Ties
from lightning_nm.nn.selection.unmaskable import matrices, quantised, unmaskable

if TYPE_CHECKING:
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


@dataclass(frozen=True)
class Rule:
    """What the layers that match get; ``include`` holds globs over module names, ``None`` matches every layer."""

    include: tuple[str, ...] | None
    pattern: NMPattern
    method: Method
    estimator: GradientEstimator | None = None
    conv_layout: ConvLayout = "channels"

    def matches(self, *names: str) -> bool:
        """Whether one of the layer's names matches."""
        return self.include is None or any(
            fnmatchcase(name, glob) for name in names for glob in self.include
        )


@dataclass
class Selection:
    """The outcome of a selection.

    Attributes:
        layers: The masked layers, in the model's order.
        skipped: Why each other weight is dense, by name; waiting layers are in it, too.
        sizes: The size of every weight of a known kind, in the model's order.
        waiting: Layers that will be masked once an optimizer trains them.
        first_last: The first and the last layer by module name, with the reason to leave them dense.
        hint: Says so if another layer looks more like the output layer than the last one; else empty.
    """

    layers: list[NMLayer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    waiting: list[NMLayer] = field(default_factory=list)
    first_last: dict[str, str] = field(default_factory=dict)
    hint: str = ""

    def wake(self, layers: Collection[NMLayer]) -> None:
        """Move waiting layers to the masked ones."""
        places = {name: place for place, name in enumerate(self.sizes)}
        self.waiting = [layer for layer in self.waiting if layer not in layers]
        self.layers += layers
        self.layers.sort(key=lambda layer: places[layer.name])  # in place: others hold this list
        for layer in layers:
            del self.skipped[layer.name]

    def replaced(self, model: nn.Module) -> list[str]:
        """Masked and waiting layers whose module is no longer in the model."""
        modules = set(map(id, model.modules()))
        return [
            layer.name for layer in (*self.layers, *self.waiting) if id(layer.module) not in modules
        ]


FROZEN = "frozen: it is masked once it requires a gradient and is in an optimizer; at once if `include` names it"


def select(
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str] = (),
    *,
    skip_first: bool = True,
    skip_last: bool = True,
    seed: int = 0,
    is_trained: Trained | None = None,
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
        continued: Names of layers that are masked all the same, because a saved state has masks for them.
        saved_first_last: ``Selection.first_last`` of the training that goes on from a saved state; by default they are
            the first convolution and the last linear layer that are trained, in the order of registration.

    Raises:
        ValueError: If a glob matches nothing, a named layer cannot be masked, no layer is left to mask, a weight holds
            a NaN, or a layer is masked already. The message names the layer.
    """
    selection = Selection()
    named = {glob for rule in rules for glob in rule.include or () if not _is_glob(glob)}
    candidates = list(candidates_of(model, selection, "channels", named))
    ties = Ties(model, candidates, named)
    selection.skipped |= {c.name: reason for c in candidates if (reason := ties.why_dense(c))}
    candidates = [c for c in candidates if c.name not in selection.skipped]
    _check_globs(model, rules, exclude, candidates, selection)
    selection.first_last = first_and_last(
        candidates, is_trained, saved_first_last, skip_first=skip_first, skip_last=skip_last
    )
    if skip_last and saved_first_last is None:
        selection.hint = head_hint(candidates, is_trained)

    wrappers = [
        (plain_name(name), module)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]
    for candidate in candidates:
        if ties.joins(candidate):
            continue
        selection.sizes[candidate.name] = _size(getattr(candidate.module, candidate.spec.parameter))
        names = ties.names(candidate)
        rule = next((rule for rule in rules if rule.matches(*names)), None)
        is_named = ties.is_named(candidate)
        spec = candidate.spec if rule is None else candidate.spec_in(rule.conv_layout)
        reason, reasons = "", ("", "")
        if rule is None:
            reason = "not in `include`"
        elif any(fnmatchcase(name, glob) for name in names for glob in exclude):
            reason = "in `exclude`"
        elif (
            candidate.module_name in selection.first_last
            and not is_named
            and candidate.name not in continued
        ):
            reason = selection.first_last[candidate.module_name]
        else:
            for holder in (candidate, *ties.tied(candidate)):
                refuse_masked(candidate.name, holder.module, holder.spec.parameter)
            reason = _why_not(candidate) or ties.why_not(candidate)
        own = f"{candidate.module_name}."
        around: list[Any] = [
            wrapper for name, wrapper in wrappers if own.startswith(name and f"{name}.")
        ]
        cuts = cuts_in_forward(
            getattr(candidate.module, candidate.spec.parameter), fsdp=bool(around)
        )
        if not reason and cuts and not candidate.adapter.tensor_parallel:
            reason = (
                "sharded while it runs, as tensor parallelism does, which only linear layers can be; under FSDP, give "
                "the module that fully_shard was given, not a part of it"
            )
        if not reason and rule is not None:
            reasons = _eligibility(candidate, spec, rule.pattern, cuts)
            wants_masks = rule.method.sparse_forward or rule.method.sparse_dgrad
            gains = (rule.method.sparse_forward and not reasons[0]) or (
                rule.method.sparse_dgrad and not reasons[1]
            )
            # With an estimator its wgrad can gain, but who names a layer wants its weights masked.
            if wants_masks and not gains and (rule.estimator is None or is_named):
                needed = reasons if rule.method.sparse_dgrad else reasons[:1]
                reason = "; ".join(text for text in needed if text)
        if reason or rule is None:
            if is_named and rule is not None:
                way = (
                    "; a rule with `method: dense` gives it N:M gradients alone"
                    if rule.estimator is not None
                    else ""
                )
                raise ValueError(
                    f"layer '{candidate.name}' is named by `include` but cannot be masked: {reason}{way}"
                )
            selection.skipped[candidate.name] = reason
            continue
        decided = LayerSpec(
            candidate.name,
            candidate.module,
            spec.parameter,
            rule.pattern,
            rule.method,
            None if candidate.is_embedding else rule.estimator,
            layout=spec.layout,
            groups=spec.groups * cuts.get(0, 1),
            forward_reason=reasons[0],
            dgrad_reason=reasons[1],
            tensor_parallel=bool(cuts),
            tied=tuple((other.module, other.spec.parameter) for other in ties.tied(candidate)),
        )
        layer = NMLayer(decided, seed=seed, wrappers=around)
        if (
            is_named
            or candidate.name in continued
            or is_trained is None
            or is_trained(candidate.weight)
        ):
            refuse_nan(layer)
            selection.layers.append(layer)
        else:
            selection.waiting.append(layer)
            selection.skipped[layer.name] = FROZEN
    if not selection.layers and not selection.waiting:
        raise ValueError("no layer can be masked. " + _advice(selection))
    return selection


def candidates_of(
    model: nn.Module, selection: Selection, conv_layout: str, named: Collection[str] = ()
) -> Iterator[Candidate]:
    """Every weight of a known layer kind; other modules that own a matrix become skipped layers of the selection."""
    wrapped: dict[
        str, nn.Module
    ] = {}  # modules with low-rank adapters, by the start of the names of their parts
    readers: dict[
        str, str
    ] = {}  # modules that their parent reads without calling, unless it is adapted itself
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        if is_low_rank(module):
            wrapped[f"{name}." if name else ""] = module
        kind = type(module).nm_base if isinstance(module, Adapter) else type(module)
        known, packed = unmaskable(kind), quantised(module)
        found = adapter_of(name, module, named)
        if found is None or (known and found[0].by_parameters):
            if packed or matrices(module):
                selection.skipped[name] = (
                    packed or known or f"no adapter for {kind.__name__}{_hint(module)}"
                )
            continue
        adapter, handled = found
        reason = ""
        if stated := packed or getattr(kind, "nm_unmaskable", "") or adapter.refusal(module):
            reason = stated
        elif kind.forward is nn.Module.forward:
            reason = f"{kind.__name__} has no forward: other modules read its weights"
        elif (
            kind.forward is not handled.forward and not adapter.wraps_forward
        ) or "forward" in vars(module):
            reason = f"{kind.__name__} has a forward of its own"
        elif name in readers:
            reason = f"read, not called, by {readers[name]}"
        elif name.startswith(tuple(wrapped)):
            reason = _in_low_rank(
                next(found for start, found in wrapped.items() if name.startswith(start))
            )
        elif parametrize.is_parametrized(module):
            reason = "parametrized: its weight is computed, not stored"
        if reason:
            selection.skipped[name] = reason
            readers.update(
                {f"{name}.{child}".lstrip("."): kind.__name__ for child in adapter.reads_children}
            )
            continue
        for spec in adapter.specs(module, conv_layout):
            own = {name, layer_name(name, spec.parameter)}
            if not adapter.recognizes(name, module, spec.parameter) and own.isdisjoint(named):
                selection.skipped[layer_name(name, spec.parameter)] = (
                    f"no adapter for it{_hint(module)}"
                )
                continue
            yield Candidate(layer_name(name, spec.parameter), name, module, adapter, spec)


_HINT = "; if it holds experts' weights, name it in `include` or see register_experts"


def _hint(module: nn.Module) -> str:
    """What to do about a module without an adapter that may hold experts."""
    specs = (
        spec for adapter in adapters_by_parameters() for spec in adapter.specs(module, "channels")
    )
    return (
        _HINT if any(len(getattr(module, spec.parameter)) > 1 for spec in specs) else ""
    )  # [1, ...] is a position


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
    if gather(torch.isnan(layer.param.detach()).any()):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds NaN: load or initialise it before masking"
        )


def _size(weight: Tensor) -> int:
    return 0 if nn.parameter.is_lazy(weight) else weight.numel()


def _why_not(candidate: Candidate) -> str:
    weight = candidate.module._parameters.get(candidate.spec.parameter)
    if weight is None and f"{candidate.spec.parameter}_orig" in candidate.module._parameters:
        return "pruned by torch.nn.utils.prune: call prune.remove(module, name) first"
    if weight is None:
        return "its weight is computed, not stored (weight norm or the like)"
    if nn.parameter.is_lazy(weight):
        return "lazy: its shape is not known before the first batch"
    if weight.is_meta:
        return "on the meta device: give it memory and values (to_empty and reset_parameters) before masking"
    if isinstance(weight, DTensor) and weight.device.type != weight.device_mesh.device_type:
        return f"FSDP keeps it on the {weight.device.type}, where no product is made: leave out its CPUOffloadPolicy"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if weight.dim() < 2:
        return (
            f"its weight is flat, {tuple(weight.shape)}, as FSDP1 keeps weights in parts: use FSDP2, fully_shard in "
            "configure_model and ModelParallelStrategy"
        )
    groups = getattr(candidate.module, "groups", 1)
    if groups > 1 and weight.shape[1] == 1:
        return "depthwise convolution: one input channel per filter"
    return ""


def _eligibility(
    candidate: Candidate, spec: WeightSpec, pattern: NMPattern, cuts: Mapping[int, int]
) -> tuple[str, str]:
    """Why the forward and the dgrad GEMM cannot be N:M, if the dimensions are cut into so many parts; else empty."""
    out, depth = row_sizes(candidate.weight.shape, spec.layout)
    part = "" if spec.groups == 1 or spec.layout.startswith("experts") else "/group"
    forward = _misfit(f"in{part}", depth, pattern, cuts.get(1, 1))
    if candidate.is_embedding:
        return forward, "tokens have no gradient"
    return forward, _misfit(f"out{part}", out // spec.groups, pattern, cuts.get(0, 1))


def _misfit(axis: str, size: int, pattern: NMPattern, cuts: int) -> str:
    """Why blocks do not fit into each of the equal parts of an axis."""
    if size % (cuts * pattern.m) == 0:
        return ""
    divided = f"{size}" if cuts == 1 else f"{size} / {cuts} processes"
    return f"{axis} {divided} % {pattern.m} != 0"


def _check_globs(
    model: nn.Module,
    rules: Sequence[Rule],
    exclude: Sequence[str],
    candidates: Sequence[Candidate],
    selection: Selection,
) -> None:
    names = list(dict.fromkeys(name for c in candidates for name in (c.module_name, c.name)))
    modules = {plain_name(name): module for name, module in model.named_modules()}
    *special, general = rules
    wanted = [
        (f"`include` of rules[{k}]", glob)
        for k, rule in enumerate(special)
        for glob in rule.include or ()
    ]
    wanted += [("`include`", glob) for glob in general.include or ()] + [
        ("`exclude`", glob) for glob in exclude
    ]
    for option, glob in wanted:
        if any(fnmatchcase(name, glob) for name in names):
            continue
        if option == "`exclude`" and any(fnmatchcase(name, glob) for name in modules):
            continue
        if glob in selection.skipped:
            raise ValueError(
                f"layer '{glob}' is named by {option} but cannot be masked: {selection.skipped[glob]}"
            )
        if matched := [
            f"'{n}': {reason}" for n, reason in selection.skipped.items() if fnmatchcase(n, glob)
        ]:
            shown = "; ".join(matched[:5]) + (
                f"; and {len(matched) - 5} more" if len(matched) > 5 else ""
            )
            raise ValueError(
                f"{option} '{glob}' matches only layers that cannot be masked: {shown}"
            )
        if glob in modules and any(name.startswith(f"{glob}.") for name in names):
            raise ValueError(
                f"{option} names '{glob}', a {type(modules[glob]).__name__}: write '{glob}.*' for its layers"
            )
        if glob in modules:
            raise ValueError(
                f"{option} names '{glob}', a {type(modules[glob]).__name__}, which cannot be masked"
            )
        stem = glob.removesuffix(".weight")
        if stem != glob and any(fnmatchcase(name, stem) for name in (*names, *modules)):
            raise ValueError(
                f"{option} '{glob}' names a parameter, and layers are named by their modules: drop '.weight' and "
                f"write '{stem}'"
            )
        raise ValueError(f"{option} '{glob}' matches no layer; {_closest(glob, names)}")


def _closest(glob: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[:5]
    return (
        f"layers are named like {', '.join(map(repr, close))}"
        if close
        else "the model has no maskable layer"
    )


def _advice(selection: Selection) -> str:
    if not selection.skipped:
        return "The model has no linear, convolution or attention layer."
    # A shape that does not fit is the reason that a user can least guess.
    telling = sorted(selection.skipped.items(), key=lambda item: "%" not in item[1])
    reasons = "; ".join(f"'{name}': {reason}" for name, reason in telling[:10])
    return f"Every layer was left out: {reasons}. See `include`, `exclude`, `pattern` and `skip_first_last`."


def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def as_globs(value: Any, option: str) -> tuple[str, ...] | None:
    """Read ``None``, one glob or a list of globs; anything else is a ``TypeError``.

    A name with ranges, as tables print it, is read as the names that it stands for.
    """
    if value is None:
        return None
    globs = (
        (value,)
        if isinstance(value, str)
        else tuple(value)
        if isinstance(value, (list, tuple, set))
        else (value,)
    )
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`{option}` takes globs over module names, for example ['encoder.*'], not {value!r}"
        )
    return tuple(plain_name(name) for glob in globs for name in expanded(glob))
