"""A plain training loop: a model, its sparsifier, its optimizer, and all that a checkpoint of them holds."""

import copy
from itertools import pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_nm import NMSparsifier


def mlp(*widths, dtype=None, seed=0):
    """Linear layers of these widths with ReLUs between them, by seed always the same."""
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


class Loop:
    """Attached and registered; its batches of this shape are random, by their number always the same."""

    def __init__(
        self,
        model,
        method="sr-ste",
        pattern="2:4",
        optimizer=sgd,
        shape=(8, 16),
        state=None,
        **options,
    ):
        self.model, self.shape = model, shape
        # As in method_loop.py: the method alone.
        options = {"skip_first_last": False, "scale": None, **options}
        self.sparsifier = NMSparsifier(model, pattern, method, **options).attach(state)
        self.optimizer = optimizer(model.parameters())
        self.sparsifier.register(self.optimizer)

    @property
    def layers(self):
        return self.sparsifier.layers

    @property
    def parts(self):
        return self.model, self.sparsifier, self.optimizer

    def batch(self, number=0):
        generator = torch.Generator().manual_seed(number)
        dtype = next(self.model.parameters()).dtype
        return torch.randn(self.shape, generator=generator, dtype=dtype)

    def backward(self, number=0):
        self.optimizer.zero_grad()
        self.model(self.batch(number)).square().mean().backward()

    def step(self):
        self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()
        return self.sparsifier.step()

    def train(self, numbers):
        """A step on each of these batches."""
        for number in numbers:
            self.backward(number)
            self.step()

    def end(self):
        self.sparsifier.bake()
        self.sparsifier.detach()

    def save(self):
        return copy.deepcopy([part.state_dict() for part in self.parts])

    def load(self, states):
        for part, state in zip(self.parts, copy.deepcopy(states), strict=True):
            part.load_state_dict(state)

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(a, b):
    """Whether two nested structures hold equal tensors of the same dtypes, and equal other values."""
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    return a == b or (a != a and b != b)
