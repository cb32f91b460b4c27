"""One dense forward pass of a model: the multiply-adds of every weight."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_nm.callbacks import MaskMonitor, NMSparsityCallback
from lightning_nm.callbacks.training_length import planned_steps
from lightning_nm.training.macs import MacsCounter, forward_macs


@dataclass(frozen=True)
class Forward:
    """What a forward pass without masks showed, as :func:`forward_of` returns it.

    Example:
        >>> forward_of(nn.Linear(8, 4), torch.zeros(2, 8))
        Forward(macs={'weight': 64}, inputs=('float32 [2, 8]',))
    """

    macs: Mapping[str, int]
    """Multiply-adds by layer name, as :class:`~lightning_nm.training.macs.MacsCounter` counts them."""
    inputs: tuple[str, ...]
    """Dtype and shape of each tensor that went in."""


@dataclass(frozen=True)
class Plan:
    """What a Trainer knows of a training before its first step.

    Example:
        >>> Plan(steps=100, optimizers=()).steps
        100
    """

    steps: int | None
    optimizers: tuple[Optimizer, ...]


class _Enough(Exception):
    """Ends the training; an exception, so that the hooks for the end of an epoch or a fit do not run."""


def forward_of(model: nn.Module, inputs: Any) -> Forward:
    """Run ``model(inputs)`` in evaluation mode, on the meta device if all of its operators work there.

    Args:
        model: The model; it is not changed.
        inputs: A tensor, a tuple of positional arguments or a dictionary of keyword arguments.

    Raises:
        ValueError: If the model does not take the inputs; the message quotes the model's error.
    """
    try:
        return _run(_on_meta(model), _moved(inputs, torch.device("meta")))
    except Exception:
        # Some operators read values, and some tensors are no buffers, so that they have no copy on
        # the meta device. With memory such a model may work; if not, the error below is the clearer one.
        pass
    first_parameter = next(model.parameters(), None)
    device = torch.device("cpu") if first_parameter is None else first_parameter.device
    inputs = _moved(inputs, device)
    try:
        return _run(model, inputs)
    except Exception as error:
        given = ", ".join(_shapes(inputs))
        raise ValueError(
            f"{type(model).__name__} does not take an input of {given}: {error}"
        ) from error


def _moved(inputs: Any, device: torch.device) -> Any:
    """Inputs whose tensors are on a device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, inputs)


def first_forward(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> tuple[Forward, Plan]:
    """Run the training step of the first batch up to its backward pass, without masks.

    Raises:
        ValueError: If no batch was trained.
    """
    watcher = _fit(trainer, model, datamodule, _Watch(runs=True))
    assert watcher.plan is not None
    assert watcher.counter is not None
    return Forward(watcher.counter.macs, watcher.inputs), watcher.plan


def plan_of(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> Plan:
    """Begin a training and end it before the first batch.

    Raises:
        ValueError: If there is no batch.
    """
    watcher = _fit(trainer, model, datamodule, _Watch(runs=False))
    assert watcher.plan is not None
    return watcher.plan


def _fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    watcher: _Watch,
) -> _Watch:
    """Train until the watcher ends it; callbacks that mask are left out meanwhile."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    # A dense forward pass is counted; what masks save is known without running it.
    masking = (NMSparsityCallback, MaskMonitor)
    others = [callback for callback in callbacks if not isinstance(callback, masking)]
    trainer.callbacks = [*others, watcher]  # type: ignore[attr-defined]  # missing in its annotations
    try:
        trainer.fit(model, datamodule=datamodule)
    except _Enough:
        pass
    finally:
        watcher.close()  # an error may have ended the fit with hooks in the model
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
    if watcher.plan is None:
        raise ValueError(
            "the training ended before its first batch: see its max_steps, limit_train_batches and data"
        )
    return watcher


class _Watch(pl.Callback):
    """Watches the first training step, and ends the training before the backward pass; without `runs`, before it."""

    def __init__(self, *, runs: bool) -> None:
        self.runs = runs
        self.counter: MacsCounter | None = None
        self.plan: Plan | None = None
        self.inputs: tuple[str, ...] = ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the plan, which needs the Trainer's optimizers and data, and begin to count."""
        steps = planned_steps(trainer, pl_module)
        self.plan = Plan(steps, tuple(trainer.optimizers))
        if not self.runs:
            raise _Enough
        self.inputs = tuple(_shapes(batch))
        self.counter = MacsCounter(pl_module)
        self.counter.watch_step()  # which may multiply by weights itself

    def on_before_backward(self, *_: Any) -> None:
        """End the training: the forward pass is complete."""
        self.close()
        raise _Enough

    # Under manual optimization a training step need not call `manual_backward`.
    def on_train_batch_end(self, *_: Any) -> None:
        """End the training of a step that has no backward pass."""
        self.close()
        raise _Enough

    def close(self) -> None:
        """Remove what was registered at the model."""
        if self.counter is not None:
            self.counter.close()


def _run(model: nn.Module, inputs: Any) -> Forward:
    """Run a model on inputs in evaluation mode, and restore the mode of each module."""
    return Forward(forward_macs(model, inputs), tuple(_shapes(inputs)))


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no memory; what is shared in the model is shared in it."""
    # `deepcopy` takes what its memo holds by id for already copied: the model's memory is never doubled.
    memo: dict[int, Any] = {}
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    for parameter in model.parameters():
        data = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _shapes(inputs: Any) -> Iterable[str]:
    """Dtype and shape of each tensor, such as ``float32 [2, 8]``."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            yield f"{dtype} {list(leaf.shape)}"
