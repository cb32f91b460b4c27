"""The settings of a sparse training: presets, rules for layers, and SparsityConfig, which holds them all."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal, TypedDict, TypeVar, get_args

from torch import nn
from typing_extensions import Required

from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import (
    ASP,
    LBC,
    SRSTE,
    SSTE,
    BiMask,
    Dense,
    MaskLogits,
    MaxQ,
    Method,
    SLoPe,
    TransposableMask,
)
from lightning_nm.nn.selection import (
    Rule,
    Selection,
    SkipFirstLast,
    as_globs,
    parse_skip_first_last,
    select,
)
from lightning_nm.nn.weight import ConvLayout
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.schedule import Schedule, ScheduleSpec, check_narrower
from lightning_nm.short_names import (
    DgradName,
    EstimatorName,
    MethodName,
    resolve_dgrad,
    resolve_estimator,
    resolve_method,
)
from lightning_nm.spelling import did_you_mean, not_given
from lightning_nm.training.scale import Scale, check_scale
from lightning_nm.training.watch import OnDirectRead

PresetName = Literal["paper", "fst"]
"""``"paper"``: the code of the paper that proposed the method. ``"fst"``: transposable masks in FST's transformers."""


@dataclass(frozen=True)
class Preset:
    """Settings of the authors' code for one method, which fill in the arguments that are not given.

    Attributes:
        method: The method's class.
        source: Where the settings are from.
        settings: Arguments of the method.
        conv_layout: How the blocks of convolutions lie.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        grad_estimator: The estimator of output gradients.

    Example:
        >>> preset = Preset(SRSTE, "arXiv 2102.04010", {"decay": 2e-4}, skip_first=False)
        >>> preset.made(decay=1e-4).decay
        0.0001
        >>> print(preset)
        arXiv 2102.04010: decay=0.0002, conv_layout=channels, skip_first=False, skip_last=True
    """

    method: type[Method]
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    conv_layout: ConvLayout = "channels"
    skip_first: bool = True
    skip_last: bool = True
    grad_estimator: EstimatorName | None = None

    def made(self, **changes: Any) -> Method:
        """Return a new method with these settings, and with ``changes`` in place of some of them."""
        arguments = {**self.settings, **changes}
        return self.method(**arguments)

    def __str__(self) -> str:
        """Return the source and all settings, on one line."""
        settings: dict[str, Any] = dict(self.settings)
        settings["conv_layout"] = self.conv_layout
        settings["skip_first"] = self.skip_first
        settings["skip_last"] = self.skip_last
        if self.grad_estimator:
            settings["grad_estimator"] = self.grad_estimator
        listed = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"{self.source}: {listed}"


# The preset of a rule that leaves layers dense, and of the dense baseline. Its source is empty, which tells it apart
# from presets that set something.
_DENSE = Preset(Dense)

