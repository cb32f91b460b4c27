"""Optimizers that wrap another one, as those of Hugging Face's Accelerate do."""

import torch
from torch import nn

from lightning_nm import NMSparsifier


class Wrapper(torch.optim.Optimizer):
    """Like Accelerate's, it is an optimizer by type alone: its base class is not initialised."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def train(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    sparsifier.register(optimizer)
    sparsifier.register(optimizer)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert not sparsifier.training.unowned()
    assert sparsifier.clock == sparsifier.layers["0"].step == 3
    return model[0].weight.detach()


def test_the_inner_optimizer_is_followed():
    plain = train(lambda optimizer: optimizer)
    assert torch.equal(train(Wrapper), plain)
    assert torch.equal(train(lambda optimizer: Wrapper(Wrapper(optimizer))), plain)
