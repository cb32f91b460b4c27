"""The precision plugins in a Trainer and from YAML."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.tuner import Tuner

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import BAME, NMFSDPPrecision, NMHalfPrecision, NMMixedPrecision, NMPrecision
from lightning_nm.kernels import router as router_module
from lightning_nm.kernels.cpu import CpuCsrKernel
from lightning_nm.plugins.precision import DECISIONS
from tests.support.cpu_products import needs_library
from tests.support.fake_kernels import FakeKernel, FakeTimer
from tests.support.lightning_models import FailsAt, assert_equal_models, make_trainer
from tests.support.mlp import (
    Blobs,
    Mlp,
    calls_of,
    fit,
    kernels_of,
    mlp,
    plugin,
    sparse_callback,
)

ALL = {
    ("net.0", "forward"): "simulated",
    ("net.0", "wgrad"): "simulated",  # data need no gradient
    **{("net.2", gemm): "simulated" for gemm in ("forward", "dgrad", "wgrad")},
}


@pytest.mark.parametrize(
    ("averages", "accumulated"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)
def test_the_plugin_changes_the_kernels_and_not_the_training(tmp_path, averages, accumulated):
    """Nor what averaged weights validate, which do not reach the training."""
    runs, routed = [], plugin()
    for plugins in ([], [routed]):
        first = [EMAWeightAveraging(decay=0.5)] if averages else []
        model = mlp().double()  # no rounding moves a mask or a draw
        options = {"accumulate_grad_batches": accumulated, "max_epochs": 4}
        trainer, _ = fit(tmp_path, plugins, [*first, sparse_callback()], model, **options)
        runs.append((dict(trainer.callback_metrics), model.state_dict()))
    assert kernels_of(routed.router) == ALL
    assert runs[1][0].pop("nm/sparse_gemm_share") > 0
    torch.testing.assert_close(runs[1], runs[0])
    assert router_module.active() is None
    # Micro-batches share packs, which are let go after the fit.
    assert routed.router.reuse == routed.router.tuner.reuse == accumulated
    assert not routed.router._packs


@pytest.mark.parametrize(
    ("cls", "base", "precision", "dtype"),
    [
        (NMPrecision, Precision, None, torch.float32),
        (NMMixedPrecision, MixedPrecision, "bf16-mixed", torch.bfloat16),
        (NMHalfPrecision, HalfPrecision, "bf16-true", torch.bfloat16),
        (NMHalfPrecision, HalfPrecision, "16-true", torch.float16),
    ],
)
def test_every_precision(cls, base, precision, dtype, tmp_path):
    made = plugin(cls) if precision is None else plugin(cls, precision)
    assert isinstance(made, base)
    trainer, _ = fit(tmp_path, [made])
    assert {used.product.key.dtype for used in made.router.used()} == {dtype}
    assert kernels_of(made.router) == ALL
    assert trainer.callback_metrics["val_loss"] < 2
    assert trainer.precision == (precision or "32-true")


def test_fsdp_precision_is_what_its_strategy_takes():
    made = NMFSDPPrecision("bf16-mixed", kernels="sparse")
    assert isinstance(made, FSDPPrecision)
    assert not made.keeps_packs
    assert made.mixed_precision_config.param_dtype == torch.bfloat16


YAML = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_nm.{cls}
      init_args:
        {init}
        kernels: sparse
        decisions: null
        backends:
          - class_path: benchmarks.gpu.simulated.SimulatedSparseKernel
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args: {{pattern: 2:4, method: bi-mask, grad_estimator: mvue, include: "net.[02]", show_tables: false}}
"""


