"""What the package is for, done as a user does it: a callback or YAML, a log to read, a checkpoint that needs nothing.

Every test ends in :func:`check_checkpoint`: the weights in the file are N:M, ``lightning-nm verify`` says so, and
a dense model that knows nothing of this package loads them and gives the validation loss of the training.
"""

import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    NMMixedPrecision,
    NMSparsityCallback,
)
from lightning_nm import functional as nmf
from lightning_nm.cli import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:BAME adapts once and never again"
)  # eight steps are few

MASKED = ["net.0.weight", "net.2.weight"]
STEPS = 8


class Net(pl.LightningModule):
    """Two layers to mask, and the last one, which stays dense."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Blobs(pl.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 4, (128,), generator=generator)
        self.data = TensorDataset(torch.randn(128, 16, generator=generator) + y[:, None], y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=32)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=64)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(folder, *callbacks, **options):
    """A training as in the README, two epochs long; returns the checkpoint and the validation loss."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        callbacks=[*callbacks, ModelCheckpoint(filename="last")],
        logger=TensorBoardLogger(folder, name="", version=""),
        max_epochs=2,
        log_every_n_steps=1,
        **{**QUIET, **options},
    )
    trainer.fit(Net(), Blobs())
    return folder / "checkpoints" / "last.ckpt", trainer.callback_metrics["val_loss"].item()


def log_of(folder):
    """The curves in a folder's event files: values by tag, one for each step."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check_log(log, method, estimator=None, steps=STEPS):
    """What each method's curves must look like, whatever the numbers."""
    assert log["nm/density"] == [0.5] * steps
    flips, kept, overlap = log["nm/flip_rate"], log["nm/kept_magnitude"], log["nm/overlap"]
    assert len(flips) == len(kept) == len(overlap) == steps
    assert all(0 <= rate <= 1 for rate in flips)
    if method in ("ste", "sr-ste", "bi-mask"):
        assert max(flips) > 0
    if method == "asp":
        assert max(flips) == 0
    if method in ("asp", "bame"):
        assert kept == [1.0] * steps, "no value lives on behind the mask"
    else:
        assert all(0.5 < share < 1 for share in kept)
    if method == "bi-mask":
        assert all(0.5 < share < 1 for share in overlap)
    else:
        assert overlap == [1.0] * steps, "one mask for both directions"
    assert all(0 < ratio < 1 for ratio in log.get("nm/train_flops_ratio", []))
    if estimator is None:
        assert "nm/grad_snr" not in log
    else:
        assert all(0.1 < ratio < 100 for ratio in log["nm/grad_snr"])
        assert all(0.1 < density <= 0.5 for density in log["nm/grad_density"])


def check_checkpoint(path, val_loss, precision="32-true", tolerance=0.0):
    """N:M exactly, verified, and the same model without the package."""
    weights = torch.load(path, weights_only=True)["state_dict"]
    for name, weight in weights.items():
        if name in MASKED:
            nonzeros = (weight.reshape(-1, 4) != 0).sum(1)  # blocks of four along the input
            assert nonzeros.max() == 2, name
            assert nonzeros.float().mean() > 1.9, name  # what BAME regrew last is still zero
        elif weight.dim() == 2:
            assert weight.count_nonzero() == weight.numel(), name
    assert weights.keys() == Net().state_dict().keys()
    assert main(["verify", str(path)]) == 0

    dense = Net.load_from_checkpoint(path)
    assert [type(layer) for layer in dense.net] == [nn.Linear, nn.ReLU] * 2 + [nn.Linear]
    trainer = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False, precision=precision)
    (figures,) = trainer.validate(dense, Blobs(), verbose=False)
    assert figures["val_loss"] == pytest.approx(val_loss, rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("method", "estimator"),
    [
        ("ste", None),
        ("sr-ste", "mvue"),
        ("asp", "mvue"),
        ("transposable", "mvue"),
        ("bi-mask", None),
        ("bame", None),
    ],
)
def test_one_callback(tmp_path, method, estimator):
    checkpoint, val_loss = fit(
        tmp_path, NMSparsityCallback("2:4", method, estimator, show_tables=False)
    )
    check_log(log_of(tmp_path), method, estimator)
    check_checkpoint(checkpoint, val_loss)


