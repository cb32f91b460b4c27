"""The layer kinds that every method must run on: a factory of the module and of an input."""

import sys
import types

import torch
from torch import nn

from lightning_nm.nn import Adapter, WeightSpec, nm_linear, register_adapter
from tests.support.experts import LinearExperts, TransposedLinearExperts


class Conv1D(nn.Module):
    """A stand-in for transformers.pytorch_utils.Conv1D, with its layout: weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            (*x.size()[:-1], self.nf)
        )


def hugging_face_conv1d():
    """The real class where transformers is installed, else the stand-in under the real module's name."""
    try:
        from transformers.pytorch_utils import Conv1D as Real
    except ImportError:
        module = types.ModuleType("transformers.pytorch_utils")
        module.Conv1D = Conv1D
        sys.modules["transformers.pytorch_utils"] = module
        return Conv1D
    return Real


class Attention(nn.Module):
    """Self-attention or, with other sizes, attention with three input projections."""

    def __init__(self, **options):
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x):
        if self.mha.in_proj_weight is None:
            return self.mha(
                x, x[..., : self.mha.kdim], x[..., : self.mha.vdim], need_weights=False
            )[0]
        return self.mha(x, x, x, need_weights=False)[0]


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.mha(x, x.flip(1), x.roll(1, 1))[0]


class TwoWeights(nn.Module):
    """A module of a user's own with two weights, each with a GEMM."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(64, 32) * 0.2)  # [in, out]
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return nn.functional.linear(x, self.up).tanh() @ self.down + self.bias


@register_adapter
class NMTwoWeights(Adapter):
    handles = TwoWeights

    @classmethod
    def specs(cls, module, conv_layout):
        yield WeightSpec("up")
        yield WeightSpec("down", "transposed")

    @classmethod
    def macs(cls, module, parameter, args, kwargs, output):
        return args[0].numel() // 32 * getattr(module, parameter).numel()

    @classmethod
    def inputs(cls, module, parameter, args, kwargs):
        x = args[0].flatten(0, -2)
        return [x if parameter == "up" else nn.functional.linear(x, module.up).tanh()]

    def forward(self, x):
        layers = self.nm_layers
        if "up" in layers:
            hidden = nm_linear(x, self.up, None, layers["up"]).tanh()
        else:
            hidden = nn.functional.linear(x, self.up).tanh()
        if "down" in layers:
            return nm_linear(hidden, self.down, self.bias, layers["down"])
        return hidden @ self.down + self.bias


KINDS = {
    "linear": (lambda: nn.Linear(32, 64), (6, 32)),
    "linear-3d-no-bias": (lambda: nn.Linear(32, 16, bias=False), (2, 5, 32)),
    "conv1d": (lambda: nn.Conv1d(16, 32, 3, padding=1, stride=2), (2, 16, 9)),
    "conv1d-same": (lambda: nn.Conv1d(16, 32, 4, padding="same"), (2, 16, 9)),
    "conv2d": (lambda: nn.Conv2d(16, 32, 3, padding=1), (2, 16, 6, 6)),
    "conv2d-groups": (
        lambda: nn.Conv2d(32, 64, (3, 2), (2, 1), (1, 2), (1, 2), groups=2),
        (2, 32, 7, 8),
    ),
    "conv2d-circular": (
        lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular", bias=False),
        (2, 16, 5, 5),
    ),
    "conv2d-reflect": (
        lambda: nn.Conv2d(16, 16, 3, padding=(2, 1), padding_mode="reflect"),
        (2, 16, 5, 5),
    ),
    "conv2d-unbatched": (lambda: nn.Conv2d(16, 16, 3, padding="valid"), (16, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(16, 16, 2, padding=1), (2, 16, 3, 3, 3)),
    "hugging-face-conv1d": (lambda: hugging_face_conv1d()(64, 32), (2, 5, 32)),
    "attention": (Attention, (2, 5, 32)),
    "attention-kdim": (lambda: Attention(kdim=16, vdim=16), (2, 5, 32)),
    "cross-attention": (CrossAttention, (2, 5, 32)),
    "experts": (LinearExperts, (11, 16)),
    "experts-transposed": (TransposedLinearExperts, (11, 16)),
    "two-weights": (TwoWeights, (2, 5, 32)),
    "encoder-layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
        (2, 5, 32),
    ),
}


def make(kind, dtype=torch.float64, seed=0):
    """A module of this kind and an input."""
    torch.manual_seed(seed)
    factory, shape = KINDS[kind]
    module = factory().to(dtype)
    return module, torch.randn(shape, dtype=dtype)


def held_tensors(layer):
    """Every tensor besides the weight that training needs: the persistent memory of a layer."""
    read = layer.read_tensors()
    return read if layer.spec.method.passes_read_buffers else [*read, *layer.buffers.values()]
