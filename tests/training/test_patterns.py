"""Patterns chosen per layer in a training: within the budget, once, and exactly the same when it goes on."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    SRSTE,
    STE,
    AutoPattern,
    BiMask,
    DecayingMask,
    NMPattern,
    NMSparsifier,
    SparsityConfig,
    TransposableMask,
)
from lightning_nm import functional as nmf
from lightning_nm.functional.pattern import parse_pattern_setting
from tests.methods.test_sensitivity import net

METHODS = {
    "ste": STE,
    "sr-ste": SRSTE,
    "asp": ASP,
    "transposable": TransposableMask,
    "bi-mask": BiMask,
    "bame": lambda: BAME(start=2, stop=6, every=2),
}


def patterns_of(sparsifier):
    return {name: str(layer.pattern) for name, layer in sparsifier.layers.items()}


def steps(sparsifier, optimizer, first, last, width=16):
    """Train with batches that depend on the step alone."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        sparsifier.model(torch.randn(8, width, generator=generator)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


def started(model, *arguments, state=None, **options):
    sparsifier = NMSparsifier(model, *arguments, **options).attach(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier.register(optimizer)
    return sparsifier, optimizer


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("auto:0.5", AutoPattern(0.5, 16)),
        ("auto:.25:8", AutoPattern(0.25, 8)),
        (" auto : 1 : 4 ", AutoPattern(1, 4)),
        ("auto:0.5:16:flops", AutoPattern(0.5, 16, "flops")),
        ("2:4", NMPattern(2, 4)),
        (124, NMPattern(2, 4)),
    ],
)
def test_what_is_written(written, meant):
    assert parse_pattern_setting(written) == meant
    assert parse_pattern_setting(str(meant)) == meant
    assert parse_pattern_setting(meant) is meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("auto", "write it as 'auto:0.5'"),
        ("auto:half", "write it as 'auto:0.5', or 'auto:0.5:8'"),
        ("auto:0.5:2.5", "or 'auto:0.5:8' for blocks of 8"),
        ("auto:0.5:8:flops:1", "write it as 'auto:0.5'"),
        ("auto:0", r"the budget 0.0 of an auto pattern must be the share"),
        ("auto:-0.5", r"the budget -0.5 of an auto pattern"),
        ("auto:1.5", r"the budget 1.5 of an auto pattern"),
        ("auto:nan", r"the budget nan of an auto pattern"),
        ("auto:0.5:1", "the block length 1 of an auto pattern must be an integer, 2 or more"),
        ("auto:0.5:8:bytes", "an auto pattern cannot count 'bytes'"),
    ],
)
def test_what_cannot_be_read(written, message):
    with pytest.raises(ValueError, match=message):
        SparsityConfig(written)


def test_where_one_pattern_is_needed_a_budget_is_refused():
    with pytest.raises(ValueError, match=r"one N:M pattern is needed here, not 'auto:0.5'"):
        nmf.nm_prune(torch.zeros(4, 16), "auto:0.5")


def test_a_config_with_a_budget_becomes_text_and_back():
    config = SparsityConfig(
        AutoPattern(0.25, 8), "sr-ste", rules=[{"include": "a", "method": "ste"}]
    )
    settings = config.to_dict()
    assert settings["pattern"] == "auto:0.25:8"
    assert SparsityConfig.from_dict(settings).to_dict() == settings
    assert config.resolve().auto == AutoPattern(0.25, 8)
    assert [rule.auto for rule in config.resolve().rules] == [AutoPattern(0.25, 8)] * 2


def test_a_rule_has_no_budget_of_its_own():
    with pytest.raises(ValueError, match="a budget is one of the whole model"):
        SparsityConfig("2:4", rules=[{"include": "a", "pattern": "auto:0.5"}])


