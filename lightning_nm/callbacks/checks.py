"""Trainers that NMSparsityCallback cannot work in."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from lightning_nm.nn.layer import NMLayer


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse a Trainer of another package, and Lightning's own pruning beside ours.

    Raises:
        TypeError: If the Trainer is that of the package ``pytorch_lightning``.
        ValueError: If the Trainer has a ModelPruning callback.

    Example:
        >>> check_trainer(pl.Trainer(logger=False, accelerator="cpu"))
    """
    if not isinstance(trainer, pl.Trainer):
        # The two packages hold the same classes twice, so its hooks would not know ours.
        package = type(trainer).__module__
        fault = f"NMSparsityCallback is made for lightning.pytorch, but this Trainer is {package}'s"
        raise TypeError(f"{fault}: import from `lightning.pytorch`, not from `pytorch_lightning`")
    # By getattr, because the Trainer's annotations lack it.
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "ModelPruning and NMSparsityCallback in one Trainer would mask the same weights twice: remove one"
        )


def refuse_gradient_scaler(trainer: pl.Trainer, layers: Iterable[NMLayer]) -> None:
    """Raise a ``ValueError`` for a gradient scaler beside packed weights whose masks move.

    Their dense gradient is made of inputs and gradients of outputs, which are scaled by a number that is gone once the
    scaler has unscaled the gradients of weights.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        return
    for layer in layers:
        if layer.spec.method.moves_packed(layer):
            raise ValueError(
                f"the precision of this Trainer scales gradients, which storage='packed' does not know while the "
                f"masks of layer '{layer.name}' move: use precision='bf16-mixed' or '32-true', or storage='dense'"
            )
