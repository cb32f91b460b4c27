"""prune(): calibration of every kind of layer, and what is refused or warned of."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_nm import NMSparsifier, prune
from lightning_nm import functional as nmf
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.nn import register_experts
from lightning_nm.nn.adapters import Adapter, adapter, find_adapter, register_adapter
from tests.support.experts import EXPERTS, WIDTH, Experts, TransposedExperts, matrices
from tests.support.kinds import KINDS, make
from tests.support.method_loop import mlp

few_tokens = pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
ALL = {"skip_first_last": False}


def data(*shape, batches=3, dtype=torch.float32):
    """Batches whose features are correlated."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(shape[-1], shape[-1], generator=generator)
    return [(torch.randn(*shape, generator=generator) @ mixing).to(dtype) for _ in range(batches)]


def pruned(weight, inputs, score):
    """A matrix as a score prunes it by its inputs ``[tokens, in]``."""
    if score == "sparsegpt":
        return sparsegpt(weight, inputs.t() @ inputs, "2:4")
    mask = nmf.magnitude_mask(weight, "2:4", dim=1)
    if score == "wanda":
        mask = wanda_mask(weight, inputs.norm(dim=0), "2:4")
    return torch.where(mask, weight, 0)


@few_tokens
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("conv2d-groups", layout) for layout in ("channels", "flat")),
        *((kind, "channels") for kind in ("linear", "conv1d", "conv2d-reflect", "conv3d")),
        *((kind, "channels") for kind in ("hugging-face-conv1d", "attention")),
    ],
)
def test_the_error_is_that_of_the_output(kind, score, layout):
    module, _ = make(kind)
    batches = data(*KINDS[kind][1], dtype=torch.float64)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if "bias" in name:
            parameter.data.zero_()
    is_attention = kind == "attention"
    weight = parameters["mha.in_proj_weight" if is_attention else "weight"]

    def outputs():
        found = [x @ weight.t() if is_attention else module(x) for x in batches]
        return torch.cat(found).detach()

    before, old = outputs(), weight.detach().clone()
    include = "mha" if is_attention else None
    result = prune(module, "2:4", score, batches, include=include, conv_layout=layout, **ALL)
    new = weight.detach()
    rows = new.t() if kind == "hugging-face-conv1d" else new
    assert nmf.is_nm(rows.flatten(1) if layout == "flat" else rows, "2:4", dim=1)
    assert new.count_nonzero() == new.numel() // 2
    if score != "sparsegpt":
        assert torch.equal(new, torch.where(new != 0, old, 0))
    (error,) = result.errors.values()
    assert error == pytest.approx(float((outputs() - before).norm() / before.norm()), rel=1e-6)
    assert 0.01 < error < 1


