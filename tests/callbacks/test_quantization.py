"""QuantizationAwareTraining: the rounding is that of the export, zeros stay, and runs resume exactly."""

import copy

import pytest
import torch
from torch import nn

from lightning_nm import SSTE, NMSparsifier, QuantizationAwareTraining, pack
from lightning_nm.functional import (
    dequantise_weight,
    fake_quantise_tokens,
    is_nm,
    quantise_weight,
)
from lightning_nm.nn import NMLinear, nm_linear, register_adapter
from lightning_nm.nn.adapters import adapter
from lightning_nm.training.int8_rounding import Int8Rounding
from tests.support.cpu_products import needs_library
from tests.support.experts import Experts, TransposedExperts
from tests.support.kinds import make
from tests.support.lightning_models import (
    FailsAt,
    Inspect,
    Net,
    assert_equal_models,
    callback,
    fit,
    new_model,
    whole_and_resumed,
)
from tests.support.loop import Loop

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def sparse(model, method="sr-ste"):
    return NMSparsifier(model, "2:4", method, skip_first_last=False).attach()


def packed(sparsifier, **options):
    """The export of a copy of the sparse model."""
    twin = copy.deepcopy(sparsifier)
    twin.bake()
    twin.detach()
    return pack(twin.model.eval(), "2:4", dtype="int8", **options)


def rounded(weight):
    return dequantise_weight(*quantise_weight(weight), torch.float32)


