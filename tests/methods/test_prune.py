"""prune(): calibration of every kind of layer, and the result."""

import copy
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_nm import ASP, NMSparsifier, prune
from lightning_nm import functional as nmf
from lightning_nm.functional.calibrated import sparsegpt
from lightning_nm.nn.adapters import Adapter, find_adapter, register_adapter

CONVOLUTIONS = {
    "conv1d": (nn.Conv1d(8, 8, 3, stride=2, padding=1), (4, 8, 9)),
    "conv2d": (nn.Conv2d(8, 4, (3, 2), padding="same", padding_mode="reflect"), (4, 8, 6, 6)),
    "groups": (nn.Conv2d(16, 8, 3, dilation=2, groups=2, bias=False), (4, 16, 7, 7)),
    "conv3d": (nn.Conv3d(4, 4, 2), (2, 4, 3, 3, 3)),
}


def data(*shape, batches=3):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(shape[-1], shape[-1], generator=generator)
    return [torch.randn(*shape, generator=generator) @ mixing for _ in range(batches)]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_patches_of_a_convolution(kind):
    module, shape = CONVOLUTIONS[kind]
    (x,) = data(*shape, batches=1)
    patches = find_adapter(type(module))[0].inputs(module, "weight", (x,), {})
    weights = module.weight.flatten(1).unflatten(0, (module.groups, -1))
    y = torch.cat(
        [patch @ weight.t() for patch, weight in zip(patches, weights, strict=True)], dim=1
    )
    if module.bias is not None:
        y = y + module.bias
    expected = module(x).transpose(0, 1).flatten(1).t()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["channels", "flat"])
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", [*CONVOLUTIONS, "linear", "Conv1D", "attention"])
def test_the_error_is_that_of_the_output(kind, score, layout):
    torch.manual_seed(0)
    if kind == "linear":
        module, shape = nn.Linear(16, 8), (2, 12, 16)
    elif kind == "Conv1D":
        module, shape = pytest.importorskip("transformers").pytorch_utils.Conv1D(8, 16), (2, 12, 16)
    elif kind == "attention":
        module, shape = nn.MultiheadAttention(16, 4, batch_first=True), (2, 12, 16)
    else:
        module, shape = copy.deepcopy(CONVOLUTIONS[kind][0]), CONVOLUTIONS[kind][1]
    model, batches = nn.Sequential(module), data(*shape)
    name = "in_proj_weight" if kind == "attention" else "weight"

    def outputs():
        if kind == "attention":
            return torch.cat([x @ module.in_proj_weight.t() for x in batches])
        plain = copy.deepcopy(module)
        if plain.bias is not None:
            plain.bias.data.zero_()
        return torch.cat([plain(x) for x in batches])

    before, old = outputs(), getattr(module, name).detach().clone()
    call = (lambda model, x: model[0](x, x, x)) if kind == "attention" else None
    options = {
        "skip_first_last": False,
        "conv_layout": layout,
        "call": call,
        "exclude": "*.out_proj",
    }
    if kind != "attention":
        del options["exclude"]
    result = prune(model, "2:4", score, batches, **options)
    new = getattr(module, name).detach()
    rows = new.t() if kind == "Conv1D" else new.flatten(1) if layout == "flat" else new
    assert nmf.is_nm(rows, "2:4", dim=1)
    assert new.count_nonzero() == new.numel() // 2
    if score != "sparsegpt":
        assert torch.equal(new, torch.where(new != 0, old, 0))
    (error,) = result.errors.values()
    direct = ((outputs() - before).norm() / before.norm()).item()
    assert error == pytest.approx(direct, rel=1e-3)
    assert 0.01 < error < 1


class Net(nn.Module):
    """A layer that is called twice, and two in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.twice = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x).relu()
        return self.last(self.twice(self.dropout(self.twice(x)).relu())[:, :8])


def test_layers_see_what_pruned_layers_give_them():
    torch.manual_seed(0)
    model, batches = Net(), data(32, 16)
    twin = copy.deepcopy(model)
    result = prune(model, "1:4", "sparsegpt", batches, skip_first_last=False)
    assert result.layers == ["first", "twice", "last"]
    assert model.training
    assert model.dropout.training
    x = torch.cat(batches)
    for inputs, name in (
        (lambda: x, "first"),
        (
            lambda: torch.cat([twin.first(x).relu(), twin.twice(twin.first(x).relu()).relu()]),
            "twice",
        ),
        (lambda: twin.twice(twin.twice(twin.first(x).relu()).relu())[:, :8], "last"),
    ):
        layer, given = getattr(twin, name), inputs().detach()
        layer.weight.data = sparsegpt(layer.weight.detach(), given.t() @ given, "1:4")
        torch.testing.assert_close(getattr(model, name).weight, layer.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_what_full_precision_keeps(dtype, score):
    """Norms of inputs this large overflow float16, and scores of bfloat16 would tie."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, 3.8, 64)[torch.randperm(64, generator=generator)]
    inputs = (torch.randn(512, 64, generator=generator) * sizes).to(dtype)
    half = nn.Sequential(nn.Linear(64, 256, bias=False, dtype=dtype))
    full = nn.Sequential(nn.Linear(64, 256, bias=False, dtype=torch.float64))
    values = torch.randn(256, 64, generator=generator).to(dtype)
    half[0].weight.data.copy_(values)
    full[0].weight.data.copy_(values)
    errors = prune(half, "2:4", score, [inputs], skip_first_last=False).errors
    expected = prune(full, "2:4", score, [inputs.double()], skip_first_last=False).errors
    assert torch.equal(half[0].weight != 0, full[0].weight != 0)
    assert errors["0"] == pytest.approx(expected["0"], rel=1e-2)


