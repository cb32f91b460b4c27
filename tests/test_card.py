"""What the package is for, done as a user does it: a callback or YAML, a log to read, a checkpoint that needs nothing.

Every test ends in :func:`check_checkpoint`: the weights in the file are N:M, ``lightning-nm verify`` says so, and
a dense model that knows nothing of this package loads them and gives the validation loss of the training.
"""

import json
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
    BAME,
    NMFSDPPrecision,
    NMHalfPrecision,
    NMMixedPrecision,
    NMPrecision,
    NMSparsityCallback,
)
from lightning_nm import functional as nmf
from lightning_nm.cli import main
from tests.support.processes import in_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:BAME adapts once and never again"
)  # eight steps are few

SHORT_NAMES = ["ste", "sr-ste", "asp", "transposable", "bi-mask", "bame"]
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


def fit(folder, nm, **options):
    """A training as in the README, two epochs long; returns the checkpoint and the validation loss."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        callbacks=[nm, ModelCheckpoint(filename="last")],
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


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", SHORT_NAMES)
def test_one_callback(tmp_path, method, estimator):
    checkpoint, val_loss = fit(
        tmp_path, NMSparsityCallback("2:4", method, estimator, show_tables=False)
    )
    check_log(log_of(tmp_path), method, estimator)
    check_checkpoint(checkpoint, val_loss)


def test_blocks_that_evolve(tmp_path):
    nm = NMSparsityCallback("2:4", BAME(stop=0.9, every=2, evidence_rate=0.5), show_tables=False)
    checkpoint, val_loss = fit(tmp_path, nm)
    log = log_of(tmp_path)
    check_log(log, "bame")
    flips = log["nm/flip_rate"]  # of the last adaptation
    assert flips[::2] == flips[1::2], "masks moved at every second step alone"
    assert min(flips) > 0
    check_checkpoint(checkpoint, val_loss)


def test_the_log_tells_what_the_files_hold(tmp_path):
    """Figures computed again from the weights and masks that were saved after every step."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        callbacks=[
            NMSparsityCallback("2:4", "bi-mask", show_tables=False),
            ModelCheckpoint(tmp_path / "steps", "{step}", save_top_k=-1, every_n_train_steps=1),
        ],
        logger=TensorBoardLogger(tmp_path, name="", version=""),
        max_epochs=2,
        log_every_n_steps=1,
        **QUIET,
    )
    trainer.fit(Net(), Blobs())
    log = log_of(tmp_path)
    before = None
    for step in range(STEPS):
        saved = torch.load(tmp_path / "steps" / f"step={step + 1}.ckpt", weights_only=True)
        layers = saved["callbacks"]["NMSparsityCallback"]["layers"].values()
        masks, backward = (
            torch.cat(
                [nmf.unpack_mask(state[name], tuple(state["shape"])).flatten() for state in layers]
            )
            for name in ("forward_mask", "backward_mask")
        )
        weights = torch.cat([saved["state_dict"][name].flatten() for name in MASKED])
        assert torch.equal(weights != 0, masks)
        assert log["nm/overlap"][step] == pytest.approx(
            ((backward & masks).sum() / masks.sum()).item()
        )
        if before is not None:
            assert log["nm/flip_rate"][step] == pytest.approx(
                (before ^ masks).float().mean().item()
            )
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
    path.write_text(text + "".join(f"{line}\n" for line in lines))
    return path


def by_lightning_cli(*words):
    return LightningCLI(args=list(words), save_config_callback=None).trainer


def by_our_command(*words):
    assert main(words) == 0


@pytest.fixture
def _no_words_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["any"])


@pytest.mark.usefixtures("_no_words_of_pytest")
@pytest.mark.parametrize("run", [by_lightning_cli, by_our_command])
@pytest.mark.parametrize("method", ["bi-mask", pytest.param("bame", marks=pytest.mark.slow)])
def test_the_same_in_yaml(tmp_path, method, run):
    nm = NMSparsityCallback("2:4", method, "mvue", show_tables=False)
    by_code, val_loss = fit(tmp_path / "code", nm)
    run("fit", "-c", str(yaml_config(tmp_path, method)))
    by_yaml = tmp_path / "checkpoints" / "last.ckpt"
    expected, found = (
        torch.load(path, weights_only=True)["state_dict"] for path in (by_code, by_yaml)
    )
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert log_of(tmp_path)["nm/flip_rate"] == log_of(tmp_path / "code")["nm/flip_rate"]
    check_log(log_of(tmp_path), method, "mvue")
    check_checkpoint(by_yaml, val_loss)


# ------------------------------------------------------------------------------------------------ precision plugins

PLUGINS = [
    (NMPrecision, "32-true"),
    (NMMixedPrecision, "bf16-mixed"),
    (NMHalfPrecision, "bf16-true"),
]


