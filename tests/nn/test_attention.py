"""nn.MultiheadAttention and the transformer layers: the same function, masked in training and in evaluation."""

import copy
import itertools

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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["none", "bool", "float", "per-head", "padding", "both"])
@pytest.mark.parametrize("self_attention", [True, False])
def test_equals_the_stock_module(options, need_weights, masks, self_attention):
    if self_attention and "kdim" in options:
        return
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, dtype=torch.float64, **options)
    batch, targets, sources = 3, 5, 5 if self_attention else 7
    shape = (
        (lambda length, width: (batch, length, width))
        if options.get("batch_first")
        else (lambda length, width: (length, batch, width))
    )
    query = torch.randn(shape(targets, 16), dtype=torch.float64)
    key = query if self_attention else torch.randn(shape(sources, mha.kdim), dtype=torch.float64)
    value = query if self_attention else torch.randn(shape(sources, mha.vdim), dtype=torch.float64)
    attn = {
        "bool": torch.rand(targets, sources) > 0.7,
        "float": torch.randn(targets, sources, dtype=torch.float64),
        "per-head": torch.randn(batch * 4, targets, sources, dtype=torch.float64),
        "both": torch.randn(targets, sources, dtype=torch.float64),
    }.get(masks)
    if attn is not None and attn.dtype == torch.bool:
        attn[:, 0] = False
    padding = None
    if masks in ("padding", "both"):
        padding = torch.zeros(batch, sources, dtype=torch.bool)
        padding[0, -2:] = True
    if masks == "both":
        padding = torch.zeros(batch, sources, dtype=torch.float64).masked_fill(
            padding, float("-inf")
        )
    arguments = {"key_padding_mask": padding, "attn_mask": attn, "need_weights": need_weights}
    expected, expected_weights = mha(query, key, value, **arguments)
    expected_heads = mha(query, key, value, **arguments, average_attn_weights=False)[1]
    sparse(mha)
    output, weights = mha(query, key, value, **arguments)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(
        mha(query, key, value, **arguments, average_attn_weights=False)[1], expected_heads
    )


def test_unbatched_and_causal():
    mha = nn.MultiheadAttention(16, 4, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = mha(x, x, x, attn_mask=causal, is_causal=True)
    sparse(mha)
    for a, b in zip(mha(x, x, x, attn_mask=causal, is_causal=True), expected, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="attn_mask"):
        mha(x, x, x, is_causal=True)


@pytest.mark.parametrize("which", [["mha", "mha.out_proj"], ["mha"], ["mha.out_proj"]], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_masked_in_training_and_in_evaluation(which, training):
    model = nn.ModuleDict({"mha": nn.MultiheadAttention(16, 4, batch_first=True)}).train(training)
    x = torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    sparsifier = sparse(model, "ste", include=which)
    plain.load_state_dict(model.state_dict())
    with torch.set_grad_enabled(training):
        output, expected, dense = (
            m["mha"](x, x, x)[0] for m in (model, plain, copy.deepcopy(plain))
        )
    torch.testing.assert_close(output, expected)
    for layer in sparsifier.layers.values():
        layer.set_masks(
            torch.zeros_like(layer.weight, dtype=torch.bool)
        )  # nothing kept: it must show
    assert not torch.allclose(model["mha"](x, x, x)[0], dense)
    sparsifier.detach()
    assert type(model["mha"]) is nn.MultiheadAttention


def test_gradients_of_separate_masks():
    """dX uses W_B and dW reaches W, through the attention, against plain autograd."""
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    sparsifier = sparse(mha, "bi-mask")
    projections, out = sparsifier.layers["in_proj_weight"], sparsifier.layers["out_proj"]
    dy = torch.randn(2, 5, 16, dtype=torch.float64)
    mha(x, x, x, need_weights=False)[0].backward(dy)

    def linear(inputs, layer, bias, weight_f):
        """Forward with W_F, input gradient through W_B: their difference is held constant."""
        weight_b = layer.backward_weight()
        constant = nn.functional.linear(inputs.detach(), weight_b)
        return (
            nn.functional.linear(inputs, weight_b)
            - constant
            + nn.functional.linear(inputs.detach(), weight_f, bias)
        )

    x2 = x.detach().clone().requires_grad_()
    weights = [layer.forward_weight().requires_grad_() for layer in (projections, out)]
    q, k, v = (
        part.unflatten(-1, (4, 4)).transpose(1, 2)
        for part in linear(x2, projections, mha.in_proj_bias, weights[0]).chunk(3, dim=-1)
    )
    heads = nn.functional.scaled_dot_product_attention(q, k, v)
    linear(heads.transpose(1, 2).flatten(2), out, mha.out_proj.bias, weights[1]).backward(dy)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(mha.in_proj_weight.grad, weights[0].grad)
    torch.testing.assert_close(mha.out_proj.weight.grad, weights[1].grad)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors"
)  # the stock encoder's fused path
@pytest.mark.parametrize(
    ("kind", "training", "grad"),
    list(itertools.product(["encoder", "decoder"], [True, False], [True, False])),
)
def test_transformer_layers_run_masked_everywhere(kind, training, grad):
    torch.manual_seed(0)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        arguments = (torch.randn(2, 5, 16),)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        kwargs = {"src_key_padding_mask": padding}
    else:
        layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
        model = nn.TransformerDecoder(layer, 2)
        arguments = (torch.randn(2, 5, 16), torch.randn(2, 7, 16))
        padding, kwargs = None, {}
    model.train(training)
    plain = copy.deepcopy(model)
    options = {name: vars(module).copy() for name, module in model.named_modules()}
    sparsifier = sparse(model, "ste")
    assert len(sparsifier.layers) == 2 * (4 if kind == "encoder" else 6)
    plain.load_state_dict(model.state_dict())
    with torch.set_grad_enabled(grad):
        output, expected = model(*arguments, **kwargs), plain(*arguments, **kwargs)
    visible = slice(None) if padding is None else ~padding  # the fused path zeroes padded positions
    torch.testing.assert_close(output[visible], expected[visible], rtol=1e-5, atol=1e-5)

    for (
        name,
        one,
    ) in sparsifier.layers.items():  # each claimed layer really ran masked: emptying it shows
        marks = one.masks.bits.clone()
        one.set_masks(torch.zeros_like(marks, dtype=torch.bool))
        with torch.set_grad_enabled(grad):
            changed = model(*arguments, **kwargs)
        assert not torch.allclose(changed[visible], output[visible]), name
        one.masks.bits.copy_(marks)
    sparsifier.detach()
    for name, module in model.named_modules():
        assert {k: v for k, v in vars(module).items() if k[0] != "_"} == {
            k: v for k, v in options[name].items() if k[0] != "_"
        }
