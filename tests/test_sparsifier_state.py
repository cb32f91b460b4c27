"""The state of a sparsifier: what it brings back, and what it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_nm import ASP, STE, BiMask, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.methods import bi_mask
from lightning_nm.training.statistics import mean_flip_rate
from tests.support.kinds import held_tensors
from tests.test_sparsifier import data, network, one_step


def test_swapping_weights_out_and_in_again_loses_nothing():
    """What averaging for validation does: no latent value is in a state dict."""
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    one_step(model, sparsifier, optimizer)
    layer = sparsifier.layers["2"]
    latent, marks, permutation = (
        t.detach().clone() for t in (layer.weight, layer.masks.bits, layer.masks.permutation)
    )
    backup = {key: value.clone() for key, value in model.state_dict().items()}
    for factor in (0.5, 0.25):
        model.load_state_dict({key: factor * value + 0.01 for key, value in backup.items()})
        assert torch.equal(
            model.state_dict()["2.weight"], nmf.nm_prune(layer.weight.detach(), "2:4")
        )
    model.load_state_dict(backup)
    assert torch.equal(layer.weight, latent)
    assert torch.equal(layer.masks.bits, marks)
    assert torch.equal(layer.masks.permutation, permutation)
    assert layer.step == 1
    one_step(model, sparsifier, optimizer, seed=1)
    assert layer.replaced_state is None, "a copy of the weights is not kept for good"


def test_random_choices_depend_on_seed_layer_and_step():
    sparsifier = NMSparsifier(network(), seed=3).attach()
    first, second = sparsifier.layers.values()
    draws = {torch.rand(1, generator=layer.generator()).item() for layer in (first, second, first)}
    assert len(draws) == 2
    first.progress.step = 1
    draws.add(torch.rand(1, generator=first.generator()).item())
    first.noise.reseed(4)
    draws.add(torch.rand(1, generator=first.generator()).item())
    assert len(draws) == 4


def test_a_state_brings_its_seed_and_its_sums():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", seed=3).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    model(data()[0])
    one_step(model, sparsifier, optimizer)
    other_model = network()
    other = NMSparsifier(other_model, "2:4", "sr-ste", seed=9).attach()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(sparsifier.state_dict())
    assert other.seed == other.layers["2"].noise.seed == 3
    assert other.macs == sparsifier.macs
    mean = mean_flip_rate(sparsifier.layers.values())
    assert mean_flip_rate(other.layers.values()) == mean > 0
    assert other.flops_ratios(mean=True) == sparsifier.flops_ratios(mean=True)


def test_a_resumed_run_keeps_the_costs_that_it_counted():
    """Another first batch may pass through other parts of the model."""

    def start():
        model = network()
        sparsifier = NMSparsifier(model, method="sr-ste").attach()
        sparsifier.register(torch.optim.SGD(model.parameters(), 0.1))
        return model, sparsifier

    (model, sparsifier), (resumed, other) = start(), start()
    model(data()[0])
    sparsifier.step()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(sparsifier.state_dict())
    resumed[0](data()[0])
    other.step()
    assert other.macs == sparsifier.macs
    assert other.flops_ratios() == sparsifier.flops_ratios()


def test_a_state_of_other_weights_or_another_layout_is_refused():
    def sparse(scale=1.0, layout="channels"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        with torch.no_grad():
            model[0].weight.mul_(scale)
        options = {"skip_first_last": False, "conv_layout": layout}
        return NMSparsifier(
            model, "2:4", ASP(start=5), **options
        ).attach()  # no mask yet to compare by

    state = sparse().state_dict()
    sparse().load_state_dict(state)
    with pytest.raises(ValueError, match="do not belong to the weights of layer '0'"):
        sparse(scale=1.01).load_state_dict(state)
    with pytest.raises(ValueError, match="layout plain in the checkpoint, flat here"):
        sparse(layout="flat").load_state_dict(state)


def test_masks_move_to_the_weights_device():
    model = network()
    sparsifier = NMSparsifier(model).attach()
    model.to("meta")
    for layer in sparsifier.layers.values():
        assert {tensor.device.type for tensor in held_tensors(layer)} == {"meta"}


@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "asp", "transposable"])
def test_a_state_can_be_loaded_over_itself_and_over_later_weights(method):
    model = network()
    sparsifier = NMSparsifier(model, "2:4", method, "mvue").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier.register(optimizer)

    def train():
        for k in range(3):
            optimizer.zero_grad()
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(k))
            model(x).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()

    train()
    states = [copy.deepcopy(part.state_dict()) for part in (model, sparsifier, optimizer)]
    latent = [p.detach().clone() for p in model.parameters()]
    found = []
    for _ in range(2):
        for part, state in zip((model, sparsifier, optimizer), states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        assert all(torch.equal(a, b) for a, b in zip(latent, model.parameters(), strict=True))
        train()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_state_given_to_attach_spares_the_searches(monkeypatch):
    calls = []
    search = bi_mask.search_permutation
    monkeypatch.setattr(
        bi_mask,
        "search_permutation",
        lambda *args, **kwargs: calls.append(1) or search(*args, **kwargs),
    )
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    assert len(calls) == 2
    state, weights = sparsifier.state_dict(), copy.deepcopy(model.state_dict())
    other = network()
    other.load_state_dict(weights)
    resumed = NMSparsifier(other, "2:4", "bi-mask").attach(state)
    for name, layer in resumed.layers.items():
        assert torch.equal(layer.masks.bits, sparsifier.layers[name].masks.bits)
    resumed.load_state_dict(state)
    assert len(calls) == 2, "the saved permutations are taken"
    for name, layer in resumed.layers.items():
        assert torch.equal(layer.masks.permutation, sparsifier.layers[name].masks.permutation)


def test_a_state_of_other_layers_given_to_attach_leaves_the_methods_own_masks():
    state = NMSparsifier(network(), "2:4", "sr-ste").attach().state_dict()
    sparsifier = NMSparsifier(network(), "2:4", "bi-mask").attach(state)
    assert all(layer.masks.has_backward for layer in sparsifier.layers.values())


def test_a_changed_source_of_the_mask_is_told_on_resume():
    model = network()
    state = NMSparsifier(model, "2:4", ASP()).attach().state_dict()
    assert state["layers"]["2"]["settings"]["init"] == "magnitude"
    sparse = network()
    with torch.no_grad():
        for module in (sparse[0], sparse[2]):
            module.weight.copy_(nmf.nm_prune(module.weight, "2:4"))
    other = NMSparsifier(sparse, "2:4", ASP(init="zeros")).attach()
    with pytest.warns(UserWarning, match="ASP's init magnitude in the checkpoint, zeros here"):
        other.load_state_dict(state)


def test_a_share_of_an_unknown_length_names_the_argument():
    with pytest.raises(
        ValueError, match=r"BAME's stop=0\.66 is a share.*pass planned_steps to NMSparsifier"
    ):
        NMSparsifier(network(), "2:4", "bame").attach()
    NMSparsifier(network(), "2:4", "bame", planned_steps=1000).attach()


def chain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8)
    )


def train(model, sparsifier, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        model(
            torch.randn(16, 8, 1, 1, generator=torch.Generator().manual_seed(seed))
        ).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


def started(method, **options):
    model = chain()
    sparsifier = NMSparsifier(model, "2:4", method, **options).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, range(3))
    return model, sparsifier, optimizer


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("method", [ASP(start=3), STE(dense_start=3), BiMask(dense_start=3)])
def test_a_snapshot_of_the_dense_phase_is_loaded_once_masks_are_in(method, steps):
    """Loading dense weights under masks must not prune them before the state of the dense phase is there."""
    torch.manual_seed(0)
    model = chain()
    sparsifier = NMSparsifier(model, "2:4", method).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, range(steps))
    parts = (model, sparsifier, optimizer)
    snapshot = [copy.deepcopy(part.state_dict()) for part in parts]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, sparsifier, optimizer, range(steps, 6))
    assert all(layer.masks.has_forward for layer in sparsifier.layers.values())
    ends = [parameter.detach().clone() for parameter in model.parameters()]

    for part, state in zip(parts, snapshot, strict=True):
        part.load_state_dict(state)
    assert not any(layer.masks.has_forward for layer in sparsifier.layers.values())
    assert all(map(torch.equal, weights, model.parameters()))
    train(model, sparsifier, optimizer, range(steps, 6))
    assert all(map(torch.equal, ends, model.parameters()))


def test_dense_weights_loaded_under_asps_masks_are_pruned_by_the_next_step():
    model, sparsifier, optimizer = started(ASP())
    model.load_state_dict(chain().state_dict())
    layer = sparsifier.layers["3"]
    assert nmf.is_nm(model.state_dict()["3.weight"], "2:4")
    assert nmf.is_nm(layer.forward_weight(), "2:4")
    train(model, sparsifier, optimizer, [3])
    assert not layer.weight[~layer.forward_mask].any()


@pytest.mark.parametrize("fault", ["layers", "weights"])
def test_a_refused_state_changes_nothing(fault):
    """Training goes on as if there had been no attempt to load."""
    found = []
    for refused in (False, True):
        model, sparsifier, optimizer = started("sr-ste")
        if refused:
            layers = sparsifier.layers
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            state = copy.deepcopy(sparsifier.state_dict())
            if fault == "layers":
                state = (
                    NMSparsifier(chain(), "2:4", "sr-ste", skip_first_last=False)
                    .attach()
                    .state_dict()
                )
            else:
                state["layers"]["1"]["checksum"] = [1e3, 1e3]
            with pytest.raises(ValueError, match="checkpoint"):
                sparsifier.load_state_dict(state)
            assert sparsifier.layers == layers
            assert all(map(torch.equal, weights, model.parameters()))
        train(model, sparsifier, optimizer, range(3, 6))
        found.append((sparsifier.state_dict(), optimizer.state_dict(), dict(model.state_dict())))
    for a, b in zip(*map(tree_leaves, found), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_last_layer_that_is_masked_in_the_checkpoint_stays_masked():
    model, sparsifier, _ = started("sr-ste", skip_first_last="first")
    state = sparsifier.state_dict()
    assert list(state["layers"]) == ["1", "3", "4"]

    def resumed(state, **options):
        other = chain()
        other.load_state_dict(model.state_dict())
        return NMSparsifier(other, "2:4", "sr-ste", **options).attach(state)

    other = resumed(state)
    with pytest.warns(
        UserWarning, match="this training began with its last layer masked, which stays"
    ):
        other.load_state_dict(state)
    assert list(other.layers) == ["1", "3", "4"]
    with pytest.raises(ValueError, match="layer '0' is masked only here"):
        resumed(state, skip_first_last="last").load_state_dict(state)


def test_other_reasons_for_the_same_first_and_last_layers_are_loaded():
    model, sparsifier, _ = started("sr-ste")
    state, layers = sparsifier.state_dict(), sparsifier.layers
    state["ends"] = {name: f"{reason}, by data flow" for name, reason in state["ends"].items()}
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    sparsifier.load_state_dict(state)
    assert all(sparsifier.layers[name] is layer for name, layer in layers.items())


def test_patterns_that_0_3_chose_in_a_training_go_on_as_rules():
    model = network()
    rules = [{"include": "2", "pattern": "3:4"}]
    state = NMSparsifier(model, "1:4", "sr-ste", rules=rules).attach().state_dict()
    assert state["auto"] == "", "0.3 reads it"
    state["auto"] = "auto:0.5:4"
    other = network()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="layer '2': pattern 3:4 in the checkpoint, 1:4 here"):
        NMSparsifier(other, "1:4", "sr-ste").attach(state).load_state_dict(state)
    other = network()
    other.load_state_dict(model.state_dict())
    again = NMSparsifier(other, "1:4", "sr-ste", rules=rules).attach(state)
    again.load_state_dict(state)
    assert [str(layer.pattern) for layer in again.layers.values()] == ["1:4", "3:4"]


def test_a_state_of_0_3_with_low_rank_adapters_is_refused():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "slope").attach()
    state = sparsifier.state_dict()
    layer = state["layers"]["2"]
    assert layer["low_rank_spent"] == 0.0, "0.3 reads it"
    layer["settings"]["adapters"] = {}
    other = network()
    other.load_state_dict(model.state_dict())
    again = NMSparsifier(other, "2:4", "slope").attach(state)
    again.load_state_dict(state)
    layer["parameters"] = {"adapter_left": torch.zeros(32, 2), "adapter_right": torch.ones(2, 32)}
    with pytest.raises(
        ValueError, match=r"adapter next to the weight of layer '2'.*lightning_nm 0\.3"
    ):
        sparsifier.load_state_dict(state)
    with pytest.raises(ValueError, match="load its N:M weights alone"):
        NMSparsifier(network(), "2:4", "slope").attach(state)