def test_the_uniform_pattern():
    for budget, m in itertools.product((0.01, 0.1, 0.3, 0.5, 0.7, 0.99, 1), (2, 4, 10, 16)):
        n = AutoPattern(budget, m).uniform.n
        assert n == max(n for n in range(1, m) if n == 1 or n / m <= budget + 1e-9)


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [0.3, 0.6])
def test_every_method_trains_within_the_budget(method, budget):
    model = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(model, f"auto:{budget}:8", METHODS[method](), planned_steps=8)
    patterns = patterns_of(sparsifier)
    assert list(patterns) == ["0", "2", "4"]
    assert len(set(patterns.values())) > 1
    steps(sparsifier, optimizer, 0, 8)
    assert patterns_of(sparsifier) == patterns
    assert sparsifier.violations() == 0
    sparsifier.bake()
    kept = sum(int(model[place].weight.count_nonzero()) for place in (0, 2, 4, 6))
    share = kept / sum(model[place].weight.numel() for place in (0, 2, 4, 6))
    assert share <= budget + 1e-9
    assert sparsifier.patterns.kept_share() == pytest.approx(share, abs=0.02)


def test_the_choice_loses_the_least_magnitude():
    model = net(8, 16, 8, 16, 4)
    sparsifier = NMSparsifier(model, "auto:0.5:4", "ste").attach()
    weights = [model[place].weight for place in (0, 2, 4)]

    def lost(choice):
        return sum(
            1 - nmf.kept_magnitude(w, nmf.magnitude_mask(w, f"{n}:4", dim=1)).item()
            for w, n in zip(weights, choice, strict=True)
        )

    total = sum(w.numel() for w in weights) + 64
    within = [
        choice
        for choice in itertools.product((1, 2, 3), repeat=3)
        if 64 + sum(w.numel() * n / 4 for w, n in zip(weights, choice, strict=True)) <= total / 2
    ]
    found = [int(pattern[0]) for pattern in patterns_of(sparsifier).values()]
    assert tuple(found) in within
    assert lost(found) == pytest.approx(min(map(lost, within)), abs=1e-5)
    choices = sparsifier.patterns.choices
    assert {name: choice.pattern for name, choice in choices.items()} == patterns_of(sparsifier)


def test_a_rule_with_a_pattern_of_its_own_keeps_it():
    model = net(16, 32, 16, 32, 8)
    rules = [{"include": "2", "pattern": "1:16"}, {"include": "4", "method": "ste"}]
    sparsifier = NMSparsifier(model, "auto:0.5:8", "sr-ste", rules=rules).attach()
    assert patterns_of(sparsifier)["2"] == "1:16"
    assert isinstance(sparsifier.layers["4"].spec.method, STE)
    # What the rule saves is there for the others.
    share = (256 + 512 / 16 + 512 * sum(sparsifier.layers[k].pattern.density for k in "04")) / 1792
    assert share <= 0.5
    assert sparsifier.patterns.kept_share() == pytest.approx(share)


def test_layers_that_are_not_trained_are_outside_of_the_budget():
    model = net(16, 32, 16, 32, 8)
    model[2].requires_grad_(False)
    sparsifier, optimizer = started(model, "auto:0.5:8", "ste")
    assert list(sparsifier.layers) == ["0", "4"]
    kept = 256 + sum(512 * layer.pattern.density for layer in sparsifier.layers.values())
    assert kept / 1280 <= 0.5
    patterns = patterns_of(sparsifier)
    steps(sparsifier, optimizer, 0, 1)
    model[2].requires_grad_(True)
    steps(sparsifier, optimizer, 1, 2)
    assert patterns_of(sparsifier) == {**patterns, "2": "4:8"}


def test_a_layer_that_is_unfrozen_before_the_choice_counts():
    model = net(16, 32, 16, 32, 8)
    model[2].requires_grad_(False)
    sparsifier, optimizer = started(model, "auto:0.4:8", STE(dense_start=3))
    steps(sparsifier, optimizer, 0, 1)
    model[2].requires_grad_(True)
    steps(sparsifier, optimizer, 1, 4)
    assert set(sparsifier.patterns.choices) == {"0", "2", "4"}
    kept = 256 + sum(512 * layer.pattern.density for layer in sparsifier.layers.values())
    assert kept / 1792 == pytest.approx(sparsifier.patterns.kept_share())
    assert kept / 1792 <= 0.4


def test_weights_that_are_not_finite_are_named():
    model = net(16, 32, 16, 8)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="the weight of layer '2' holds values that are not"):
        NMSparsifier(model, "auto:0.5:8", "ste").attach()


def test_a_method_without_masks_chooses_nothing():
    sparsifier = NMSparsifier(net(16, 32, 8), "auto:0.1:8", "dense").attach()
    assert sparsifier.stats()["density"] == 1
    assert not sparsifier.patterns.choices