class Net(nn.Module):
    """A layer that is called twice, and two in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
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
    model, twin, x = Net(), Net(), torch.cat(data(32, 16))
    result = prune(model, "2:4", "sparsegpt", data(32, 16), **ALL)
    assert result.layers == ["first", "twice", "last"]
    assert model.training
    assert model.dropout.training

    def given(name):
        hidden = twin.first(x).relu()
        twice = torch.cat([hidden, twin.twice(hidden).relu()])
        return {"first": x, "twice": twice, "last": twin.twice(twice[96:])[:, :8]}[name].detach()

    for name in result.layers:
        weight = getattr(twin, name).weight
        weight.data = pruned(weight.detach(), given(name), "sparsegpt")
        torch.testing.assert_close(getattr(model, name).weight, weight, rtol=1e-3, atol=1e-4)


def test_a_pass_ends_at_the_layer():
    model, ended = Net(), []
    model.register_forward_hook(lambda *_: ended.append(True))
    prune(model, "2:4", "wanda", data(8, 16, batches=2), **ALL)
    assert model.calls == 2 + 3 * 2
    assert len(ended) == 2  # of the pass that finds the order
    assert not model.first._forward_hooks
    assert not model.first._forward_pre_hooks


def test_batches_as_mappings_and_pairs():
    (x,) = data(8, 16, batches=1)
    results = []
    for batch in (x, (x, 3), [x, x], {"x": x}):
        model = Net()
        prune(model, "2:4", "wanda", [batch])
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], other[key]) for other in results[1:] for key in other)


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_what_full_precision_keeps(dtype, score):
    """Norms of inputs this large overflow float16, and scores of bfloat16 would tie."""
    torch.manual_seed(0)
    sizes = torch.logspace(0, 3.8, 64)[torch.randperm(64)]
    inputs = (torch.randn(512, 64) * sizes).to(dtype)
    half, full = (nn.Linear(64, 256, bias=False, dtype=each) for each in (dtype, torch.float64))
    half.weight.data.normal_()
    full.weight.data.copy_(half.weight)
    (error,) = prune(half, "2:4", score, [inputs], **ALL).errors.values()
    (expected,) = prune(full, "2:4", score, [inputs.double()], **ALL).errors.values()
    assert torch.equal(half.weight != 0, full.weight != 0)
    assert error == pytest.approx(expected, rel=1e-2)


def test_autocast_of_the_model_leaves_the_statistics_in_single_precision(monkeypatch):
    moments = []
    noted = lambda weight, moment, *rest: moments.append(moment) or weight  # noqa: E731
    monkeypatch.setattr("lightning_nm.methods.prune.sparsegpt", noted)
    (inputs,) = data(512, 16, batches=1)
    call = torch.autocast("cpu", torch.bfloat16)(lambda model, x: model(x))
    prune(mlp(16, 8), "2:4", "sparsegpt", [inputs], call=call, **ALL)
    expected = inputs.double().t() @ inputs.double()
    torch.testing.assert_close(moments[0], expected, rtol=1e-5, atol=1e-2)


# --------------------------------------------------------------------------------------------- experts and groups


class Mixture(nn.Module):
    """Tokens go to the expert of their largest of the first features, of which `most` have experts."""

    def __init__(self, kind=Experts, most=EXPERTS):
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.most, self.calls = kind(), most, 0

    def chosen(self, x):
        return x[:, : self.most].argmax(1)

    def forward(self, x):
        self.calls += 1
        return self.experts(x, self.chosen(x))


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_is_calibrated_by_its_tokens(kind, score):
    model, twin, x = Mixture(kind), Mixture(kind), torch.cat(data(48, WIDTH))
    result = prune(model, "2:4", score, data(48, WIDTH))
    assert result.layers == ["experts.up", "experts.down"]
    assert not result.uncalibrated
    assert type(model.experts) is kind
    errors = {"up": [0.0, 0.0], "down": [0.0, 0.0]}
    for expert in range(EXPERTS):
        given = x[model.chosen(x) == expert].double()
        for name, sums in errors.items():
            found, weight = (
                matrices(each.experts, getattr(each.experts, name).detach())[expert].double()
                for each in (model, twin)
            )
            expected = pruned(weight, given, score)
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
            sums[0] += float((given @ (weight - found).t()).square().sum())
            sums[1] += float((given @ weight.t()).square().sum())
            given = (given @ found.t()).relu()
    for name, (lost, whole) in errors.items():
        assert result.errors[f"experts.{name}"] == pytest.approx((lost / whole) ** 0.5, rel=1e-3)


@few_tokens
def test_as_many_experts_are_summed_at_a_time_as_take_no_more_memory_than_the_weight(monkeypatch):
    """All four of [32, 16], but one of [16, 32]: the passes over the data tell."""
    model, whole = Mixture(), Mixture()
    prune(model, "2:4", "sparsegpt", data(48, WIDTH, batches=2))
    assert model.calls == 2 + 2 * (1 + 4)
    monkeypatch.setattr("lightning_nm.methods.calibration.max", lambda *_: EXPERTS, raising=False)
    prune(whole, "2:4", "sparsegpt", data(48, WIDTH, batches=2))
    assert whole.calls == 2 + 2 * (1 + 1)
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


class ByBatch(nn.Module):
    """Modules of which a batch calls one or two, one of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(16, 8)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for k in x[0, :3].nonzero().flatten().tolist():
            x = x + self.experts[k](x)
            if k == 1 and x[0, 1] > 2:
                x = x + self.experts[k](x)
        return self.out(x)


