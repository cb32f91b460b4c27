"""The strategy by name, by class path and by object; what the callback compares and logs under it."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader

from lightning_nm import BAME, NMDDPStrategy, NMSparsifier
from lightning_nm.callbacks.fit_checks import ProcessConsistency
from lightning_nm.training.ranks import reduce_gradients
from tests.support.lightning_models import callback, make_trainer
from tests.support.outside import ScaledMask
from tests.support.parallel import fit
from tests.support.processes import in_processes


class Net(pl.LightningModule):
    """Every process draws its own batches."""

    def __init__(self, manual: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        def loss():
            return self.net(torch.randn(4, 32)).square().mean()

        if self.automatic_optimization:
            return loss()
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_registered_by_name(tmp_path):
    before = StrategyRegistry.available_strategies()
    NMDDPStrategy.register_strategies(StrategyRegistry)
    assert StrategyRegistry.available_strategies() == before
    assert type(StrategyRegistry.get("ddp")) is DDPStrategy
    assert type(make_trainer(tmp_path, strategy="nm_ddp", devices=2).strategy) is NMDDPStrategy


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
    strategy = cli.trainer.strategy
    assert type(strategy) is NMDDPStrategy
    assert strategy.comm_hook.dtype is torch.bfloat16
    assert strategy._ddp_kwargs["find_unused_parameters"] is True


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


EVERY_STEP = [0, 1, 2, 3, 4, 5, "end"]


@pytest.mark.parametrize(
    ("strategy", "every", "expected"),
    [
        (DDPStrategy, 0, []),
        (DDPStrategy, 1, EVERY_STEP),
        (DDPStrategy, 3, [0, 3, "end"]),
        (NMDDPStrategy, 0, EVERY_STEP),
        (NMDDPStrategy, 3, EVERY_STEP),
        (lambda: make_trainer(".").strategy, 1, []),  # one process
    ],
)
def test_when_masks_are_compared(monkeypatch, strategy, every, expected):
    sparsifier = NMSparsifier(Net(), "2:4", "asp", skip_first_last=False).attach()
    ranks, compared, now = ProcessConsistency(strategy(), sparsifier, every), [], 0
    name = "lightning_nm.callbacks.fit_checks.compare_ranks"
    monkeypatch.setattr(name, lambda layers: compared.append(now))
    for now in range(6):  # noqa: B007
        for _ in range(2):  # micro-batches
            ranks.before_backward()
        ranks.before_step()
    now = "end"
    ranks.at_end()
    assert compared == expected


class Flip(pl.Callback):
    """One rank's mask moves by itself."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            layer = trainer.callbacks[0].sparsifier.layers["net.2"]
            layer.masks.bits[0] = layer.masks.bits[0].roll(1)


class Logged(pl.Callback):
    """The fraction of bytes that each step sent."""

    def __init__(self):
        self.ratios = []

    def on_train_batch_end(self, trainer, *args):
        self.ratios.append(float(trainer.callback_metrics.get("nm/grad_bytes_ratio", -1)))


def run(strategy, method, manual=False, pattern="1:16", other=None, **options):
    """What was logged, the weights, the layers' states."""
    nm = callback(method, pattern, skip_first_last=False, log_layers=True)
    log, model = other or Logged(), Net(manual)
    torch.manual_seed(dist.get_rank())
    fit([nm, log], model, 2, strategy, DataLoader(range(6)), log_every_n_steps=1, **options)
    layers = nm.state_dict()["layers"].values()
    masks = [layer["forward_mask"] for layer in layers]
    own = [layer["parameters"] for layer in layers]
    return getattr(log, "ratios", None), model.state_dict(), masks, own


def disagrees(strategy):
    with pytest.raises(RuntimeError) as raised:
        run(strategy, "asp", other=Flip())
    return str(raised.value)


weights, biases = 32 * 64 + 64 * 16, 64 + 16
SPARSE = (weights / 16 + biases) / (weights + biases)
ACCUMULATES = {"accumulate_grad_batches": 3}
SCALED = {"method": ScaledMask(), "pattern": "2:4", "strategy": "ddp"}
RUNS = {
    "asp": ({}, [SPARSE] * 6),
    "bf16": ({"strategy": NMDDPStrategy(wire_dtype="bf16")}, [SPARSE / 2] * 6),
    "bame": (
        {"method": BAME(stop=4, every=2, gradient_every=2)},
        [1, SPARSE, 1, SPARSE, SPARSE, SPARSE],
    ),
    "dense": ({"method": "sr-ste"}, [1] * 6),
    "plain": ({"strategy": "ddp"}, [-1] * 6),
    "accumulating": (ACCUMULATES, [-1] * 2 + [SPARSE] * 4),
    "manual": ({"manual": True}, [SPARSE] * 6),
    "autocast": ({"precision": "bf16-mixed"}, [SPARSE] * 6),
    "scaled": (SCALED | ACCUMULATES, [-1] * 6),
    "scaled-manual": (SCALED | {"manual": True}, [-1] * 6),
}


def many():
    """Everything that takes two processes, at the cost of one start."""
    reduced, found = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_nm.callbacks.fit_checks.reduce_gradients",
            lambda layers: (reduced.append(1), reduce_gradients(layers)),
        )
        for name, (options, _) in RUNS.items():
            reduced.clear()
            found[name] = run(**{"strategy": "nm_ddp", "method": "asp"} | options)
            assert name != "scaled" or len(reduced) == 2, "once for each real step"
    return [disagrees(strategy) for strategy in ("ddp", "nm_ddp")], found


@pytest.mark.slow
def test_two_processes(tmp_path):
    (errors, found), (other_errors, others) = in_processes(2, tmp_path / "run", many)
    assert errors == other_errors
    for error in errors:
        assert "layer 'net.2': ranks [1] differ from rank 0 in masks" in error
        assert "net.0" not in error
    for name, (_, expected) in RUNS.items():
        assert found[name][0] == pytest.approx(expected), name
        torch.testing.assert_close(found[name], others[name], rtol=0, atol=0)
    for name in ("scaled", "scaled-manual"):
        assert all(own["scale"] != 1.5 for own in found[name][3]), "it is trained"
