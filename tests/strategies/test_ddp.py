"""The strategy by name, by class path and by object; what the callback compares and logs under it."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader

import lightning_nm
from lightning_nm import BAME, NMDDPStrategy, NMSparsifier, NMSparsityCallback
from lightning_nm.callbacks.checks import ProcessConsistency
from lightning_nm.training.ranks import reduce_gradients
from tests.support.outside import ScaledMask
from tests.support.processes import in_processes

OPTIONS = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(pl.LightningModule):
    """Every process draws its own batches."""

    def __init__(self, manual: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.net(torch.randn(4, 32)).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.net(torch.randn(4, 32)).square().mean())
            optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_registered_by_name():
    assert isinstance(StrategyRegistry.get("nm_ddp"), NMDDPStrategy)
    before = StrategyRegistry.available_strategies()
    NMDDPStrategy.register_strategies(StrategyRegistry)
    assert StrategyRegistry.available_strategies() == before
    assert type(StrategyRegistry.get("ddp")) is DDPStrategy
    assert type(pl.Trainer(strategy="nm_ddp", devices=2, **OPTIONS).strategy) is NMDDPStrategy


def test_by_class_path(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text("""
        seed_everything: 0
        trainer:
          accelerator: cpu
          devices: 2
          logger: false
          strategy:
            class_path: lightning_nm.NMDDPStrategy
            init_args: {wire_dtype: bf16, find_unused_parameters: true}
    """)
    monkeypatch.setattr("sys.argv", ["any"])  # pytest's own otherwise
    cli = LightningCLI(Net, run=False, args=["--config", str(config)], save_config_callback=None)
    assert cli.trainer.strategy.comm_hook.dtype is torch.bfloat16
    assert cli.trainer.strategy._ddp_kwargs["find_unused_parameters"] is True
    assert lightning_nm.NMDDPStrategy is type(cli.trainer.strategy)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"wire_dtype": "fp8"}, "wire_dtype='fp8'.*'bf16'"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook.*strategy='ddp'"),
        ({"ddp_comm_state": 1}, "ddp_comm_state"),
    ],
)
def test_refusals(options, match):
    with pytest.raises(ValueError, match=match):
        NMDDPStrategy(**options)


@pytest.mark.parametrize("every", [-1, 0.5])
def test_bad_interval(every):
    with pytest.raises(ValueError, match=f"compare_ranks_every={every}"):
        NMSparsityCallback(compare_ranks_every=every)


@pytest.mark.parametrize(
    ("every", "expected"), [(0, []), (1, [0, 1, 2, 3, 4, 5, "end"]), (3, [0, 3, "end"])]
)
@pytest.mark.parametrize("strategy", [DDPStrategy, NMDDPStrategy])
def test_when_masks_are_compared(monkeypatch, every, expected, strategy):
    sparsifier = NMSparsifier(Net(), "2:4", "asp", skip_first_last=False).attach()
    ranks, compared, now = ProcessConsistency(strategy(), sparsifier, every), [], 0
    name = "lightning_nm.callbacks.checks.compare_ranks"
    monkeypatch.setattr(name, lambda layers: compared.append(now))
    for now in range(6):  # noqa: B007
        for _ in range(2):  # micro-batches
            ranks.before_backward()
        ranks.before_step()
    now = "end"
    ranks.at_end()
    assert compared == (expected if strategy is DDPStrategy else [0, 1, 2, 3, 4, 5, "end"])


def test_nothing_to_keep_together_in_one_process():
    ranks = ProcessConsistency(pl.Trainer(devices=1, **OPTIONS).strategy, NMSparsifier(Net()), 1)
    assert not ranks.is_parallel
    assert ranks.every == 0


class Flip(pl.Callback):
    """One rank's mask moves by itself."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            layer = trainer.callbacks[0].sparsifier.layers["net.2"]
            layer.masks.bits[0] = layer.masks.bits[0].roll(1)


