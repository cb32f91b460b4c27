"""A small model under a method, and the plain loop that trains it."""

import io

import torch
from torch import nn

from lightning_nm import NMSparsifier
from tests.support.loop import mlp, sgd


def one_layer(dtype=torch.float64, seed=0):
    """A weight [8, 16]."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 8, bias=False, dtype=dtype))


class Loop:
    """Trains a model under a method, on batches that depend on the training step alone.

    Args:
        method: As those that follow, an argument of NMSparsifier.
        make: Makes the optimizer from the parameters.
        model: By default of the sizes 16, 32, 16.
        shape: That of a batch.
    """

    def __init__(self, method, pattern="2:4", make=sgd, model=None, shape=(12, 16), **options):
        self.model = mlp(16, 32, 16) if model is None else model
        self.shape = shape
        # The method alone: what scales initial values and learning rates is asked for.
        options = {"skip_first_last": False, "planned_steps": 20, "scale": None} | options
        self.sparsifier = NMSparsifier(self.model, pattern, method, **options).attach()
        self.optimizer = make(self.model.parameters())
        self.sparsifier.register(self.optimizer)

    @property
    def layers(self):
        return self.sparsifier.layers

    @property
    def layer(self):
        """The first layer."""
        return next(iter(self.layers.values()))

    @property
    def state(self):
        """The optimizer's state of the first layer's weight."""
        return self.optimizer.state[self.layer.param]

    def batch(self, step):
        """The inputs of a training step."""
        generator = torch.Generator().manual_seed(step)
        parameter = next(self.model.parameters())
        x = torch.randn(self.shape, generator=generator, dtype=parameter.dtype)
        return x.to(parameter.device)

    def backward(self, windows=1, factor=1.0):
        """The gradients of the present training step, in so many micro-batches, of a loss times ``factor``."""
        self.optimizer.zero_grad()
        for number, x in enumerate(self.batch(self.sparsifier.clock).chunk(windows)):
            if number:
                self.sparsifier.step()  # a micro-batch has ended
            loss = (self.model(x) - 1).square().mean()
            (factor / windows * loss).backward()

    def optimize(self):
        self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()

    def step(self):
        """The rest of a training step."""
        self.optimize()
        self.sparsifier.step()

    def steps(self, count, windows=1):
        """Train, and yield after each step how many there were."""
        for _ in range(count):
            self.backward(windows)
            self.step()
            yield self.sparsifier.clock

    def train(self, count, windows=1):
        for _ in self.steps(count, windows):
            pass
        return self

    def states(self):
        """What a checkpoint holds, as it is read."""
        buffer = io.BytesIO()
        parts = (self.model, self.sparsifier, self.optimizer)
        torch.save([part.state_dict() for part in parts], buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def load(self, states):
        for part, state in zip((self.model, self.sparsifier, self.optimizer), states, strict=True):
            part.load_state_dict(state)
        return self