# By preset, then by the method's short name. Arguments that are not listed keep the method's own default.
_PRESETS: dict[PresetName, dict[str, Preset]] = {
    "paper": {
        "dense": _DENSE,
        "sr-ste": Preset(
            SRSTE,
            "arXiv 2102.04010",
            # The code adds the decay in every process, and then sums the gradients of all.
            {"decay": 2e-4, "decay_scale": "world-size"},
            skip_first=False,
        ),
        "bi-mask": Preset(
            BiMask,
            "arXiv 2302.06058",
            {
                # The code counts forward passes from 1: rows keep their own order for 99 of them.
                "permute_every": 100,
                "first_search": 99,
                "candidates": 100,
                "search": "redraw",  # the permutation in use does not compete with the new ones
                "criterion": "retained",
                "decay": 2e-4,
                "decay_scale": "world-size",
            },
            conv_layout="flat",
        ),
        # Its code is for transformers: the layout of convolutions is the default one.
        "s-ste": Preset(SSTE, "arXiv 2409.09099", grad_estimator="approx-mvue"),
        "asp": Preset(
            ASP,
            "arXiv 2104.08378",
            {"start": 0, "init": "magnitude"},
            skip_first=False,
            skip_last=False,
        ),
        "slope": Preset(
            SLoPe,
            "arXiv 2405.16325",
            # The code selects the backward masks after every step whose number leaves 99 when divided by 100.
            {"refresh_every": 100, "first_refresh": 99, "start": 0, "init": "magnitude"},
        ),
        "transposable": Preset(
            TransposableMask,
            "arXiv 2102.08124",
            # Masks change before the 40th forward pass: after 39 steps.
            {"update_every": 40, "first_update": 39, "decay": 0.0},
            conv_layout="flat",
            skip_first=False,
        ),
        "lbc": Preset(
            LBC,
            "arXiv 2206.06662",
            # The command of the code: 60 of 120 epochs.
            {"stop": 0.5},
        ),
        "maxq": Preset(
            MaxQ,
            "arXiv 2312.07061",
            # The scripts of the code: 30 of 120 epochs. Stems of 7x7 cannot be given to its convolutions.
            {"start": 0, "stop": 0.25, "ramp": "linear", "decay": 2e-4, "temperature": 0.01},
        ),
        "mask-logits": Preset(
            MaskLogits,
            "arXiv 2409.17481",
            {
                "temperature": (4.0, 0.05),
                "scale": (1e2, 5e2),
                "prior_strength": 3.0,
                "weight_reg": 1e-5,
                "stop": 1.0,
            },
        ),
    },
    "fst": {
        "dense": _DENSE,
        "transposable": Preset(
            TransposableMask,
            "arXiv 2404.01847",
            {"update_every": 40, "decay": 6e-5, "decay_at": "after-clipping", "dense_end": 1 / 6},
            grad_estimator="approx-mvue",
        ),
    },
}


def preset_of(preset: PresetName, method: MethodName | Method) -> Preset:
    """Return the preset for a method, which is given by its short name or as an object.

    Raises:
        ValueError: If there is none.

    Example:
        >>> preset_of("paper", "bi-mask").source
        'arXiv 2302.06058'
    """
    if preset not in _PRESETS:
        choices = " or ".join(repr(name) for name in get_args(PresetName))
        raise ValueError(f"preset={preset!r} is unknown: use {choices}")
    preset_of_name = _PRESETS[preset]
    resolve_method(
        method
    )  # for its error alone: a name that no method has is not the preset's fault
    if isinstance(method, str):
        found = preset_of_name.get(method)
    else:
        # The exact class: the papers' settings say nothing about a user's subclass.
        preset_of_class = {each.method: each for each in preset_of_name.values()}
        found = preset_of_class.get(type(method))
    if found is None:
        wanted = repr(method) if isinstance(method, str) else f"{type(method).__name__} objects"
        # Dense layers have a preset for rules' sake only, so it is not offered.
        names = ", ".join(repr(name) for name in preset_of_name if name != "dense")
        raise ValueError(
            f"preset={preset!r} has no settings for method {wanted}: it has them for {names}"
        )
    return found


def preset_method(method: MethodName, preset: PresetName = "paper", **changes: Any) -> Method:
    """Return a method with the settings of a paper's code and some changes.

    ``preset="paper"`` alone uses the settings as they are; this is for experiments that depart from them.

    Args:
        method: The short name.
        preset: Whose settings, see docs/papers.md.
        changes: Arguments of the method's class that are to be others.

    Raises:
        ValueError: If there is no such preset, or for a bad argument of the method.
        TypeError: If the method has no such argument.

    Example:
        >>> from lightning_nm import NMSparsityCallback
        >>> callback = NMSparsityCallback("2:4", preset_method("bi-mask", permute_every=50), preset="paper")
        >>> preset_method("bi-mask").search
        'redraw'
    """
    return preset_of(preset, method).made(**changes)


Part = TypeVar("Part", Method, GradientEstimator)


def with_schedules(rules: Sequence[Rule]) -> list[Rule]:
    """The rules with the dense phases of their schedules in their estimators and in methods that plan by them.

    Rules without masks, such as those of the method ``dense``, have a schedule for their estimator alone.

    Raises:
        ValueError: If a method refuses a part of its schedule, a moment is given twice, or the ramp does not lead to
            the rule's pattern; if a part is given that no rule follows.
    """
    scheduled = []
    for rule in rules:
        try:
            scheduled.append(_with_schedule(rule))
        except ValueError as error:
            if rule.include is None:
                raise
            names = ", ".join(rule.include)
            raise ValueError(
                f"{error}. This is the rule of {names}: give it a `schedule` of its own, or null"
            ) from error
    _refuse_unused(rules)
    return scheduled


