"""Masks that come after a dense start and go before a dense end."""

import io

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_nm import (
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
from tests.methods.plain_loop import sgd_steps
from tests.support.lightning_models import Data, make_trainer, new_model

METHODS = {
    "ste": STE,
    "s-ste": SSTE,
    "sr-ste": lambda **w: SRSTE(0.05, **w),
    "transposable": lambda **w: TransposableMask(3, **w),
    "bi-mask": lambda **w: BiMask(permute_every=2, **w),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def train(model, sparsifier, steps, look):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    sparsifier.register(optimizer)
    for step in range(steps):
        look(step)
        optimizer.zero_grad()
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_masks_come_and_go(method, frozen):
    model = network()
    model[2].weight.requires_grad_(not frozen)
    made = METHODS[method](dense_start=3, dense_end=0.2)
    sparsifier = NMSparsifier(
        model, "2:4", made, skip_first_last=False, planned_steps=10, frozen="mask"
    ).attach()
    phases, gemms = [], []

    def look(step):
        weights = model.state_dict()
        sparse = {nmf.is_nm(weights[f"{k}.weight"], "2:4", 1) for k in (0, 2)}
        assert len(sparse) == 1, "all layers, frozen ones included, change together"
        phases.append(sparse.pop())
        gemms.append(sparsifier.layers["0"].gemms())
        stats = sparsifier.stats()
        assert stats["density"] == (0.5 if phases[-1] else 1.0)

    train(model, sparsifier, 10, look)
    assert phases == [False] * 3 + [True] * 5 + [False] * 2
    for sparse, (forward, dgrad, _) in zip(phases, gemms, strict=True):
        if not sparse:
            assert (forward.label, dgrad.label) == ("dense", "dense")
            assert forward.reason == "dense phase"
    per_step = sparsifier.flops_ratios()["eligible"]
    assert per_step == 1.0, "the run ended dense"
    sparse_gemms = 2 if method in ("transposable", "bi-mask") else 1
    if not frozen:
        assert sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx(
            1 - 5 / 10 * sparse_gemms / 6
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_dense_start_trains_as_a_dense_training(method):
    plain, phased = network(), network()
    dense = NMSparsifier(plain, "2:4", "dense", skip_first_last=False).attach()
    sparsifier = NMSparsifier(
        phased, "2:4", METHODS[method](dense_start=4), skip_first_last=False
    ).attach()
    for model, s in ((plain, dense), (phased, sparsifier)):
        train(model, s, 4, lambda step: None)
    for a, b in zip(plain.parameters(), phased.parameters(), strict=True):
        assert torch.equal(a, b)
    assert nmf.is_nm(phased.state_dict()["0.weight"], "2:4", 1), "from the next forward on"


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_cannot_be_masked_are_there_for_their_gradients(method):
    model = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 18))
    sparsifier = NMSparsifier(
        model, "2:4", METHODS[method](), "mvue", skip_first_last=False
    ).attach()
    assert len(list(sgd_steps(model, sparsifier, 3, (16, 18)))) == 3
    first, second = (sparsifier.layers[name].gemms() for name in ("0", "2"))
    assert first.forward == (
        "dense",
        None,
        "in 18 % 4 != 0 (M = 2, 3, 6, 9 would fit)",
        1.0,
        1.0,
        1.0,
    )
    assert first.wgrad.label == second.wgrad.label == "2:4"
    assert second.forward.label == "2:4"
    assert second.dgrad.reason == "out 18 % 4 != 0 (M = 2, 3, 6, 9 would fit)"
    fresh = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 18))
    fresh.load_state_dict(model.state_dict())
    resumed = NMSparsifier(fresh, "2:4", METHODS[method](), "mvue", skip_first_last=False).attach()
    resumed.load_state_dict(sparsifier.state_dict())
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


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
    seen = []

    def summary(trainer, pl_module):
        console = Console(width=160, file=io.StringIO())
        print_summary(nm.sparsifier, trainer, console)
        seen.append(console.file.getvalue())

    trainer = make_trainer(
        tmp_path, [nm, pl.callbacks.LambdaCallback(on_train_end=summary)], max_epochs=2
    )
    model = new_model()
    trainer.fit(model, Data())
    assert warning in seen[0]
    assert not nmf.is_nm(model.state_dict()["net.6.weight"], "2:4", 1)


@pytest.mark.parametrize("method", METHODS)
def test_phases_at_their_limits(method):
    made = METHODS[method]
    assert made(dense_start=0.0, dense_end=0.0).schedule(None) == ()
    assert made(dense_end=0.04).schedule(10) == (), "no dense step, so the masks stay"
    assert made(dense_start=9).schedule(10) == (9,)
    with pytest.raises(
        ValueError, match="dense_start=10 ends at step 10 and dense_end=0 begins at step 10 of 10"
    ):
        made(dense_start=10).schedule(10)


def test_flops_of_a_layer_that_no_optimizer_trains():
    model = network()
    sparsifier = NMSparsifier(
        model, "2:4", STE(0, 5), skip_first_last=False, planned_steps=10
    ).attach()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.05)
    sparsifier.register(optimizer)
    for _ in range(10):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        sparsifier.step()
    for layer in sparsifier.layers.values():
        assert mean_densities(layer)["eligible"].forward == 0.75


@pytest.mark.parametrize("method", METHODS)
def test_bad_phases(method):
    for phases, message in (
        ({"dense_start": 1.5}, r"dense_start=1\.5 is not a share"),
        ({"dense_end": -2}, "dense_end=-2"),
        ({"dense_start": 0.6, "dense_end": 0.4}, "whole training dense"),
        ({"dense_start": 1.0}, "whole training dense"),
        ({"dense_end": 1.0}, "whole training dense"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS[method](**phases)
    with pytest.raises(TypeError, match="dense_start=True"):
        METHODS[method](dense_start=True)