def test_flops_are_those_of_the_example():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 72)
    )
    with pytest.raises(ValueError, match="Sequential has no example_input_array: set it"):
        NMSparsifier(model, "auto:0.5:4:flops", "ste", skip_first_last=False).attach()
    model.example_input_array = torch.zeros(2, 8, 16, 16)
    sparsifier = NMSparsifier(model, "auto:0.51:4:flops", "ste", skip_first_last=False).attach()
    # The convolution has as many entries and 256 times as many multiply-adds.
    assert patterns_of(sparsifier) == {"0": "2:4", "3": "3:4"}
    share = sparsifier.patterns.kept_share()
    assert share == pytest.approx((256 * 0.5 + 0.75) / 257)
    sparsifier.detach()
    model.example_input_array = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="Sequential does not take its example_input_array"):
        NMSparsifier(model, "auto:0.51:4:flops", "ste", skip_first_last=False).attach()
    assert model.training


@pytest.mark.parametrize("dense_start", [0, 4])
def test_a_budget_that_cannot_be_reached_is_refused_before_training(dense_start):
    model = net(16, 16, 64)
    kinds = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"pattern='auto:0.5:8' cannot .* 0\.8250 of the .*'2'"):
        NMSparsifier(model, "auto:0.5:8", STE(dense_start=dense_start)).attach()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert patterns_of(NMSparsifier(model, "auto:0.825:8", "ste").attach()) == {"0": "1:8"}


# --------------------------------------------------------------------------------------------------------- dense start


@pytest.mark.parametrize("method", [STE, SRSTE, BiMask, TransposableMask, lambda **o: ASP(start=3)])
def test_after_a_dense_start_the_trained_weights_decide(method):
    model = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(model, "auto:0.4:8", method(dense_start=3))
    assert set(patterns_of(sparsifier).values()) == {"3:8"}
    assert sparsifier.patterns.is_pending(sparsifier.clock)
    steps(sparsifier, optimizer, 0, 2)
    assert sparsifier.patterns.is_pending(sparsifier.clock)
    # Nearly all of its magnitude is in one entry of each block: it can be the sparsest.
    with torch.no_grad():
        model[4].weight.view(-1, 8)[:, 1:] *= 1e-4
        optimizer.state.clear()
    steps(sparsifier, optimizer, 2, 3)
    assert not sparsifier.patterns.is_pending(sparsifier.clock)
    patterns = patterns_of(sparsifier)
    assert patterns["4"] == "1:8"
    assert sparsifier.patterns.kept_share() <= 0.4
    for layer in sparsifier.layers.values():
        assert nmf.is_nm(layer.forward_weight(), layer.pattern)
    steps(sparsifier, optimizer, 3, 6)
    assert patterns_of(sparsifier) == patterns
    assert sparsifier.violations() == 0


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("moment", [1, 3, 5])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "bame", "sr-ste-late", "asp-late"])
def test_a_resumed_training_is_the_same(method, moment):
    def made():
        late = {"sr-ste-late": SRSTE(dense_start=3), "asp-late": ASP(start=3)}
        return late[method] if method in late else METHODS[method]()

    straight = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(straight, "auto:0.4:8", made(), planned_steps=8)
    steps(sparsifier, optimizer, 0, moment)
    weights = copy.deepcopy(straight.state_dict())
    state = copy.deepcopy(sparsifier.state_dict())
    momentum = copy.deepcopy(optimizer.state_dict())
    steps(sparsifier, optimizer, moment, 8)

    resumed = net(16, 32, 16, 32, 8, seed=5)
    resumed.load_state_dict(weights)
    again, optimizer = started(resumed, "auto:0.4:8", made(), state=state, planned_steps=8)
    again.load_state_dict(state)
    optimizer.load_state_dict(momentum)
    steps(again, optimizer, moment, 8)
    assert patterns_of(again) == patterns_of(sparsifier)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])


