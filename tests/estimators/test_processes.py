"""Two processes: other noise in each, the same weights in both."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_nm import MVUE, NMSparsifier
from tests.support.processes import in_processes


def run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    sparsifier = NMSparsifier(
        model, "2:4", "transposable", MVUE("2:4"), skip_first_last=False
    ).attach()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    noise = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))  # the same on both
        noise.append([layer.noise.words for layer in sparsifier.layers.values()])
        parallel(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    return noise, model.state_dict(), sparsifier.state_dict()


@pytest.mark.slow
def test_processes_draw_independently_and_stay_together(tmp_path):
    (noise, weights, state), (other_noise, other_weights, other_state) = in_processes(
        2, tmp_path, run
    )
    words = [tuple(words.tolist()) for step in noise + other_noise for words in step]
    assert len(set(words)) == len(words) == 16
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
    for name, layer in state["layers"].items():
        assert torch.equal(layer["forward_mask"], other_state["layers"][name]["forward_mask"])
        assert layer["draws"] == other_state["layers"][name]["draws"]
