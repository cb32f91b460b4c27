"""Products with weights that no adapter knows count as dense in ratios and shares."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics.classification import MulticlassAccuracy

from lightning_nm import NMSparsifier
from lightning_nm.training.macs import OTHERS, READ, MacsCounter, can_watch

pytestmark = pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")


class Stacked(nn.Module):
    """Weights [experts, out, in] in one parameter, of which no name says so."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16))

    def forward(self, x):
        parts = x.chunk(4)
        return torch.cat(
            [torch.nn.functional.linear(part, self.up[k]) for k, part in enumerate(parts)]
        )


class Batched(Stacked):
    def forward(self, x):
        return torch.bmm(x.view(4, -1, 16), self.up.transpose(1, 2).contiguous()).flatten(0, 1)


class Einsum(Stacked):
    def forward(self, x):
        return torch.einsum("eti,eoi->eto", x.view(4, -1, 16), self.up).flatten(0, 1)


class Attention(nn.Module):
    """Products of activations only."""

    def forward(self, x):
        return torch.cat([x @ (x.t() @ x), x @ x.t() @ x], 1)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return x @ self.weight


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(16, 32)

    def forward(self, x):
        return self.rnn(x[:, None])[0][:, 0]


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(16, 4, 32)

    def forward(self, x):
        return self.both(x, x[:, :4])


TOKENS = 16
CASES = {
    "stacked": (Stacked, TOKENS * 32 * 16),
    "bmm": (Batched, TOKENS * 32 * 16),
    "einsum": (Einsum, TOKENS * 32 * 16),
    "matmul": (Own, TOKENS * 32 * 16),
    "activations": (Attention, 0),
    "lstm": (Recurrent, TOKENS * 4 * 32 * (16 + 32)),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS * 3 * 32 * (16 + 32)),
    "bilinear": (Bilinear, TOKENS * 32 * 16 * 4),
}


@pytest.mark.parametrize(("kind", "expected"), CASES.values(), ids=CASES)
def test_ratios_and_shares_count_all_weights(kind, expected):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(32, 16), nn.Linear(16, 8))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    model(torch.randn(TOKENS, 16)).square().mean().backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()
    known = {"0": TOKENS * 16 * 16, "2": TOKENS * 32 * 16, "3": TOKENS * 16 * 8}
    assert sparsifier.macs == known | ({OTHERS: expected} if expected else {})
    masked = (known["0"] + known["2"]) / (sum(known.values()) + expected)
    assert sparsifier.shares()["flops"] == pytest.approx(masked)
    assert sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - masked / 6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), (
        "the hooks are gone"
    )
    twin = copy.deepcopy(sparsifier.state_dict())
    other = NMSparsifier(model_like(model, kind), "2:4", "sr-ste")
    other.model.load_state_dict(model.state_dict())
    other.attach(twin).load_state_dict(twin)
    assert other.macs == sparsifier.macs


def model_like(model, kind):
    return nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(32, 16), nn.Linear(16, 8))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch 2.8 or later")
def test_grouped_products_count():
    class Grouped(Stacked):
        def forward(self, x):
            ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
            weights = self.up.transpose(1, 2).bfloat16()
            return torch._grouped_mm(x.bfloat16(), weights, offs=ends).float()

    model = nn.Sequential(nn.Linear(16, 16), Grouped(), nn.Linear(32, 16))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    try:
        model(torch.randn(64, 16))
    except RuntimeError as error:
        pytest.skip(f"not on this device: {error}")
    assert sparsifier.macs[OTHERS] == 64 * 32 * 16


class Tokens(nn.Module):
    """A linear layer that reads a parameter."""

    def __init__(self):
        super().__init__()
        self.learned, self.project = nn.Parameter(torch.randn(5, 16)), nn.Linear(16, 32)

    def forward(self, x):
        return torch.cat([x, x], 1) + self.project(self.learned).sum(0)