@pytest.mark.parametrize(("plugin", "precision"), PLUGINS)
@pytest.mark.parametrize(
    ("method", "estimator"),
    [
        ("bi-mask", "mvue"),
        *[
            pytest.param(name, "mvue", marks=pytest.mark.slow)
            for name in SHORT_NAMES
            if name != "bi-mask"
        ],
        *[pytest.param(name, None, marks=pytest.mark.slow) for name in SHORT_NAMES],
    ],
)
def test_precision_plugins(tmp_path, monkeypatch, plugin, precision, method, estimator):
    monkeypatch.setenv("HOME", str(tmp_path))  # where decisions are kept
    nm = NMSparsityCallback("2:4", method, estimator, show_tables=False)
    options = {"kernels": "sparse"} | ({} if plugin is NMPrecision else {"precision": precision})
    checkpoint, val_loss = fit(tmp_path, nm, plugins=[plugin(**options)])
    check_log(log_of(tmp_path), method, estimator)
    # Sparse kernels round otherwise than the dense products of the model without the package.
    check_checkpoint(
        checkpoint, val_loss, precision, tolerance=1e-6 if precision == "32-true" else 1e-2
    )


@pytest.mark.usefixtures("_no_words_of_pytest")
def test_a_precision_plugin_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    nm = NMSparsityCallback("2:4", "transposable", "mvue", show_tables=False)
    by_code, val_loss = fit(
        tmp_path / "code", nm, plugins=[NMMixedPrecision("bf16-mixed", kernels="sparse")]
    )
    plugins = [
        "  plugins:",
        "    - class_path: lightning_nm.NMMixedPrecision",
        "      init_args: {kernels: sparse}",
    ]
    trainer = by_lightning_cli("fit", "-c", str(yaml_config(tmp_path, "transposable", *plugins)))
    assert isinstance(trainer.precision_plugin, NMMixedPrecision)
    by_yaml = tmp_path / "checkpoints" / "last.ckpt"
    expected, found = (
        torch.load(path, weights_only=True)["state_dict"] for path in (by_code, by_yaml)
    )
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    check_checkpoint(by_yaml, val_loss, "bf16-mixed", tolerance=1e-2)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="Lightning's FSDPStrategy, its place, needs a CUDA device"
)
def test_fsdp_precision(tmp_path):
    nm = NMSparsityCallback("2:4", "bi-mask", "mvue", show_tables=False)
    options = {
        "accelerator": "cuda",
        "strategy": "fsdp",
        "plugins": [NMFSDPPrecision("bf16-mixed")],
    }
    checkpoint, val_loss = fit(tmp_path, nm, **options)
    check_checkpoint(checkpoint, val_loss, tolerance=1e-2)


# ------------------------------------------------------------------------------------- processes, and none of ours


def _train_in_two(folder, cases):
    """Every case in turn, in one of two processes."""
    losses = []
    for method, estimator in cases:
        nm = NMSparsityCallback("2:4", method, estimator, show_tables=False)
        path = folder / f"{method}-{estimator}"
        losses.append(fit(path, nm, strategy="nm_ddp", devices=2)[1])
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the processes' own
def test_nm_ddp(tmp_path):
    cases = [(method, estimator) for method in SHORT_NAMES for estimator in (None, "mvue")]
    losses, others = in_processes(2, tmp_path / "processes", _train_in_two, tmp_path, cases)
    assert losses == others
    for (method, estimator), val_loss in zip(cases, losses, strict=True):
        folder = tmp_path / f"{method}-{estimator}"
        log = log_of(folder)
        check_log(log, method, estimator, steps=STEPS // 2)
        sent = log["nm/grad_bytes_ratio"]
        assert all(ratio < 1 for ratio in sent) == (method == "asp")
        assert min(sent) < 1 or method not in ("asp", "bame")
        check_checkpoint(folder / "checkpoints" / "last.ckpt", val_loss, tolerance=1e-6)


@pytest.mark.slow
def test_nm_ddp_by_command(tmp_path):
    """Two processes that Lightning starts by itself."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "lightning_nm",
        "fit",
        "-c",
        yaml_config(tmp_path, "bame"),
    ]
    words = ["--trainer.strategy=nm_ddp", "--trainer.devices=2"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log = log_of(tmp_path)
    check_log(log, "bame", "mvue", steps=STEPS // 2)
    check_checkpoint(tmp_path / "checkpoints" / "last.ckpt", log["val_loss"][-1], tolerance=1e-6)


PLAIN = """
import json, sys
sys.modules["lightning_nm"] = sys.modules["lightning"] = None  # importing them fails
import torch
from torch import nn
losses = []
for path in sys.argv[2:]:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    weights = torch.load(path, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): weight for name, weight in weights.items()})
    with torch.no_grad():
        x, y = torch.load(sys.argv[1])
        losses.append(nn.functional.cross_entropy(net(x), y).item())
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_without_the_package(tmp_path):
    """Plain torch, in a process that can import neither this package nor Lightning."""
    runs = [
        fit(tmp_path / name, NMSparsityCallback("2:4", name, show_tables=False))
        for name in SHORT_NAMES
    ]
    data = Blobs()
    data.setup("fit")
    torch.save(data.data.tensors, tmp_path / "data.pt")
    command = [
        sys.executable,
        "-c",
        PLAIN,
        tmp_path / "data.pt",
        *[checkpoint for checkpoint, _ in runs],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx([val_loss for _, val_loss in runs], rel=1e-6)
