"""sensitivity(): errors against the layers' own outputs, and what is chosen from them."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_nm import functional as nmf
from lightning_nm import prune, sensitivity
from lightning_nm.functional.budget import DENSE, Candidates, all_patterns, choose_patterns


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


def test_errors_are_those_of_the_dense_models_inputs():
    model, data = net(16, 32, 16, 8), batches(16)
    before = copy.deepcopy(model.state_dict())
    model.train()
    found = sensitivity(model, data, ["1:4", "2:4", "4:8"], skip_first_last=False)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert list(found.layers) == ["0", "2", "4"]
    inputs = torch.cat(data)
    for name, layer in found.layers.items():
        module = model[int(name)]
        x = model[: int(name)](inputs)
        output = x @ module.weight.t()
        for pattern, error in layer.errors.items():
            pruned = nmf.nm_prune(module.weight, pattern)
            direct = (x @ (module.weight - pruned).t()).norm() / output.norm()
            assert error == pytest.approx(direct.item(), rel=1e-3)
            kept = nmf.kept_magnitude(module.weight, pruned != 0)
            assert layer.retained[pattern] == pytest.approx(kept.item(), rel=1e-5)
        assert (layer.size, layer.macs) == (module.weight.numel(), 72 * module.weight.numel())


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_a_layer_alone_has_the_error_of_prune(score):
    model, data = net(16, 8), batches(16)
    found = sensitivity(model, data, ["2:4"], score=score, skip_first_last=False)
    result = prune(model, "2:4", score, data, skip_first_last=False)
    assert found.layers["0"].errors["2:4"] == pytest.approx(result.errors["0"], rel=1e-6)


def test_convolutions_are_scanned_in_their_layout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 2))
    data = [torch.randn(2, 8, 6, 6)]
    scans = {
        layout: sensitivity(model, data, ["2:4"], skip_first_last=False, conv_layout=layout)
        for layout in ("channels", "flat")
    }
    for layout, found in scans.items():
        pruned = copy.deepcopy(model)
        result = prune(pruned, "2:4", data=data, skip_first_last=False, conv_layout=layout)
        assert found.layers["0"].errors["2:4"] == pytest.approx(result.errors["0"], rel=1e-6)
    first, second = (found.layers["0"].errors["2:4"] for found in scans.values())
    assert first != second


def test_without_data_there_are_magnitudes_alone():
    found = sensitivity(net(16, 32, 16, 4), patterns=["2:4"])
    assert list(found.layers) == ["0", "2"]
    assert found.skipped == {"4": "last linear layer"}
    assert found.dense_sizes == {"4": 64}
    assert not found.layers["0"].errors
    assert 0.5 < found.layers["0"].retained["2:4"] < 1
    with pytest.raises(ValueError, match=r"max_error=0.1 needs calibration batches: data=loader"):
        found.choose(max_error=0.1)
    with pytest.raises(ValueError, match="counted='flops' needs calibration batches"):
        found.choose(0.5, counted="flops")


def test_a_layer_lacks_the_patterns_that_do_not_fit():
    model = net(16, 8, 16, 4)
    found = sensitivity(model, batches(16), ["2:4", "4:16"])
    assert list(found.layers["0"].errors) == ["4:16", "2:4"]
    assert list(found.layers["2"].errors) == ["2:4"]
    assert found.choose(0.6)["2"].pattern in ("2:4", DENSE)


def test_all_of_16_are_the_candidates():
    found = sensitivity(net(16, 32, 8))
    assert [str(pattern) for pattern in found.patterns] == [f"{n}:16" for n in range(1, 16)]
    assert list(found.layers["0"].retained) == [str(pattern) for pattern in found.patterns]


def kept_share(found, choices):
    """The share of all entries that a choice keeps."""
    kept = sum(found.dense_sizes.values())
    total = kept
    for name, layer in found.layers.items():
        kept += layer.size * choices[name].density
        total += layer.size
    return kept / total


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("has_data", [True, False])
def test_a_budget_has_the_least_loss_of_all_choices(budget, has_data):
    found = sensitivity(
        net(16, 32, 16, 8, 4), batches(16) if has_data else None, ["1:8", "2:8", "4:8", "6:8"]
    )
    choices = found.choose(budget)
    assert kept_share(found, choices) <= budget + 1e-9

    def loss_of(patterns):
        losses = []
        for layer, pattern in zip(found.layers.values(), patterns, strict=True):
            if pattern == DENSE:
                losses.append(0)
            else:
                losses.append(
                    layer.errors[pattern] ** 2 if has_data else 1 - layer.retained[pattern]
                )
        return sum(losses)

    options = ["1:8", "2:8", "4:8", "6:8", DENSE]
    total = sum(layer.size for layer in found.layers.values()) + 32
    least = min(
        loss_of(patterns)
        for patterns in itertools.product(options, repeat=3)
        if 32
        + sum(
            layer.size * (1 if pattern == DENSE else int(pattern[0]) / 8)
            for layer, pattern in zip(found.layers.values(), patterns, strict=True)
        )
        <= budget * total + 1e-6
    )
    assert loss_of(choice.pattern for choice in choices.values()) == pytest.approx(least)


def test_flops_are_those_of_the_calls():
    """A layer that is called for many positions is dear by FLOPs and cheap by parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 72)
    )
    found = sensitivity(model, [torch.randn(4, 8, 16, 16)], ["1:4", "2:4"], skip_first_last=False)
    conv, linear = found.layers["0"], found.layers["3"]
    assert (conv.size, linear.size) == (576, 576)
    assert (conv.macs, linear.macs) == (4 * 256 * 576, 4 * 576)
    choices = found.choose(0.51, counted="flops")
    assert choices["3"].pattern == DENSE
    macs = conv.macs * choices["0"].density + linear.macs * choices["3"].density
    assert macs <= 0.51 * (conv.macs + linear.macs)


