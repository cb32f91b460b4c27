"""Rules for some layers, as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_nm.estimators import resolve_estimator
from lightning_nm.methods import resolve_method
from lightning_nm.nn.selection import Rule, as_globs
from lightning_nm.pattern import NMPattern


def parse_rule(rule: Mapping[str, Any], general: Rule) -> Rule:
    """Parse one of the ``rules``; keys that it lacks are taken from the general rule."""
    unknown = set(rule) - {"include", "pattern", "method", "grad_estimator"}
    if unknown or "include" not in rule:
        problem = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no 'include'"
        keys = "'include' and any of 'pattern', 'method', 'grad_estimator'"
        raise ValueError(f"rule {dict(rule)!r} has {problem}: a rule has {keys}")
    return Rule(
        as_globs(rule["include"], "include"),
        NMPattern.parse(rule["pattern"]) if "pattern" in rule else general.pattern,
        resolve_method(rule["method"]) if "method" in rule else general.method,
        resolve_estimator(rule["grad_estimator"]) if "grad_estimator" in rule else general.estimator,
    )
