"""What the contract tests run on besides the layer kinds of ``tests.support.kinds``; a class from outside adds its row.

A pytest plugin may add rows before the tests are collected, see docs/extend: ``python -m pytest -p my_rows ...``.
"""

from typing import get_args

import torch

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    MVUE,
    SRSTE,
    STEP,
    ApproxMVUE,
    DecayingMask,
    MaskLogits,
    MaxQ,
    RigL,
    SLoPe,
    TopN,
    TransposableMask,
)
from lightning_nm.short_names import MethodName
from tests.support.outside import ScaledMask, SoftThreshold

METHODS = {
    **{name: lambda name=name: name for name in get_args(MethodName)},
    "step": lambda: STEP(dense_start=1, latest=2),
    "decaying": lambda: DecayingMask(stop=3),
    "asp-late": lambda: ASP(start=2),
    "transposable": lambda: TransposableMask(update_every=2),
    "bame": lambda: BAME(stop=100, every=2, budget=1.0, evidence="batch"),
    "bame-late": lambda: BAME(
        start=1, stop=100, every=2, gradient_every=2, evidence_rate=0.5, budget=1.0
    ),
    "bame-bi-mask": lambda: BAME(
        stop=100, gradient_every=2, budget=1.0, evidence_rate=0.2, dgrad="bi-mask"
    ),
    "slope": lambda: SLoPe(refresh_every=2),
    "rigl": lambda: RigL(every=1, stop=100, drop=0.9),
    "cast": lambda: CAST(decay=1e-3, refresh_every=2, end=3),
    "lbc": lambda: LBC(stop=3),
    "mask-logits": lambda: MaskLogits(stop=6),
    "maxq": lambda: MaxQ(start=1, stop=4, decay=1e-2),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
    "sr-ste-drawn": SRSTE,
}

OPTIONS = {"sr-ste-drawn": {"dgrad": "mvue"}}
"""Settings of a row besides its method."""


def _at_kept_entries(layer, grad):
    return torch.where(layer.forward_mask, grad, 0)


WEIGHT_GRADIENTS = {
    "asp": _at_kept_entries,
    "bame-late": _at_kept_entries,
    "rigl": _at_kept_entries,
    "slope": _at_kept_entries,
    "scaled-mask": lambda layer, grad: 1.5 * grad,
    "mask-logits": lambda layer, grad: None,
}
"""The gradient that W receives in the first step, from the layer and dL/dW_F, which it is by default; None for none."""

OWNERS = ("scaled-mask", "lbc", "mask-logits")
"""Methods that own a parameter: Muon, which trains matrices alone, is refused."""

WITHOUT_LATENT_WEIGHTS = ("asp", "bame", "lbc", "rigl", "slope")
"""How the names of rows begin whose methods keep pruned entries at zero."""
LEAVES_GRADIENTS_OUT = (*WITHOUT_LATENT_WEIGHTS, "cast")
"""Of those that need no gradient at pruned entries in some steps."""
TWO_GRAPHS = ("asp-late", "bame", "cast", "rigl", "step", "decaying")
"""Of those whose compiled layers have two graphs: pruned or not, a dense gradient or not."""
REFUSED_OPTIMIZERS = {
    "bame": (("adafactor", "muon"), "is neither SGD nor of the Adam family"),
    "rigl": (("adafactor", "muon"), "is neither SGD nor of the Adam family"),
    "cast": (("sgd", "adafactor", "muon"), "for Adam and AdamW, but not for"),
    "step": (("sgd", "adafactor", "muon"), "is neither Adam nor AdamW"),
}
"""How the names of rows begin, and the optimizers that their methods refuse, with a part of the error."""


def refusal(method, optimizer):
    """The error with which a row's method refuses an optimizer; ``None`` if it takes it."""
    for name, (optimizers, error) in REFUSED_OPTIMIZERS.items():
        if method.startswith(name) and optimizer in optimizers:
            return error
    return None


def accepted(method, *optimizers):
    """The first of these optimizers that a row's method takes."""
    return next(name for name in optimizers if refusal(method, name) is None)


def sgd_or_adam(method, parameters, rate, **options):
    """SGD with these options, or AdamW for a method that refuses it."""
    if refusal(method, "sgd") is None:
        return torch.optim.SGD(parameters, rate, **options)
    return torch.optim.AdamW(parameters, rate / 10)


ESTIMATORS = {
    "mvue": lambda: MVUE("2:4"),
    "mvue-1:2": lambda: MVUE("1:2"),
    "mvue-1:16": lambda: MVUE("1:16"),
    "approx-mvue": ApproxMVUE,
    "top-n": lambda: TopN("2:4"),
}

KERNEL = SimulatedSparseKernel
"""The kernel of tests of routed layers."""
