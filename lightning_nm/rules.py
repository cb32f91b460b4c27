"""Reading a sparsifier's arguments: which layers get which pattern, method and estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_nm.estimators import EstimatorName, GradientEstimator, resolve_estimator
from lightning_nm.methods import Method, MethodName, resolve_method
from lightning_nm.nn.selection import Rule, as_globs
from lightning_nm.pattern import NMPattern, PatternLike


def make_rules(
    pattern: PatternLike,
    method: MethodName | Method,
    grad_estimator: EstimatorName | GradientEstimator | None,
    include: str | Sequence[str] | None,
    rules: Sequence[Mapping[str, Any]] | None,
) -> list[Rule]:
    """The rules in order, the general one last.

    Raises:
        ValueError: For a bad pattern, method or key, naming it.
    """
    general = Rule(
        as_globs(include, "include"),
        NMPattern.parse(pattern),
        resolve_method(method),
        resolve_estimator(grad_estimator),
    )
    made = []
    for rule in rules or ():
        unknown = set(rule) - {"include", "pattern", "method", "grad_estimator"}
        if unknown or "include" not in rule:
            problem = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no 'include'"
            raise ValueError(
                f"rule {dict(rule)!r} has {problem}: a rule has 'include' and any of 'pattern', 'method', "
                "'grad_estimator'"
            )
        made.append(
            Rule(
                as_globs(rule["include"], "include"),
                NMPattern.parse(rule["pattern"]) if "pattern" in rule else general.pattern,
                resolve_method(rule["method"]) if "method" in rule else general.method,
                resolve_estimator(rule["grad_estimator"]) if "grad_estimator" in rule else general.estimator,
            )
        )
    return [*made, general]