@pytest.mark.parametrize(
    "kind",
    ["linear", "conv1d", "conv2d-groups", "hugging-face-conv1d", "attention", "two-weights"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_is_that_of_the_export(kind, dtype):
    model, x = make(kind, dtype)
    sparsifier = sparse(model)
    before = {layer: layer.param.detach().clone() for layer in sparsifier.layers.values()}
    with Int8Rounding().within(sparsifier.layers.values()), torch.no_grad():
        found = model(x)
        for layer, weight in before.items():
            assert torch.equal(layer.forward_weight() != 0, layer.forward_mask)
            pruned = ~layer.forward_mask
            assert torch.equal(layer.param[pruned], weight[pruned])
    for layer, weight in before.items():
        assert torch.equal(layer.param, weight)
    if kind == "two-weights":  # its adapter is none of packed layers in a copy
        return
    tolerance = {"rtol": 2.0**-6, "atol": 2.0**-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(packed(sparsifier, kernels="reference")(x), found, **tolerance)


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_has_scales_of_its_own(kind):
    torch.manual_seed(0)
    model = kind()
    sparsifier = sparse(model)
    x, experts = torch.randn(7, 16), torch.arange(7) % 4
    with Int8Rounding().within(sparsifier.layers.values()), torch.no_grad():
        found = model(x, experts)
    torch.testing.assert_close(packed(sparsifier, kernels="reference")(x, experts), found)


@needs_library
def test_activations_are_rounded_as_the_kernel_rounds_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    sparsifier, x = sparse(model), torch.randn(5, 64)
    x[:, 0] = 4
    rounding = Int8Rounding(activations=True)
    with rounding.within(sparsifier.layers.values()), torch.no_grad():
        first = model[0](x)
    exported = packed(sparsifier, kernels="sparse")
    assert exported[0].weight.form == "cpu-int8"
    torch.testing.assert_close(exported[0](x), first)
    with torch.no_grad():
        assert not torch.equal(model[0](x), first), "the hooks are gone"


def test_the_gradient_of_rounding_is_that_of_its_input():
    x, grad = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    (found,) = torch.autograd.grad(fake_quantise_tokens(x), x, grad)
    assert torch.equal(found, grad)
    model = nn.Linear(8, 8, bias=False)
    sparsifier, data = sparse(model, "ste"), torch.randn(4, 8)
    with Int8Rounding().within(sparsifier.layers.values()):
        y = model(data)
        y.square().sum().backward()
    expected = (2 * y.detach()).t() @ data  # at the rounded weight
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_mask_and_fake_quantisation_of_torch_ao_see_the_same_weight(monkeypatch):
    from torch.ao import quantization
    from torch.ao.nn import qat

    monkeypatch.setattr(adapter, "_ADAPTERS", list(adapter._ADAPTERS))

    @register_adapter
    class NMFakeQuantised(NMLinear):
        handles = qat.Linear

        def forward(self, x):
            rounded = self.weight_fake_quant(self.weight)
            return nm_linear(x, rounded, self.bias, self.nm_layers["weight"])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).train()
    rounding = quantization.default_per_channel_weight_fake_quant
    model.qconfig = quantization.QConfig(activation=nn.Identity, weight=rounding)
    loop = Loop(quantization.prepare_qat(model), "sr-ste")
    first = loop.layers["0"].forward_mask.clone()
    loop.train(range(20))
    assert not torch.equal(first, loop.layers["0"].forward_mask), "masks move"
    model = loop.model.apply(quantization.disable_observer)
    trained = model(loop.batch())
    loop.end()
    # Without masks, the same outputs: what was rounded in training is what is rounded now.
    assert torch.equal(model(loop.batch()), trained)
    for layer in (model[0], model[2]):
        assert is_nm(layer.weight_fake_quant(layer.weight), "2:4")


@pytest.mark.parametrize(
    ("method", "batch", "accumulate"), [("bi-mask", 4, 1), ("sr-ste", 14, 1), ("bame", 13, 2)]
)
def test_resume_is_bit_exact(tmp_path, method, batch, accumulate):
    """Before and after the 9th of 18 batches, at which rounding begins, also within a window of accumulation."""
    made = []

    def callbacks():
        made.append(QuantizationAwareTraining(0.5))
        return [made[-1], callback(method)]

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    straight, resumed = whole_and_resumed(tmp_path, callbacks, batch, **options)
    assert {each.start for each in made} == {{1: 9, 2: 5}[accumulate]}
    assert_equal_models(straight, resumed)
    assert is_nm(straight.net[6].weight, "2:4")


def test_weights_are_rounded_in_the_last_steps_and_in_validation(tmp_path):
    seen = {"train": [], "val": []}

    class Watched(Net):
        def step(self, batch, stage):
            weight = self.net[6].nm_layers["weight"].forward_weight()
            seen[stage].append(bool((weight - rounded(weight)).abs().max() < 1e-7))
            return super().step(batch, stage)

    look = Inspect(lambda trainer, module: module.net[6].weight.detach().clone())
    callbacks = [QuantizationAwareTraining(4), callback("sr-ste"), look]
    fit(tmp_path, callbacks, new_model(of=Watched), num_sanity_val_steps=0)
    assert seen["train"] == [False] * 8 + [True] * 4
    assert seen["val"] == [False, False, True, True]
    assert not torch.equal(look.seen[-1], rounded(look.seen[-1])), "the latent weight is not"


def test_a_fit_that_fails_leaves_the_weights_as_they_were(tmp_path):
    def callbacks():
        return [QuantizationAwareTraining(1.0), callback("ste")]

    _, complete = fit(tmp_path, callbacks(), max_steps=3)
    broken, fails = new_model(), FailsAt("on_before_zero_grad", 3)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [*callbacks(), fails], broken, max_steps=6)
    for (key, x), y in zip(complete.named_parameters(), broken.parameters(), strict=True):
        assert torch.equal(x, y), key


def manual():
    model = new_model()
    model.automatic_optimization = False
    return model


def compiled():
    model = new_model()
    model.net.compile(backend="eager")
    return model


NO_VALIDATION = {"num_sanity_val_steps": 0}


@pytest.mark.parametrize(
    ("message", "others", "activations", "model", "options"),
    [
        ("masks: callbacks=", lambda qat: [callback(), qat], False, new_model, {}),
        ("masks: callbacks=", lambda qat: [qat], False, new_model, {}),
        ("length is not known|whose length", None, False, new_model, {"max_epochs": -1}),
        (
            "cannot round layer 'net.3': SSTE changes the values",
            lambda qat: [qat, callback(SSTE())],
            False,
            new_model,
            {},
        ),
        (
            "cannot round layer 'net.3': it is torch.float64",
            None,
            False,
            new_model,
            {"precision": "64-true"},
        ),
        ("manual optimization", None, False, manual, {}),
        ("compiled modules", None, True, compiled, {}),
    ],
)
def test_what_cannot_be_rounded_is_refused(tmp_path, message, others, activations, model, options):
    model, qat = model(), QuantizationAwareTraining(activations=activations)
    before = copy.deepcopy(model.state_dict())
    callbacks = [qat, callback("sr-ste")] if others is None else others(qat)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, callbacks, model, **NO_VALIDATION, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("last", [-0.1, 1.5, -3])
def test_a_bad_share_of_the_training_is_refused(last):
    with pytest.raises(ValueError, match="last"):
        QuantizationAwareTraining(last)


def test_a_weight_with_nan_is_refused_and_left_alone():
    model = nn.Linear(8, 8)
    sparsifier = sparse(model)
    model.weight.data[0, :] = torch.nan
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"layer '.*': a weight with NaN"):
        Int8Rounding().begin(sparsifier.layers.values())
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0, equal_nan=True)
