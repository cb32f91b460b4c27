"""Lightning's ModelPruning, asked the questions of :mod:`benchmarks.peers.probes` within a Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.probes import dense_products, new_model, new_optimizer, returns
from benchmarks.peers.tools import weight
from lightning_nm.functional import is_nm

EPOCHS = 4
INPUTS = torch.eye(32)


class Net(pl.LightningModule):
    """The probes' model."""

    def __init__(self, net: nn.Sequential | None = None) -> None:
        super().__init__()
        self.net = net or new_model()

    def forward(self, x: Tensor) -> Tensor:
        """Call the model."""
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Imitate the inputs."""
        out = self(batch[0])
        return (out.flatten(1) - batch[0].flatten(1)[:, : out[0].numel()]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use the probes' optimizer."""
        return new_optimizer(self)


def pruning(**options: Any) -> ModelPruning:
    """Prune half of the weights once, at the end of the first epoch, without resetting the others."""
    settings: dict[str, Any] = {
        "parameter_names": ["weight"],
        "use_lottery_ticket_hypothesis": False,
    }
    settings["apply_pruning"] = lambda epoch: epoch == 0
    return ModelPruning("l1_unstructured", **settings | options)


class _Watch(pl.Callback):
    """Saves after the second epoch; keeps the nonzeros after each epoch, and what the last epoch multiplies by."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.outputs = torch.empty(0)
        self.dense = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = weight(pl_module.net[0])  # type: ignore[index,arg-type]
        self.seen.append(found != 0)
        self.weights.append(found.clone())
        linear = found.dim() == 2
        if trainer.current_epoch == 1 and not self.path.exists():
            if linear:
                with torch.no_grad():
                    self.outputs = pl_module(INPUTS)
            trainer.save_checkpoint(self.path)
        if trainer.current_epoch == 2 and linear:
            self.dense = dense_products(pl_module, tuple(found.shape))


def fit(
    folder: Path, callback: ModelPruning, net: Net | None = None, ckpt_path: Path | None = None
) -> tuple[Net, _Watch]:
    """Train four epochs; the callback that saves comes after the one that prunes."""
    net = net or Net()
    shape = (16, 32) if isinstance(net.net[0], nn.Linear) else (16, 32, 4, 4)
    data = DataLoader(
        TensorDataset(torch.randn(shape, generator=torch.Generator().manual_seed(0))), batch_size=8
    )
    watch = _Watch(folder / "saved.ckpt")
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    quiet |= {
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(folder),
    }
    trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[callback, watch], **quiet)
    trainer.fit(net, data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return net, watch


def _patterned(folder: Path, pattern: str, net: Net | None = None) -> bool:
    trained, _ = fit(folder, pruning(amount=0.875 if pattern == "1:8" else 0.5), net)
    return is_nm(weight(trained.net[0]), pattern, dim=1)


def masks_move(folder: Path) -> bool:
    """A pruned weight comes back: the callback prunes the fraction again of what is left at every epoch end."""
    _, watch = fit(folder, pruning(amount=0.3, apply_pruning=True))
    return returns(watch.seen)


def optimizer_before(folder: Path) -> bool:
    """The Trainer made its optimizer before anything was pruned: its steps still change the weights."""
    _, watch = fit(folder, pruning())
    return not torch.equal(watch.weights[1], watch.weights[2])


def loads_without(folder: Path) -> bool:
    """The checkpoint in the middle of training loads into the plain model, and gives the same outputs."""
    _, watch = fit(folder, pruning())
    plain = Net(new_model(1))
    try:
        plain.load_state_dict(torch.load(watch.path, weights_only=True)["state_dict"])
    except RuntimeError:
        return False
    return torch.equal(plain(INPUTS), watch.outputs)


def resumes(folder: Path) -> bool:
    """``ckpt_path`` continues as the run that was not stopped would have."""
    expected, watch = fit(folder, pruning())
    resumed, _ = fit(folder, pruning(), Net(new_model(1)), watch.path)
    return torch.equal(weight(resumed.net[0]), weight(expected.net[0]))


def sparse_products(folder: Path) -> bool:
    """During training forward multiplies by the kept weights alone."""
    _, watch = fit(folder, pruning())
    return not watch.dense


def _convolution() -> Net:
    torch.manual_seed(0)
    return Net(nn.Sequential(nn.Conv2d(32, 32, 3)))


QUESTIONS: dict[str, Callable[[Path], bool]] = {
    "two-of-four": lambda folder: _patterned(folder, "2:4"),
    "other-patterns": lambda folder: _patterned(folder, "1:8"),
    "convolutions": lambda folder: _patterned(folder, "2:4", _convolution()),
    "masks-move": masks_move,
    "optimizer-before": optimizer_before,
    "loads-without": loads_without,
    "resumes": resumes,
    "both-directions": lambda folder: is_nm(weight(fit(folder, pruning())[0].net[0]), "2:4", dim=0),
    "sparse-products": sparse_products,
}


def answers() -> dict[str, bool]:
    """The answer to every question."""
    found = {}
    for name, question in QUESTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = question(Path(folder))
    return found
