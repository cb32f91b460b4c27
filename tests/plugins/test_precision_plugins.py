"""The precision plugins in a Trainer, from YAML, and in Fabric."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_nm
from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    BAME,
    NMFSDPPrecision,
    NMHalfPrecision,
    NMMixedPrecision,
    NMPrecision,
    NMSparsityCallback,
)
from lightning_nm.kernels import router as router_module
from lightning_nm.kernels.cpu import CpuCsrKernel
from lightning_nm.plugins.precision import DECISIONS
from tests.support.cpu_products import needs_library
from tests.support.fake_kernels import FakeKernel, FakeTimer
from tests.support.lightning_models import assert_equal_models, callback, make_trainer


class Mlp(pl.LightningModule):
    """Linear layers of sizes that fit 2:4 kernels."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 4)
        )

    def forward(self, x):
        x = x.to(self.net[0].weight.dtype)
        return checkpoint(self.net, x, use_reentrant=False) if self.checkpointed else self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Blobs(pl.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 4, (64,), generator=generator)
        self.data = TensorDataset(torch.randn(64, 32, generator=generator) + y[:, None] * 0.3, y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=32)


def mlp(**options):
    pl.seed_everything(0, verbose=False)
    return Mlp(**options)


def plugin(cls=NMPrecision, *args, kernels="sparse", **options):
    return cls(
        *args, kernels=kernels, backends=[SimulatedSparseKernel()], decisions=None, **options
    )


def sparse_callback(**options):
    return callback(
        "bi-mask", grad_estimator="mvue", skip_first_last=False, include="net.[02]", **options
    )


def fit(tmp_path, plugins, callbacks=None, model=None, **options):
    trainer = make_trainer(
        tmp_path,
        [sparse_callback()] if callbacks is None else callbacks,
        plugins=plugins,
        **options,
    )
    model = model or mlp()
    trainer.fit(model, Blobs())
    return trainer, model


def tabled(tables):
    return NMSparsityCallback("2:4", skip_first_last=False, include="net.[02]", show_tables=tables)


def kernels_of(router):
    return {(used.product.layer, used.product.key.gemm): used.kernel for used in router.used()}


ALL = {
    (layer, gemm): "simulated"
    for layer, gemm in [
        (f"net.{k}", gemm) for k in (0, 2) for gemm in ("forward", "dgrad", "wgrad")
    ]
    if (layer, gemm) != ("net.0", "dgrad")  # data need no gradient
}


def test_the_plugin_changes_the_kernels_and_not_the_training(tmp_path):
    stock, expected = fit(tmp_path, [], model=mlp().double())  # no rounding moves a mask or a draw
    routed = plugin()
    trainer, model = fit(tmp_path, [routed], model=mlp().double())
    assert kernels_of(routed.router) == ALL
    metrics = dict(trainer.callback_metrics)
    assert metrics.pop("nm/sparse_gemm_share") > 0
    torch.testing.assert_close(metrics, dict(stock.callback_metrics))
    for (key, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=key)
    assert router_module.active() is None


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
    assert repr(trainer.precision) == repr(precision or "32-true")


def test_fsdp_precision_is_what_its_strategy_takes():
    made = NMFSDPPrecision("bf16-mixed", kernels="sparse")
    assert isinstance(made, FSDPPrecision)
    assert not made.keeps_packs
    assert made.mixed_precision_config.param_dtype == torch.bfloat16


def test_micro_batches_share_packs(tmp_path):
    made = plugin()
    fit(tmp_path, [made], accumulate_grad_batches=2)
    assert made.router.reuse == 2
    assert made.router.tuner.reuse == 2
    assert not made.router._packs, "packs are let go after the fit"


@pytest.mark.parametrize("accumulated", [1, 2])
def test_averaged_weights_in_validation_do_not_reach_the_training(accumulated, tmp_path):
    results = []
    for plugins in ([], [plugin()]):
        callbacks = [EMAWeightAveraging(decay=0.5), sparse_callback()]
        options = {"accumulate_grad_batches": accumulated, "max_epochs": 4}
        trainer, model = fit(
            tmp_path, plugins, callbacks, model=mlp().double(), **options
        )  # no rounding moves a mask
        results.append((float(trainer.callback_metrics["val_loss"]), model.state_dict()))
    (loss, weights), (other_loss, other_weights) = results
    assert loss == pytest.approx(other_loss, rel=1e-4)
    for key in weights:
        torch.testing.assert_close(weights[key], other_weights[key], rtol=1e-4, atol=1e-6)


