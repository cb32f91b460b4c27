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
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import Data, make_trainer, new_model
from tests.support.method_loop import Loop, mlp, sgd


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.5)


def frozen(**options):
    return mlp(16, 32, 16, **options).requires_grad_(False)


def attach(method, model=None, **options):
    options = {"skip_first_last": False, **options}
    return NMSparsifier(model or frozen(), "2:4", method, **options).attach()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_weights_stay_bit_for_bit_and_logits_move(optimizer, is_frozen):
    model = mlp(16, 32, 16).requires_grad_(not is_frozen)
    before = copy.deepcopy(model)
    run = Loop(MaskLogits(stop=6), make=optimizer, model=model)
    logits = [layer.parameters["logits"].detach().clone() for layer in run.layers.values()]
    run.train(6, windows=2)
    for layer, first in zip(run.layers.values(), logits, strict=True):
        assert torch.equal(layer.param, before.get_submodule(layer.name).weight)
        assert layer.param.grad is None
        assert layer.param not in run.optimizer.state
        assert not torch.equal(layer.parameters["logits"], first)
    assert torch.equal(model[0].bias, before[0].bias) == is_frozen
    assert run.sparsifier.violations() == 0


def test_a_layer_that_no_optimizer_holds_stays_dense():
    """Such as a teacher: the weights of a student, frozen or not, are in the optimizer."""
    model = nn.ModuleDict({"student": frozen(), "teacher": frozen()})
    optimizer = torch.optim.SGD(model["student"].parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=5)).attach(optimizers=[optimizer])
    assert list(sparsifier.layers) == ["student.0"]
    assert sparsifier.skipped["student.2"] == "last linear layer"
    assert sparsifier.skipped["teacher.0"].startswith("in no optimizer")
    # Another method goes by whether the weight is trained.
    other = NMSparsifier(frozen(), "2:4", "sr-ste").attach(optimizers=[optimizer])
    assert not other.layers


def test_layers_that_join_an_optimizer_later_are_masked_then():
    model = frozen()
    first = torch.optim.SGD(model[2].parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", MaskLogits(stop=5), skip_first_last=False)
    sparsifier.attach(optimizers=[first])
    sparsifier.register(first)
    assert list(sparsifier.layers) == ["2"]
    first.add_param_group({"params": list(model[0].parameters())})
    assert [layer.name for layer in sparsifier.mask_unfrozen()] == ["0"]
    model(torch.randn(4, 16)).sum().backward()
    sparsifier.before_step(first)
    first.step()
    sparsifier.step()
    assert sparsifier.layers["0"].step == 1


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["linear", "conv2d", "conv2d-groups", "hugging-face-conv1d"]),
    st.sampled_from(["2:4", "1:4", "2:8", "3:4"]),
    st.integers(0, 4),
)
def test_logits_get_the_gradient_of_the_soft_mask(kind, pattern, clock):
    module, _ = make(kind, torch.float64)
    plain = copy.deepcopy(module)
    run = Loop(MaskLogits(stop=5), pattern, model=module, shape=KINDS[kind][1])
    layer = run.layer
    layer.progress.clock = clock
    layer.spec.method.update(layer)
    run.backward()

    logits = layer.parameters["logits"]
    twin = logits.detach().clone().requires_grad_()
    noise = gumbel_noise(twin.numel(), nmf.fold_seed(0, layer.name, "mask-logits", 0))
    scale, temperature = 100 + 400 * clock / 5, 4 - 3.95 * clock / 5
    soft = torch.softmax((scale * twin + noise.view(twin.shape)) / temperature, -1)
    blocks = soft.flatten(0, 1) @ block_patterns(pattern).double()
    rows = layer.view.rows(layer.weight.detach())
    mask = blocks.view(rows.movedim(1, -1).shape).movedim(-1, 1)
    weight = layer.view.unrows(rows * mask)
    torch.testing.assert_close(layer.values_of("forward", layer.weight.detach()), weight)
    y = torch.func.functional_call(plain, {"weight": weight}, (run.batch(0),))
    (y - 1).square().mean().backward()
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-9, atol=1e-12)


def test_the_model_is_nm_and_training_is_soft():
    run = Loop(MaskLogits(stop=6), make=adamw, model=frozen()).train(2)
    layer, model, x = run.layer, run.model, run.batch(9)
    assert (layer.values_of("forward", layer.weight.detach()) != 0).all()
    assert not torch.equal(model.train()(x), model.eval()(x))
    logits = layer.parameters["logits"].detach()
    best = block_patterns("2:4")[logits.argmax(-1)].flatten(0, 1)
    assert torch.equal(as_blocks(layer.forward_mask, 4), best)
    stats = run.sparsifier.stats()
    # It trains by dense GEMMs, and says so; the weight gradient is made for the logits.
    assert all(gemm.kind == "dense" for gemm in layer.gemms())
    assert "while it trains" in layer.gemms().forward.reason
    assert set(run.sparsifier.flops_ratios().values()) == {1}
    certain = [
        torch.softmax(each.parameters["logits"].detach() * (100 + 400 * 2 / 6), -1)
        .amax(-1)
        .flatten()
        for each in run.layers.values()
    ]
    assert stats["mask_confidence"] == pytest.approx(float(torch.cat(certain).mean()), rel=1e-5)
    assert stats["density"] == 0.5