def _refuse_unused(rules: Sequence[Rule]) -> None:
    """Refuse parts of schedules that no rule follows."""
    given: dict[str, None] = {}  # a dict keeps the order
    followed = set()
    for rule in rules:
        for part in [] if rule.schedule is None else rule.schedule.parts:
            given[part] = None
            # An estimator has dense phases of its own, and no ramp.
            if rule.method.uses_masks or (rule.estimator is not None and part != "ramp"):
                followed.add(part)
    unused = [part for part in given if part not in followed]
    if not unused:
        return
    needs = "masks" if unused == ["ramp"] else "masks or a gradient estimator"
    raise ValueError(
        f"schedule has {', '.join(unused)}, but no layer gets {needs}: leave that out, or use another method"
    )


def _with_schedule(rule: Rule) -> Rule:
    schedule = rule.schedule
    if schedule is None:
        return rule
    method = rule.method
    estimator = rule.estimator
    if estimator is not None:
        estimator = _with_dense_phases(estimator, schedule)
    if method.sparse_forward and not method.uses_masks:
        raise ValueError(
            f"method {_name(method)} makes its zeros without the layers' masks, so that a schedule cannot begin or end "
            "them: leave `schedule` out, or use another method"
        )
    if not method.uses_masks:
        return replace(rule, estimator=estimator, schedule=None)
    for part in schedule.parts:
        if part in method.refused_schedule:
            raise ValueError(
                f"schedule has {part}, which method {_name(method)} refuses: {method.refused_schedule[part]}"
            )
    if schedule.ramp:
        check_narrower(schedule.ramp[-1], rule.pattern)
    if method.plans_dense_phases:
        method = _with_dense_phases(method, schedule)
    else:
        _refuse_own_phases(method)
    return replace(rule, method=method, estimator=estimator)


def _with_dense_phases(part: Part, schedule: Schedule) -> Part:
    """A copy of a method or an estimator with the dense phases of the schedule."""
    part = copy.copy(part)
    for name in ("dense_start", "dense_end"):
        moment = getattr(schedule, name)
        if moment:
            _refuse_second(part, name)
            setattr(part, name, moment)
    return part


def _refuse_own_phases(method: Method) -> None:
    """Refuse a method with dense phases of its own, between which the schedule would not lie."""
    for name in ("dense_start", "dense_end"):
        _refuse_second(method, name)


def _refuse_second(part: Method | GradientEstimator, name: str) -> None:
    if getattr(part, name):
        raise ValueError(
            f"{part!r} has a dense phase of its own, {name}={getattr(part, name)}, beside that of the schedule: leave "
            f"it out, and give {name} in `schedule`. If a `preset` sets it, give the method itself without the preset"
        )


def _name(method: Method) -> str:
    return f"'{method.short_name}'" if method.short_name else type(method).__name__


SHORT_NAMES: dict[str, str] = {
    type(resolve_method(name)).__name__: name for name in get_args(MethodName)
}
# "dense" is no estimator: it resolves to None.
SHORT_NAMES |= {
    type(resolve_estimator(name)).__name__: name
    for name in get_args(EstimatorName)
    if name != "dense"
}
"""The short names of methods and estimators by the names of their classes, which saved states hold."""


class RuleSpec(TypedDict, total=False):
    """One of the ``rules`` of :class:`~lightning_nm.SparsityConfig`, as users write it.

    Keys that are left out take the value of the setting of the same name.

    Example:
        >>> rule: RuleSpec = {"include": "encoder.*", "pattern": "1:4"}
    """

    include: Required[str | list[str]]
    pattern: PatternLike
    method: MethodName | Method
    grad_estimator: EstimatorName | GradientEstimator | None
    conv_layout: ConvLayout
    dgrad: DgradName | None
    schedule: ScheduleSpec | None