def test_a_trainer_without_any_callback_is_told_of_it(tmp_path):
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(max_steps=1, logger=False, accelerator="cpu", plugins=[plugin()], **quiet)
    assert not trainer.callbacks
    with pytest.raises(RuntimeError, match="Mlp has none: add NMSparsityCallback"):
        trainer.fit(mlp(), Blobs())


def test_a_plugin_without_masked_layers_is_an_error_before_training(tmp_path):
    model = mlp()
    before = copy.deepcopy(model)
    with pytest.raises(
        RuntimeError, match=r"NMPrecision .* Mlp has none: add NMSparsityCallback .* own Precision"
    ):
        fit(tmp_path, [plugin()], callbacks=[pl.Callback()], model=model)
    assert_equal_models(model, before)
    trainer = make_trainer(tmp_path, plugins=[plugin()])
    trainer.validate(model, Blobs(), verbose=False)  # a trained model holds its zeros itself


def test_bad_settings_are_refused_when_the_plugin_is_made():
    with pytest.raises(ValueError, match="kernels='fastest' is unknown: use 'auto'"):
        NMPrecision(kernels="fastest")
    with pytest.raises(ValueError, match="precision='bf16' is unknown"):
        NMHalfPrecision("bf16")
    with pytest.raises(ValueError, match="bf16-mixed"):
        NMMixedPrecision("bf16")
    with pytest.raises(ValueError, match="two kernels are named 'simulated'"):
        NMPrecision(backends=[SimulatedSparseKernel(), SimulatedSparseKernel()])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_auto_measures_the_first_batch_before_its_backward(checkpointed, tmp_path):
    fast = FakeKernel()
    made = NMPrecision(backends=[fast], decisions=str(tmp_path / "kernels.json"))
    made.router.timer = timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    fit(tmp_path, [made], model=mlp(checkpointed=checkpointed))
    calls = {
        (
            used.product.layer,
            used.product.key.gemm,
            used.product.key.columns,
            used.kernel,
        ): used.calls
        for used in made.router.used()
    }
    assert calls["net.0", "forward", 16, "reference"] == 1
    assert calls["net.0", "forward", 16, "fast"] == (15 if checkpointed else 7), (
        "computed again in backward"
    )
    assert calls["net.2", "dgrad", 16, "fast"] == 8
    assert timer.timed
    assert (tmp_path / "kernels.json").exists()

    again = NMPrecision(backends=[fast], decisions=str(tmp_path / "kernels.json"))
    again.router.timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    fit(tmp_path, [again])
    assert not again.router.timer.timed


def test_a_second_fit_is_counted_anew(tmp_path):
    made = plugin()
    trainer, model = fit(tmp_path, [made], max_epochs=1)
    calls = [used.calls for used in made.router.used()]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, Blobs())
    assert [used.calls for used in made.router.used()] == calls


