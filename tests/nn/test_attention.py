"""nn.MultiheadAttention and the transformer layers: the same function, masked in training and in evaluation."""

import copy

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier


def sparse(module, method="dense", **options):
    return NMSparsifier(module, "2:4", method, skip_first_last=False, **options).attach()


OPTIONS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
    {"kdim": 8, "vdim": 24},
    {"kdim": 8, "vdim": 24, "bias": False, "batch_first": True},
]
BATCH, TARGETS = 3, 5


def attention_masks(kind, sources):
    """``attn_mask`` and ``key_padding_mask``."""
    attention = {
        "bool": torch.rand(TARGETS, sources) > 0.7,
        "float": torch.randn(TARGETS, sources).double(),
        "per-head": torch.randn(BATCH * 4, TARGETS, sources).double(),
        "both": torch.randn(TARGETS, sources).double(),
    }.get(kind)
    if kind == "bool":
        attention[:, 0] = False
    padding = torch.zeros(BATCH, sources, dtype=torch.bool)
    padding[0, -2:] = True
    if kind == "both":
        padding = torch.zeros(BATCH, sources).double().masked_fill(padding, float("-inf"))
    return attention, padding if kind in ("padding", "both") else None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", ["none", "bool", "float", "per-head", "padding", "both"])
@pytest.mark.parametrize("self_attention", [True, False])
def test_equals_the_stock_module(options, masks, self_attention):
    if self_attention and "kdim" in options:
        return
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, dtype=torch.float64, **options)
    sources = TARGETS if self_attention else 7

    def inputs(length, width):
        shape = (BATCH, length) if mha.batch_first else (length, BATCH)
        return torch.randn(*shape, width, dtype=torch.float64)

    query = inputs(TARGETS, 16)
    key, value = query, query
    if not self_attention:
        key, value = inputs(sources, mha.kdim), inputs(sources, mha.vdim)
    attention, padding = attention_masks(masks, sources)
    arguments = {"key_padding_mask": padding, "attn_mask": attention}

    def call():
        return [
            mha(query, key, value, **arguments, **weights)
            for weights in (
                {"need_weights": False},
                {"need_weights": True},
                {"average_attn_weights": False},
            )
        ]

    expected = call()
    sparse(mha)
    torch.testing.assert_close(call(), expected)


def test_unbatched_and_causal():
    mha = nn.MultiheadAttention(16, 4, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = mha(x, x, x, attn_mask=causal, is_causal=True)
    sparse(mha)
    torch.testing.assert_close(mha(x, x, x, attn_mask=causal, is_causal=True), expected)
    with pytest.raises(RuntimeError, match="attn_mask"):
        mha(x, x, x, is_causal=True)


def test_gradients_of_separate_masks():
    """dX uses W_B and dW reaches W, through the attention, against plain autograd."""
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    layers = sparse(mha, "bi-mask").layers
    projections, out = layers["in_proj_weight"], layers["out_proj"]
    dy = torch.randn(2, 5, 16, dtype=torch.float64)
    mha(x, x, x, need_weights=False)[0].backward(dy)

    def linear(inputs, layer, bias, weight_f):
        """Forward with W_F, input gradient through W_B: their difference is held constant."""
        through_b = nn.functional.linear(inputs, layer.backward_weight())
        return (
            through_b - through_b.detach() + nn.functional.linear(inputs.detach(), weight_f, bias)
        )

    x2 = x.detach().clone().requires_grad_()
    weights = [layer.forward_weight().requires_grad_() for layer in (projections, out)]
    parts = linear(x2, projections, mha.in_proj_bias, weights[0]).chunk(3, dim=-1)
    heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts]
    mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    linear(mixed, out, mha.out_proj.bias, weights[1]).backward(dy)
    found = [x.grad, mha.in_proj_weight.grad, mha.out_proj.weight.grad]
    torch.testing.assert_close(found, [x2.grad, *(weight.grad for weight in weights)])


class Mha(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


SIZES = {"dropout": 0.0, "batch_first": True}
MODELS = {
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, **SIZES), 2),
        {"include": None},
        8,
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **SIZES), 2),
        {"include": None},
        12,
    ),
    "attention": (Mha, {"include": ["mha", "mha.out_proj"]}, 2),
    "projections": (Mha, {"include": ["mha"]}, 1),
    "output": (Mha, {"include": ["mha.out_proj"]}, 1),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the stock encoder
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_all_layers_run_masked_everywhere(kind, training, grad):
    torch.manual_seed(0)
    make, options, count = MODELS[kind]
    model = make().train(training)
    arguments, visible = [torch.randn(2, 5, 16)], slice(None)
    if kind == "decoder":
        arguments.append(torch.randn(2, 7, 16))
    if kind == "encoder":
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        arguments += [None, padding]
        visible = ~padding  # the fused path zeroes padded positions

    def settings():
        return {
            name: {key: value for key, value in vars(module).items() if key[0] != "_"}
            for name, module in model.named_modules()
        }

    plain, before = copy.deepcopy(model), settings()
    sparsifier = sparse(model, "ste", **options)
    assert len(sparsifier.layers) == count
    plain.load_state_dict(model.state_dict())
    with torch.set_grad_enabled(grad):
        output, expected = model(*arguments)[visible], plain(*arguments)[visible]
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        for name, layer in sparsifier.layers.items():  # where nothing is kept, it shows
            marks = layer.masks.bits.clone()
            layer.set_masks(torch.zeros_like(marks, dtype=torch.bool))
            assert not torch.allclose(model(*arguments)[visible], output), name
            layer.masks.bits.copy_(marks)
    sparsifier.detach()
    assert settings() == before
