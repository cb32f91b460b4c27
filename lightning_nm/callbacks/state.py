"""What NMSparsityCallback saves in a Trainer's checkpoints, and reads back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_nm.callbacks.monitor import MaskMonitor
from lightning_nm.export.files import check_archive, file_fault
from lightning_nm.functional import unpack_mask
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import dropped, latent_weight
from lightning_nm.nn.weight import parameter_key, plain_name
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.checkpoint import check_schema


class Phase(Enum):
    """Whether masks are installed, and how far the fit is."""

    IDLE = "idle"  # no masks: before the first fit, between fits and during evaluation
    INSTALLED = "installed"  # masks are installed, and no batch of this fit has ended
    TRAINING = "training"  # the first batch has ended
    # An exception ended a fit with sharded weights: masks stay until the next fit starts, when all processes are there.
    INTERRUPTED = "interrupted"


class Origin(Enum):
    """Where the training state of the current fit, or of the next one, comes from."""

    NEW = "new"  # masks and clocks start from scratch
    # An earlier fit or an evaluated checkpoint; dropped if it does not fit the model.
    CARRIED_OVER = "carried over"
    # The checkpoint that the fit resumes; an error if it does not fit the model.
    CHECKPOINT = "checkpoint"


@dataclass
class Lifecycle:
    """The state machine of :class:`~lightning_nm.NMSparsityCallback`.

    The phases of a fit::

        IDLE --> INSTALLED -- end_batch() --> TRAINING -- end(state) --> IDLE
                     |                            |
                     +----------------------------+--> INTERRUPTED -- end(state) --> IDLE

    Checkpoints arrive by :meth:`read_checkpoint` and then :meth:`receive`. Before masks are installed,
    :meth:`begin_fit` and one of :meth:`restored` and :meth:`start_anew` set the :class:`Origin`.

    Example:
        >>> lifecycle = Lifecycle()
        >>> lifecycle.read_checkpoint(resumes=True, global_step=100)
        >>> lifecycle.receive({"clock": 100})
        >>> lifecycle.begin_fit()
        >>> lifecycle.origin
        <Origin.CHECKPOINT: 'checkpoint'>
    """

    phase: Phase = Phase.IDLE
    origin: Origin = Origin.NEW
    batch_open: bool = False
    """Whether a backward pass has run since the last batch ended: its random numbers are used, and the optimizer may
    have stepped, but the masks are not updated yet. Checkpoints save it as ``open``."""
    state: dict[str, Any] | None = None
    """The state that the next fit continues; ``None`` if there is none, or once it is restored."""
    steps_before: int = 0
    """Optimizer steps of the resumed run. If its checkpoint has no state of this callback, it joins the run after
    them."""
    # What a state that arrives by receive() is; set by read_checkpoint(), which Lightning's order puts before it.
    _origin_of_loaded: Origin = Origin.CHECKPOINT

    @property
    def is_new(self) -> bool:
        """Whether the training started in this fit, without a saved state."""
        return self.origin is Origin.NEW

    def read_checkpoint(self, *, resumes: bool, global_step: int) -> None:
        """Note that a Trainer reads a checkpoint, to resume a fit or else to evaluate it; its state may follow."""
        if resumes:
            self._origin_of_loaded = Origin.CHECKPOINT
            self.steps_before = global_step
        else:
            self._origin_of_loaded = Origin.CARRIED_OVER
            self.steps_before = 0

    def receive(self, state: dict[str, Any]) -> None:
        """Keep a loaded state until the next fit starts."""
        self.state = state
        self.origin = self._origin_of_loaded

    def begin_fit(self) -> None:
        """Start a fit; masks are not installed yet."""
        self.batch_open = False
        if self.state is None:
            self.origin = Origin.NEW

    def restored(self, state: dict[str, Any]) -> None:
        """Note that the sparsifier has loaded a saved state; without the key ``open`` it counts as saved in a batch."""
        self.batch_open = state.get("open", True)
        self.state = None

    def give_back(self, state: dict[str, Any] | None) -> bool:
        """Keep a state for the next fit, after this one failed before its first batch; whether it had been restored."""
        was_restored = state is not None and self.state is None and not self.is_new
        if was_restored:
            self.state = state
            self.batch_open = False
        return was_restored

    def start_anew(self) -> None:
        """Drop the saved state, which does not fit the model."""
        self.state = None
        self.origin = Origin.NEW

    def end_batch(self) -> None:
        """End a batch, whose masks are updated."""
        self.phase = Phase.TRAINING
        self.batch_open = False

    def end(self, state: dict[str, Any] | None) -> None:
        """End the fit, whose masks are removed; a second fit continues ``state``, ``None`` if nothing was trained."""
        self.phase = Phase.IDLE
        self.state = state
        self.origin = Origin.NEW if state is None else Origin.CARRIED_OVER


def check_averaging_order(callback: pl.Callback, trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` if a WeightAveraging callback follows this one: its weights could not be masked."""
    # Lightning calls on_save_checkpoint in the callbacks' order: the average must be in the checkpoint already.
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    own_place = callbacks.index(callback)
    for other in callbacks[own_place + 1 :]:
        if isinstance(other, WeightAveraging):
            fault = (
                f"{type(other).__name__} comes after NMSparsityCallback in the Trainer's callbacks"
            )
            raise ValueError(
                f"{fault}, so its checkpoints would hold dense weights: put it before NMSparsityCallback"
            )


