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
from lightning_nm.training.macs import MacsCounter


@dataclass(frozen=True)
class Forward:
    """What a forward pass without masks showed."""

    macs: Mapping[str, int]
    """Multiply-adds by layer name, as :class:`~lightning_nm.training.macs.MacsCounter` counts them."""
    inputs: tuple[str, ...]
    """Dtype and shape of each tensor that went in."""


@dataclass(frozen=True)
class Plan:
    """What a Trainer knows of a training before its first step."""

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
        ValueError: If the model does not take the inputs, with its own words.
    """
    try:
        return _run(
            _on_meta(model),
            tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, inputs),
        )
    except (
        Exception
    ):  # operators that read values, tensors that are no buffers: with memory they may work
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        inputs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
        try:
            return _run(model, inputs)
        except Exception as error:
            given = ", ".join(_shapes(inputs))
            raise ValueError(
                f"{type(model).__name__} does not take an input of {given}: {error}"
            ) from error


def first_forward(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> tuple[Forward, Plan]:
    """Run the training step of the first batch up to its backward pass, without masks.

    Raises:
        ValueError: If no batch was trained.
    """
    watcher = _fit(trainer, model, datamodule, _Watch(model, runs=True))
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
    watcher = _fit(trainer, model, datamodule, _Watch(model, runs=False))
    assert watcher.plan is not None
    return watcher.plan


def _fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    watcher: _Watch,
) -> _Watch:
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    others = [
        callback
        for callback in callbacks
        if not isinstance(callback, (NMSparsityCallback, MaskMonitor))
    ]
    trainer.callbacks = [*others, watcher]  # type: ignore[attr-defined]  # missing in its annotations
    try:
        trainer.fit(model, datamodule=datamodule)
    except _Enough:
        pass
    finally:
        watcher.close()
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
    if watcher.plan is None:
        raise ValueError(
            "the training ended before its first batch: see its max_steps, limit_train_batches and data"
        )
    return watcher


class _Watch(pl.Callback):
    """Watches the first training step, and ends the training before the backward pass."""

    def __init__(self, model: nn.Module, *, runs: bool) -> None:
        self.runs = runs
        self.counter: MacsCounter | None = None
        self.plan: Plan | None = None
        self.inputs: tuple[str, ...] = ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count."""
        self.plan = Plan(planned_steps(trainer, pl_module), tuple(trainer.optimizers))
        if not self.runs:
            raise _Enough
        self.inputs = tuple(_shapes(batch))
        self.counter = MacsCounter(pl_module)

    def on_before_backward(self, *_: Any) -> None:
        """The forward pass has ended."""
        raise _Enough

    def on_train_batch_end(self, *_: Any) -> None:
        """There was no backward pass."""
        raise _Enough

    def close(self) -> None:
        """Remove what was registered at the model."""
        if self.counter is not None:
            self.counter.close()


def _run(model: nn.Module, inputs: Any) -> Forward:
    counter = MacsCounter(model)
    args, kwargs = inputs if isinstance(inputs, tuple) else (inputs,), {}
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        counter.close()
        for module, mode in training.items():
            module.training = mode
    return Forward(counter.macs, tuple(_shapes(inputs)))


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no memory; what is shared in the model is shared in it."""
    known: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
    return copy.deepcopy(model, known)


def _shapes(inputs: Any) -> Iterable[str]:
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            yield f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
