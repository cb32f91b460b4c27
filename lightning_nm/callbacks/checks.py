"""Trainers that NMSparsityCallback cannot work in."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning


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