@few_tokens
@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_each_of_a_list_of_experts_is_calibrated_by_all_batches_that_call_it(score):
    batches = data(24, 16, batches=4)
    for x, first in zip(batches, ([1, 0, 0], [0, 1, 0], [0, 3, 1], [1, 0, 1]), strict=True):
        x[0, :3] = torch.tensor(first)
    model, twin = ByBatch(), ByBatch()
    result = prune(model, "2:4", score, batches, **ALL)
    assert result.layers == ["experts.0", "experts.1", "experts.2", "out"]
    for name in result.layers:
        inputs, linear = [], twin.get_submodule(name)
        note = linear.register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0]))
        for x in batches:
            twin(x)
        note.remove()
        # The layers after it see what it gives them now.
        linear.weight.data = pruned(linear.weight.detach(), torch.cat(inputs).detach(), score)
        found = model.get_submodule(name).weight
        torch.testing.assert_close(found, linear.weight, rtol=1e-3, atol=1e-4)


class Routed(nn.Module):
    """An expert of a list gets the tokens of its number; the third gets none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        y = torch.zeros_like(x)
        chosen = x[:, :2].argmax(1)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
        return y


class HalfZeros(nn.Module):
    def forward(self, x):
        return (x * (torch.arange(16) < 8))[:, :, None]


SOME = r"not all experts or groups of {} layers, such as \[.*\] of '{}'.* magnitude"
UNREACHED = {
    "a module": (
        Routed,
        "no calibration token, or only zeros, reach 1 layers, such as 'experts.2': .* magnitude",
        {"experts.2": [0]},
    ),
    "a group": (
        lambda: nn.Sequential(HalfZeros(), nn.Conv1d(16, 8, 1, groups=2)),
        SOME.format(1, "1"),
        {"1": [1]},
    ),
    "experts": (
        lambda: Mixture(most=2),
        SOME.format(2, "experts.up"),
        {"experts.up": [2, 3], "experts.down": [2, 3]},
    ),
}


@few_tokens
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("case", UNREACHED)
def test_what_no_token_reaches_is_pruned_by_magnitude_and_named(case, score):
    make_model, message, unreached = UNREACHED[case]
    torch.manual_seed(0)
    model = make_model()
    twin = copy.deepcopy(model)
    prune(twin, "2:4", **ALL)
    with pytest.warns(UserWarning, match=message):
        result = prune(model, "2:4", score, data(48, 16), **ALL)
    assert result.uncalibrated == unreached
    whole = {"experts.2"} if case == "a module" else set()
    assert set(result.errors) == set(result.layers) - whole
    others, by_magnitude = dict(model.named_parameters()), dict(twin.named_parameters())
    for name, groups in unreached.items():
        name = name if name in others else f"{name}.weight"
        count = 1 if case == "a module" else 2 * len(groups)
        parts = (each[name].detach().chunk(count) for each in (others, by_magnitude))
        same = [torch.equal(*pair) for pair in zip(*parts, strict=True)]
        assert all(same[len(same) - len(groups) :])
        assert all(same) == (score == "magnitude" or case == "a module")


# --------------------------------------------------------------------------------------------- warnings and refusals


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_fewer_tokens_than_input_features_are_warned_of(score):
    """Before a layer is pruned, by name. Convolutions have a token for each position."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prune(model, "2:4", score, [torch.randn(40, 8, 4, 4)], include=["0", "2"])
    assert len(caught) == (score == "sparsegpt")  # 160 tokens for 72 features of the convolution
    for warning in caught:
        assert "in 1 layers, such as '2' (40 for 64)" in str(warning.message)
        assert warning.filename == __file__


def test_layers_that_are_sparse_already_are_warned_of():
    for pattern in ("2:4", "1:4"):
        model = Net()
        prune(model, pattern, include="first")
        before = model.first.weight.clone()
        message = "1 of 3 layers, such as 'first', are 2:4 already: nothing of them is pruned. Give"
        with pytest.warns(UserWarning, match=message) as caught:
            prune(model, "2:4", "sparsegpt", data(32, 16), **ALL)
        assert torch.equal(model.first.weight, before)
        assert [each.filename for each in caught] == [__file__]
    model = Net()
    prune(model, "2:4", **ALL)
    prune(model, "1:4", **ALL)  # sparser: there is something to prune