@pytest.mark.parametrize(
    ("cls", "init", "dtype"),
    [
        ("NMPrecision", "", torch.float32),
        ("NMMixedPrecision", "precision: bf16-mixed", torch.bfloat16),
        ("NMHalfPrecision", "precision: bf16-true", torch.bfloat16),
    ],
)
def test_from_yaml(cls, init, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(YAML.format(cls=cls, init=init))
    monkeypatch.setattr("sys.argv", ["train", "fit", "-c", "config.yaml"])
    router = LightningCLI(Mlp, Blobs, save_config_callback=None).trainer.precision_plugin.router
    assert kernels_of(router) == ALL
    assert {used.product.key.dtype for used in router.used()} == {dtype}


@pytest.mark.parametrize("callbacks", [[], [pl.Callback()]])
def test_a_plugin_without_masked_layers_is_an_error_before_training(tmp_path, callbacks):
    model = mlp()
    before = copy.deepcopy(model)
    with pytest.raises(
        RuntimeError, match=r"NMPrecision .* Mlp has none: add NMSparsityCallback .* own Precision"
    ):
        fit(tmp_path, [plugin()], callbacks, model)
    assert_equal_models(model, before)
    trainer = make_trainer(tmp_path, callbacks, plugins=[plugin()])
    trainer.validate(model, Blobs(), verbose=False)  # a trained model holds its zeros itself


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NMPrecision(kernels="fastest"), "kernels='fastest' is unknown: use 'auto'"),
        (lambda: NMHalfPrecision("bf16"), "precision='bf16' is unknown"),
        (lambda: NMMixedPrecision("bf16"), "bf16-mixed"),
        (
            lambda: NMPrecision(backends=[SimulatedSparseKernel(), SimulatedSparseKernel()]),
            "two kernels are named 'simulated'",
        ),
    ],
)
def test_bad_settings_are_refused_when_the_plugin_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_defaults_name_no_machine():
    assert DECISIONS == "~/.cache/lightning_nm/kernels.json"
    made = NMMixedPrecision()
    assert made.precision == "bf16-mixed"
    assert made.router.file.is_absolute()
    assert not made.router.file.is_relative_to("~")


def timed(decisions=None, dense=9.0, sparse=1.0):
    """A plugin with a kernel, and what they are found to take."""
    kernel = FakeKernel()
    made = NMPrecision(backends=[kernel], decisions=decisions)
    made.router.timer = FakeTimer([kernel], dense=dense, fast=(sparse, 0.0))
    return made


@pytest.mark.parametrize("checkpointed", [False, True])
def test_auto_measures_the_first_batch_before_its_backward(checkpointed, tmp_path):
    file = tmp_path / "kernels.json"
    made = timed(str(file))
    fit(tmp_path, [made], model=mlp(checkpointed=checkpointed))
    calls = {
        (used.product.layer, used.product.key.gemm, used.kernel): used.calls
        for used in made.router.used()
        if used.product.key.columns == 16
    }
    assert calls["net.0", "forward", "reference"] == 1
    # Checkpointed layers are computed again in backward.
    assert calls["net.0", "forward", "fast"] == (15 if checkpointed else 7)
    assert calls["net.2", "dgrad", "fast"] == 8
    assert made.router.timer.timed
    assert file.exists()

    again = timed(str(file))
    fit(tmp_path, [again])
    assert not again.router.timer.timed


def test_where_no_product_is_faster_sparse_the_router_goes_inactive(tmp_path, capsys):
    made, masks = timed(dense=1.0, sparse=9.0), sparse_callback(grad_estimator=None)
    masks.show_tables = True
    fit(tmp_path, [made], [masks], mlp(checkpointed=True))
    assert made.router.all_dense
    assert set(calls_of(made.router).values()) <= {1, 2, 4}, "one step, computed twice"
    assert "later calls are not counted" in " ".join(capsys.readouterr().out.split())


def test_reference_routes_nothing(tmp_path):
    made = plugin(kernels="reference")
    fit(tmp_path, [made])
    assert not made.router.used()


def test_a_second_fit_is_counted_anew(tmp_path):
    made = plugin()
    trainer, model = fit(tmp_path, [made], max_epochs=1)
    calls = calls_of(made.router)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, Blobs())
    assert calls_of(made.router) == calls


def test_resuming_is_exact(tmp_path):
    path = tmp_path / "half.ckpt"
    _, model = fit(tmp_path, [plugin()])
    fit(tmp_path, [plugin()], max_epochs=1)[0].save_checkpoint(path)
    _, other = fit(tmp_path, [plugin()], ckpt_path=path)
    assert_equal_models(other, model)


