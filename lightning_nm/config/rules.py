"""Which method, pattern, estimator and layout which layers get, as users write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from torch import nn
from typing_extensions import Required

from lightning_nm.config.presets import Preset, PresetName, preset_of
from lightning_nm.estimators import EstimatorName, GradientEstimator, resolve_estimator
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.methods import Method, MethodName, resolve_method
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast, parse_skip_first_last
from lightning_nm.nn.selection.selection import Rule, Selection, as_globs, select

SHORT_NAMES: dict[str, str] = {
    type(resolve_method(name)).__name__: name for name in get_args(MethodName)
}
SHORT_NAMES |= {
    type(resolve_estimator(name)).__name__: name
    for name in get_args(EstimatorName)
    if name != "dense"
}
"""The short names of methods and estimators by the names of their classes, which saved states hold."""


class RuleSpec(TypedDict, total=False):
    """A rule of :class:`~lightning_nm.NMSparsityCallback`. Keys that are left out take the callback's arguments."""

    include: Required[str | list[str]]
    pattern: PatternLike
    method: MethodName | Method
    grad_estimator: EstimatorName | GradientEstimator | None
    conv_layout: ConvLayout


@dataclass(frozen=True)
class ResolvedRules:
    """Which layers a training masks, and how, with objects in place of names.

    Attributes:
        rules: The first one that matches a layer decides; the last one is the general one.
        exclude: Globs over names of modules to keep dense.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        presets: The presets of the rules' methods, each once; empty without a preset.
    """

    rules: list[Rule]
    exclude: tuple[str, ...]
    skip_first: bool
    skip_last: bool
    presets: list[Preset]

    def masked_in(self, state: Mapping[str, Any]) -> list[str]:
        """Return "first" and "last" if a saved state masks that layer although these settings leave it dense."""
        masked = []
        if self.skip_first and not state.get("skip_first", True):
            masked.append("first")
        if self.skip_last and not state.get("skip_last", True):
            masked.append("last")
        return masked

    def select(self, model: nn.Module, **options: Any) -> Selection:
        """:func:`~lightning_nm.nn.selection.selection.select` by these settings."""
        options |= {"skip_first": self.skip_first, "skip_last": self.skip_last}
        return select(model, self.rules, self.exclude, **options)


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
) -> ResolvedRules:
    """Resolve what is given, else what the preset says, else the package's defaults.

    A method that is an object is taken as it is.

    Raises:
        ValueError: For an impossible pattern, an unknown name or preset, or a bad rule.
    """
    _check_layout(conv_layout)
    _check_list(rules)
    chosen = _preset(preset, method)
    general = Rule(
        as_globs(include, "include"),
        NMPattern.parse(pattern),
        _method(chosen, method),
        resolve_estimator(
            chosen.grad_estimator if chosen and grad_estimator is None else grad_estimator
        ),
        conv_layout or (chosen.conv_layout if chosen else "channels"),
    )
    masks = chosen is None or bool(
        chosen.source
    )  # a general method that is dense has no preset: those of rules count
    own_estimator = not masks and grad_estimator is None
    found = [_parse_rule(rule, general, preset, conv_layout, own_estimator) for rule in rules or ()]
    used = [chosen, *(_preset(preset, rule["method"]) for rule in rules or () if "method" in rule)]
    presets = list({id(each): each for each in used if each is not None and each.source}.values())
    deciding = [chosen] if chosen and masks else presets
    if skip_first_last is not None:
        skip_first, skip_last = parse_skip_first_last(skip_first_last)
    elif deciding:
        skip_first = any(each.skip_first for each in deciding)
        skip_last = any(each.skip_last for each in deciding)
    else:
        skip_first, skip_last = True, True
    return ResolvedRules(
        [*found, general], as_globs(exclude, "exclude") or (), skip_first, skip_last, presets
    )


def _preset(preset: PresetName | None, method: MethodName | Method) -> Preset | None:
    resolve_method(method)  # raises for what is no method
    return None if preset is None else preset_of(preset, method)


def _method(preset: Preset | None, method: MethodName | Method) -> Method:
    return (
        preset.made() if preset is not None and isinstance(method, str) else resolve_method(method)
    )


def _check_layout(conv_layout: Any) -> None:
    if conv_layout is not None and conv_layout not in get_args(ConvLayout):
        raise ValueError(f"conv_layout={conv_layout!r} is unknown: use 'channels' or 'flat'")


def _check_list(rules: Any) -> None:
    """Refuse what is no list of mappings, such as one mapping alone, by a ``TypeError``."""
    if rules is None or (
        isinstance(rules, (list, tuple)) and all(isinstance(rule, Mapping) for rule in rules)
    ):
        return
    example = "[{'include': 'encoder.*', 'pattern': '1:4'}]"
    raise TypeError(f"`rules` takes a list of mappings, for example {example}, not {rules!r}")


def _parse_rule(
    rule: Mapping[str, Any],
    general: Rule,
    preset: PresetName | None,
    conv_layout: ConvLayout | None,
    own_estimator: bool,
) -> Rule:
    """Parse one of the ``rules``; keys that it lacks are taken from the general rule, or from its method's preset.

    The preset's estimator is taken with ``own_estimator`` alone.
    """
    known = list(RuleSpec.__annotations__)
    unknown = set(rule) - set(known)
    if unknown or "include" not in rule:
        problem = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no 'include'"
        raise ValueError(
            f"rule {dict(rule)!r} has {problem}: a rule has 'include' and any of {', '.join(map(repr, known[1:]))}"
        )
    own = _preset(preset, rule["method"]) if "method" in rule else None
    _check_layout(rule.get("conv_layout"))
    estimator = (
        resolve_estimator(own.grad_estimator) if own and own_estimator else general.estimator
    )
    return Rule(
        as_globs(rule["include"], "include"),
        NMPattern.parse(rule["pattern"]) if "pattern" in rule else general.pattern,
        _method(own, rule["method"]) if "method" in rule else general.method,
        resolve_estimator(rule["grad_estimator"]) if "grad_estimator" in rule else estimator,
        rule.get("conv_layout") or conv_layout or (own.conv_layout if own else general.conv_layout),
    )
