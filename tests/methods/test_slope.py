"""SLoPe: both masks and what they cost. The golden traces hold its training, step by step."""

from itertools import chain

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, SLoPe
from lightning_nm import functional as nmf
from tests.support.method_loop import Loop


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8"])
@pytest.mark.parametrize(("every", "first"), [(5, None), (5, 4), (1, None)])
def test_the_backward_mask_prunes_the_pruned_weight_when_it_is_time(pattern, every, first):
    run = Loop(SLoPe(refresh_every=every, first_refresh=first), pattern)
    forward = nmf.magnitude_mask(run.layer.weight.detach(), pattern)
    backwards = []
    for step in chain([0], run.steps(12)):
        if step == 0 or (step - (first or every)) % every == 0:
            expected = forward & nmf.magnitude_mask(run.layer.forward_weight(), pattern, dim=0)
            backwards.append(expected)
        assert torch.equal(run.layer.forward_mask, forward)
        assert torch.equal(run.layer.masks.backward, backwards[-1])
    assert not all(torch.equal(each, backwards[0]) for each in backwards), "no mask moved"


def test_the_share_that_is_lost_twice_is_that_of_random_weights():
    """3/32 of all entries at 2:4: the sum over j > N of C(M, j) s^j (1 - s)^(M - j) (j - N) / M."""
    torch.manual_seed(0)
    module = nn.Linear(256, 512, bias=False)
    sparsifier = NMSparsifier(module, "2:4", SLoPe(), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    lost = 0.5 - layer.masks.backward.double().mean().item()
    assert lost == pytest.approx(3 / 32, abs=0.005)
    assert layer.masks.backward_density == pytest.approx(0.5 - lost)


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_each_product_is_pruned_where_it_can_be():
    model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 10), nn.Linear(8, 8))
    sparsifier = NMSparsifier(model, "2:4", SLoPe(), skip_first_last=False).attach()
    kinds = [[gemm.kind for gemm in layer.gemms()] for layer in sparsifier.layers.values()]
    assert kinds == [
        ["dense", "n:m", "dense"],
        ["n:m", "masked", "outputs"],
        ["n:m", "n:m", "outputs"],
    ]
    gemms = sparsifier.layers["2"].gemms()
    assert [gemm.paper for gemm in gemms] == [0.5, 0.5, 1.0]
    assert [gemm.eligible for gemm in gemms] == [0.5, 0.5, 1.0]
    assert gemms.dgrad.arithmetic == sparsifier.layers["2"].masks.backward_density < 0.5


def test_it_can_start_later():
    run = Loop(SLoPe(refresh_every=1, start=0.5), planned_steps=6)
    masks = [run.layer.masks.has_forward and run.layer.masks.has_backward for _ in run.steps(6)]
    assert masks == [False, False, True, True, True, True]