def test_noise_follows_from_the_seed_the_layer_and_the_step():
    def used(seed):
        make = lambda p: torch.optim.SGD(p, 1e-30)  # noqa: E731
        run, found = Loop(MaskLogits(stop=20), make=make, model=frozen(), seed=seed), []
        for layer in run.layers.values():
            layer.parameters["logits"].data.zero_()
            layer.param.data.fill_(1)

        def look():
            return [layer.values_of("forward", layer.param) for layer in run.layers.values()]

        for _ in range(3):
            found += look()
            run.backward()
            run.sparsifier.step()  # a micro-batch
            assert all(map(torch.equal, look(), found[-2:]))
            run.step()
        return found

    first, same, other = used(0), used(0), used(1)
    assert all(map(torch.equal, first, same))
    assert not any(map(torch.equal, first, other))
    assert not any(map(torch.equal, first[:-2], first[2:])), "another step"


def test_the_prior_is_the_first_mask():
    dense = frozen()
    pruned = copy.deepcopy(dense)
    prune(pruned, "2:4", "wanda", [torch.randn(64, 16)], skip_first_last=False)
    method = MaskLogits(prior=pruned.state_dict(), prior_strength=1e3, stop=5)
    for name, layer in attach(method, dense).layers.items():
        assert torch.equal(layer.forward_mask, pruned.get_submodule(name).weight != 0)
    assert "state" not in repr(method)
    assert len(repr(method)) < 200
    for layer in attach(MaskLogits(prior_strength=1e3, stop=5)).layers.values():
        assert torch.equal(layer.forward_mask, nmf.magnitude_mask(layer.weight, "2:4", 1))


def test_without_a_prior_the_first_masks_are_random():
    method = MaskLogits(prior_strength=0, stop=5)
    layers = [attach(method, seed=seed).layers["0"] for seed in (0, 0, 1)]
    first, same, other = (layer.forward_mask for layer in layers)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({}, r"`prior` has no '0\.weight', the weight of layer '0'"),
        ({"0.weight": torch.ones(4, 4)}, r"has the shape \(4, 4\).*layer '0' \(32, 16\)"),
        ({"0.weight": torch.ones(32, 16)}, r"'0\.weight' in `prior` is not 2:4"),
    ],
)
def test_priors_that_do_not_fit_are_named(prior, message):
    with pytest.raises(ValueError, match=message):
        attach(MaskLogits(prior=prior, stop=5))


def test_the_table_says_the_memory():
    (line,) = owned_parameters(attach(MaskLogits(stop=5)))
    count = 2 * 16 * 32 * 6 // 4
    own = f"MaskLogits trains {count:,} parameters of its own, 1.5 for each masked weight: "
    assert line.startswith(own)
    assert f": {count * 4 / 2**10:.1f} KiB, and as much for their gradients" in line


def test_weights_that_are_pruned_already_are_warned_of():
    model = frozen()
    prune(model, skip_first_last=False)
    run = Loop(MaskLogits(stop=5), model=model, include="2")
    with pytest.warns(UserWarning, match="layer '2' is 2:4 already, .* give the pruned ones as"):
        run.train(1)


def test_in_several_processes_the_weights_must_be_frozen(monkeypatch):
    sparsifier = attach(MaskLogits(stop=5), mlp(16, 32, 16))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    optimizer = torch.optim.SGD(sparsifier.model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"layer '0' gets no gradient.*requires_grad_\(False\)"):
        sparsifier.register(optimizer)
    sparsifier.model.requires_grad_(False)
    sparsifier.register(optimizer)


def test_a_frozen_model_under_the_callback(tmp_path):
    def fit(held):
        model = new_model().requires_grad_(False)
        model.net[8].requires_grad_(True)
        weights = [layer.weight.clone() for layer in masked(model)]
        optimizer = torch.optim.AdamW(held(model).parameters(), 0.01)
        model.configure_optimizers = lambda: optimizer
        nm = NMSparsityCallback("2:4", "mask-logits", show_tables=False)
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
        return model, weights

    with pytest.warns(UserWarning, match=r"no layer is masked yet.*their weights, frozen or not"):
        fit(lambda model: model.net[8])
    model, weights = fit(lambda model: model)
    ends_sparse(model)
    for layer, weight in zip(masked(model), weights, strict=True):
        kept = layer.weight != 0
        assert torch.equal(layer.weight[kept], weight[kept])