def test_a_product_of_learned_tokens_counts_once():
    model = nn.Sequential(nn.Linear(16, 16), Tokens(), nn.Linear(32, 8))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    model(torch.randn(4, 16))
    assert sparsifier.macs == {"0": 4 * 16 * 16, "1.project": 5 * 16 * 32, "2": 4 * 32 * 8}


def test_a_linear_layer_with_a_forward_of_its_own_counts_by_its_operators():
    class Router(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return scores.softmax(-1), scores

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.router, self.head = nn.Linear(16, 16), Router(16, 4), nn.Linear(16, 8)

        def forward(self, x):
            x = self.up(x)
            return self.head(x * self.router(x)[0].amax(-1, keepdim=True))

    model = Model()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    model(torch.randn(4, 16))
    assert sparsifier.macs == {"up": 4 * 16 * 16, "router": 4 * 16 * 4, "head": 4 * 16 * 8}


def test_modules_whose_hash_changes_are_watched():
    class Measured(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
            self.accuracy = MulticlassAccuracy(4)

        def forward(self, x):
            logits = self.layers(x)
            self.accuracy(logits, torch.zeros(len(x), dtype=torch.long))
            return logits

    model = Measured()
    sparsifier = NMSparsifier(model, "2:4", "ste").attach()
    model(torch.randn(8, 16))
    sparsifier.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def attention(**options):
    return nn.MultiheadAttention(32, 4, **options)


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (attention, [(5, 3, 32)] * 3),
        (lambda: attention(batch_first=True), [(3, 5, 32), (3, 7, 32), (3, 7, 32)]),
        (lambda: attention(kdim=16, vdim=24), [(5, 32), (7, 16), (7, 24)]),
        (encoder, [(3, 5, 32)]),
    ],
)
def test_attention_is_counted_as_torch_counts_it(make, shapes, masked):
    """Without the products of two activations; torch counts none in the fused path of evaluation."""
    model = make().train()
    inputs = [torch.randn(shape) for shape in shapes]
    with FlopCounterMode(display=False) as torchs:
        model(*inputs)
    by_operator = torchs.get_flop_counts()["Global"]
    of_weights = sum(
        flops for name, flops in by_operator.items() if str(name) in ("aten.mm", "aten.addmm")
    )
    sparsifier = (
        NMSparsifier(model, "2:4", "ste", skip_first_last=False).attach() if masked else None
    )
    counter = MacsCounter(model)
    model.eval()(*inputs)
    counter.close()
    if sparsifier is not None:
        sparsifier.detach()
    assert sum(counter.macs.values()) == of_weights // 2


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


class Reader(nn.Module):
    """Reads the weights of layers that are called elsewhere or never."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(16, 16)
        self.read = nn.Linear(16, 16)
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.embed = nn.Embedding(12, 32)

    def forward(self, x):
        x = nn.functional.linear(self.called(x), self.read.weight, self.read.bias)
        x = nn.functional.conv1d(x.view(-1, 4, 4), self.conv.weight, padding=1).flatten(1)
        return x @ self.embed.weight.t()


def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("make", [Autoencoder, Reader, weight_norm])
def test_weights_that_other_code_reads_are_counted_as_torch_counts_them(make, masked):
    model = nn.Sequential(nn.Linear(16, 16), make())
    x = torch.randn(TOKENS, 16)
    with FlopCounterMode(display=False) as torchs:
        model(x)
    sparsifier = NMSparsifier(model, "2:4", "ste", skip_first_last=False)
    if masked:
        sparsifier.attach()
    counter = MacsCounter(model)
    model(x)
    counter.close()
    if masked:
        sparsifier.detach()
    assert sum(counter.macs.values()) == torchs.get_total_flops() // 2


def test_what_other_code_reads_of_a_masked_layer_counts_as_dense():
    model = Autoencoder()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    model(torch.randn(TOKENS, 16))
    macs = TOKENS * 16 * 32
    names = ("layers.0", "layers.1")
    assert sparsifier.macs == dict.fromkeys(names, macs) | {name + READ: macs for name in names}
    # Of the masked half, one of three GEMMs has half of the multiply-adds.
    assert sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - 0.5 / 6)
