"""What the contract tests run on, beside the layer kinds of ``tests.support.kinds``; a class from outside adds its row.

A pytest plugin may add rows before the tests are collected, see docs/extend: ``python -m pytest -p my_rows ...``.
"""

from typing import get_args

import torch

from lightning_nm import ASP, BAME, MVUE, SRSTE, ApproxMVUE, TopN, TransposableMask
from lightning_nm.kernels import SimulatedSparseKernel
from lightning_nm.methods import MethodName
from tests.support.outside import ScaledMask, SoftThreshold

METHODS = {
    **{name: lambda name=name: name for name in get_args(MethodName)},
    "asp-late": lambda: ASP(start=2),
    "transposable": lambda: TransposableMask(update_every=2),
    "bame": lambda: BAME(stop=100, every=2, budget=1.0, evidence="batch"),
    "bame-late": lambda: BAME(
        start=1, stop=100, every=2, gradient_every=2, evidence_rate=0.5, budget=1.0
    ),
    "bame-bi-mask": lambda: BAME(
        stop=100, gradient_every=2, budget=1.0, evidence_rate=0.2, dgrad="bi-mask"
    ),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
    "sr-ste-drawn": SRSTE,
}

OPTIONS = {"sr-ste-drawn": {"dgrad": "mvue"}}
"""Settings of a row beside its method."""


def _at_kept_entries(layer, grad):
    return torch.where(layer.forward_mask, grad, 0)


WEIGHT_GRADIENTS = {
    "asp": _at_kept_entries,
    "bame-late": _at_kept_entries,
    "scaled-mask": lambda layer, grad: 1.5 * grad,
}
"""The gradient that W receives in the first step, from the layer and dL/dW_F; by default dL/dW_F itself."""

ESTIMATORS = {
    "mvue": lambda: MVUE("2:4"),
    "mvue-1:2": lambda: MVUE("1:2"),
    "mvue-1:16": lambda: MVUE("1:16"),
    "approx-mvue": ApproxMVUE,
    "top-n": lambda: TopN("2:4"),
}

KERNEL = SimulatedSparseKernel
"""The kernel of tests of routed layers."""
