"""Which method, pattern, estimator and layout which layers get, as users write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from torch import nn
from typing_extensions import Required

from lightning_nm.config.presets import Preset, PresetName, preset_of
from lightning_nm.config.schedules import with_schedules
from lightning_nm.estimators import (
    DgradName,
    EstimatorName,
    GradientEstimator,
    resolve_dgrad,
    resolve_estimator,
)
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.schedule import Schedule, ScheduleSpec
from lightning_nm.methods import Method, MethodName, resolve_method
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast, parse_skip_first_last
from lightning_nm.nn.selection.selection import Rule, Selection, as_globs, select

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

    def masked_in(self, state: Mapping[str, Any]) -> list[str]:
        """Return "first" and "last" if a saved state masks that layer although these settings leave it dense."""
        masked = []
        if self.skip_first and not state["skip_first"]:
            masked.append("first")
        if self.skip_last and not state["skip_last"]:
            masked.append("last")
        return masked

    def select(self, model: nn.Module, **options: Any) -> Selection:
        """Select the layers of a model by these settings.

        Args:
            model: The model; it is not changed.
            options: The other arguments of :func:`~lightning_nm.nn.selection.selection.select`, by name.
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
