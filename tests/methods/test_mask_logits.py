"""Learned masks of frozen weights: what is trained, what the noise depends on, and which mask the model has."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import MaskLogits, NMSparsifier, NMSparsityCallback, prune
from lightning_nm import functional as nmf
from lightning_nm.callbacks.tables import owned_parameters
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.functional.soft import block_patterns, gumbel_noise
from tests.support.features import ends_sparse, masked
from tests.support.kinds import make
from tests.support.lightning_models import Data, make_trainer, new_model

QUIET = {"skip_first_last": False}


def network(frozen=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    return model.double().requires_grad_(not frozen)


def batches(step, micro=0):
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(8, 8, 4, 4, generator=generator, dtype=torch.float64)


def train(sparsifier, optimizer, steps, accumulated=1):
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulated):
            sparsifier.model(batches(step, micro)).square().mean().backward()
            if micro < accumulated - 1:
                sparsifier.step()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_stay_bit_for_bit_and_logits_move(optimizer, frozen):
    model = network(frozen)
    made = OPTIMIZERS[optimizer](model.parameters())
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=6), **QUIET).attach(optimizers=[made])
    sparsifier.register(made)
    assert list(sparsifier.layers) == ["0", "3", "5"]
    weights = {name: layer.weight.detach().clone() for name, layer in sparsifier.layers.items()}
    logits = {
        name: layer.parameters["logits"].detach().clone()
        for name, layer in sparsifier.layers.items()
    }
    bias = model[3].bias.detach().clone()
    train(sparsifier, made, range(6), accumulated=2)
    for name, layer in sparsifier.layers.items():
        assert torch.equal(layer.weight, weights[name])
        assert layer.weight.grad is None
        assert layer.weight not in made.state
        assert not torch.equal(layer.parameters["logits"], logits[name])
    assert torch.equal(model[3].bias, bias) == frozen
    assert sparsifier.violations() == 0


def test_a_layer_that_no_optimizer_holds_stays_dense():
    """Such as a teacher: the weights of a student, frozen or not, are in the optimizer."""
    model = nn.ModuleDict({"student": network(), "teacher": network()})
    optimizer = torch.optim.SGD(model["student"].parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=5))
    sparsifier.attach(optimizers=[optimizer])
    assert list(sparsifier.layers) == ["student.3"]
    assert sparsifier.skipped["student.5"] == "last linear layer"
    assert sparsifier.skipped["teacher.3"].startswith("in no optimizer")
    # Another method goes by whether the weight is trained.
    other = NMSparsifier(network(), "2:4", "sr-ste").attach(optimizers=[optimizer])
    assert not other.layers


def test_layers_that_join_an_optimizer_later_are_masked_then():
    model = network()
    first = torch.optim.SGD(model[3].parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=5), **QUIET).attach(optimizers=[first])
    sparsifier.register(first)
    assert list(sparsifier.layers) == ["3"]
    train(sparsifier, first, range(1))
    first.add_param_group({"params": list(model[0].parameters())})
    assert [layer.name for layer in sparsifier.mask_unfrozen()] == ["0"]
    train(sparsifier, first, range(1, 3))
    assert sparsifier.layers["0"].step == 2


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["linear", "conv2d", "conv2d-groups", "hugging-face-conv1d"]),
    st.sampled_from(["2:4", "1:4", "2:8", "3:4"]),
    st.integers(0, 4),
)
def test_logits_get_the_gradient_of_the_soft_mask(kind, pattern, clock):
    module, x = make(kind, torch.float64)
    sparsifier = NMSparsifier(module, pattern, MaskLogits(stop=5), **QUIET).attach()
    (layer,) = sparsifier.layers.values()
    layer.progress.clock = clock
    layer.spec.method.update(layer)
    module(x).square().sum().backward()

    logits = layer.parameters["logits"]
    twin = logits.detach().clone().requires_grad_()
    noise = gumbel_noise(twin.numel(), nmf.fold_seed(0, layer.name, "mask-logits", 0))
    scale = torch.tensor(100 + 400 * clock / 5, dtype=torch.float64)
    temperature = torch.tensor(4 - 3.95 * clock / 5, dtype=torch.float64)
    noise = noise.double().view(twin.shape)
    choice = torch.softmax((scale * twin + noise) / temperature, -1).flatten(0, 1)
    blocks = choice @ block_patterns(pattern).double()
    rows = layer.view.rows(layer.weight.detach())
    channels_last = rows.movedim(1, -1)
    mask = blocks.view(channels_last.shape).movedim(-1, 1)
    weight = layer.view.unrows(rows * mask)
    torch.testing.assert_close(layer.values_of("forward", layer.weight.detach()), weight)
    plain, _ = make(kind, torch.float64)
    plain.load_state_dict({**module.state_dict()})
    torch.func.functional_call(plain, {"weight": weight}, (x,)).square().sum().backward()
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-9, atol=1e-12)


def test_the_model_is_nm_and_training_is_soft():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=6), **QUIET).attach()
    sparsifier.register(optimizer)
    train(sparsifier, optimizer, range(2))
    layer = sparsifier.layers["3"]
    x = batches(9)
    soft = layer.values_of("forward", layer.weight.detach())
    assert (soft != 0).all()
    assert not torch.equal(model.train()(x), model.eval()(x))
    state = copy.deepcopy(model.state_dict())
    plain = network()
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x), model(x))
    logits = layer.parameters["logits"].detach()
    best = block_patterns("2:4")[logits.argmax(-1)].flatten(0, 1)
    assert torch.equal(as_blocks(layer.forward_mask, 4), best)
    assert nmf.is_nm(state["3.weight"], "2:4", dim=1)
    assert sparsifier.violations() == 0
    assert sparsifier.stats()["density"] == 0.5
    # It trains by dense products, and says so; the weight gradient is made for the logits.
    for gemm in layer.gemms():
        assert gemm.kind == "dense"
        assert gemm.arithmetic == gemm.eligible == 1
    assert "while it trains" in layer.gemms().forward.reason
    assert sparsifier.flops_ratios() == {"arithmetic": 1, "paper": 1, "eligible": 1}
    sparsifier.bake()
    sparsifier.detach()
    torch.testing.assert_close(model(x), plain(x))


def test_noise_follows_from_the_seed_the_layer_and_the_step():
    def used(seed, steps):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=100), seed=seed, **QUIET).attach()
        sparsifier.register(optimizer)
        for layer in sparsifier.layers.values():
            layer.parameters["logits"].data.zero_()
            layer.weight.data.fill_(1)
        masks = []
        for step in range(steps):
            optimizer.zero_grad()
            masks.append(
                {
                    n: each.values_of("forward", each.weight.detach())
                    for n, each in sparsifier.layers.items()
                }
            )
            model(batches(step)).square().mean().backward()
            sparsifier.step()  # a micro-batch
            again = {
                n: each.values_of("forward", each.weight.detach())
                for n, each in sparsifier.layers.items()
            }
            assert all(torch.equal(masks[-1][name], again[name]) for name in again)
            model(batches(step)).square().mean().backward()
            sparsifier.before_step(optimizer)
            for layer in sparsifier.layers.values():
                layer.parameters["logits"].grad.fill_(1)  # a step that is one, of learning rate 0
            optimizer.param_groups[0]["lr"] = 1e-30
            optimizer.step()
            sparsifier.step()
        return masks

    first, same, other = used(0, 3), used(0, 3), used(1, 3)
    for one, two, three in zip(first, same, other, strict=True):
        for name in one:
            assert torch.equal(one[name], two[name])
            assert not torch.equal(one[name], three[name])
    assert not torch.equal(first[0]["3"], first[1]["3"])
    assert not torch.equal(first[1]["3"], first[2]["3"])


def test_masks_are_learned_that_magnitudes_do_not_show():
    """The largest weight of each block meets an input that is always 0."""
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        model.weight[:, ::4] += 3
    x = torch.randn(512, 32)
    x[:, ::4] = 0
    target = model(x).detach()
    model.requires_grad_(False)
    pruned = copy.deepcopy(model)
    prune(pruned, skip_first_last=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=100, weight_reg=0), **QUIET).attach()
    sparsifier.register(optimizer)
    for step in range(100):
        optimizer.zero_grad()
        part = slice(64 * (step % 8), 64 * (step % 8) + 64)
        (model(x[part]) - target[part]).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    model.eval()
    error = (model(x) - target).square().mean()
    by_magnitude = (pruned(x) - target).square().mean()
    assert error < 0.5 * by_magnitude
    assert sparsifier.stats()["mask_confidence"] > 0.5


def test_the_prior_is_the_first_mask():
    dense = network()
    pruned = copy.deepcopy(dense)
    prune(pruned, "2:4", "wanda", [batches(0)], skip_first_last=False)
    method = MaskLogits(prior=pruned.state_dict(), prior_strength=1e3, stop=5)
    sparsifier = NMSparsifier(dense, "2:4", method, **QUIET).attach()
    for name, layer in sparsifier.layers.items():
        expected = pruned.get_submodule(name).weight != 0
        assert torch.equal(layer.forward_mask, expected)
    assert "state" not in repr(method)
    assert len(repr(method)) < 200

    by_magnitude = NMSparsifier(network(), "2:4", MaskLogits(prior_strength=1e3, stop=5), **QUIET)
    for layer in by_magnitude.attach().layers.values():
        rows = layer.view.rows(layer.weight.detach())
        assert torch.equal(layer.view.rows(layer.forward_mask), nmf.magnitude_mask(rows, "2:4", 1))


def test_without_a_prior_the_first_masks_are_random():
    masks = [
        NMSparsifier(network(), "2:4", MaskLogits(prior_strength=0, stop=5), seed=seed, **QUIET)
        .attach()
        .layers["3"]
        .forward_mask
        for seed in (0, 0, 1)
    ]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_the_table_says_the_memory():
    sparsifier = NMSparsifier(network(), "2:4", MaskLogits(stop=5), **QUIET).attach()
    weights = sum(layer.weight.numel() for layer in sparsifier.layers.values())
    (line,) = owned_parameters(sparsifier)
    assert line.startswith(
        f"MaskLogits trains {weights * 6 // 4:,} parameters of its own, 1.5 for each masked weight: "
    )
    assert f": {weights * 6 / 4 * 8 / 2**10:.1f} KiB, and as much for their gradients" in line


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({}, r"`prior` has no '0\.weight', the weight of layer '0'"),
        ({"0.weight": torch.ones(4, 4)}, r"has the shape \(4, 4\).*layer '0' \(16, 8, 3, 3\)"),
        ({"0.weight": torch.ones(16, 8, 3, 3)}, r"'0\.weight' in `prior` is not 2:4"),
    ],
)
def test_priors_that_do_not_fit_are_named(prior, message):
    with pytest.raises(ValueError, match=message):
        NMSparsifier(network(), "2:4", MaskLogits(prior=prior, stop=5), **QUIET).attach()


def test_weights_that_are_pruned_already_are_warned_of():
    model = network()
    prune(model, skip_first_last=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=5), include="3", **QUIET).attach()
    sparsifier.register(optimizer)
    with pytest.warns(UserWarning, match="layer '3' is 2:4 already, .* give the pruned ones as"):
        train(sparsifier, optimizer, range(1))


def test_in_several_processes_the_weights_must_be_frozen(monkeypatch):
    sparsifier = NMSparsifier(network(frozen=False), "2:4", MaskLogits(stop=5), **QUIET).attach()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    optimizer = torch.optim.SGD(sparsifier.model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"layer '0' gets no gradient.*requires_grad_\(False\)"):
        sparsifier.register(optimizer)
    for layer in sparsifier.layers.values():
        layer.param.requires_grad_(False)
    sparsifier.register(optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": (4, 0)}, r"temperature=\(4, 0\) must be two positive numbers"),
        ({"scale": (1, 2, 3)}, r"scale=\(1, 2, 3\) must be two positive numbers"),
        ({"prior_strength": -1}, "prior_strength=-1 must be 0 or a positive number"),
        ({"weight_reg": float("inf")}, "weight_reg=inf must be 0 or a positive number"),
        ({"stop": 1.5}, r"stop=1\.5"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskLogits(**settings)


def test_too_many_patterns_and_no_plan_are_refused():
    with pytest.raises(ValueError, match=r"layer '3'.*= 12870 patterns"):
        NMSparsifier(network(), "8:16", MaskLogits(stop=5), include="3").attach()
    with pytest.raises(ValueError, match=r"MaskLogits's stop=1\.0 is a share"):
        NMSparsifier(network(), "2:4", "mask-logits").attach()
    with pytest.warns(UserWarning, match="stay soft: stop=30 is step 30 of 10"):
        NMSparsifier(network(), "2:4", MaskLogits(stop=30), planned_steps=10).attach()


def test_weights_that_no_optimizer_holds_are_warned_of(tmp_path):
    model = new_model()
    model.requires_grad_(False)
    model.net[8].requires_grad_(True)
    model.configure_optimizers = lambda: torch.optim.SGD(model.net[8].parameters(), 0.1)
    nm = NMSparsityCallback("2:4", "mask-logits", show_tables=False)
    with pytest.warns(UserWarning, match=r"no layer is masked yet.*their weights, frozen or not"):
        make_trainer(tmp_path, [nm], max_steps=2).fit(model, Data())


def test_a_frozen_model_under_the_callback(tmp_path):
    model = new_model()
    model.requires_grad_(False)
    before = [layer.weight.clone() for layer in masked(model)]
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), 0.01)
    nm = NMSparsityCallback("2:4", "mask-logits", show_tables=False)
    make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    ends_sparse(model)
    for layer, weight in zip(masked(model), before, strict=True):
        kept = layer.weight != 0
        assert torch.equal(layer.weight[kept], weight[kept])
