"""Mixtures of experts for tests: one parameter for all experts, used in several ways, and one linear layer for each."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, WIDTH, HIDDEN = 4, 16, 32


def offsets(experts, number):
    return torch.bincount(experts, minlength=number).cumsum(0).int()


GROUPED = hasattr(torch, "_grouped_mm")
"""Whether this torch has the grouped product."""


def grouped_mm(x, weight, ends):
    """The grouped product; a torch without it takes its definition."""
    if GROUPED:
        return torch._grouped_mm(x, weight, offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat(
        [x[start:end] @ weight[k] for k, (start, end) in enumerate(itertools.pairwise(bounds))]
    )


class Experts(nn.Module):
    """Two products for each token, with the expert that it is sent to; weights ``[experts, out, in]``."""

    transposed = False
    sizes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))

    def __init__(self, way="loop", number=EXPERTS):
        super().__init__()
        self.way, self.number = way, number
        for name, (out, width) in zip(("up", "down"), self.sizes, strict=True):
            values = torch.randn(number, out, width) * 0.2
            self.register_parameter(
                name, nn.Parameter(values.mT.contiguous() if self.transposed else values)
            )

    def forward(self, x, experts):
        return getattr(self, f"by_{self.way}")(x, experts)

    def each(self, x, experts, product):
        y = torch.zeros_like(x)
        for expert in range(self.number):
            (tokens,) = torch.where(experts == expert)
            if len(tokens):
                hidden = product(x[tokens], "up", expert).relu()
                y = y.index_add(0, tokens, product(hidden, "down", expert).to(y.dtype))
        return y

    def turned(self, weight):
        """``[..., in, out]``."""
        return weight if self.transposed else weight.transpose(-2, -1)

    def by_loop(self, x, experts):
        def product(x, name, expert):
            weight = getattr(self, name)[torch.tensor(expert)]
            return F.linear(x, weight.t() if self.transposed else weight)

        return self.each(x, experts, product)

    def by_matmul(self, x, experts):
        up, down = list(self.up), self.down.unbind(0)
        return self.each(
            x, experts, lambda x, name, k: x @ self.turned(up[k] if name == "up" else down[k])
        )

    def by_left(self, x, experts):
        return self.each(
            x, experts, lambda x, name, k: (self.turned(getattr(self, name)[k]).T @ x.T).T
        )

    def by_index(self, x, experts):
        hidden = torch.bmm(x.unsqueeze(1), self.turned(self.up[experts])).relu()
        return torch.bmm(self.turned(self.down)[experts].mT, hidden.mT).squeeze(-1)

    def by_sorted(self, x, experts, product):
        order, ends = experts.argsort(stable=True), offsets(experts, self.number)
        y = product(
            product(x[order], self.turned(self.up), ends).relu(), self.turned(self.down), ends
        )
        return torch.empty_like(y).index_copy(0, order, y)

    def by_grouped(self, x, experts):
        return self.by_sorted(x, experts, grouped_mm)

    def by_all(self, x, experts):
        """Every expert on every token, as a batch, and a sum over chosen ones."""
        y = torch.bmm(
            (x.expand(self.number, *x.shape) @ self.turned(self.up)).relu(), self.turned(self.down)
        )
        return (F.one_hot(experts, self.number).t()[..., None] * y).sum(0)

    def by_einsum(self, x, experts):
        axes = "eio" if self.transposed else "eoi"
        hidden = torch.einsum(f"ti,{axes}->eto", x, self.up).relu()
        y = torch.einsum(f"{axes},eti->teo", self.down, hidden)
        return (F.one_hot(experts, self.number)[..., None] * y).sum(1)


class TransposedExperts(Experts):
    """The same with weights ``[experts, in, out]``; the attributes are those of transformers' experts."""

    transposed = is_transposed = True
    has_gate = False


WAYS = ["loop", "matmul", "left", "index", "grouped", "all", "einsum"]
SPARSE_WAYS = WAYS[:5]  # those that give an expert its own tokens alone


class Twin(nn.Module):
    """The same function with a linear layer for each expert."""

    def __init__(self, experts):
        super().__init__()
        self.number = experts.number
        for name, (out, width) in zip(("up", "down"), experts.sizes, strict=True):
            layers = [nn.Linear(width, out, bias=False) for _ in range(experts.number)]
            setattr(self, name, nn.ModuleList(layers))
            for layer, values in zip(
                layers, matrices(experts, getattr(experts, name)), strict=True
            ):
                layer.weight.data = values.detach().clone()

    def forward(self, x, experts):
        return Experts.each(
            self, x, experts, lambda x, name, expert: getattr(self, name)[expert](x)
        )


def matrices(experts, tensor):
    """Each expert's part of a weight-shaped tensor, ``[out, in]``."""
    return [part.t() if experts.transposed else part for part in tensor]


class LinearExperts(nn.Module):
    """One product, for which the experts take the tokens in turn."""

    bias, number = None, 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.number, HIDDEN, WIDTH) * 0.2)

    def forward(self, x):
        experts = torch.arange(len(x)) % self.number
        return torch.bmm(self.weight[experts], x.unsqueeze(-1)).squeeze(-1)


class TransposedLinearExperts(LinearExperts):
    """The same with a weight ``[experts, in, out]`` and a loop."""

    is_transposed = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().mT.contiguous())

    def forward(self, x):
        return torch.cat(
            [x[expert :: self.number] @ self.weight[expert] for expert in range(self.number)]
        )
