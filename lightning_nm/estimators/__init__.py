"""Gradient estimators for the wgrad GEMM."""

from __future__ import annotations

from typing import Any

from lightning_nm.estimators.base import GradientEstimator

__all__ = ["GradientEstimator", "resolve_estimator"]


def resolve_estimator(estimator: GradientEstimator | Any | None) -> GradientEstimator | None:
    """Return a gradient estimator object as it is, and ``None`` as ``None``.

    Raises:
        TypeError: If the object is not a :class:`GradientEstimator`.
    """
    if estimator is None or isinstance(estimator, GradientEstimator):
        return estimator
    raise TypeError(f"grad_estimator must be a GradientEstimator or None, not {estimator!r}")