def test_a_state_that_comes_after_attach_brings_its_patterns():
    """As with FSDP: other weights were there when the patterns were chosen."""
    straight = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(straight, "auto:0.4:8", "sr-ste")
    steps(sparsifier, optimizer, 0, 2)
    resumed = net(16, 32, 16, 32, 8, seed=5)
    with torch.no_grad():
        resumed[0].weight.view(-1, 8)[:, 1:] *= 1e-4
    again, other = started(resumed, "auto:0.4:8", "sr-ste")
    assert patterns_of(again) != patterns_of(sparsifier)
    resumed.load_state_dict(straight.state_dict())
    again.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert patterns_of(again) == patterns_of(sparsifier)
    for trained, owner in ((sparsifier, optimizer), (again, other)):
        steps(trained, owner, 2, 5)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])


def test_a_state_that_comes_after_attach_brings_its_schedule():
    straight = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(straight, "auto:0.4:8", STE(dense_start=0.5), planned_steps=8)
    steps(sparsifier, optimizer, 0, 2)
    resumed = net(16, 32, 16, 32, 8, seed=5)
    again, other = started(resumed, "auto:0.4:8", STE(dense_start=0.5), planned_steps=80)
    assert again.patterns.moment == 40
    resumed.load_state_dict(straight.state_dict())
    with pytest.warns(UserWarning, match="scheduled at steps"):
        again.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.patterns.moment == 4
    for trained, owner in ((sparsifier, optimizer), (again, other)):
        steps(trained, owner, 2, 6)
    assert patterns_of(again) == patterns_of(sparsifier)
    assert again.patterns.choices


def test_a_state_that_does_not_fit_leaves_the_patterns():
    sparsifier, optimizer = started(net(16, 32, 16, 32, 8), "auto:0.4:8", "sr-ste")
    steps(sparsifier, optimizer, 0, 2)
    other = net(16, 32, 16, 32, 8, seed=5)
    with torch.no_grad():
        other[0].weight.view(-1, 8)[:, 1:] *= 1e-4
    again, _ = started(other, "auto:0.4:8", "sr-ste")
    before = patterns_of(again)
    with pytest.raises(ValueError, match="do not belong to the weights of layer"):
        again.load_state_dict(sparsifier.state_dict())
    assert patterns_of(again) == before
    assert again.violations() == 0


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            "auto:0.4:8",
            "auto:0.5:8",
            "pattern='auto:0.4:8', and this training has pattern='auto:0.5:8'",
        ),
        ("auto:0.4:8", "auto:0.4:4", "has pattern='auto:0.4:4': use the former"),
        ("auto:0.4:8", "2:8", "this training has patterns that are given: use the former"),
        ("2:8", "auto:0.4:8", "saved with patterns that were given"),
    ],
)
def test_a_state_of_another_budget_is_refused(saved, here, message):
    model = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(model, saved, "sr-ste")
    steps(sparsifier, optimizer, 0, 1)
    state = sparsifier.state_dict()
    twin = net(16, 32, 16, 32, 8)
    twin.load_state_dict(model.state_dict())
    again = NMSparsifier(twin, here, "sr-ste").attach(state)
    with pytest.raises(ValueError, match=message):
        again.load_state_dict(state)


def test_attached_again_it_chooses_again():
    model = net(16, 32, 16, 32, 8)
    sparsifier, optimizer = started(model, "auto:0.4:8", STE(dense_start=1))
    steps(sparsifier, optimizer, 0, 3)
    patterns = patterns_of(sparsifier)
    sparsifier.bake()
    sparsifier.detach()
    sparsifier.attach()
    assert not sparsifier.patterns.is_pending(sparsifier.clock)
    assert sparsifier.patterns.choices
    assert patterns_of(sparsifier).keys() == patterns.keys()
    assert sparsifier.violations() == 0


@pytest.mark.parametrize("method", [CAST(), DecayingMask("structure")], ids=["cast", "structure"])
def test_methods_that_plan_by_the_pattern_refuse_a_budget(method):
    with pytest.raises(ValueError, match=r"pattern='auto:0\.5:16' chooses N when masks begin, but"):
        NMSparsifier(net(), "auto:0.5", method)
    rules = [{"include": "0", "method": method}]
    with pytest.raises(ValueError, match="plans by the pattern from the first step on"):
        NMSparsifier(net(), "auto:0.5", "ste", rules=rules)
    rules = [{"include": "0", "method": method, "pattern": "2:4"}]
    NMSparsifier(net(), "auto:0.5", "ste", rules=rules)