@torch.no_grad()
def mask_average(
    weights: dict[str, Tensor], model: nn.Module, layers: Mapping[str, NMLayer]
) -> dict[str, dict[str, Any]]:
    """Mask the state dict of an averaged model, by the layers' methods.

    Returns, for each key of a masked weight, the layer's name and its
    :func:`~lightning_nm.nn.state.dropped` entries.
    """
    names = _layer_names(model, layers)
    averages: dict[str, dict[str, Any]] = {}
    for key, average in weights.items():
        name = names.get(plain_name(key))
        if name is None:
            continue
        layer = layers[name]
        # The average is kept with its pruned entries, as latent values of its own: averaging goes on with them.
        latent = average.detach().to(layer.param.device)
        masked = layer.spec.method.forward_weight(layer, latent).detach()
        averages[key] = {"layer": name, "dropped": dropped(latent, masked, layer.forward_mask)}
        weights[key] = masked.to(average.device)
    return averages


def _layer_names(model: nn.Module, layers: Mapping[str, NMLayer]) -> dict[str, str]:
    """The layer's name of each key of a masked weight; a module that the model holds twice has two keys."""
    # A holder is a module and the name of one of its parameters. Tied weights have several.
    layer_of_holder = {
        holder: name for name, layer in layers.items() for holder in layer.spec.holders
    }
    return {
        # Without the prefixes of wrappers such as torch.compile's.
        plain_name(parameter_key(prefix, parameter)): layer_of_holder[module, parameter]
        for prefix, module in model.named_modules(remove_duplicate=False)
        for parameter in module._parameters
        if (module, parameter) in layer_of_holder
    }


def restore_average(
    checkpoint: dict[str, Any],
    state: Mapping[str, Any],
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
) -> None:
    """Restore the dropped entries of a checkpoint's averaged weights, and let the averaging callbacks load it again.

    ``state`` is the sparsity callback's state in the checkpoint, with the ``averages`` of :func:`mask_average`.
    """
    averages: Mapping[str, dict[str, Any]] = state.get("averages", {})
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    averaging = [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
    if not averages or not averaging or "current_model_state" not in checkpoint:
        return
    # A new dictionary, since others may hold the checkpoint's.
    weights = dict(checkpoint["state_dict"])
    for key, average in averages.items():
        if key not in weights:
            continue  # it was renamed, and the state was not: which layers these are is said where states are checked
        masked = weights[key]
        mask = None  # the method had none at that time, as before its first step
        packed_mask = state["layers"][average["layer"]]["forward_mask"]
        if packed_mask is not None:
            mask = unpack_mask(packed_mask.to(masked.device), tuple(masked.shape))
        weights[key] = latent_weight(masked, average["dropped"], mask)
    checkpoint["state_dict"] = weights
    # These callbacks come first, so they have read the masked averages already.
    for callback in averaging:
        callback.on_load_checkpoint(trainer, pl_module, checkpoint)


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
