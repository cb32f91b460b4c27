"""When ASP prunes."""

import pytest
import torch
from torch import nn

from lightning_nm import ASP, NMSparsifier, TransposableMask, prune
from tests.support.lightning_models import Data, callback, make_trainer, new_model


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(sparsifier, steps):
    densities = []
    optimizer = torch.optim.SGD(sparsifier.model.parameters(), 0.1, momentum=0.9)
    sparsifier.register(optimizer)
    for _ in range(steps):
        densities.append(sparsifier.stats()["density"])
        optimizer.zero_grad()
        sparsifier.model(torch.randn(8, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    return densities


@pytest.mark.parametrize("start", [3, 0.3])
def test_the_start_is_a_step_or_a_share(start):
    sparsifier = NMSparsifier(network(), "2:4", ASP(start), planned_steps=10).attach()
    assert train(sparsifier, 5) == [1, 1, 1, 0.5, 0.5]


def test_a_share_needs_the_planned_steps():
    with pytest.raises(ValueError, match=r"ASP's start=0\.3 is a share"):
        NMSparsifier(network(), "2:4", ASP(0.3)).attach()


@pytest.mark.parametrize(
    ("start", "error"), [(1.5, ValueError), (-1, ValueError), ("1", TypeError)]
)
def test_bad_starts_are_named(start, error):
    with pytest.raises(error, match=f"start={start!r}"):
        ASP(start)


@pytest.mark.parametrize("late", [2000, 12])
def test_a_start_that_is_never_reached_is_warned_of(tmp_path, late):
    masks = callback(ASP(late))
    with pytest.warns(
        UserWarning,
        match=f"ASP never prunes: start={late} is step {late} of 12, so the model stays dense",
    ):
        make_trainer(tmp_path, [masks]).fit(new_model(), Data())


def test_zeros_of_another_pattern_are_refused():
    """A sparser one is N:M, too."""
    model = network()
    prune(model, "2:4", skip_first_last=False)
    with pytest.raises(
        ValueError,
        match=r"layer '0' is not 1:4 sparse.*blocks with 2 nonzeros of 4\. Give the pattern that it was pruned to",
    ):
        NMSparsifier(model, "1:4", ASP(init="zeros")).attach()
    assert NMSparsifier(model, "3:4", ASP(init="zeros")).attach().stats()["density"] == 0.5


@pytest.mark.filterwarnings("ignore:ASP never prunes")
@pytest.mark.parametrize(
    "method", [ASP(9), TransposableMask(dense_end=0.4)], ids=["not-begun", "ended"]
)
def test_violations_of_a_dense_model_are_counted(method):
    sparsifier = NMSparsifier(network(), "2:4", method, planned_steps=5).attach()
    train(sparsifier, 5)
    assert sparsifier.violations() == 32 * 16 // 4
