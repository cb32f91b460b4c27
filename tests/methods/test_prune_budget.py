"""prune() with a budget and with a bound of the error: patterns per layer."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_nm import ASP, prune
from lightning_nm import functional as nmf
from tests.methods.test_prune import ALL, Mixture, data
from tests.support.experts import WIDTH, matrices
from tests.support.method_loop import Loop, mlp


def net(*sizes):
    """Linear layers whose weights differ in how they spread: the later ones lose less."""
    model = mlp(*sizes)
    for place, layer in enumerate(model[::2]):
        values = layer.weight.data
        layer.weight.data = values.sign() * values.abs() ** (1 + place)
    return model


def density(model):
    """The fraction of nonzeros of all weights."""
    weights = [layer.weight for layer in model[::2]]
    return sum(map(torch.count_nonzero, weights)) / sum(map(torch.numel, weights))


def loss(model, name, pattern, batches):
    """What is to be small: the squared output error by magnitude, or the lost fraction of magnitude."""
    if pattern == "dense":
        return 0.0
    weight = model[int(name)].weight.detach().double()
    pruned = nmf.nm_prune(weight, pattern)
    if batches is None:
        return 1 - float(pruned.abs().sum() / weight.abs().sum())
    x = model[: int(name)](torch.cat(batches)).detach().double()
    return float((x @ (weight - pruned).t()).norm() / (x @ weight.t()).norm()) ** 2


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("has_data", [True, False])
def test_a_budget_has_the_least_loss_of_all_choices(budget, has_data):
    model, batches = net(16, 32, 16, 8, 4), data(24, 16) if has_data else None
    names, candidates = "024", ["1:8", "2:8", "4:8", "6:8"]
    options = [*candidates, "dense"]
    losses = {(k, each): loss(model, k, each, batches) for k in names for each in options}
    sizes = {name: model[int(name)].weight.numel() for name in names}
    result = prune(model, data=batches, budget=budget, candidates=candidates)
    assert list(result.choices) == list(names)
    assert density(model) <= budget

    def kept(choice):
        shares = (1 if pattern == "dense" else int(pattern[0]) / 8 for pattern in choice)
        return 32 + sum(a * b for a, b in zip(sizes.values(), shares, strict=True))

    def total(choice):
        return sum(losses[pair] for pair in zip(names, choice, strict=True))

    most = budget * kept(["dense"] * 3) + 1e-6  # the last layer, of 32 entries, stays dense
    within = [each for each in itertools.product(options, repeat=3) if kept(each) <= most]
    found = [choice.pattern for choice in result.choices.values()]
    assert total(found) == pytest.approx(min(map(total, within)), rel=1e-3)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
def test_a_budget_is_kept_by_the_errors_in_the_dense_model(score):
    model, batches = net(16, 32, 16, 32, 4), data(24, 16)
    dense = copy.deepcopy(model)
    result = prune(model, score=score, data=batches, budget=0.5)
    assert density(model) <= 0.5
    assert set(result.layers) == set(result.patterns) == set(result.errors)
    for name, choice in result.choices.items():
        weight = model.get_submodule(name).weight
        if choice.pattern == "dense":
            assert name in result.skipped
            assert weight.count_nonzero() == weight.numel()
            continue
        assert result.patterns[name] == choice.pattern
        assert choice.pattern.endswith(":16")  # by default
        assert nmf.is_nm(weight, choice.pattern)
        alone = prune(copy.deepcopy(dense), choice.pattern, score, batches, include=name)
        assert choice.value == pytest.approx(alone.errors[name], rel=1e-6)
    assert result.choices["0"].why.count(" has 0.") == 2


def test_convolutions_are_measured_in_their_layout():
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Conv2d(8, 4, 3)), [torch.randn(2, 8, 6, 6)]
    measured = set()
    for layout in ("channels", "flat"):
        options = {"data": batches, "conv_layout": layout, **ALL}
        result = prune(copy.deepcopy(model), budget=0.5, candidates="2:4", **options)
        assert result.choices["0"].value == pytest.approx(result.errors["0"], rel=1e-6)
        measured.add(result.errors["0"])
    assert len(measured) == 2


def test_a_layer_lacks_the_patterns_that_do_not_fit():
    result = prune(net(16, 8, 16, 4), data=data(24, 16), budget=0.55, candidates=["2:4", "4:16"])
    assert result.patterns["2"] == "2:4"
    assert result.choices["2"].why == ""  # there is no other candidate
    assert "4:16" in f"{result.choices['0'].pattern}, {result.choices['0'].why}"


def test_flops_are_those_of_the_calls():
    """A layer that is called for many positions is dear by FLOPs and cheap by parameters."""
    torch.manual_seed(0)
    parts = (nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 72))
    options = {"data": [torch.randn(4, 8, 16, 16)], "budget": 0.51, "counted": "flops", **ALL}
    choices = prune(nn.Sequential(*parts), candidates=["1:4", "2:4"], **options).choices
    # Of 257 multiply-adds 256 are those of the convolution.
    assert {name: choice.pattern for name, choice in choices.items()} == {"0": "2:4", "3": "dense"}


def test_the_budget_that_a_message_names_can_be_reached():
    model = net(16, 16, 64)
    with pytest.raises(ValueError, match=r"budget=0.5 cannot be reached: .* 0\.8500 .*'2'"):
        prune(model, budget=0.5, candidates=["1:4"])
    assert prune(model, budget=0.85, candidates=["1:4"]).patterns == {"0": "1:4"}


@pytest.mark.parametrize("options", [{"budget": 1}, {"max_error": 0}])
def test_what_nothing_can_keep_leaves_the_model_dense(options):
    model = net(16, 32, 16)
    before = copy.deepcopy(model.state_dict())
    result = prune(model, data=data(24, 16), **options, **ALL)
    assert not result.layers
    assert result.skipped["0"].startswith("dense by choice: 15:16 has 0.")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_layer_that_no_token_reaches_is_compared_by_its_weight():
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.used = nn.Linear(8, 8)
            self.lost = nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + self.lost(x[:0]).sum()

    weight = Lost().lost.weight.detach()
    options = {"data": data(16, 8), "candidates": ["2:4"], **ALL}
    with pytest.warns(UserWarning, match="no calibration token"):
        result = prune(Lost(), budget=0.5, **options)
    lost = (weight - nmf.nm_prune(weight, "2:4")).norm() / weight.norm()
    assert result.choices["lost"].value == pytest.approx(lost.item(), rel=1e-5)
    assert result.uncalibrated == {"lost": [0]}
    why = prune(Lost(), max_error=0.9, **options).skipped["lost"]
    assert why == "dense by choice: no calibration token reaches it"


@pytest.mark.parametrize("score", ["magnitude", "sparsegpt"])
@pytest.mark.parametrize("max_error", [0.05, 0.3, 0.6])
def test_no_layer_exceeds_a_bound(score, max_error):
    model, batches = net(16, 32, 16, 32, 8), data(24, 16)
    dense = copy.deepcopy(model)
    result = prune(model, score=score, data=batches, max_error=max_error, **ALL)
    assert list(result.choices) == ["0", "2", "4", "6"]
    assert all(error <= max_error for error in result.errors.values())
    for name in result.layers:
        choice = result.choices[name]
        assert choice.value == pytest.approx(result.errors[name], rel=1e-6)
        n, m = map(int, choice.pattern.split(":"))
        if n > 1 and score == "magnitude":
            # The next sparser pattern does not keep the bound, with the inputs as the layers before are pruned.
            before = nn.Sequential(*model[: int(name)], dense[int(name)])
            assert loss(before, name, f"{n - 1}:{m}", batches) ** 0.5 > max_error


def test_experts_share_a_pattern_within_the_bound():
    model = Mixture()
    options = {"max_error": 0.5, "candidates": ["1:4", "2:4", "3:4"]}
    result = prune(model, data=data(48, WIDTH), **options)
    assert set(result.choices) == {"experts.up", "experts.down"}
    assert result.patterns
    for name, error in result.errors.items():
        assert result.choices[name].value == pytest.approx(error, rel=1e-6)
        assert error <= 0.5
        for matrix in matrices(model.experts, model.get_parameter(name).detach()):
            assert nmf.is_nm(matrix, result.patterns[name])


def test_fine_tuning_goes_on_with_the_rules():
    model = net(16, 32, 16, 32, 8)
    result = prune(model, data=data(24, 16), budget=0.4, **ALL)
    assert len(set(result.patterns.values())) > 1
    zeros = {name: model.get_submodule(name).weight == 0 for name in result.layers}
    run = Loop(ASP(init="zeros"), model=model, include=result.layers, rules=result.rules).train(1)
    assert {name: str(layer.pattern) for name, layer in run.layers.items()} == result.patterns
    for name, gone in zeros.items():
        assert not model.get_submodule(name).weight.detach()[gone].any()


def test_the_table_says_what_was_chosen():
    options = {"data": data(24, 16), "budget": 0.5, "candidates": ["1:4", "2:4"]}
    result = prune(net(16, 32, 16, 8), **options)
    head, *lines = result.table().splitlines()
    assert head.split() == ["layer", "pattern", "kept", "measured", "why"]
    for line, (name, choice) in zip(lines, result.choices.items(), strict=True):
        assert line.split()[:2] == [name, choice.pattern]
        assert line.endswith(choice.why)
    assert prune(net(16, 32, 8)).table() == ""
