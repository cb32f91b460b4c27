"""QuantizationAwareTraining: the rounding is that of the export, zeros stay, and runs resume exactly."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import (
    SSTE,
    NMSparsifier,
    NMSparsityCallback,
    QuantizationAwareTraining,
    pack,
)
from lightning_nm.demo import ExactResume
from lightning_nm.functional import (
    dequantise_weight,
    fake_quantise_tokens,
    is_nm,
    quantise_weight,
)
from lightning_nm.training.int8_rounding import Int8Rounding
from tests.support.cpu_products import needs_library
from tests.support.experts import Experts, TransposedExperts
from tests.support.kinds import make
from tests.support.lightning_models import (
    Data,
    Inspect,
    SaveAt,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def sparse(model, pattern="2:4", method="sr-ste"):
    return NMSparsifier(model, pattern, method, skip_first_last=False).attach()


def exported(sparsifier):
    """A copy of the sparse model without masks."""
    twin = copy.deepcopy(sparsifier)
    twin.bake()
    twin.detach()
    return twin.model.eval()


@pytest.mark.parametrize(
    "kind",
    ["linear", "conv1d", "conv2d-groups", "hugging-face-conv1d", "attention", "two-weights"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_is_that_of_the_export(kind, dtype):
    model, x = make(kind, dtype)
    sparsifier = sparse(model)
    before = {key: value.clone() for key, value in model.named_parameters()}
    with Int8Rounding().within(sparsifier.layers.values()), torch.no_grad():
        found = model(x)
        for layer in sparsifier.layers.values():
            assert torch.equal(layer.forward_weight() != 0, layer.forward_mask)
            latent = torch.where(layer.forward_mask, 0, layer.param)
            key = next(name for name, p in model.named_parameters() if p is layer.param)
            assert torch.equal(latent, torch.where(layer.forward_mask, 0, before[key]))
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key])
    if kind == "two-weights":  # its adapter is none of packed layers in a copy
        return
    packed = pack(exported(sparsifier), "2:4", dtype="int8", kernels="reference")
    tolerance = {"rtol": 2.0**-6, "atol": 2.0**-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(packed(x), found, **tolerance)


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_has_scales_of_its_own(kind):
    torch.manual_seed(0)
    model = kind()
    sparsifier = sparse(model)
    x, experts = torch.randn(7, 16), torch.arange(7) % 4
    with Int8Rounding().within(sparsifier.layers.values()), torch.no_grad():
        found = model(x, experts)
    packed = pack(exported(sparsifier), "2:4", dtype="int8", kernels="reference")
    torch.testing.assert_close(packed(x, experts), found)


@needs_library
def test_activations_are_rounded_as_the_kernel_rounds_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    sparsifier, x = sparse(model), torch.randn(5, 64)
    x[:, 0] = 4
    rounding = Int8Rounding(activations=True)
    with rounding.within(sparsifier.layers.values()), torch.no_grad():
        first = model[0](x)
    packed = pack(exported(sparsifier), dtype="int8", kernels="sparse")
    assert packed[0].weight.form == "cpu-int8"
    torch.testing.assert_close(packed[0](x), first)
    with torch.no_grad():
        assert not torch.equal(model[0](x), first), "the hooks are gone"


def test_the_gradient_of_rounding_is_that_of_its_input():
    x = torch.randn(3, 8, requires_grad=True)
    grad = torch.randn(3, 8)
    (found,) = torch.autograd.grad(fake_quantise_tokens(x), x, grad)
    assert torch.equal(found, grad)
    model = nn.Linear(8, 8, bias=False)
    sparsifier, data = sparse(model, method="ste"), torch.randn(4, 8)
    with Int8Rounding().within(sparsifier.layers.values()):
        y = model(data)
        y.square().sum().backward()
    expected = (2 * y.detach()).t() @ data  # at the rounded weight
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize(
    ("method", "batch", "accumulate"), [("bi-mask", 4, 1), ("sr-ste", 14, 1), ("bame", 13, 2)]
)
def test_resume_is_bit_exact(tmp_path, method, batch, accumulate):
    """Before and after the 9th of 18 batches, at which rounding begins, also within a window of accumulation."""
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}

    def callbacks():
        return [QuantizationAwareTraining(0.5), callback(method), ExactResume()]

    straight, save = new_model(), SaveAt(tmp_path / "mid.ckpt", batch)
    make_trainer(tmp_path, [*callbacks(), save], **options).fit(straight, Data())
    resumed, own = new_model(7), callbacks()
    trainer = make_trainer(tmp_path, own, **options)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "mid.ckpt")
    assert own[0].start == {1: 9, 2: 5}[accumulate]
    assert_equal_models(straight, resumed)
    assert is_nm(straight.net[6].weight, "2:4")


def test_weights_are_rounded_in_the_last_steps_and_in_validation(tmp_path):
    seen = {"train": [], "val": []}

    class Watched(type(new_model())):
        def step(self, batch, stage):
            layer = self.net[6].nm_layers["weight"]
            weight = layer.forward_weight()
            rounded = dequantise_weight(*quantise_weight(weight), torch.float32)
            seen[stage].append(bool((weight - rounded).abs().max() < 1e-7))
            return super().step(batch, stage)

    pl.seed_everything(0, verbose=False)
    values = []
    look = Inspect(lambda trainer, module: values.append(module.net[6].weight.detach().clone()))
    callbacks = [QuantizationAwareTraining(4), callback("sr-ste"), look]
    make_trainer(tmp_path, callbacks, max_epochs=2, num_sanity_val_steps=0).fit(Watched(), Data())
    assert seen["train"] == [False] * 8 + [True] * 4
    assert seen["val"] == [False, False, True, True]
    kept = torch.where(values[-1] == 0, 0, values[-1])
    assert not torch.equal(kept, dequantise_weight(*quantise_weight(kept), torch.float32))


def test_a_fit_that_fails_leaves_the_weights_as_they_were(tmp_path):
    class Fails(type(new_model())):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    def trained(kind, **options):
        pl.seed_everything(0, verbose=False)
        model = kind()
        trainer = make_trainer(
            tmp_path, [QuantizationAwareTraining(1.0), callback("ste")], **options
        )
        return model, trainer

    complete, trainer = trained(type(new_model()), max_steps=3)
    trainer.fit(complete, Data())
    broken, trainer = trained(Fails, max_steps=6)
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(broken, Data())
    for (key, x), y in zip(
        complete.named_parameters(), dict(broken.named_parameters()).values(), strict=True
    ):
        assert torch.equal(x, y), key


def test_what_is_refused(tmp_path):
    def refused(message, callbacks, model=None, **options):
        model = model or new_model()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, callbacks, **options).fit(model, Data())
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])

    qat = QuantizationAwareTraining
    no_validation = {"num_sanity_val_steps": 0}
    refused("masks: callbacks=", [callback(), qat()])
    refused("masks: callbacks=", [qat()])
    refused(
        "length is not known|whose length",
        [qat(), callback("sr-ste")],
        max_epochs=-1,
        **no_validation,
    )
    refused(
        "cannot round layer 'net.3': SSTE changes the values",
        [qat(), NMSparsityCallback("2:4", SSTE(), show_tables=False)],
        **no_validation,
    )
    refused(
        "cannot round layer 'net.3': it is torch.float64",
        [qat(), callback("sr-ste")],
        precision="64-true",
        **no_validation,
    )
    manual = new_model()
    manual.automatic_optimization = False
    refused("manual optimization", [qat(), callback("sr-ste")], manual)
    compiled = new_model()
    compiled.net.compile(backend="eager")
    refused("compiled modules", [qat(activations=True), callback("sr-ste")], compiled)
    for last in (-0.1, 1.5, -3):
        with pytest.raises(ValueError, match="last"):
            qat(last)
    diverged = nn.Linear(8, 8)
    sparsifier = sparse(diverged)
    with torch.no_grad():
        diverged.weight[0, :] = torch.nan
    weight = diverged.weight.detach().clone()
    with pytest.raises(ValueError, match=r"layer '.*': a weight with NaN"):
        Int8Rounding().begin(sparsifier.layers.values())
    torch.testing.assert_close(diverged.weight.detach(), weight, rtol=0, atol=0, equal_nan=True)