@pytest.mark.parametrize("joins", [True, False])
def test_the_scaler_goes_on_when_the_plugin_joins_or_leaves(joins, tmp_path):
    def made(routes):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        args = ("16-mixed", "cpu", scaler)
        return plugin(NMMixedPrecision, *args) if routes else MixedPrecision(*args)

    path, other = tmp_path / "half.ckpt", made(joins)
    trainer, _ = fit(tmp_path, [made(not joins)], max_epochs=1)
    trainer.save_checkpoint(path)
    scale = trainer.precision_plugin.scaler.get_scale()
    assert scale > 256
    fit(tmp_path, [other], max_epochs=1, ckpt_path=path)
    assert other.scaler.get_scale() == scale


def test_an_interrupted_backward_leaves_no_router_active(tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [plugin()], [sparse_callback(), FailsAt("on_after_backward")])
    assert router_module.active() is None


def test_plugins_can_be_sent_to_other_processes(tmp_path):
    made = plugin(NMMixedPrecision)
    fit(tmp_path, [made], max_epochs=1)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        fit(tmp_path, [other], max_epochs=1)
        assert kernels_of(other.router) == ALL


class Manual(Mlp):
    """Three updates in a step, as generators and discriminators make."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(3):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


def test_every_update_of_a_step_is_routed(tmp_path):
    made = plugin()
    fit(tmp_path, [made], model=mlp(Manual), max_epochs=1, limit_val_batches=0)
    assert calls_of(made.router) == dict.fromkeys(ALL, 12)


class Tuned(Mlp):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.05, 16


@pytest.mark.parametrize("as_callback", [False, True])
def test_searches_of_lightning_take_the_masks_away(as_callback, tmp_path):
    made, model, data = plugin(), mlp(Tuned), Blobs()
    finder = [LearningRateFinder(num_training_steps=3)] if as_callback else []
    options = {"plugins": [made], "max_epochs": 1}
    trainer = make_trainer(tmp_path, [sparse_callback(), *finder], **options)
    if not as_callback:
        tuner = Tuner(trainer)
        tuner.lr_find(model, data, num_training=3)
        tuner.scale_batch_size(model, datamodule=data, steps_per_trial=1, max_trials=1)
        data.batch_size = 16
    trainer.fit(model, data)
    assert kernels_of(made.router) == ALL


class OnlyWgrad(CpuCsrKernel):
    """A kernel of weight gradients at kept entries, and the timer that finds it ten times as fast as dense ones."""

    called = ""

    def supports(self, key):
        return "only weight gradients" if key.gemm != "wgrad" else super().supports(key)

    def layout(self, matrix):
        self.called = "layout"
        return super().layout(matrix)

    def sampled(self, layout, grad, x):
        self.called = "sampled"
        return super().sampled(layout, grad, x)

    def time(self, function, device):
        self.called = ""
        function()
        return {"layout": 0.0, "sampled": 1e-3, "": 1e-2}[self.called]


@needs_library
@pytest.mark.parametrize(("every", "dense_steps"), [(1, 5), (2, 3), (3, 2)])
def test_weight_gradients_that_become_sparse_later_are_routed(tmp_path, every, dense_steps):
    """The first batch of `bame` has dense ones, and no other GEMM is faster sparse here."""
    kernel = OnlyWgrad()
    made = NMPrecision(backends=[kernel], decisions=None)
    made.router.timer = kernel
    method = BAME(start=0, stop=5, every=every, gradient_every=every)
    fit(tmp_path, [made], [sparse_callback(method, grad_estimator=None)], max_epochs=3)
    routed = [used for used in made.router.used() if used.kernel == kernel.name]
    calls = {(used.product.layer, used.product.key.gemm): used.calls for used in routed}
    assert calls == {(name, "wgrad"): 12 - dense_steps for name in ("net.0", "net.2")}
    assert not made.router.all_dense