def test_autocast_of_the_model_leaves_the_statistics_in_single_precision(monkeypatch):
    moments = []

    def noting(weight, moment, *rest):
        moments.append(moment)
        return sparsegpt(weight, moment, *rest)

    monkeypatch.setattr("lightning_nm.methods.prune.sparsegpt", noting)

    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    prune(
        *(nn.Sequential(nn.Linear(16, 8)), "2:4", "sparsegpt", [inputs]),
        skip_first_last=False,
        call=call,
    )
    (moment,) = moments
    torch.testing.assert_close(moment, inputs.double().t() @ inputs.double(), rtol=1e-5, atol=1e-2)


class Routed(nn.Module):
    """An expert of a list gets the tokens of its number; some get none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        y = torch.zeros_like(x)
        chosen = x[:, :2].argmax(1)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
        return self.out(y)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
def test_a_layer_that_no_token_reaches_is_pruned_by_magnitude_and_named(score):
    torch.manual_seed(0)
    model = Routed()
    expected = nmf.nm_prune(model.experts[2].weight.detach(), "2:4", dim=1)
    message = (
        "no calibration token, or only zeros, reach 1 layers, such as 'experts.2': .* magnitude"
    )
    with pytest.warns(UserWarning, match=message):
        result = prune(model, "2:4", score, data(32, 16), skip_first_last=False)
    assert result.uncalibrated == {"experts.2": [0]}
    assert set(result.layers) == {"experts.0", "experts.1", "experts.2", "out"}
    assert set(result.errors) == set(result.layers) - {"experts.2"}
    assert torch.equal(model.experts[2].weight, expected)


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_a_group_of_a_convolution_that_gets_zeros_is_pruned_by_magnitude(score):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 8, 3, groups=2, bias=False))
    expected = nmf.nm_prune(model[0].weight.detach(), "2:4", dim=1)
    x = torch.randn(4, 16, 9)
    x[:, 8:] = 0
    with pytest.warns(
        UserWarning,
        match=r"not all experts or groups of 1 layers, such as \[1\] of '0'.* magnitude",
    ):
        result = prune(model, "2:4", score, [x], skip_first_last=False)
    assert result.uncalibrated == {"0": [1]}
    assert 0 < result.errors["0"] < 1
    assert torch.equal(model[0].weight[4:], expected[4:])
    assert not torch.equal(model[0].weight[:4], expected[:4])


def test_it_is_a_start_for_asp():
    torch.manual_seed(0)
    model, batches = Net(), data(32, 16)
    result = prune(model, "2:4", "sparsegpt", batches)
    assert result.skipped == {"first": "last linear layer"}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    sparsifier = NMSparsifier(model, "2:4", ASP(init="zeros")).attach()
    assert set(sparsifier.layers) == set(result.layers)
    for name, layer in sparsifier.layers.items():
        assert torch.equal(layer.forward_mask, weights[f"{name}.weight"] != 0)
        assert torch.equal(layer.forward_weight(), weights[f"{name}.weight"])


def test_batches_as_mappings_and_pairs():
    (x,) = data(8, 16, batches=1)
    results = []
    for batch in (x, (x, 3), [x, x], {"x": x}):
        torch.manual_seed(0)
        model = Net()
        prune(model, "2:4", "wanda", [batch])
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], other[key]) for other in results[1:] for key in other)


def test_a_pass_ends_at_the_layer():
    model = Net()
    ended = []
    model.register_forward_hook(lambda *_: ended.append(True))
    prune(model, "2:4", "wanda", data(8, 16, batches=2), skip_first_last=False)
    assert model.calls == 2 + 3 * 2
    assert len(ended) == 2  # of the pass that finds the order
    assert not model.first._forward_hooks
    assert not model.first._forward_pre_hooks


# A loader that yields nothing: its data set is smaller than a batch.
SHORT = DataLoader(list(torch.ones(3, 16)), batch_size=4, drop_last=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"score": "random"},
            ValueError,
            "'random' is unknown: use 'magnitude' or 'wanda' or 'sparsegpt'",
        ),
        ({"score": "wanda"}, ValueError, "needs calibration batches"),
        ({"score": "wanda", "data": []}, ValueError, "holds no batch: .* Give one batch or more"),
        ({"score": "wanda", "data": iter([])}, ValueError, "holds no batch"),
        ({"score": "sparsegpt", "data": SHORT}, ValueError, "holds no batch.*drop_last=True"),
        ({"data": []}, ValueError, "holds no batch"),
        (
            {"score": "sparsegpt", "data": 2 * [{"x": torch.ones(0, 16)}]},
            ValueError,
            r"holds no token: the tensors of its 2 batches are empty, the first one of shape \(0, 16\)",
        ),
        ({"data": [torch.ones(3, 0, 16)]}, ValueError, "holds no token"),
        (
            {"data": {"x": torch.ones(2, 16)}},
            TypeError,
            r"`data` is a dict.*give \[batch\] for one",
        ),
        (
            {"score": "wanda", "data": [torch.full((2, 16), torch.nan)]},
            ValueError,
            "layer 'first'.*not finite",
        ),
        (
            {"score": "sparsegpt", "data": [torch.full((16, 16), torch.inf)]},
            ValueError,
            "layer 'first'.*not finite",
        ),
        (
            {"score": "wanda", "data": [torch.ones(2, 16)], "call": lambda m, x: m.first(x)},
            ValueError,
            "'twice'",
        ),
        ({"include": "nothing"}, ValueError, "matches no layer"),
        ({"pattern": "2:3"}, ValueError, "%"),
    ],
)
def test_refusals(options, error, message):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        prune(model, **{"skip_first_last": False, **options})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_data_that_can_be_read_once_are_enough():
    results = []
    for batches in (data(32, 16), iter(data(32, 16))):
        torch.manual_seed(0)
        model = Net()
        prune(model, "2:4", "wanda", batches, skip_first_last=False)
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_fewer_tokens_than_input_features_are_warned_of(score):
    """Before a layer is pruned, by name; the error on others is larger. Convolutions have a token for each position."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 32)).double()
    mixing = torch.randn(8, 8).double()
    inputs = [
        torch.einsum("nchw,cd->ndhw", torch.randn(n, 8, 4, 4).double(), mixing) for n in (40, 4000)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = copy.deepcopy(model)
        result = prune(model, "2:4", score, inputs[:1], include=["0", "2"])
    expected = []
    if score == "sparsegpt":  # 160 tokens for 72 features of the convolution
        expected = [
            "score='sparsegpt' has fewer calibration tokens than input features in 1 layers, such as '2' (40 for 64): "
            "they are fitted to these tokens, for which alone the errors of the result hold. Give more data, or "
            "score='wanda'"
        ]
    assert [str(each.message) for each in caught] == expected
    assert all(each.filename == __file__ for each in caught)
    x = trained[:2](inputs[1])
    change = (trained[2].weight - model[2].weight).t()
    error = (x @ change).norm() / (x @ trained[2].weight.t()).norm()
    assert (error > 2 * result.errors["2"]) == (score == "sparsegpt")


@pytest.mark.parametrize("score", ["magnitude", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_layers_that_are_sparse_already_are_warned_of(pattern, score):
    model = Net()
    prune(model, pattern, include="first", skip_first_last=False)
    before = model.first.weight.clone()
    more = {} if score == "magnitude" else {"data": data(32, 16)}
    with pytest.warns(
        UserWarning,
        match="1 of 3 layers, such as 'first', are 2:4 already: nothing of them is pruned. Give a",
    ) as caught:
        prune(model, "2:4", score, skip_first_last=False, **more)
    assert torch.equal(model.first.weight, before)
    assert [each.filename for each in caught] == [__file__]
    if pattern == "2:4":
        prune(model, "1:4", skip_first_last=False)  # sparser: there is something to prune


def test_a_masked_model_is_refused():
    model = Net()
    NMSparsifier(model, "2:4").attach()
    with pytest.raises(ValueError, match="masked already"):
        prune(model, "2:4")


def test_an_adapter_without_inputs_is_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class NMScaled(Adapter):
        handles = Scaled
        specs = find_adapter(nn.Linear)[0].specs

    registered = sys.modules["lightning_nm.nn.adapters.base"]._ADAPTERS
    register_adapter(NMScaled)
    try:
        model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8))
        before = model[0].weight.clone()
        with pytest.raises(
            ValueError, match="layer '1' cannot be calibrated: its adapter defines no inputs"
        ):
            prune(model, "2:4", "wanda", [torch.ones(2, 8)], skip_first_last=False)
        assert torch.equal(model[0].weight, before)  # refused before any layer is pruned
        prune(model, "2:4", skip_first_last=False)
        assert nmf.is_nm(model[1].weight, "2:4")
    finally:
        registered.remove(NMScaled)
