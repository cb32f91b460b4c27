"""Masks that come after a dense start and go before a dense end."""

import io

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim import SGD

from lightning_nm import (
    ASP,
    LBC,
    SRSTE,
    SSTE,
    STE,
    BiMask,
    NMSparsifier,
    NMSparsityCallback,
    TransposableMask,
)
from lightning_nm import functional as nmf
from lightning_nm.callbacks.tables import print_summary
from lightning_nm.nn.costs import mean_densities
from tests.support.lightning_models import Data, make_trainer, new_model
from tests.support.method_loop import Loop, mlp

METHODS = {
    "ste": STE,
    "s-ste": SSTE,
    "sr-ste": lambda **w: SRSTE(0.05, **w),
    "transposable": lambda **w: TransposableMask(3, **w),
    "bi-mask": lambda **w: BiMask(permute_every=2, **w),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_masks_come_and_go(method, frozen):
    model = mlp(16, 32, 16)
    model[2].weight.requires_grad_(not frozen)
    made = METHODS[method](dense_start=3, dense_end=0.2)
    run = Loop(made, model=model, planned_steps=10, frozen="mask")
    phases = []
    for _ in range(10):
        weights = model.state_dict()
        sparse = {nmf.is_nm(weights[f"{k}.weight"], "2:4", 1) for k in (0, 2)}
        assert len(sparse) == 1, "all layers, frozen ones included, change together"
        phases += sparse
        assert run.sparsifier.stats()["density"] == (0.5 if phases[-1] else 1.0)
        forward, dgrad, _ = run.layer.gemms()
        if not phases[-1]:
            labels = (forward.label, forward.reason, dgrad.label)
            assert labels == ("dense", "dense phase", "dense")
        run.train(1)
    assert phases == [False] * 3 + [True] * 5 + [False] * 2
    assert run.sparsifier.flops_ratios()["eligible"] == 1.0, "the run ended dense"
    sparse_gemms = 2 if method in ("transposable", "bi-mask") else 1
    if not frozen:
        mean = run.sparsifier.flops_ratios(mean=True)["eligible"]
        assert mean == pytest.approx(1 - 5 / 10 * sparse_gemms / 6)


@pytest.mark.parametrize("method", METHODS)
def test_a_dense_start_trains_as_a_dense_training(method):
    dense, run = Loop("dense").train(4), Loop(METHODS[method](dense_start=4)).train(4)
    assert all(map(torch.equal, dense.model.parameters(), run.model.parameters()))
    assert nmf.is_nm(run.model.state_dict()["0.weight"], "2:4", 1), "from the next forward on"


@pytest.mark.parametrize(("start", "steps"), [(3, 3), (0.15, 3), (0, 0)])
def test_the_start_is_a_step_or_a_share(start, steps):
    run = Loop(ASP(start))
    densities = [run.train(1).sparsifier.stats()["density"] for _ in range(5)]
    assert densities == [1.0] * max(steps - 1, 0) + [0.5] * (5 - max(steps - 1, 0))


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_cannot_be_masked_are_there_for_their_gradients(method):
    options = {"model": mlp(18, 32, 18), "shape": (16, 18), "grad_estimator": "mvue"}
    run = Loop(METHODS[method](), **options).train(3)
    first, second = (run.layers[name].gemms() for name in ("0", "2"))
    fitting = "18 % 4 != 0 (M = 2, 3, 6, 9 would fit)"
    assert first.forward == ("dense", None, f"in {fitting}", 1.0, 1.0, 1.0)
    assert first.wgrad.label == second.wgrad.label == second.forward.label == "2:4"
    assert second.dgrad.reason == f"out {fitting}"


@pytest.mark.filterwarnings("ignore:LBC's masks never become N.M")
@pytest.mark.parametrize(
    ("method", "warning"),
    [
        (TransposableMask(dense_end=0.25), "the trained model is dense in 2 of 2 layers"),
        (LBC(stop=1000), "the trained model is not N:M in 2 of 2 layers: the masks of LBC"),
    ],
    ids=["ends dense", "ends before N:M"],
)
def test_a_model_that_does_not_end_n_m_is_said_not_to_be(tmp_path, method, warning):
    nm = NMSparsityCallback("2:4", method, show_tables=False)
    console = Console(width=160, file=io.StringIO())
    tell = lambda trainer, _: print_summary(nm.sparsifier, trainer, console)  # noqa: E731
    model = new_model()
    last = pl.callbacks.LambdaCallback(on_train_end=tell)
    make_trainer(tmp_path, [nm, last]).fit(model, Data())
    assert warning in console.file.getvalue()
    assert not nmf.is_nm(model.state_dict()["net.6.weight"], "2:4", 1)


@pytest.mark.parametrize("method", METHODS)
def test_phases_at_their_limits(method):
    made = METHODS[method]
    assert made(dense_start=0.0, dense_end=0.0).schedule(None) == ()
    assert made(dense_end=0.04).schedule(10) == (), "no dense step, so the masks stay"
    assert made(dense_start=9).schedule(10) == (9,)


def test_flops_of_a_layer_that_no_optimizer_trains():
    model = mlp(16, 32, 16)
    method, make = STE(0, 5), lambda _: SGD(model[0].parameters(), 0.05)
    run = Loop(method, make=make, model=model, planned_steps=10).train(10)
    for layer in run.layers.values():
        assert mean_densities(layer)["eligible"].forward == 0.75


@pytest.mark.filterwarnings("ignore:ASP never prunes")
@pytest.mark.parametrize("method", [ASP(9), TransposableMask(dense_end=0.4)], ids=str)
def test_violations_of_a_dense_model_are_counted(method):
    run = Loop(method, planned_steps=5).train(5)
    assert run.sparsifier.violations() == 2 * 32 * 16 // 4


@pytest.mark.parametrize("conv", [False, True])
def test_dgrad_of_a_transposable_mask_is_exact_and_counts_as_sparse(conv):
    model = nn.Sequential(nn.Conv2d(16, 16, 3) if conv else nn.Linear(16, 16))
    options = {"skip_first_last": False}
    sparsifier = NMSparsifier(model, "2:4", "transposable", **options).attach()
    layer = sparsifier.layers["0"]
    assert torch.equal(layer.backward_weight(), layer.forward_weight())
    assert [gemm.label for gemm in layer.gemms()] == ["2:4", "2:4", "dense"]
    assert [*sparsifier.flops_ratios().values()] == pytest.approx([2 / 3] * 3)


def test_rows_that_are_no_blocks_get_the_mask_of_one_direction():
    run = Loop("transposable", model=mlp(16, 10, 8), include="0")
    mask = nmf.magnitude_mask(run.layer.weight.detach(), "2:4", dim=1)
    assert torch.equal(run.layer.forward_mask, mask)
    assert [gemm.label for gemm in run.layer.gemms()] == ["2:4", "masked", "dense"]
    assert "out 10 % 4" in run.layer.gemms().dgrad.reason
    with pytest.raises(ValueError, match="in 10 % 4 != 0"):
        Loop("transposable", model=mlp(16, 10, 8), include="2")


def test_zeros_of_another_pattern_are_refused():
    """A sparser one is N:M, too."""
    model = mlp(16, 32, 16)
    for layer in (model[0], model[2]):
        layer.weight.data = nmf.nm_prune(layer.weight.detach(), "2:4")
    message = r"'0' is not 1:4 sparse.*blocks with 2 nonzeros of 4\. Give the pattern that it was"
    with pytest.raises(ValueError, match=message):
        Loop(ASP(init="zeros"), "1:4", model=model)
    assert Loop(ASP(init="zeros"), "3:4", model=model).sparsifier.stats()["density"] == 0.5
