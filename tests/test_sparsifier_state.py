"""The state of a sparsifier: what it brings back, and what it refuses."""

import copy

import pytest
import torch

from lightning_nm import ASP, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.training.statistics import mean_flip_rate
from tests.support.kinds import held_tensors
from tests.support.loop import Loop, adamw, mlp, same


def start(method="sr-ste", **options):
    return Loop(mlp(16, 32, 32, 4), method, **options)


def test_swapping_weights_out_and_in_again_loses_nothing():
    """What averaging for validation does: no latent value is in a state dict."""
    loop = start("bi-mask")
    loop.train([0])
    layer = loop.layers["2"]
    held = copy.deepcopy([layer.weight, *held_tensors(layer)])
    backup = copy.deepcopy(loop.model.state_dict())
    for factor in (0.5, 0.25):
        loop.model.load_state_dict({key: factor * each + 0.01 for key, each in backup.items()})
        expected = nmf.nm_prune(layer.weight.detach(), "2:4")
        assert torch.equal(loop.model.state_dict()["2.weight"], expected)
    loop.model.load_state_dict(backup)
    assert same([layer.weight, *held_tensors(layer)], held)
    assert layer.step == 1
    loop.train([1])
    assert layer.replaced_state is None, "a copy of the weights is not kept for good"


def test_random_choices_depend_on_seed_layer_and_step():
    first, second, _ = start(seed=3).layers.values()
    draws = {torch.rand(1, generator=layer.generator()).item() for layer in (first, second, first)}
    assert len(draws) == 2
    first.progress.step = 1
    draws.add(torch.rand(1, generator=first.generator()).item())
    first.noise.reseed(4)
    draws.add(torch.rand(1, generator=first.generator()).item())
    assert len(draws) == 4


def test_a_state_brings_its_seed_and_its_sums():
    """The costs, too: the next batch may pass through other parts of the model."""
    loop, other = (start(optimizer=lambda p: torch.optim.SGD(p, 50.0), seed=s) for s in (3, 9))
    loop.train([0])
    other.load(loop.save())
    assert other.sparsifier.seed == other.layers["2"].noise.seed == 3
    other.model[0](other.batch())
    assert other.sparsifier.macs == loop.sparsifier.macs
    mean = mean_flip_rate(loop.layers.values())
    assert mean_flip_rate(other.layers.values()) == mean > 0
    for each in (False, True):
        found = other.sparsifier.flops_ratios(mean=each)
        assert found == loop.sparsifier.flops_ratios(mean=each)


def test_masks_move_to_the_weights_device():
    loop = start("bi-mask")
    loop.model.to("meta")
    for layer in loop.layers.values():
        assert {tensor.device.type for tensor in held_tensors(layer)} == {"meta"}


def test_a_state_of_other_layers_given_to_attach_leaves_the_methods_own_masks():
    loop = start("bi-mask", state=start("sr-ste").save()[1])
    assert all(layer.masks.has_backward for layer in loop.layers.values())


def test_a_changed_source_of_the_mask_is_told_on_resume():
    loop = start(ASP())
    states = loop.save()
    assert states[1]["layers"]["2"]["settings"]["init"] == "magnitude"
    loop.end()
    other = Loop(loop.model, ASP(init="zeros"))
    with pytest.warns(UserWarning, match="ASP's init magnitude in the checkpoint, zeros here"):
        other.load(states)


def test_dense_weights_loaded_under_asps_masks_are_pruned_by_the_next_step():
    loop = start("asp")
    loop.train([0])
    loop.model.load_state_dict(mlp(16, 32, 32, 4, seed=1).state_dict())
    layer = loop.layers["2"]
    assert nmf.is_nm(loop.model.state_dict()["2.weight"], "2:4")
    assert nmf.is_nm(layer.forward_weight(), "2:4")
    loop.train([1])
    assert not layer.weight[~layer.forward_mask].any()


def other_layers(state):
    state["layers"]["6"] = state["layers"].pop("4")


def other_weights(state):
    state["layers"]["2"]["checksum"] = [1e3, 1e3]


@pytest.mark.parametrize("change", [other_layers, other_weights])
def test_a_refused_state_changes_nothing(change):
    """Training goes on as if there had been no attempt to load. No mask tells whose weights they are."""
    loop, undisturbed = start(ASP(start=5)), start(ASP(start=5))
    for each in (loop, undisturbed):
        each.train(range(3))
    layers, (_, state, _) = loop.layers, loop.save()
    change(state)
    with pytest.raises(ValueError, match="checkpoint"):
        loop.sparsifier.load_state_dict(state)
    assert loop.layers == layers
    assert same(loop.weights(), undisturbed.weights())
    for each in (loop, undisturbed):
        each.train(range(3, 6))
    assert same(loop.save(), undisturbed.save())


@pytest.mark.parametrize("method", ["cast", "lbc"])
def test_a_run_that_unfroze_a_layer_resumes_with_the_state_of_its_own_parameters(method):
    """Methods own parameters of each layer, whose optimizer state is saved by position."""

    def begin(frozen, state=None):
        model = mlp(16, 16, 16, 16)
        model[2].requires_grad_(not frozen)
        return Loop(model, method, optimizer=adamw, state=state, planned_steps=20)

    whole = begin(frozen=True)
    whole.train(range(3))
    whole.model[2].requires_grad_(True)
    whole.sparsifier.mask_unfrozen()
    whole.train(range(3, 6))
    states = whole.save()
    resumed = begin(frozen=False, state=states[1])
    resumed.load(states)
    for each in (whole, resumed):
        each.train(range(6, 9))
    assert same(whole.weights(), resumed.weights())


def test_patterns_that_0_3_chose_in_a_training_go_on_as_rules():
    rules = [{"include": "2", "pattern": "3:4"}]
    loop = start(pattern="1:4", rules=rules)
    states = loop.save()
    assert states[1]["auto"] == "", "0.3 reads it"
    states[1]["auto"] = "auto:0.5:4"
    with pytest.raises(ValueError, match="layer '2': pattern 3:4 in the checkpoint, 1:4 here"):
        start(pattern="1:4", state=states[1]).load(states)
    again = start(pattern="1:4", rules=rules, state=states[1])
    again.load(states)
    assert [str(layer.pattern) for layer in again.layers.values()] == ["1:4", "3:4", "1:4"]


def test_a_state_of_0_3_with_low_rank_adapters_is_refused():
    states = start("slope").save()
    layer = states[1]["layers"]["2"]
    assert layer["low_rank_spent"] == 0.0, "0.3 reads it"
    layer["settings"]["adapters"] = {}
    loop = start("slope", state=states[1])
    loop.load(states)
    layer["parameters"] = {"adapter_left": torch.zeros(32, 2), "adapter_right": torch.ones(2, 32)}
    with pytest.raises(
        ValueError, match=r"adapter next to the weight of layer '2'.*lightning_nm 0\.3"
    ):
        loop.load(states)
    with pytest.raises(ValueError, match="load its N:M weights alone"):
        NMSparsifier(mlp(16, 32, 32, 4), "2:4", "slope").attach(states[1])
