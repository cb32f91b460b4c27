"""What NMSparsityCallback saves in a Trainer's checkpoints, and reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_nm.callbacks.averages import mask_average, restore_average
from lightning_nm.callbacks.lifecycle import Lifecycle
from lightning_nm.callbacks.monitor import MaskMonitor
from lightning_nm.export.files import check_archive, file_fault
from lightning_nm.nn.layer import NMLayer
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.checkpoint import check_schema


class SavedSparsity(pl.Callback):
    """The part of :class:`~lightning_nm.NMSparsityCallback` that checkpoints hold."""

    name: str | None
    sparsifier: NMSparsifier | None
    _lifecycle: Lifecycle
    _monitor: MaskMonitor | None
    _finished_layers: dict[str, NMLayer]
    _read_checkpoint = False  # in this call of the Trainer

    @property
    def state_key(self) -> str:
        """The class name without arguments, so that a resume with other arguments finds the state and is refused."""
        class_name = type(self).__qualname__
        return f"{class_name}[{self.name}]" if self.name else class_name

    def refuse_unreadable(self, trainer: pl.Trainer, exception: BaseException) -> None:
        """Say why a checkpoint cannot be read, where torch's own error does not name the file.

        Raises:
            ValueError: Naming the file, and what is wrong with it; only if the checkpoint was not read.
        """
        path = trainer.ckpt_path
        if (
            isinstance(exception, Exception)
            and not self._read_checkpoint
            and path
            and Path(path).is_file()
        ):
            fault = file_fault(Path(path))
            if fault:
                raise ValueError(f"cannot read '{path}': {fault}") from exception

    def state_dict(self) -> dict[str, Any]:
        """Return the sparsifier's state, during fit and after it."""
        if self.sparsifier is None:
            return self._lifecycle.state or {}
        state = self.sparsifier.state_dict()
        state["open"] = self._lifecycle.batch_open
        if self._monitor is not None:
            history = self._monitor.history(self.sparsifier)
            if history:
                state["history"] = history
        return state

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mask the averaged weights that WeightAveraging saves, and save the dropped entries."""
        layers = self._finished_layers if self.sparsifier is None else self.sparsifier.layers
        is_averaged = (
            "current_model_state" in checkpoint
        )  # the key under which WeightAveraging saves the model itself
        if is_averaged and layers:
            averages = mask_average(checkpoint["state_dict"], pl_module, layers)
            states = checkpoint["callbacks"]
            states[self.state_key] = {**states[self.state_key], "averages": averages}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a damaged file, and restore averaged weights when a fit resumes."""
        self._read_checkpoint = True
        path = trainer.ckpt_path
        if trainer.is_global_zero and path and Path(path).is_file():
            check_archive(path)
        resumes = trainer.state.fn == "fit"
        self._lifecycle.read_checkpoint(
            resumes=resumes, global_step=checkpoint.get("global_step", 0)
        )
        if resumes:
            states = checkpoint.get("callbacks", {})
            restore_average(checkpoint, states.get(self.state_key, {}), trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore now if masks are installed, else when fit starts; which comes first depends on the strategy."""
        if not state_dict:
            return
        check_schema(state_dict)
        if self.sparsifier is not None:
            self.sparsifier.load_state_dict(state_dict)
            self._lifecycle.restored(state_dict)
        else:
            self._lifecycle.receive(state_dict)
