"""CAST: forms of the optimizer, the scale, its end. The golden traces hold its training, step by step."""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import Adam, AdamW

from lightning_nm import CAST, NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.methods.cast import SCALE
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import Data, make_trainer, new_model
from tests.support.method_loop import Loop, one_layer


def loop(method, kind=AdamW, **options):
    return Loop(method, make=lambda p: kind(p, 0.02, (0.8, 0.9), **options), model=one_layer())


FORMS = [
    (Adam, {}),
    (AdamW, {"foreach": True}),
    (AdamW, {"fused": True}),
    (Adam, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_every_form_of_adam_takes_the_same_steps(kind, form):
    method = CAST(decay=0.01, refresh_every=3, end=14)
    plain = loop(method, weight_decay=0, foreach=False).train(18)
    run = loop(method, kind, weight_decay=0, **form).train(18)
    if "amsgrad" in form:
        assert (run.state["max_exp_avg_sq"] >= run.state["exp_avg_sq"]).all()
        assert nmf.is_nm(run.layer.param, "2:4")
        return
    torch.testing.assert_close(run.layer.param, plain.layer.param)
    torch.testing.assert_close(run.layer.parameters[SCALE], plain.layer.parameters[SCALE])


def test_the_model_is_dense_until_the_end_and_says_so():
    run = loop(CAST(decay=0.1, refresh_every=1, end=3))
    for step in range(5):
        is_sparse = step >= 3
        assert (run.sparsifier.violations() == 0) == is_sparse
        assert nmf.is_nm(run.layer.forward_weight(), "2:4") == is_sparse
        gemms = run.layer.gemms()
        kinds = ["n:m", "masked", "outputs"] if is_sparse else ["dense"] * 3
        assert [gemm.kind for gemm in gemms] == kinds
        assert gemms.forward.paper == (0.5 if is_sparse else 1.0)
        weight = run.layer.param.detach().abs()
        lost = 1 - nmf.nm_prune(weight, "2:4").sum() / weight.sum()
        stats = run.sparsifier.stats()
        assert stats["decayed_magnitude"] == pytest.approx(float(lost), abs=1e-12)
        assert (float(lost) > 0.02) != is_sparse
        assert stats["density"] == (0.5 if is_sparse else 1.0)
        run.train(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_and_its_gradient_are_those_of_autograd(kind):
    module, _ = make(kind)
    sparsifier = NMSparsifier(module, "2:4", CAST(end=5), skip_first_last=False).attach()
    for layer in sparsifier.layers.values():
        scale = layer.parameters[SCALE]
        torch.nn.init.uniform_(scale, 1, 2)
        weight = layer.weight.detach().clone().requires_grad_()
        rows = layer.view.rows(weight)
        assert scale.shape == (len(rows), 2)
        factor = scale.detach().clone().requires_grad_()
        parts = [
            torch.einsum("o...,o->o...", part, factor[:, c])
            for c, part in enumerate(rows.chunk(2, 1))
        ]
        wanted = layer.view.unrows(torch.cat(parts, 1))
        torch.testing.assert_close(layer.forward_weight(), wanted.detach())
        grad = torch.randn_like(weight)
        wanted.backward(grad)
        found = layer.spec.method.weight_gradient(layer, layer.weight.detach(), grad.clone())
        torch.testing.assert_close(found, (weight.grad, factor.grad))


def test_a_step_that_fails_is_undone_by_the_next():
    def fail(*_):
        raise KeyboardInterrupt

    weights = []
    for fails in (False, True):
        run = loop(CAST(decay=1.0, end=8), Adam).train(3)
        if fails:
            run.backward()
            handle = run.optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                run.step()
            handle.remove()
            run.sparsifier.step()
        weights.append(run.train(2).layer.param.detach())
    assert torch.equal(*weights)


def test_it_works_without_a_scale_and_with_one_number_a_row():
    run = loop(CAST(scale_groups=0, end=3))
    assert torch.equal(run.layer.forward_weight(), run.layer.param)
    run.train(4)
    assert not run.layer.parameters
    assert nmf.is_nm(run.layer.param, "2:4")
    odd = NMSparsifier(nn.Linear(9, 4), "1:3", CAST(end=3), skip_first_last=False).attach()
    assert odd.layers["weight"].parameters[SCALE].shape == (4, 1), "9 columns have no halves"


class Overflows(pl.Callback):
    """Makes the first gradients infinite, so that the scaler skips their steps."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step < 3:
            pl_module.net[6].weight.grad.fill_(math.inf)


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= 4


@pytest.mark.parametrize(
    ("others", "steps", "is_sparse"),
    [([], 12, True), ([Overflows()], 9, True), ([Stops()], 4, False)],
    ids=["by its default end", "the clock counts no skipped steps", "stopped early"],
)
def test_a_fit_ends_with_an_nm_model_and_checkpoint(tmp_path, others, steps, is_sparse):
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    saves = ModelCheckpoint(str(tmp_path), save_last=True)
    nm = NMSparsityCallback("2:4", "cast", show_tables=False)
    model = new_model(optimizer="adamw")
    options = {"plugins": [scaled], "limit_val_batches": 0}
    make_trainer(tmp_path, [nm, *others, saves], **options).fit(model, Data())
    for layer in nm.state_dict()["layers"].values():
        assert (layer["step"], layer["schedule"]) == (steps, [12])
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for key in ("net.3.weight", "net.6.weight"):
        assert nmf.is_nm(last[key], "2:4", dim=1) == is_sparse
        assert torch.equal(last[key], model.state_dict()[key])


def test_a_plain_loop_that_stops_early_can_finish():
    run = loop(CAST(end=9)).train(4)
    assert run.sparsifier.violations()
    run.sparsifier.finish()
    weight = run.layer.forward_weight()
    assert nmf.is_nm(run.layer.param, "2:4")
    run.sparsifier.finish()
    assert torch.equal(run.layer.forward_weight(), weight)
    assert run.train(2).sparsifier.violations() == 0