class Logged(pl.Callback):
    """The share of bytes that each step sent, and whether gradients at pruned entries are zero."""

    def __init__(self):
        self.ratios = []

    def on_train_batch_end(self, trainer, *args):
        self.ratios.append(float(trainer.callback_metrics.get("nm/grad_bytes_ratio", -1)))


def fit(strategy, method, manual=False, callbacks=(), pattern="1:16", **options):
    callback = NMSparsityCallback(
        pattern, method, show_tables=False, skip_first_last=False, log_layers=True
    )
    trainer = pl.Trainer(
        devices=2, strategy=strategy, max_epochs=1, log_every_n_steps=1, callbacks=[callback, *callbacks], **OPTIONS,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    model = Net(manual)
    torch.manual_seed(dist.get_rank())
    trainer.fit(model, DataLoader(range(6)))
    return model, callback.state_dict()["layers"]


def disagrees(strategy):
    try:
        fit(strategy, "asp", callbacks=[Flip()])
    except RuntimeError as error:
        return str(error)
    return ""


def many():
    """Everything that takes two processes, at the cost of one start."""
    errors = [disagrees(strategy) for strategy in ("ddp", "nm_ddp")]
    logged = {}
    for name, strategy, method, options in (
        ("asp", "nm_ddp", "asp", {}),
        ("bf16", NMDDPStrategy(wire_dtype="bf16"), "asp", {}),
        ("bame", "nm_ddp", BAME(stop=4, every=2, gradient_every=2), {}),
        ("dense", "nm_ddp", "sr-ste", {}),
        ("plain", "ddp", "asp", {}),
        ("accumulating", "nm_ddp", "asp", {"accumulate_grad_batches": 3}),
        ("manual", "nm_ddp", "asp", {"manual": True}),
        ("autocast", "nm_ddp", "asp", {"precision": "bf16-mixed"}),
    ):
        log = Logged()
        model, layers = fit(strategy, method, callbacks=[log], **options)
        logged[name] = (
            log.ratios,
            model.state_dict(),
            [layer["forward_mask"] for layer in layers.values()],
        )
    with pytest.MonkeyPatch.context() as patch:
        reduced = []
        patch.setattr(
            "lightning_nm.callbacks.checks.reduce_gradients",
            lambda layers: (reduced.append(1), reduce_gradients(layers)),
        )
        _, scaled = fit("ddp", ScaledMask(), pattern="2:4", accumulate_grad_batches=3)
        assert len(reduced) == 2, "once for each real step"
    _, manual = fit("ddp", ScaledMask(), manual=True, pattern="2:4")
    scales = [layer["parameters"]["scale"] for layer in [*scaled.values(), *manual.values()]]
    return errors, logged, scales


@pytest.mark.slow
def test_two_processes(tmp_path):
    (errors, logged, scales), (other_errors, other_logged, other_scales) = in_processes(
        2, tmp_path / "run", many
    )
    assert errors == other_errors
    for error in errors:
        assert "layer 'net.2': ranks [1] differ from rank 0 in masks" in error
        assert "net.0" not in error
    weights, biases = 32 * 64 + 64 * 16, 64 + 16
    sparse = pytest.approx((weights / 16 + biases) / (weights + biases))
    half = pytest.approx((weights / 16 + biases) / (weights + biases) / 2)
    expected = {
        "asp": [sparse] * 6,
        "bf16": [half] * 6,
        "bame": [1, sparse, 1, sparse, sparse, sparse],
        "dense": [1] * 6,
        "plain": [-1] * 6,
        "accumulating": [-1, -1, sparse, sparse, sparse, sparse],
        "manual": [sparse] * 6,
        "autocast": [sparse] * 6,
    }
    for name, (ratios, weights, masks) in logged.items():
        assert ratios == expected[name], name
        _, other_weights, other_masks = other_logged[name]
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights), name
        assert all(
            torch.equal(mask, other) for mask, other in zip(masks, other_masks, strict=True)
        ), name
    assert all(
        scale != 1.5 and scale == other for scale, other in zip(scales, other_scales, strict=True)
    )