def test_the_log_tells_what_the_files_hold(tmp_path):
    """Figures computed again from the weights and masks that were saved after every step."""
    saves = ModelCheckpoint(tmp_path / "steps", "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(tmp_path, NMSparsityCallback("2:4", "bi-mask", show_tables=False), saves)
    log, before = log_of(tmp_path), None
    for step in range(STEPS):
        saved = torch.load(tmp_path / "steps" / f"step={step + 1}.ckpt", weights_only=True)
        layers = saved["callbacks"]["NMSparsityCallback"]["layers"].values()
        masks, backward = (
            torch.cat(
                [nmf.unpack_mask(each[name], tuple(each["shape"])).flatten() for each in layers]
            )
            for name in ("forward_mask", "backward_mask")
        )
        weights = torch.cat([saved["state_dict"][name].flatten() for name in MASKED])
        assert torch.equal(weights != 0, masks)
        overlap = ((backward & masks).sum() / masks.sum()).item()
        assert log["nm/overlap"][step] == pytest.approx(overlap)
        if before is not None:
            flipped = (before ^ masks).float().mean().item()
            assert log["nm/flip_rate"][step] == pytest.approx(flipped)
        before = masks


# ------------------------------------------------------------------------------------------------------------ YAML

YAML = """
seed_everything: 0
model: {class_path: tests.test_card.Net}
data: {class_path: tests.test_card.Blobs}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: FOLDER, name: "", version: ""}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: last}
    - class_path: lightning_nm.NMSparsityCallback
      init_args:
        pattern: 2:4
        method: METHOD
        grad_estimator: mvue
        show_tables: false
"""


def yaml_config(folder, method, *lines):
    path = folder / "config.yaml"
    text = YAML.replace("FOLDER", str(folder)).replace("METHOD", method)
    path.write_text(text + "".join(f"  {line}\n" for line in lines))
    return path


def by_lightning_cli(*words):
    LightningCLI(args=list(words), save_config_callback=None)


def by_our_command(*words):
    assert main(words) == 0


@pytest.mark.parametrize("run", [by_lightning_cli, by_our_command])
def test_the_same_in_yaml(tmp_path, monkeypatch, run):
    """With a precision plugin, whose kernels round otherwise than the GEMMs of the model without the package."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where decisions are kept
    nm = NMSparsityCallback("2:4", "bi-mask", "mvue", show_tables=False)
    plugin = NMMixedPrecision("bf16-mixed", kernels="sparse")
    by_code, val_loss = fit(tmp_path / "code", nm, plugins=[plugin])
    plugins = "plugins: [{class_path: lightning_nm.NMMixedPrecision, init_args: {kernels: sparse}}]"
    run("fit", "-c", str(yaml_config(tmp_path, "bi-mask", plugins)))
    by_yaml = tmp_path / "checkpoints" / "last.ckpt"
    expected, found = (
        torch.load(path, weights_only=True)["state_dict"] for path in (by_code, by_yaml)
    )
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    log = log_of(tmp_path)
    assert log["nm/flip_rate"] == log_of(tmp_path / "code")["nm/flip_rate"]
    check_log(log, "bi-mask", "mvue")
    check_checkpoint(by_yaml, val_loss, "bf16-mixed", tolerance=1e-2)


# ------------------------------------------------------------------------------------------------ precision plugins


# ------------------------------------------------------------------------------------- processes, and none of ours


@pytest.mark.slow
def test_nm_ddp_by_command(tmp_path):
    """Two processes that Lightning starts by itself."""
    config = yaml_config(tmp_path, "bame")
    command = [sys.executable, "-W", "ignore", "-m", "lightning_nm", "fit", "-c", config]
    words = ["--trainer.strategy=nm_ddp", "--trainer.devices=2"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    log = log_of(tmp_path)
    check_log(log, "bame", "mvue", steps=STEPS // 2)
    assert min(log["nm/grad_bytes_ratio"]) < 1
    check_checkpoint(tmp_path / "checkpoints" / "last.ckpt", log["val_loss"][-1], tolerance=1e-6)


PLAIN = """
import sys
sys.modules["lightning_nm"] = sys.modules["lightning"] = None  # importing them fails
import torch
from torch import nn
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
weights = torch.load(sys.argv[2], weights_only=True)["state_dict"]
net.load_state_dict({name.removeprefix("net."): weight for name, weight in weights.items()})
x, y = torch.load(sys.argv[1])
print(nn.functional.cross_entropy(net(x), y).item())
"""


@pytest.mark.slow
def test_without_the_package(tmp_path):
    """Plain torch, in a process that can import neither this package nor Lightning."""
    nm = NMSparsityCallback("2:4", "bi-mask", show_tables=False)
    checkpoint, val_loss = fit(tmp_path, nm)
    data = Blobs()
    data.setup("fit")
    torch.save(data.data.tensors, tmp_path / "data.pt")
    command = [sys.executable, "-c", PLAIN, tmp_path / "data.pt", checkpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(val_loss, rel=1e-6)
