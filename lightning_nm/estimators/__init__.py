"""Gradient estimators for the wgrad GEMM, and their short names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_nm.estimators.base import GradientEstimator
from lightning_nm.estimators.blocks import BlockEstimator
from lightning_nm.estimators.mvue import MVUE, ApproxMVUE
from lightning_nm.estimators.top_n import TopN
from lightning_nm.functional.spelling import did_you_mean

__all__ = [
    "MVUE",
    "ApproxMVUE",
    "BlockEstimator",
    "EstimatorName",
    "GradientEstimator",
    "TopN",
    "resolve_estimator",
]

EstimatorName = Literal["dense", "mvue", "approx-mvue", "top-n"]
"""``"dense"`` is none: dY is kept, also where a preset has an estimator."""

_CLASSES: tuple[type[GradientEstimator], ...] = (MVUE, ApproxMVUE, TopN)
_BY_NAME: dict[str, type[GradientEstimator]] = dict(
    zip(get_args(EstimatorName)[1:], _CLASSES, strict=True)
)


def resolve_estimator(
    estimator: EstimatorName | GradientEstimator | Any | None,
) -> GradientEstimator | None:
    """Make an estimator from its short name; an object is returned as it is, and ``"dense"`` and ``None`` as ``None``.

    Raises:
        ValueError: If no estimator has this name.
        TypeError: If the object is not a :class:`GradientEstimator`.
    """
    if estimator is None or isinstance(estimator, GradientEstimator):
        return estimator
    if isinstance(estimator, str):
        if estimator == "dense":
            return None
        if estimator not in _BY_NAME:
            names = get_args(EstimatorName)
            advice = f"use one of {', '.join(map(repr, names))}, an object or None{did_you_mean(estimator, names)}"
            raise ValueError(f"grad_estimator {estimator!r} does not exist: {advice}")
        return _BY_NAME[estimator]()
    raise TypeError(
        f"grad_estimator must be a short name, a GradientEstimator or None, not {estimator!r}"
    )
