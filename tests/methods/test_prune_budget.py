"""prune() with a budget and with a bound of the error: patterns per layer, and what is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_nm import ASP, NMSparsifier, prune
from lightning_nm import functional as nmf
from tests.methods.test_one_shot_experts import Mixture, matrices
from tests.methods.test_one_shot_experts import batches as expert_batches


def net(*sizes, seed=0):
    """Linear layers with ReLUs between them, whose weights differ in how they spread."""
    torch.manual_seed(seed)
    parts = []
    for place, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(inputs, outputs)
        # Few large entries in the later layers: they lose less.
        layer.weight.data = layer.weight.data.sign() * layer.weight.data.abs() ** (1 + place)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def batches(width, number=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    return [torch.randn(24, width, generator=generator) @ mixing for _ in range(number)]


def density(model, names):
    """The share of nonzeros of the weights of some layers."""
    weights = [model.get_submodule(name).weight for name in names]
    kept = sum(int(weight.count_nonzero()) for weight in weights)
    return kept / sum(weight.numel() for weight in weights)


def losses_of(model, data, names, patterns):
    """By layer and pattern, what is to be small: squared output errors by magnitude, or lost shares of magnitude."""
    found = {}
    for name in names:
        weight = model.get_submodule(name).weight.detach().double()
        own = found[name] = {"dense": 0.0}
        for pattern in patterns:
            pruned = nmf.nm_prune(weight, pattern)
            if data is None:
                own[pattern] = 1 - float(pruned.abs().sum() / weight.abs().sum())
            else:
                x = model[: int(name)](torch.cat(data)).double()
                lost = ((x @ (weight - pruned).t()).norm() / (x @ weight.t()).norm()).detach()
                own[pattern] = float(lost) ** 2
    return found


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("has_data", [True, False])
def test_a_budget_has_the_least_loss_of_all_choices(budget, has_data):
    model, data = net(16, 32, 16, 8, 4), batches(16) if has_data else None
    names, patterns = "024", ["1:8", "2:8", "4:8", "6:8"]
    losses = losses_of(model, data, names, patterns)
    sizes = {name: model.get_submodule(name).weight.numel() for name in names}
    total = sum(sizes.values()) + 32  # the last layer stays dense
    result = prune(model, data=data, budget=budget, candidates=patterns)
    assert list(result.choices) == list(names)
    assert density(model, "0246") <= budget

    def kept(choice):
        shares = [1 if pattern == "dense" else int(pattern[0]) / 8 for pattern in choice]
        return 32 + sum(size * share for size, share in zip(sizes.values(), shares, strict=True))

    def loss(choice):
        return sum(losses[name][pattern] for name, pattern in zip(names, choice, strict=True))

    within = [
        choice
        for choice in itertools.product([*patterns, "dense"], repeat=3)
        if kept(choice) <= budget * total + 1e-6
    ]
    found = [choice.pattern for choice in result.choices.values()]
    assert loss(found) == pytest.approx(min(map(loss, within)), rel=1e-3)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_a_budget_is_kept(score, budget):
    model, data = net(16, 32, 16, 32, 4), batches(16)
    result = prune(model, score=score, data=data, budget=budget)
    assert density(model, "0246") <= budget
    for name, choice in result.choices.items():
        weight = model.get_submodule(name).weight
        if choice.pattern == "dense":
            assert name in result.skipped
            assert weight.count_nonzero() == weight.numel()
        else:
            assert result.patterns[name] == choice.pattern
            assert choice.pattern.endswith(":16")  # by default
            assert nmf.is_nm(weight, choice.pattern)
    assert set(result.layers) == set(result.patterns) == set(result.errors)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
def test_what_is_measured_for_a_choice_is_the_error_in_the_dense_model(score):
    model, data = net(16, 32, 16, 4), batches(16)
    chosen = prune(copy.deepcopy(model), score=score, data=data, budget=0.5).choices
    for name, choice in chosen.items():
        if choice.pattern != "dense":
            alone = prune(copy.deepcopy(model), choice.pattern, score, data, include=name)
            assert choice.value == pytest.approx(alone.errors[name], rel=1e-6)
    assert chosen["0"].why.count(" has 0.") == 2


def test_the_whole_loses_less_than_with_one_pattern():
    model, data = net(16, 64, 64, 64, 8), batches(16)
    uniform, chosen = copy.deepcopy(model), copy.deepcopy(model)
    prune(uniform, "4:16", data=data, skip_first_last=False)
    result = prune(chosen, data=data, budget=0.25, skip_first_last=False)
    assert density(chosen, "0246") <= density(uniform, "0246")
    losses = losses_of(model, data, "0246", ["4:16"])
    uniform_loss = sum(own["4:16"] for own in losses.values())
    assert sum(choice.value**2 for choice in result.choices.values()) < 0.98 * uniform_loss


def test_convolutions_are_measured_in_their_layout():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 2)), [torch.randn(2, 8, 6, 6)]
    measured = set()
    for layout in ("channels", "flat"):
        options = {"data": data, "skip_first_last": False, "conv_layout": layout}
        result = prune(copy.deepcopy(model), budget=0.5, candidates="2:4", **options)
        assert result.choices["0"].value == pytest.approx(result.errors["0"], rel=1e-6)
        measured.add(result.errors["0"])
    assert len(measured) == 2


def test_a_layer_lacks_the_patterns_that_do_not_fit():
    model = net(16, 8, 16, 4)
    result = prune(model, data=batches(16), budget=0.55, candidates=["2:4", "4:16"])
    assert result.patterns["2"] == "2:4"
    assert result.choices["2"].why == ""  # there is no other candidate
    assert "4:16" in f"{result.choices['0'].pattern}, {result.choices['0'].why}"


def test_flops_are_those_of_the_calls():
    """A layer that is called for many positions is dear by FLOPs and cheap by parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 72)
    )
    options = {"data": [torch.randn(4, 8, 16, 16)], "skip_first_last": False, "budget": 0.51}
    choices = prune(model, candidates=["1:4", "2:4"], counted="flops", **options).choices
    # Of 257 multiply-adds 256 are those of the convolution.
    assert {name: choice.pattern for name, choice in choices.items()} == {"0": "2:4", "3": "dense"}


