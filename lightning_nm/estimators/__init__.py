"""Gradient estimators for the wgrad GEMM, and their short names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_nm.estimators.base import BlockEstimator, GradientEstimator
from lightning_nm.estimators.mvue import MVUE, ApproxMVUE
from lightning_nm.estimators.top_n import TopN
from lightning_nm.spelling import did_you_mean, not_given

__all__ = [
    "MVUE",
    "ApproxMVUE",
    "BlockEstimator",
    "DgradName",
    "EstimatorName",
    "GradientEstimator",
    "TopN",
    "resolve_dgrad",
    "resolve_estimator",
]

EstimatorName = Literal["dense", "mvue", "approx-mvue", "top-n"]
"""Short names of estimators. ``"dense"`` is none: dY is kept, also where a preset has an estimator."""

DgradName = Literal["mvue"]
"""Short names of what draws the backward weight of the forward weight."""

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
            f"grad_estimator must be a short name, a GradientEstimator or None{not_given(estimator)}"
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


def resolve_dgrad(dgrad: DgradName | Any | None) -> GradientEstimator | None:
    """Make what draws the backward weight W_B from its short name; ``None`` leaves W_B to the method.

    Raises:
        ValueError: If there is nothing of this name.

    Example:
        >>> resolve_dgrad("mvue"), resolve_dgrad(None)
        (MVUE(pattern=None, dense_start=0, dense_end=0), None)
    """
    if dgrad is None:
        return None
    if dgrad not in get_args(DgradName):
        raise ValueError(
            f"dgrad={dgrad!r} is unknown: use 'mvue', or None for the backward weight of the method (such as "
            "'bi-mask' or 'transposable')"
        )
    # The same blocks and the same draw as for dY: blocks of outputs in the place of blocks of tokens.
    return MVUE()
