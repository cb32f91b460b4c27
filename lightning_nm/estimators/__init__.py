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
"""Short names of estimators. ``"dense"`` is none: dY is kept, also where a preset has an estimator."""

# Every name but "dense", which makes no estimator.
_BY_NAME: dict[str, type[GradientEstimator]] = {
    "mvue": MVUE,
    "approx-mvue": ApproxMVUE,
    "top-n": TopN,
}


def resolve_estimator(
    estimator: EstimatorName | GradientEstimator | Any | None,
) -> GradientEstimator | None:
    """Make an estimator from its short name; an object is returned as it is, and ``"dense"`` and ``None`` as ``None``.

    Raises:
        ValueError: If no estimator has this name.
        TypeError: If the object is not a :class:`GradientEstimator`.

    Example:
        >>> resolve_estimator("mvue"), resolve_estimator("dense")
        (MVUE(pattern=None, dense_start=0, dense_end=0), None)
    """
    if estimator is None or isinstance(estimator, GradientEstimator):
        return estimator
    if not isinstance(estimator, str):
        raise TypeError(
            f"grad_estimator must be a short name, a GradientEstimator or None, not {estimator!r}"
        )
    if estimator == "dense":
        return None
    if estimator not in _BY_NAME:
        names = get_args(EstimatorName)
        choices = ", ".join(map(repr, names))
        hint = did_you_mean(estimator, names)  # empty if no name is close
        raise ValueError(
            f"grad_estimator {estimator!r} does not exist: use one of {choices}, an object or None{hint}"
        )
    estimator_class = _BY_NAME[estimator]
    return estimator_class()