def test_an_unreachable_budget_names_the_one_that_can_be_reached():
    model = net(16, 16, 64)
    # 256 of 1280 entries can be masked, a quarter of them stays.
    with pytest.raises(ValueError, match=r"budget=0.5 cannot be reached: .* 0\.8500 .*'2'"):
        prune(model, budget=0.5, candidates=["1:4"])
    assert prune(model, budget=0.85, candidates=["1:4"]).patterns == {"0": "1:4"}


def test_a_budget_of_one_keeps_everything():
    model = net(16, 32, 16)
    before = copy.deepcopy(model.state_dict())
    assert not prune(model, budget=1).layers
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_equal_layers_get_equal_patterns_where_the_budget_allows_it():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    result = prune(
        model, budget=0.5, candidates=[f"{n}:8" for n in range(1, 8)], skip_first_last=False
    )
    assert set(result.patterns.values()) == {"4:8"}
    assert len(result.patterns) == 4


def test_a_layer_that_no_token_reaches_is_compared_by_its_weight():
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(8, 8)
            self.lost = nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + self.lost(x[:0]).sum()

    torch.manual_seed(0)
    model = Lost()
    weight = model.lost.weight.detach().clone()
    options = {"data": [torch.randn(16, 8)], "skip_first_last": False}
    with pytest.warns(UserWarning, match="no calibration token"):
        result = prune(model, budget=0.5, candidates=["2:4"], **options)
    lost = (weight - nmf.nm_prune(weight, "2:4")).norm() / weight.norm()
    assert result.choices["lost"].value == pytest.approx(lost.item(), rel=1e-5)
    assert result.uncalibrated == {"lost": [0]}
    assert prune(Lost(), max_error=0.9, candidates=["2:4"], **options).skipped["lost"] == (
        "dense by choice: no calibration token reaches it"
    )


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
        ({"candidates": ["2:4"]}, "candidates=.* are for a budget, or max_error"),
        ({"counted": "flops"}, "counted='flops' is for a budget"),
        ({"budget": -0.1}, "budget=-0.1 must be a positive number of at most 1: the share"),
        ({"budget": 0}, "budget=0 must be a positive number"),
        ({"budget": 1.5}, "budget=1.5 must be a positive number of at most 1"),
        ({"budget": 0.5, "counted": "bytes"}, "counted='bytes' is unknown"),
        ({"budget": 0.5, "candidates": []}, "there is no candidate pattern"),
        ({"budget": 0.5, "candidates": ["5:4"]}, "prunes nothing"),
        ({"budget": 0.5, "candidates": ["3:7"]}, "no layer can be masked"),
        ({"budget": 0.1}, r"budget=0.1 cannot be reached: .* 0\.1[0-9]+ "),
        ({"budget": 0.5, "counted": "flops", "data": None}, "counted='flops' needs calibration"),
        ({"max_error": 0.1, "data": None}, r"max_error=0.1 needs calibration batches"),
        ({"max_error": 0.1, "counted": "flops"}, "counted='flops' is for a budget"),
        ({"max_error": 1.5}, "max_error=1.5 must be 0 or a positive number of at most 1"),
        (
            {"max_error": -1},
            "max_error=-1 must be 0 or a positive number of at most 1: the largest",
        ),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(options, message):
    model = net(16, 32, 16, 8)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prune(model, **{"data": batches(16), **options})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_bound_or_a_budget_is_a_number():
    for option in ("budget", "max_error"):
        with pytest.raises(TypeError, match=f"{option}=True must be a number"):
            prune(net(16, 32, 16), data=batches(16), **{option: True})