# A loader that yields nothing: its data set is smaller than a batch.
SHORT = DataLoader(list(torch.ones(3, 16)), batch_size=4, drop_last=True)
BUDGET, ERROR = {"budget": 0.5}, {"max_error": 0.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "random"}, "'random' is unknown: use 'magnitude' or 'wanda' or 'sparsegpt'"),
        ({"score": "wanda", "data": None}, "score='wanda' needs calibration batches"),
        ({"blocks": "", "data": None}, "blocks='' needs calibration batches"),
        ({"data": []}, "holds no batch: .* Give one batch or more"),
        ({"data": iter([])}, "holds no batch"),
        ({"data": SHORT}, "holds no batch.*drop_last=True"),
        ({"data": 2 * [torch.ones(0, 16)]}, r"no token: .* 2 batches are empty, .*\(0, 16\)"),
        ({"data": {"x": torch.ones(2, 16)}}, r"`data` is a dict.*give \[batch\] for one"),
        (
            {"score": "wanda", "data": [torch.full((2, 16), torch.nan)]},
            "layer 'first'.*not finite",
        ),
        (
            {"score": "sparsegpt", "data": [torch.full((16, 16), torch.inf)]},
            "layer 'first'.*not finite",
        ),
        ({"call": lambda m, x: m.first(x)}, r"\['last', 'twice'\]: name them in `exclude`"),
        ({"include": "nothing"}, "matches no layer"),
        ({"pattern": "2:3"}, "%"),
        ({**BUDGET, **ERROR}, "both budget=0.5 and max_error=0.1 are given"),
        ({"pattern": "2:4", **BUDGET}, "pattern='2:4' is for all layers"),
        ({"candidates": ["2:4"]}, "candidates=.* are for a budget, or max_error"),
        ({"counted": "flops"}, "counted='flops' is for a budget"),
        ({"counted": "flops", **ERROR}, "counted='flops' is for a budget"),
        ({"counted": "bytes", **BUDGET}, "counted='bytes' is unknown"),
        ({"counted": "flops", "data": None, **BUDGET}, "counted='flops' needs calibration"),
        ({"data": None, **ERROR}, "max_error=0.1 needs calibration batches"),
        ({"budget": 0}, "budget=0 must be a positive number of at most 1: the fraction"),
        ({"budget": 1.5}, "budget=1.5 must be a positive number of at most 1"),
        ({"budget": True}, "budget=True must be a number"),
        ({"max_error": 1.5}, "max_error=1.5 must be 0 or a positive number of at most 1: the lar"),
        ({"max_error": True}, "max_error=True must be a number"),
        ({"candidates": [], **BUDGET}, "there is no candidate pattern"),
        ({"candidates": ["5:4"], **BUDGET}, "prunes nothing"),
        ({"candidates": ["3:7"], **BUDGET}, "no layer can be masked"),
        # 512 of 576 entries can be masked, a quarter of them stays.
        (
            {"candidates": "1:4", "exclude": "last", "budget": 0.3},
            r"budget=0.3 cannot be reached: .* 0\.3334 .*'last'",
        ),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(options, message):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        prune(model, **{"data": data(32, 16), **ALL, **options})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_a_masked_model_is_refused():
    model = Net()
    NMSparsifier(model, "2:4", "bi-mask").attach()
    with pytest.raises(ValueError, match="masked already"):
        prune(model, "2:4")


def test_an_adapter_without_inputs_is_named(monkeypatch):
    class Scaled(nn.Linear):
        pass

    class NMScaled(Adapter):
        handles = Scaled
        specs = find_adapter(nn.Linear)[0].specs

    monkeypatch.setattr(adapter, "_ADAPTERS", list(adapter._ADAPTERS))
    register_adapter(NMScaled)
    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8))
    before = model[0].weight.clone()
    message = "layer '1' cannot be calibrated: its adapter defines no inputs"
    with pytest.raises(ValueError, match=message):
        prune(model, "2:4", "wanda", [torch.ones(2, 8)], **ALL)
    assert torch.equal(model[0].weight, before), "refused before any layer is pruned"
    prune(model, "2:4", **ALL)
    assert nmf.is_nm(model[1].weight, "2:4")


def test_a_product_that_is_not_known_is_refused():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x):
            return (self.weight * x).sum(-1)

    register_experts(Squares)
    model = Squares()
    before = model.weight.detach().clone()
    message = "forward of Squares did not multiply by 'weight' with .*nm_grouped_linear"
    with pytest.raises(RuntimeError, match=message):
        prune(model, "2:4", "wanda", [torch.randn(16)])
    assert type(model) is Squares
    assert torch.equal(model.weight, before)
    assert not model._forward_hooks
    prune(model, "2:4")
    assert nmf.is_nm(model.weight, "2:4", dim=2)
