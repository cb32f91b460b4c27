"""What NMSparsityCallback keeps between fits and checkpoints, and masks for weight averages of other callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_nm.callbacks.fit_checks import callbacks_of
from lightning_nm.functional import unpack_mask
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import State, dropped, latent_weight
from lightning_nm.nn.weight import plain_name


class Origin(Enum):
    """Where the training state of the current fit, or of the next one, comes from."""

    NEW = "new"  # masks and clocks start from scratch
    # An earlier fit or an evaluated checkpoint; dropped if it does not fit the model.
    CARRIED_OVER = "carried over"
    # The checkpoint that the fit resumes; an error if it does not fit the model.
    CHECKPOINT = "checkpoint"


@dataclass
class Lifecycle:
    """State of :class:`~lightning_nm.NMSparsityCallback` across fits: what the next one continues, and the phase.

    A state arrives by :meth:`receive`, from a checkpoint, or by :meth:`end`, from the fit before. :meth:`begin_fit`
    starts a fit; its masks then come from the state, which is :meth:`restored`, or are new.

    Example:
        >>> lifecycle = Lifecycle(resumes=True)
        >>> lifecycle.receive({"clock": 100})
        >>> lifecycle.begin_fit()
        >>> lifecycle.origin
        <Origin.CHECKPOINT: 'checkpoint'>
    """

    origin: Origin = Origin.NEW
    state: State | None = None
    """The state that the next fit continues; ``None`` if there is none, or once it is restored."""
    resumes: bool = True
    """Whether the checkpoint that is read resumes a fit; else it is evaluated."""
    steps_before: int = 0
    """Optimizer steps of the checkpoint that a fit resumes."""
    in_first_batch: bool = True
    """Whether no batch of this fit has ended."""
    batch_open: bool = False
    """Whether a backward pass has run since the last batch ended: its random numbers are used, and the optimizer may
    have stepped, but the masks are not updated yet. Checkpoints save it as ``open``."""
    interrupted: bool = False
    """Whether an exception ended a fit with sharded weights, whose masks stay until the next fit starts: all processes
    are there then."""

    @property
    def is_new(self) -> bool:
        """Whether the training started in this fit, without a saved state."""
        return self.origin is Origin.NEW

    @property
    def joined_at(self) -> int:
        """The Trainer's optimizer steps before the first one of a new training: those of a resumed dense one."""
        return self.steps_before if self.is_new else 0

    def receive(self, state: State) -> None:
        """Keep the state of a checkpoint until the next fit starts."""
        self.state = state
        self.origin = Origin.CHECKPOINT if self.resumes else Origin.CARRIED_OVER

    def begin_fit(self) -> None:
        """Start a fit; masks are not installed yet."""
        self.in_first_batch = True
        self.batch_open = self.interrupted = False
        if self.state is None:
            self.origin = Origin.NEW

    def restored(self) -> None:
        """Note that the sparsifier has loaded the state; without the key ``open`` it counts as saved in a batch."""
        assert self.state is not None
        self.batch_open = self.state.get("open", True)
        self.state = None

    def end(self, state: State | None) -> None:
        """Keep what the next fit continues; ``None`` if nothing was trained."""
        self.state = state
        self.origin = Origin.NEW if state is None else Origin.CARRIED_OVER


@torch.no_grad()
def mask_average(
    weights: dict[str, Tensor], model: nn.Module, layers: Mapping[str, NMLayer]
) -> dict[str, State]:
    """Mask the state dict of an averaged model, by the layers' methods.

    Returns, for each key of a masked weight, the layer's name and its
    :func:`~lightning_nm.nn.state.dropped` entries.
    """
    layer_of_weight = {layer.param: layer for layer in layers.values()}
    layer_of_key = {
        # Without the prefixes of wrappers such as torch.compile's.
        plain_name(key): layer_of_weight[weight]
        # Tied weights have several keys, and so have those of a module that the model holds twice.
        for key, weight in model.named_parameters(remove_duplicate=False)
        if weight in layer_of_weight
    }
    averages: dict[str, State] = {}
    for key, average in weights.items():
        layer = layer_of_key.get(plain_name(key))
        if layer is None:
            continue
        # The average is kept with its pruned entries, as latent values of its own: averaging goes on with them.
        latent = average.detach().to(layer.param.device)
        masked = layer.spec.method.forward_weight(layer, latent).detach()
        averages[key] = {
            "layer": layer.name,
            "dropped": dropped(latent, masked, layer.forward_mask),
        }
        weights[key] = masked.to(average.device)
    return averages


def restore_average(
    checkpoint: State,
    state: State,
    trainer: Trainer,
    pl_module: LightningModule,
) -> None:
    """Restore the dropped entries of a checkpoint's averaged weights, and let the averaging callbacks load it again.

    ``state`` is the sparsity callback's state in the checkpoint, with the ``averages`` of :func:`mask_average`.
    """
    averages: Mapping[str, State] = state.get("averages", {})
    averaging = callbacks_of(trainer, WeightAveraging)
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