def test_resuming_is_exact(tmp_path):
    whole, model = fit(tmp_path, [plugin()], max_epochs=2)
    first, _ = fit(tmp_path, [plugin()], max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make_trainer(tmp_path, [sparse_callback()], plugins=[plugin()])
    other = mlp()
    resumed.fit(other, Blobs(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert_equal_models(other, model)
    assert resumed.global_step == whole.global_step


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)


@pytest.mark.parametrize(
    ("first", "second"), [(NMMixedPrecision, MixedPrecision), (MixedPrecision, NMMixedPrecision)]
)
def test_the_scaler_goes_on_when_the_plugin_joins_or_leaves(first, second, tmp_path):
    def made(cls):
        return (
            plugin(cls, "16-mixed", "cpu", scaler())
            if cls is NMMixedPrecision
            else cls("16-mixed", "cpu", scaler())
        )

    trainer, _ = fit(tmp_path, [made(first)], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    scale = trainer.precision_plugin.scaler.get_scale()
    assert scale > 256
    other = made(second)
    resumed = make_trainer(tmp_path, [sparse_callback()], plugins=[other], max_epochs=1)
    resumed.fit(mlp(), Blobs(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert other.scaler.get_scale() == scale


def test_an_interrupted_backward_leaves_no_router_active(tmp_path):
    class Fails(Mlp):
        def on_after_backward(self):
            raise RuntimeError("out of luck")

    pl.seed_everything(0, verbose=False)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [plugin()], model=Fails())
    assert router_module.active() is None


def test_reference_routes_nothing(tmp_path):
    made = plugin(kernels="reference")
    fit(tmp_path, [made])
    assert not made.router.used()


def test_plugins_can_be_sent_to_other_processes(tmp_path):
    made = plugin(NMMixedPrecision)
    fit(tmp_path, [made], max_epochs=1)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        fit(tmp_path, [other], max_epochs=1)
        assert kernels_of(other.router) == ALL


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
      init_args: {{pattern: 2:4, grad_estimator: mvue, include: "net.[02]", show_tables: false}}
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
    monkeypatch.setattr("sys.argv", ["train", "fit", "-c", str(tmp_path / "config.yaml")])
    cli = LightningCLI(Mlp, Blobs, save_config_callback=None)
    router = cli.trainer.precision_plugin.router
    assert kernels_of(router) == ALL
    assert {used.product.key.dtype for used in router.used()} == {dtype}


def test_defaults_name_no_machine():
    assert DECISIONS == "~/.cache/lightning_nm/kernels.json"
    made = lightning_nm.NMMixedPrecision()
    assert made.precision == "bf16-mixed"
    assert made.router.file.is_absolute()
    assert not made.router.file.is_relative_to("~")


class Manual(Mlp):
    """Three updates in a step, as generators and discriminators make."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(3):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    def validation_step(self, batch, batch_idx):
        pass


def test_every_update_of_a_step_is_routed(tmp_path):
    made = plugin()
    pl.seed_everything(0, verbose=False)
    fit(tmp_path, [made], model=Manual(), max_epochs=1)
    calls = {(used.product.layer, used.product.key.gemm): used.calls for used in made.router.used()}
    assert set(calls.values()) == {12}
    assert set(calls) == set(ALL)


@pytest.mark.parametrize("as_callback", [False, True])
def test_searches_of_lightning_take_the_masks_away(as_callback, tmp_path):
    class Tuned(Mlp):
        def __init__(self):
            super().__init__()
            self.lr = 0.05
            self.batch_size = 16

    pl.seed_everything(0, verbose=False)
    callbacks = [
        sparse_callback(),
        *([LearningRateFinder(num_training_steps=3)] if as_callback else []),
    ]
    made = plugin()
    trainer = make_trainer(tmp_path, callbacks, plugins=[made], max_epochs=1)
    model, data = Tuned(), Blobs()
    if not as_callback:
        tuner = Tuner(trainer)
        tuner.lr_find(model, data, num_training=3)
        tuner.scale_batch_size(model, datamodule=data, steps_per_trial=1, max_trials=1)
        data.batch_size = 16
    trainer.fit(model, data)
    assert kernels_of(made.router) == ALL


def test_where_no_product_is_faster_sparse_the_router_goes_inactive(tmp_path, capsys):
    kernel = FakeKernel()
    made = NMPrecision(backends=[kernel], decisions=None)
    made.router.timer = FakeTimer([kernel], dense=1.0, fast=(9.0, 0.0))
    fit(tmp_path, [made], [tabled(True)], Mlp(checkpointed=True), max_epochs=2)
    assert made.router.all_dense
    calls = {used.product.key.gemm: used.calls for used in made.router.used()}
    assert set(calls.values()) <= {1, 2, 4}, "one step, whose forward is computed twice"
    assert "later calls are not counted" in " ".join(capsys.readouterr().out.split())


class OnlyWgrad(CpuCsrKernel):
    """A kernel of weight gradients at kept entries, and the timer that finds it ten times as fast as dense ones."""

    def __init__(self):
        self.called = ""

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
    """The first batch of `bame` has dense ones, and no other product is faster sparse here."""
    kernel = OnlyWgrad()
    made = NMPrecision(backends=[kernel], decisions=None)
    made.router.timer = kernel
    method = BAME(start=0, stop=5, every=every, gradient_every=every)
    masks = NMSparsityCallback("2:4", method, skip_first_last=False, include="net.[02]")
    fit(tmp_path, [made], [masks], max_epochs=3)  # of 4 steps
    calls = {
        (used.product.layer, used.product.key.gemm): used.calls
        for used in made.router.used()
        if used.kernel == kernel.name
    }
    assert calls == {("net.0", "wgrad"): 12 - dense_steps, ("net.2", "wgrad"): 12 - dense_steps}
    assert not made.router.all_dense


# ----------------------------------------------------------------------------------------------------- Fabric
