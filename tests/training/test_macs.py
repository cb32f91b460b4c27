"""GEMMs with weights that no adapter knows count as dense in ratios and fractions."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d, linear
from torch.utils.flop_counter import FlopCounterMode

from lightning_nm import NMSparsifier
from lightning_nm.training.macs import OTHERS, READ, MacsCounter, can_watch
from tests.support.loop import Loop

pytestmark = pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")
TOKENS = 16


class Own(nn.Module):
    """A module of a user's own with one weight."""

    def __init__(self, shape, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(shape)), product

    def forward(self, x):
        return self.product(x, self.weight)


class Call(nn.Module):
    """Modules, and what is made of them and an input."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.modules_of = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.modules_of)


def in_parts(x, weight):
    return torch.cat([linear(part, weight[k]) for k, part in enumerate(x.chunk(4))])


def batched(x, weight):
    return torch.bmm(x.view(4, -1, 16), weight.transpose(1, 2).contiguous()).flatten(0, 1)


def einsum(x, weight):
    return torch.einsum("eti,eoi->eto", x.view(4, -1, 16), weight).flatten(0, 1)


def grouped(x, weight):
    ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
    return torch._grouped_mm(x.bfloat16(), weight.transpose(1, 2).bfloat16(), offs=ends).float()


def recurrent(x, rnn):
    return rnn(x[:, None])[0][:, 0]


def of_activations(x):
    return torch.cat([x @ (x.t() @ x), x @ x.t() @ x], 1)


needs_grouped = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch 2.8 or later")
EXPERTS, PER_TOKEN = (4, 32, 16), 32 * 16
CASES = [
    pytest.param(lambda: Own(EXPERTS, in_parts), PER_TOKEN, id="stacked"),
    pytest.param(lambda: Own(EXPERTS, batched), PER_TOKEN, id="bmm"),
    pytest.param(lambda: Own(EXPERTS, einsum), PER_TOKEN, id="einsum"),
    pytest.param(lambda: Own(EXPERTS, grouped), PER_TOKEN, id="grouped", marks=needs_grouped),
    pytest.param(lambda: Own((16, 32), torch.matmul), PER_TOKEN, id="matmul"),
    pytest.param(lambda: Call(of_activations), 0, id="activations"),
    pytest.param(lambda: Call(recurrent, nn.LSTM(16, 32)), 4 * 32 * (16 + 32), id="lstm"),
    pytest.param(lambda: Call(recurrent, nn.GRU(16, 32)), 3 * 32 * (16 + 32), id="gru"),
    pytest.param(
        lambda: Call(lambda x, both: both(x, x[:, :4]), nn.Bilinear(16, 4, 32)),
        4 * PER_TOKEN,
        id="bilinear",
    ),
]


@pytest.mark.parametrize(("kind", "per_token"), CASES)
def test_ratios_and_shares_count_all_weights(kind, per_token):
    model = nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(32, 16), nn.Linear(16, 8))
    loop = Loop(model, shape=(TOKENS, 16), skip_first_last=True)
    try:
        loop.model(loop.batch())
    except RuntimeError as error:
        pytest.skip(f"not on this device: {error}")
    loop.step()
    known, expected = {"0": TOKENS * 256, "2": TOKENS * 512, "3": TOKENS * 128}, TOKENS * per_token
    assert loop.sparsifier.macs == known | ({OTHERS: expected} if expected else {})
    masked = (known["0"] + known["2"]) / (sum(known.values()) + expected)
    assert loop.sparsifier.shares()["flops"] == pytest.approx(masked)
    assert loop.sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - masked / 6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def macs_of(model, tokens):
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    model(torch.randn(tokens, 16))
    return sparsifier.macs


def test_a_product_of_learned_tokens_counts_once():
    learned = torch.randn(5, 16)
    reads = Call(
        lambda x, project: torch.cat([x, x], 1) + project(learned).sum(0), nn.Linear(16, 32)
    )
    model = nn.Sequential(nn.Linear(16, 16), reads, nn.Linear(32, 8))
    expected = {"0": 4 * 16 * 16, "1.modules_of.0": 5 * 16 * 32, "2": 4 * 32 * 8}
    assert macs_of(model, 4) == expected


def test_a_linear_layer_with_a_forward_of_its_own_counts_by_its_operators():
    class Router(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return scores.softmax(-1), scores

    routed = Call(lambda x, router: x * router(x)[0].amax(-1, keepdim=True), Router(16, 4))
    model = nn.Sequential(nn.Linear(16, 16), routed, nn.Linear(16, 8))
    expected = {"0": 4 * 16 * 16, "1.modules_of.0": 4 * 16 * 4, "2": 4 * 16 * 8}
    assert macs_of(model, 4) == expected


class Autoencoder(nn.Module):
    """Decodes by the weights of its encoder."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in reversed(self.layers):
            x = x @ layer.weight
        return x


def reads(x, called, read, conv, embed):
    """Reads the weights of layers that are called elsewhere or never."""
    x = linear(called(x), read.weight, read.bias)
    x = conv1d(x.view(-1, 4, 4), conv.weight, padding=1).flatten(1)
    return x @ embed.weight.t()


def reader():
    conv = nn.Conv1d(4, 8, 3, padding=1)
    return Call(reads, nn.Linear(16, 16), nn.Linear(16, 16), conv, nn.Embedding(12, 32))


def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))


def attention(**options):
    return nn.MultiheadAttention(32, 4, **options)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


WITH_WEIGHTS = ("aten.mm", "aten.addmm", "aten.convolution")
"""Operators of torch; others multiply activations by each other."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), Autoencoder()), [(16, 16)]),
        (lambda: nn.Sequential(nn.Linear(16, 16), reader()), [(16, 16)]),
        (lambda: nn.Sequential(nn.Linear(16, 16), weight_norm()), [(16, 16)]),
        (attention, [(5, 3, 32)] * 3),
        (lambda: attention(batch_first=True), [(3, 5, 32), (3, 7, 32), (3, 7, 32)]),
        (lambda: attention(kdim=16, vdim=24), [(5, 32), (7, 16), (7, 24)]),
        (encoder, [(3, 5, 32)]),
    ],
)
def test_weights_are_counted_as_torch_counts_them(make, shapes, masked):
    """Also those that other code reads; torch counts none in the fused path of evaluation."""
    model, inputs = make().train(), [torch.randn(shape) for shape in shapes]
    with FlopCounterMode(display=False) as torchs:
        model(*inputs)
    counts = torchs.get_flop_counts()["Global"]
    expected = sum(flops for name, flops in counts.items() if str(name) in WITH_WEIGHTS) // 2
    sparsifier = NMSparsifier(model, "2:4", "ste", skip_first_last=False)
    if masked:
        sparsifier.attach()
    counter = MacsCounter(model)
    model.eval()(*inputs)
    counter.close()
    sparsifier.detach()
    assert sum(counter.macs.values()) == expected


def test_what_other_code_reads_of_a_masked_layer_counts_as_dense():
    loop = Loop(Autoencoder(), shape=(TOKENS, 16))
    loop.model(loop.batch())
    macs = TOKENS * 16 * 32
    names = ("layers.0", "layers.1")
    assert loop.sparsifier.macs == dict.fromkeys(names, macs) | {
        name + READ: macs for name in names
    }
    # Of the masked half, one of three GEMMs has half of the multiply-adds.
    assert loop.sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - 0.5 / 6)
