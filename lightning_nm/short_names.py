"""Short names of methods and gradient estimators, as YAML and command lines give them."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_nm import methods
from lightning_nm.estimators import MVUE, ApproxMVUE, GradientEstimator, TopN
from lightning_nm.methods import Method
from lightning_nm.spelling import did_you_mean, not_given

MethodName = Literal[
    "dense",
    "ste",
    "sr-ste",
    "s-ste",
    "step",
    "decaying",
    "asp",
    "transposable",
    "bi-mask",
    "slope",
    "bame",
    "rigl",
    "cast",
    "lbc",
    "maxq",
    "mask-logits",
]
"""The short names; each is the ``short_name`` of a class in this package."""


# `Method` itself is among them, whose short name is that of no method.
# dir() of the package, which loads lazily, lists the public classes; getattr imports each.
_CLASSES = [getattr(methods, name) for name in dir(methods)]
_BY_NAME = {kind.short_name: kind for kind in _CLASSES}
# In the order of the Literal, by which messages list them. A name without a class is an error at the import.
METHODS: dict[str, type[Method]] = {name: _BY_NAME[name] for name in get_args(MethodName)}
"""The class of each short name."""


def resolve_method(method: MethodName | Method | Any, **settings: Any) -> Method:
    """Make a method from its short name and arguments of its class; an object is returned as it is.

    Raises:
        ValueError: If no method has this name.
        TypeError: If the object is not a :class:`Method`.
    """
    if isinstance(method, Method):
        # As it is: the `settings` of a preset do not change an object of the user's.
        return method
    if not isinstance(method, str):
        raise TypeError(f"method must be a short name or a Method{not_given(method)}")
    if method not in METHODS:
        names = ", ".join(map(repr, METHODS))
        meant = did_you_mean(method, METHODS)
        raise ValueError(
            f"method {method!r} does not exist: use one of {names} or an object{meant}"
        )
    return METHODS[method](**settings)


EstimatorName = Literal["dense", "mvue", "approx-mvue", "top-n"]
"""Short names of estimators. ``"dense"`` is none: dY is kept, also where a preset has an estimator."""

DgradName = Literal["mvue"]
"""Short names of what draws the backward weight of the forward weight."""

# Every name but "dense", which makes no estimator.
_ESTIMATORS: dict[str, type[GradientEstimator]] = {
    "mvue": MVUE,
    "approx-mvue": ApproxMVUE,
    "top-n": TopN,
}


SHORT_NAMES = {kind.__name__: name for name, kind in (METHODS | _ESTIMATORS).items()}
"""The short names of methods and estimators by the names of their classes, which saved states hold."""


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
    if estimator not in _ESTIMATORS:
        names = get_args(EstimatorName)
        choices = ", ".join(map(repr, names))
        meant = did_you_mean(estimator, names)
        raise ValueError(
            f"grad_estimator {estimator!r} does not exist: use one of {choices}, an object or None{meant}"
        )
    return _ESTIMATORS[estimator]()


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
    if dgrad != "mvue":
        raise ValueError(
            f"dgrad={dgrad!r} is unknown: use 'mvue', or None for the backward weight of the method (such as "
            "'bi-mask' or 'transposable')"
        )
    # The same blocks and the same draw as for dY: blocks of outputs in the place of blocks of tokens.
    return MVUE()
