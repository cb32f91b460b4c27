"""The schedule of each rule: checked against its method, pattern and estimator, which get what they plan themselves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_nm.estimators import GradientEstimator
from lightning_nm.functional.schedule import Schedule, check_narrower
from lightning_nm.methods import Method
from lightning_nm.nn.selection.selection import Rule

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
