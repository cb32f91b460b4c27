"""prune() with a budget and with a bound of the error: patterns per layer, and what is refused."""

import copy

import pytest
import torch

from lightning_nm import ASP, NMSparsifier, prune, sensitivity
from lightning_nm import functional as nmf
from tests.methods.test_one_shot_experts import Mixture, matrices
from tests.methods.test_one_shot_experts import batches as expert_batches
from tests.methods.test_sensitivity import batches, net


def density(model, names):
    """The share of nonzeros of the weights of some layers."""
    weights = [model.get_submodule(name).weight for name in names]
    kept = sum(int(weight.count_nonzero()) for weight in weights)
    return kept / sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_a_budget_is_kept(score, budget):
    model, data = net(16, 32, 16, 32, 4), batches(16)
    expected = sensitivity(model, data, score=score).choose(budget)
    result = prune(model, score=score, data=data, budget=budget)
    assert result.choices == expected
    assert density(model, "0246") <= budget
    for name, choice in result.choices.items():
        weight = model.get_submodule(name).weight
        if choice.pattern == "dense":
            assert name in result.skipped
            assert weight.count_nonzero() == weight.numel()
        else:
            assert result.patterns[name] == choice.pattern
            assert nmf.is_nm(weight, choice.pattern)
    assert set(result.layers) == set(result.patterns) == set(result.errors)


def test_a_budget_without_data_goes_by_magnitude():
    model = net(16, 32, 16, 32, 4)
    expected = sensitivity(model).choose(0.4)
    result = prune(model, budget=0.4)
    assert result.choices == expected
    assert not result.errors
    assert density(model, "0246") <= 0.4


def test_the_whole_loses_less_than_with_one_pattern():
    model, data = net(16, 64, 64, 64, 8), batches(16)
    uniform, chosen = copy.deepcopy(model), copy.deepcopy(model)
    same = prune(uniform, "4:16", data=data, skip_first_last=False)
    result = prune(chosen, data=data, budget=0.25, skip_first_last=False)
    scan = sensitivity(model, data, skip_first_last=False)
    assert density(chosen, "0246") <= density(uniform, "0246")
    uniform_loss = sum(scan.layers[name].errors["4:16"] ** 2 for name in same.layers)
    chosen_loss = sum(choice.value**2 for choice in result.choices.values())
    assert chosen_loss < 0.98 * uniform_loss


@pytest.mark.parametrize("score", ["magnitude", "sparsegpt"])
@pytest.mark.parametrize("max_error", [0.05, 0.3, 0.6])
def test_no_layer_exceeds_a_bound(score, max_error):
    model, data = net(16, 32, 16, 32, 8), batches(16)
    dense = copy.deepcopy(model)
    result = prune(model, score=score, data=data, max_error=max_error, skip_first_last=False)
    assert list(result.choices) == ["0", "2", "4", "6"]
    for error in result.errors.values():
        assert error <= max_error
    for name, choice in result.choices.items():
        if choice.pattern == "dense":
            continue
        assert choice.value == pytest.approx(result.errors[name], rel=1e-6)
        n, m = map(int, choice.pattern.split(":"))
        if n == 1 or score != "magnitude":
            continue
        # The next sparser pattern does not keep the bound, with the inputs of the layers as they are pruned.
        place = int(name)
        weight = dense[place].weight
        x = model[:place](torch.cat(data))
        sparser = nmf.nm_prune(weight, f"{n - 1}:{m}")
        assert (x @ (weight - sparser).t()).norm() / (x @ weight.t()).norm() > max_error


def test_a_bound_that_nothing_keeps_leaves_the_model_dense():
    model, data = net(16, 32, 8), batches(16)
    before = copy.deepcopy(model.state_dict())
    result = prune(model, data=data, max_error=0, skip_first_last=False)
    assert not result.layers
    assert result.skipped["0"].startswith("dense by choice: 15:16 has 0.")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_experts_share_a_pattern_within_the_bound():
    torch.manual_seed(0)
    model = Mixture()
    result = prune(model, data=expert_batches(), max_error=0.5, candidates=["1:4", "2:4", "3:4"])
    assert set(result.choices) == {"experts.up", "experts.down"}
    assert result.patterns
    for name, error in result.errors.items():
        assert error <= 0.5
        assert result.choices[name].value == pytest.approx(error, rel=1e-6)
        assert nmf.is_nm(matrices(model.experts, name.split(".")[1]), result.patterns[name])


def test_fine_tuning_goes_on_with_the_rules():
    model, data = net(16, 32, 16, 32, 8), batches(16)
    result = prune(model, data=data, budget=0.4, skip_first_last=False)
    assert len(set(result.patterns.values())) > 1
    masks = {name: model.get_submodule(name).weight != 0 for name in result.layers}
    sparsifier = NMSparsifier(
        model, "2:4", ASP(init="zeros"), include=result.layers, rules=result.rules
    ).attach()
    assert {name: str(layer.pattern) for name, layer in sparsifier.layers.items()} == (
        result.patterns
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.register(optimizer)
    model(data[0]).square().mean().backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()
    for name, mask in masks.items():
        assert not model.get_submodule(name).weight.detach()[~mask].any()


def test_the_table_says_what_was_chosen():
    result = prune(net(16, 32, 16, 8), data=batches(16), budget=0.5, candidates=["1:4", "2:4"])
    head, *lines = result.table().splitlines()
    assert head.split() == ["layer", "pattern", "kept", "measured", "why"]
    for line, (name, choice) in zip(lines, result.choices.items(), strict=True):
        assert line.startswith(name)
        assert choice.pattern in line
        assert choice.why in line
    assert prune(net(16, 32, 8)).table() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5, "max_error": 0.1}, r"both budget=0.5 and max_error=0.1 are given"),
        ({"pattern": "2:4", "budget": 0.5}, "pattern='2:4' is for all layers"),
        ({"candidates": ["2:4"]}, "candidates is for a budget, or max_error"),
        ({"counted": "flops"}, "counted is for a budget, or max_error"),
        ({"budget": -0.1}, "budget=-0.1 must be the share"),
        ({"budget": 0.1}, r"budget=0.1 cannot be reached: .* 0\.1[0-9]+ "),
        ({"budget": 0.5, "counted": "flops", "data": None}, "counted='flops' needs calibration"),
        ({"max_error": 0.1, "data": None}, r"max_error=0.1 needs calibration batches"),
        ({"max_error": 0.1, "counted": "flops"}, "counted='flops' is for a budget"),
        ({"max_error": -1}, "max_error=-1 must be the largest relative output error"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(options, message):
    model = net(16, 32, 16, 8)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prune(model, **{"data": batches(16), **options})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