def test_the_sparsest_within_a_bound():
    found = sensitivity(net(16, 32, 16, 8), batches(16), ["1:8", "4:8", "7:8"])
    choices = found.choose(max_error=0.4)
    for name, layer in found.layers.items():
        within = [pattern for pattern, error in layer.errors.items() if error <= 0.4]
        assert choices[name].pattern == min(within, key=lambda text: int(text[0]), default=DENSE)
    assert {choice.pattern for choice in found.choose(max_error=0).values()} == {DENSE}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of budget and max_error"),
        ({"budget": 0.5, "max_error": 0.1}, "give one of budget and max_error"),
        ({"budget": 0}, "budget=0 must be the share of the model's weights that is kept"),
        ({"budget": 1.5}, "budget=1.5 must be the share"),
        ({"budget": True}, "budget=True must be the share"),
        ({"max_error": 1}, "max_error=1 must be the largest relative output error"),
        ({"budget": 0.5, "counted": "bytes"}, "counted='bytes' is unknown"),
    ],
)
def test_what_choose_refuses(arguments, message):
    found = sensitivity(net(16, 32, 16), batches(16), ["2:4"], skip_first_last=False)
    with pytest.raises(ValueError, match=message):
        found.choose(**arguments)


def test_an_unreachable_budget_names_the_one_that_can_be_reached():
    found = sensitivity(net(16, 16, 64), patterns=["1:4"])
    # 256 of 1280 entries can be masked, a quarter of them stays.
    assert found.dense_sizes == {"2": 1024}
    with pytest.raises(ValueError, match=r"budget=0.5 cannot be reached: .* 0\.8500 .*'2'"):
        found.choose(0.5)
    assert found.choose(0.85)["0"].pattern == "1:4"


def test_a_budget_of_one_keeps_everything():
    assert {choice.pattern for choice in sensitivity(net(16, 32, 16)).choose(1).values()} == {DENSE}


def test_a_layer_that_no_token_reaches():
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(8, 8)
            self.lost = nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + self.lost(x[:0]).sum()

    torch.manual_seed(0)
    model = Lost()
    found = sensitivity(model, [torch.randn(16, 8)], ["2:4"], skip_first_last=False)
    assert found.uncalibrated == ("lost",)
    weight = model.lost.weight
    lost = (weight - nmf.nm_prune(weight, "2:4")).norm() / weight.norm()
    assert found.layers["lost"].errors["2:4"] == pytest.approx(lost.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patterns": []}, ValueError, "there is no candidate pattern"),
        ({"patterns": ["5:4"]}, ValueError, "prunes nothing"),
        ({"score": "best"}, ValueError, "score='best' is unknown"),
        ({"score": "wanda", "data": None}, ValueError, "score='wanda' needs calibration batches"),
        ({"data": iter([])}, TypeError, "can be read only once"),
        ({"data": []}, ValueError, "`data` holds no batch"),
        ({"include": "9"}, ValueError, "`include` '9' matches no layer"),
        ({"patterns": ["3:7"]}, ValueError, "no layer can be masked"),
    ],
)
def test_what_a_scan_refuses(options, error, message):
    arguments = {"data": batches(16), **options}
    with pytest.raises(error, match=message):
        sensitivity(net(16, 32, 16), **arguments)


def test_all_patterns_of_a_length():
    assert [str(pattern) for pattern in all_patterns(3)] == ["1:3", "2:3"]
    for m in (1, 0, 2.0, True):
        with pytest.raises(ValueError, match="must be the length of a block"):
            all_patterns(m)


def test_equal_layers_get_equal_patterns_where_the_budget_allows_it():
    values = {f"{n}:8": (1 - n / 8) ** 2 for n in range(1, 8)}
    layers = {name: Candidates(64, values) for name in "abcd"}
    choices = choose_patterns(layers, 0.5, {})
    assert {choice.pattern for choice in choices.values()} == {"4:8"}
    assert choices["a"].why == "3:8 has 0.3906, 5:8 has 0.1406"