@dataclass(frozen=True)
class ResolvedRules:
    """The settings that decide which layers are masked and how, with objects in place of short names.

    Attributes:
        rules: The first one that matches a layer decides; the last one is the general one.
        exclude: Globs over names of modules to keep dense.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        presets: The presets of the rules' methods, each once; empty without a preset.

    Example:
        >>> from lightning_nm import SparsityConfig
        >>> settings = SparsityConfig("2:4", "ste", rules=[{"include": "head", "pattern": "1:4"}]).resolve()
        >>> [str(rule.pattern) for rule in settings.rules]
        ['1:4', '2:4']
    """

    rules: list[Rule]
    exclude: tuple[str, ...]
    skip_first: bool
    skip_last: bool
    presets: list[Preset]

    def select(self, model: nn.Module, **options: Any) -> Selection:
        """Select the layers of a model by these settings.

        Args:
            model: The model; it is not changed.
            options: The other arguments of :func:`~lightning_nm.nn.selection.select`, by name.
        """
        return select(
            model,
            self.rules,
            self.exclude,
            skip_first=self.skip_first,
            skip_last=self.skip_last,
            **options,
        )


def resolve_rules(
    pattern: PatternLike,
    method: MethodName | Method,
    grad_estimator: EstimatorName | GradientEstimator | None,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    rules: Sequence[Mapping[str, Any]] | None,
    preset: PresetName | None,
    skip_first_last: SkipFirstLast | None,
    conv_layout: ConvLayout | None,
    dgrad: DgradName | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> ResolvedRules:
    """Resolve the settings of :class:`~lightning_nm.SparsityConfig` of the same names.

    What is given comes first, then what the preset says, then the package's defaults. A method that is an object is
    taken as it is.

    Raises:
        ValueError: For an impossible pattern, an unknown name or preset, or a bad rule.
        TypeError: If ``rules`` is no list of mappings, or for globs that are no strings.
    """
    _check_layout(conv_layout)
    _check_list(rules)
    specs = rules or ()
    general_preset = _preset_or_none(preset, method)
    general = _general_rule(
        pattern, method, grad_estimator, include, conv_layout, general_preset, dgrad, schedule
    )

    # Dense layers have a preset without a source. Where the general method is dense, the masked layers are those of
    # the rules, so the presets of the rules decide in place of the general one.
    general_is_dense = general_preset is not None and not general_preset.source
    takes_own_estimator = general_is_dense and grad_estimator is None
    parsed = [
        _parse_rule(spec, general, preset, conv_layout, takes_own_estimator) for spec in specs
    ]

    rule_presets = [_preset_or_none(preset, spec["method"]) for spec in specs if "method" in spec]
    # In the order of use, each once: the table of layers prints them.
    presets: list[Preset] = []
    for used in (general_preset, *rule_presets):
        if used is not None and used.source and used not in presets:
            presets.append(used)

    scheduled = with_schedules([*parsed, general])
    deciding = presets
    if general_preset is not None and not general_is_dense:
        deciding = [general_preset]
    skip_first, skip_last = _skips(skip_first_last, deciding)
    return ResolvedRules(
        # The first match decides: the general rule comes last, because it may match every layer.
        rules=scheduled,
        exclude=as_globs(exclude, "exclude") or (),
        skip_first=skip_first,
        skip_last=skip_last,
        presets=presets,
    )


def _skips(skip_first_last: SkipFirstLast | None, presets: Sequence[Preset]) -> tuple[bool, bool]:
    """Whether the first convolution, and whether the last linear layer stays dense, as given or by the presets."""
    if skip_first_last is not None:
        return parse_skip_first_last(skip_first_last)
    if not presets:
        return True, True  # the package's default
    # A layer that one of several presets leaves dense stays dense.
    skip_first = any(preset.skip_first for preset in presets)
    skip_last = any(preset.skip_last for preset in presets)
    return skip_first, skip_last


def _general_rule(
    pattern: PatternLike,
    method: MethodName | Method,
    grad_estimator: EstimatorName | GradientEstimator | None,
    include: str | Sequence[str] | None,
    conv_layout: ConvLayout | None,
    own_preset: Preset | None,
    dgrad: DgradName | None,
    schedule: Mapping[str, Any] | None,
) -> Rule:
    """The rule of the layers that none of the ``rules`` matches; ``own_preset`` is that of its method."""
    # None means "not given". "dense" is given: it keeps dY even where the preset has an estimator.
    if grad_estimator is None and own_preset is not None:
        grad_estimator = own_preset.grad_estimator
    default_layout: ConvLayout = "channels" if own_preset is None else own_preset.conv_layout
    rule = Rule(
        include=as_globs(include, "include"),
        pattern=NMPattern.parse(pattern),
        method=_method(own_preset, method),
        estimator=resolve_estimator(grad_estimator),
        conv_layout=conv_layout or default_layout,
        dgrad=resolve_dgrad(dgrad),
        schedule=Schedule.parse(schedule),
    )
    _check_dgrad(rule)
    return rule


def _check_dgrad(rule: Rule) -> None:
    """Refuse to draw the backward weight of a method that makes its own, by a ``ValueError``."""
    method = rule.method
    if rule.dgrad is None:
        return
    if method.sparse_dgrad:
        made = "gives dgrad a mask of its own"
    elif method.transposable:
        made = "makes the forward weight N:M along `out`, too"
    elif method.has_own_backward_weight:
        made = "makes a backward weight of its own"
    else:
        return
    name = method.short_name or type(method).__name__
    place = "" if rule.include is None else f" of the layers {', '.join(rule.include)}"
    raise ValueError(
        f"dgrad='mvue' draws the backward weight{place}, but method '{name}' {made}: leave dgrad out (in one of the "
        "`rules`: dgrad: null), or use a method whose dgrad takes the forward weight, such as 'sr-ste'"
    )


def _parse_rule(
    spec: Mapping[str, Any],
    general: Rule,
    preset: PresetName | None,
    conv_layout: ConvLayout | None,
    takes_own_estimator: bool,
) -> Rule:
    """Parse one of the ``rules``; keys that it lacks are taken from the general rule, or from its method's preset.

    Args:
        spec: The rule as the user wrote it.
        general: The rule of all other layers.
        preset: The name of the preset in use.
        conv_layout: The layout that the user gave for all layers; it precedes that of a preset.
        takes_own_estimator: Whether the preset of the rule's method precedes the general rule's estimator.

    Raises:
        ValueError: For an unknown key, a missing ``include``, or a bad value.
    """
    _check_keys(spec)
    _check_layout(spec.get("conv_layout"))
    pattern = general.pattern
    method = general.method
    estimator = general.estimator
    layout = general.conv_layout
    dgrad = general.dgrad
    schedule = general.schedule

    # A method of the rule's own comes with a preset of its own.
    if "method" in spec:
        own_preset = _preset_or_none(preset, spec["method"])
        method = _method(own_preset, spec["method"])
        if own_preset is not None:
            layout = conv_layout or own_preset.conv_layout
            if takes_own_estimator:
                estimator = resolve_estimator(own_preset.grad_estimator)

    # What the rule says precedes everything. In YAML a key may be there with the value null: as an estimator it keeps
    # dY, as a layout it counts as not given.
    if "pattern" in spec:
        pattern = NMPattern.parse(spec["pattern"])
    if "grad_estimator" in spec:
        estimator = resolve_estimator(spec["grad_estimator"])
    if spec.get("conv_layout"):
        layout = spec["conv_layout"]
    if "dgrad" in spec:
        dgrad = resolve_dgrad(spec["dgrad"])
    if "schedule" in spec:
        schedule = Schedule.parse(spec["schedule"])
    globs = as_globs(spec["include"], "include")
    rule = Rule(globs, pattern, method, estimator, layout, dgrad=dgrad, schedule=schedule)
    _check_dgrad(rule)
    return rule


def _preset_or_none(preset: PresetName | None, method: MethodName | Method) -> Preset | None:
    return None if preset is None else preset_of(preset, method)


def _method(preset: Preset | None, method: MethodName | Method) -> Method:
    """Make a method from its short name, with the preset's settings if there is one; an object stays as it is."""
    if preset is not None and isinstance(method, str):
        return preset.made()
    return resolve_method(method)


def _check_layout(conv_layout: Any) -> None:
    """Refuse an unknown layout; ``None`` stands for none that is given."""
    if conv_layout is not None and conv_layout not in get_args(ConvLayout):
        raise ValueError(f"conv_layout={conv_layout!r} is unknown: use 'channels' or 'flat'")


def _check_list(rules: Any) -> None:
    """Refuse what is no list of mappings by a ``TypeError``."""
    if rules is None:
        return
    # One mapping alone is a likely slip in YAML: iterating over it would give its keys.
    is_list = isinstance(rules, (list, tuple))
    if not is_list or not all(isinstance(rule, Mapping) for rule in rules):
        example = "[{'include': 'encoder.*', 'pattern': '1:4'}]"
        raise TypeError(f"`rules` takes a list of mappings, for example {example}, not {rules!r}")


def _check_keys(spec: Mapping[str, Any]) -> None:
    """Refuse a rule with an unknown key or without ``include``."""
    known = list(RuleSpec.__annotations__)
    unknown = sorted(set(spec) - set(known))
    if unknown:
        problem = f"unknown key {unknown[0]!r}"
    elif "include" not in spec:
        problem = "no 'include'"
    else:
        return
    # In the order of the class, so that the message reads like the documentation.
    optional = ", ".join(repr(key) for key in known if key != "include")
    raise ValueError(
        f"rule {dict(spec)!r} has {problem}: a rule has 'include' and any of {optional}"
    )


@dataclass(frozen=True)
class SparsityConfig:
    """Which weights a training masks, and how.

    :class:`~lightning_nm.NMSparsityCallback`, :class:`~lightning_nm.NMSparsifier` and the callback for the Trainer of
    transformers take these settings as keyword arguments, or all together as ``config=``.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: A short name, such as ``bi-mask``, ``sr-ste``, ``bame`` or ``asp``, of those in docs/which-method.md, or
            a :class:`Method`
            by ``class_path``.
        grad_estimator: The estimator that replaces the output gradient dY in the weight-gradient GEMM: ``mvue``,
            ``approx-mvue``, ``top-n``, or a :class:`GradientEstimator` by ``class_path``; ``dense`` keeps dY, and so
            does ``None`` unless the preset has an estimator. By short name, ``mvue`` and ``top-n`` use each layer's own
            pattern, and ``approx-mvue`` always 2:4.
        include: Globs over names of modules to mask; all maskable layers by default. A name without wildcards must be
            maskable.
        exclude: Globs over names of modules to keep dense.
        rules: Exceptions for some layers: mappings with ``include`` and any of ``pattern``, ``method``,
            ``grad_estimator``, ``conv_layout``, ``dgrad``, ``schedule``; the first match wins.
        preset: ``paper``: settings of the code of the method's paper, for the methods that docs/papers.md lists, also
            those of ``rules``. ``fst``: those of FST (arXiv 2404.01847), for ``transposable``.
            They fill in what is not given: ``conv_layout``, ``skip_first_last`` and ``grad_estimator``, and all
            arguments of a method that is given by its short name. A method that is an object is taken as it is, see
            :func:`~lightning_nm.preset_method`. docs/papers.md has the settings.
        skip_first_last: Which of the first convolution and the last linear layer stay dense: ``True`` both, ``first``
            or ``last`` one of them, ``False`` none; by default as the preset says, else both. They are the first and
            the last one of the trained layers that the model registers, whatever the order in which ``forward`` calls
            them. A resumed run keeps its choice. The table of layers gives the reason.
        conv_layout: ``channels``, the default: convolution blocks along the input channels for a fixed kernel tap, as
            hardware reads them, and as in the code of SR-STE and ASP. ``flat``: along the flattened filter, as in the
            code of Bi-Mask and transposable masks.
        seed: Base of all random choices; equal on all ranks.
        frozen: ``dense``: weights that no optimizer trains, such as those of a teacher, stay dense; a layer that is
            unfrozen later is masked from then on. Layers that ``include`` names are masked in any case. ``mask``: all
            are masked.
        grad_snr_every: Training steps between two comparisons of estimated weight gradients with exact ones: one more
            GEMM in each of four layers, which take turns. A resumed training compares four in its first step, too.
            0 for none. Compiled layers are never compared.
        scale: ``supar``: weights that are not trained yet get initial values that make up for the pruned entries, and
            masked weights the learning rate times ``base_density / density`` (arXiv 2405.15743, docs/scale.md).
            ``supar-lr``: the learning rate alone, for weights that were trained before.
        base_density: The density that the learning rate and the initial values suit: 1 if they were found for the dense
            model.
        dgrad: ``mvue``: the input gradient is made with a random draw of the forward weight, N:M along the outputs and
            equal to it in the mean, by the estimator of arXiv 2203.10991, as layers of the repository
            huyz2023/2by4-pretrain do. It is drawn anew for every backward pass. For methods whose own dgrad uses the
            forward weight. ``None`` leaves the backward weight to the method.
        schedule: A dense start, a ramp of patterns and a dense end, for all methods: a mapping with any of
            ``dense_start``, ``ramp``, ``ramp_ends`` and ``dense_end``, such as ``{dense_start: 0.1, ramp: [8:16, 4:16],
            dense_end: 0.1}``. Moments are training steps (an integer) or shares of the training (a float). ``ramp`` has
            the patterns before ``pattern``; each has an equal share of the time between the dense phases, or lasts
            until its moment of ``ramp_ends``. The dense phases hold for ``grad_estimator``, too. With ``dense_end``
            **the trained model is dense**. Methods refuse what they cannot follow. See docs/which-method.md.

        direct_reads: What happens before the first optimizer step of a masked weight that has a gradient though its
            layer was not called: other code reads it, for example by ``F.linear(x, layer.weight)``, gets the dense
            values, and the weight would be pruned at the end. ``error`` or ``warn``. A layer that is not used has no
            gradient and is accepted. Calls in compiled functions are not seen: after ``torch.compile`` there are
            warnings at most.

    Raises:
        ValueError: For an impossible pattern, an unknown method or estimator, a bad rule or an argument out of range.
        TypeError: For an argument of another type.

    Example:
        >>> config = SparsityConfig("1:4", "sr-ste", exclude="head")
        >>> SparsityConfig.from_dict(config.to_dict()) == config
        True
    """

    pattern: PatternLike = "2:4"
    method: MethodName | Method = "bi-mask"
    grad_estimator: EstimatorName | GradientEstimator | None = None
    include: str | list[str] | None = None
    exclude: str | list[str] | None = None
    rules: list[RuleSpec] | None = None
    preset: PresetName | None = None
    skip_first_last: SkipFirstLast | None = None
    conv_layout: ConvLayout | None = None
    seed: int = 0
    frozen: Literal["dense", "mask"] = "dense"
    grad_snr_every: int = 100
    scale: Scale | None = None
    base_density: float = 1.0
    dgrad: DgradName | None = None
    schedule: ScheduleSpec | None = None
    direct_reads: OnDirectRead = "error"

    def __post_init__(self) -> None:
        # Mistakes are refused here, where the user wrote them, and not when a fit starts.
        if self.frozen not in ("dense", "mask"):
            raise ValueError(f"frozen={self.frozen!r} is unknown: use 'dense' or 'mask'")
        if self.direct_reads not in ("error", "warn"):
            raise ValueError(
                f"direct_reads={self.direct_reads!r} is unknown: use 'error' or 'warn'"
            )
        every = self.grad_snr_every
        # bool is a subclass of int: grad_snr_every=True would mean every step.
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(
                f"grad_snr_every={every} must be a number of training steps, or 0 for never"
            )
        check_scale(self.scale, self.base_density)
        # For its errors, too: patterns, names and rules are checked while they are resolved.
        self.resolve()

    def resolve(self) -> ResolvedRules:
        """Return the rules of the layers, with objects in place of short names.

        Each call makes new methods from short names, so two trainings with one configuration share none.
        """
        return resolve_rules(
            self.pattern,
            self.method,
            self.grad_estimator,
            self.include,
            self.exclude,
            self.rules,
            self.preset,
            self.skip_first_last,
            self.conv_layout,
            self.dgrad,
            self.schedule,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are not the default, as primitives that JSON and YAML hold.

        Methods and estimators that are objects become ``{"class_path": ..., "init_args": ...}``.
        """
        # Defaults are left out, so that a file shows what was chosen.
        settings = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "pattern":
                # Of its several notations this is the one of the default, "2:4".
                value = str(NMPattern.parse(value))
            if value != setting.default:
                settings[setting.name] = _as_primitive(value)
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SparsityConfig:
        """Return the configuration of :meth:`to_dict`, or of the same keys in YAML.

        Raises:
            TypeError: For a key that is no setting; the message has the closest one.
        """
        refuse_unknown(settings, cls)
        arguments = {name: _from_primitive(value) for name, value in settings.items()}
        return cls(**arguments)


def chosen_config(config: SparsityConfig | None, given: SparsityConfig) -> SparsityConfig:
    """Return ``config``, or the configuration ``given`` by single arguments instead.

    Raises:
        TypeError: If ``config`` is something else.
        ValueError: If both are given.

    Example:
        >>> chosen_config(SparsityConfig("1:4"), given=SparsityConfig()).pattern
        '1:4'
    """
    if config is None:
        return given
    if not isinstance(config, SparsityConfig):
        raise TypeError(f"config must be a SparsityConfig{not_given(config)}")
    # An argument with its default value cannot be told from one that was not given, and changes nothing.
    arguments = given.to_dict()
    if arguments:
        raise ValueError(
            f"both config and {', '.join(arguments)} are given: put them into the SparsityConfig"
        )
    return config


def refuse_unknown(options: Mapping[str, Any], owner: type) -> None:
    """Refuse names that are neither arguments of ``owner`` nor settings of :class:`SparsityConfig`.

    Raises:
        TypeError: With the closest name that exists.

    Example:
        >>> refuse_unknown({"includ": "encoder.*"}, SparsityConfig)
        Traceback (most recent call last):
            ...
        TypeError: SparsityConfig has no argument 'includ'; did you mean 'include'?
    """
    # Constructors take these options as **options, so Python itself refuses none.
    known = arguments_of(owner)
    for name in options:
        if name not in known:
            raise TypeError(f"{owner.__name__} has no argument {name!r}{did_you_mean(name, known)}")


def arguments_of(owner: type) -> list[str]:
    """Return the names of a constructor's arguments, with the settings of :class:`SparsityConfig` where it takes them.

    Example:
        >>> arguments_of(SparsityConfig)[:3]
        ['pattern', 'method', 'grad_estimator']
    """
    names = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    # Who takes config= also takes its settings one by one, by **options.
    if "config" in names:
        names += [field.name for field in fields(SparsityConfig) if field.name not in names]
    return names


def _as_primitive(value: Any) -> Any:
    """The value as JSON and YAML hold it: patterns as text, methods and estimators as ``class_path`` and arguments."""
    if isinstance(value, NMPattern):
        return str(value)
    if isinstance(value, (Method, GradientEstimator)):
        owner = type(value)
        # Constructors keep each argument under its own name; other attributes are derived from these.
        arguments = inspect.signature(owner).parameters
        init_args = {}
        for name, setting in vars(value).items():
            if name in arguments:
                init_args[name] = _as_primitive(setting)
        # The notation of LightningCLI.
        return {"class_path": f"{owner.__module__}.{owner.__qualname__}", "init_args": init_args}
    if isinstance(value, Mapping):
        return {key: _as_primitive(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_as_primitive(entry) for entry in value]
    return value


def _from_primitive(value: Any) -> Any:
    """The inverse of :func:`_as_primitive`; patterns stay text, which every setting takes."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            module, _, name = value["class_path"].rpartition(".")
            owner = getattr(import_module(module), name)
            return owner(**value.get("init_args", {}))
        return {key: _from_primitive(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_primitive(entry) for entry in value]
    return value
