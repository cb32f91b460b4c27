"""What the tests of Lightning's features share: the methods, a fit, and what must hold after it."""

import pytest
import torch

from lightning_nm import MVUE, NMSparsityCallback, TransposableMask
from lightning_nm import functional as nmf
from tests.support import lightning_models
from tests.support.lightning_models import callback, is_plain, is_sparse

NAMES = [
    *("ste", "sr-ste", "asp", "transposable", "bi-mask", "slope", "rigl"),
    *("bame", "bame-bi-mask", "three-gemms"),
]


def methods(*quick):
    """Every method as parameters of tests; those that are not quick are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in NAMES]


def sparse(method, **options):
    if method == "three-gemms":  # without the dense phases that other tests have
        method, options["grad_estimator"] = TransposableMask(update_every=3), MVUE("1:2")
        return NMSparsityCallback("2:4", method, show_tables=False, **options)
    return callback(method, **options)


def masked(model):
    """The layers that are masked by default, which is all but the first convolution and the last linear layer."""
    return [model.net[3], model.net[6]]


def ends_sparse(model):
    """Ordinary modules, whose weights are N:M."""
    assert is_plain(model)
    assert is_sparse(model)
    assert all(torch.isfinite(module.weight).all() for module in masked(model))
    assert not nmf.is_nm(model.net[8].weight, "2:4", dim=1)


def fit(tmp_path, method, *callbacks, first=(), **options):
    return lightning_models.fit(tmp_path, [*first, sparse(method), *callbacks], **options)
