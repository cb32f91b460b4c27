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
    """The part of :class:`~lightning_nm.NMSparsityCallback` that saves and loads its state.

    Lightning saves a checkpoint in this order: the model's ``state_dict()``, in which masked layers put their sparse
    weights, then :meth:`state_dict` of every callback, then :meth:`on_save_checkpoint` of every callback. It loads one
    with :meth:`on_load_checkpoint` of every callback and then :meth:`load_state_dict`.
    """

    name: str | None
    sparsifier: NMSparsifier | None
    _lifecycle: Lifecycle
    _monitor: MaskMonitor | None
    _finished_layers: dict[str, NMLayer]
    _read_checkpoint = False  # whether this call of the Trainer has read one

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint: the class's name, and that of the callback."""
        # Without the arguments, which Lightning's own keys have: a resume with others finds the state and is refused.
        class_name = type(self).__qualname__
        return f"{class_name}[{self.name}]" if self.name else class_name

    def refuse_unreadable(self, trainer: pl.Trainer, exception: BaseException) -> None:
        """Say why a checkpoint cannot be read, where torch's own error does not name the file.

        Raises:
            ValueError: Naming the file, and what is wrong with it; only if the checkpoint was not read.
        """
        # A KeyboardInterrupt is no fault of the file.
        if self._read_checkpoint or not isinstance(exception, Exception):
            return
        path = trainer.ckpt_path
        # Distributed checkpoints are folders.
        if path and Path(path).is_file():
            fault = file_fault(Path(path))
            if fault:
                raise ValueError(f"cannot read '{path}': {fault}") from exception

    def state_dict(self) -> dict[str, Any]:
        """Return the sparsifier's state, during fit and after it."""
        # After fit, trainer.save_checkpoint() saves what the fit left.
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
        # Under this key WeightAveraging saves the model itself: "state_dict" then holds the average, which is dense.
        is_averaged = "current_model_state" in checkpoint
        if is_averaged and layers:
            averages = mask_average(checkpoint["state_dict"], pl_module, layers)
            # A new dictionary: the callback's own state may be the one that its next fit continues.
            states = checkpoint["callbacks"]
            states[self.state_key] = {**states[self.state_key], "averages": averages}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a damaged file; restore averaged weights when a fit resumes."""
        # Lightning calls this also if the checkpoint has no state of this callback, unlike load_state_dict.
        self._read_checkpoint = True
        path = trainer.ckpt_path
        # This reads the whole file, so one process does it for all.
        if trainer.is_global_zero and path and Path(path).is_file():
            check_archive(path)
        resumes = trainer.state.fn == "fit"
        self._lifecycle.read_checkpoint(
            resumes=resumes, global_step=checkpoint.get("global_step", 0)
        )
        if resumes:
            state = checkpoint.get("callbacks", {}).get(self.state_key, {})
            restore_average(checkpoint, state, trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore now if masks are installed, else when fit starts; which comes first depends on the strategy."""
        if not state_dict:
            return
        check_schema(state_dict)
        # With FSDP and ModelParallelStrategy, Lightning reads checkpoints after on_fit_start.
        if self.sparsifier is not None:
            self.sparsifier.load_state_dict(state_dict)
            self._lifecycle.restored(state_dict)
        else:
            self._lifecycle.receive(state_dict)
