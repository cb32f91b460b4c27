"""Mixtures of experts for tests: one parameter for all experts, and one linear layer for each."""

import torch
from torch import nn

from lightning_nm.nn import nm_grouped_linear, register_experts

EXPERTS, WIDTH, HIDDEN = 4, 16, 32


def offsets(experts, number):
    return torch.bincount(experts, minlength=number).cumsum(0)


@register_experts
class Experts(nn.Module):
    """Two GEMMs for each token, with the expert that it is sent to; weights ``[experts, out, in]``."""

    transposed = False
    sizes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))

    def __init__(self, number=EXPERTS):
        super().__init__()
        self.number = number
        for name, (out, width) in zip(("up", "down"), self.sizes, strict=True):
            values = torch.randn(number, out, width) * 0.2
            self.register_parameter(
                name, nn.Parameter(values.mT.contiguous() if self.transposed else values)
            )

    def forward(self, x, experts):
        order, offs = experts.argsort(stable=True), offsets(experts, self.number)
        hidden = nm_grouped_linear(x[order], self, "up", offs).relu()
        y = nm_grouped_linear(hidden, self, "down", offs)
        return torch.empty_like(y).index_copy(0, order, y)


@register_experts(transposed=True)
class TransposedExperts(Experts):
    """The same with weights ``[experts, in, out]``."""

    transposed = True


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
        y = torch.zeros_like(x)
        for expert in range(self.number):
            (tokens,) = torch.where(experts == expert)
            if len(tokens):
                made = self.down[expert](self.up[expert](x[tokens]).relu())
                y = y.index_add(0, tokens, made.to(y.dtype))
        return y


def matrices(experts, tensor):
    """Each expert's part of a weight-shaped tensor, ``[out, in]``."""
    return [part.t() if experts.transposed else part for part in tensor]


@register_experts
class LinearExperts(nn.Module):
    """One GEMM, for which the experts take the tokens in turn."""

    bias, number = None, 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.number, HIDDEN, WIDTH) * 0.2)

    def forward(self, x):
        tokens = [x[expert :: self.number] for expert in range(self.number)]
        offs = torch.tensor([len(each) for each in tokens]).cumsum(0)
        return nm_grouped_linear(torch.cat(tokens), self, "weight", offs)


@register_experts(transposed=True)
class TransposedLinearExperts(LinearExperts):
    """The same with a weight ``[experts, in, out]``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().mT.contiguous())
