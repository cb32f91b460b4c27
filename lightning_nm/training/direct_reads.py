"""Masked weights that other code than their own layer reads: they would train dense and be pruned at the end."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import local_values
from lightning_nm.training.forwards import compiled_parts

OnDirectRead = Literal["error", "warn"]
"""What happens when a masked weight has a gradient that is not of its masked layer."""


class DirectReads:
    """Compares, before the first step of each weight, where its gradient came from.

    A weight with a gradient, whose layer has run no backward pass, was read by other code: ``F.linear(x,
    layer.weight)``. A layer that is not used has no gradient. Both are facts of this process: under
    DistributedDataParallel a gradient may be of another process alone, so ``.grad`` does not tell.

    Args:
        model: The model, whose compiled parts run backward passes that are not seen.
        on_read: What to do.
    """

    def __init__(self, model: nn.Module, on_read: OnDirectRead = "error") -> None:
        self.with_gradient: set[NMLayer] = set()
        """Layers of whose weight a backward pass of this process made a gradient."""
        self._model = model
        self._is_error = on_read == "error"
        self._watched: dict[NMLayer, RemovableHandle] = {}
        self._settled: set[NMLayer] = set()

    def watch(self, layers: Sequence[NMLayer]) -> None:
        """Note gradients of layers that are trained and not settled yet; to be called between steps."""
        for layer in layers:
            if layer in self._settled or layer in self._watched:
                continue
            parameter = layer.view.optimizer_param
            if not parameter.requires_grad:
                continue  # it may be trained later
            hook = _NoteGradient(self.with_gradient, layer)
            self._watched[layer] = parameter.register_post_accumulate_grad_hook(hook)

    def check(self, layers: Sequence[NMLayer]) -> None:
        """Look at layers whose optimizer is about to step.

        Raises:
            ValueError: If the weight of one was read by other code, naming all.
        """
        found = []
        for layer in layers:
            if layer not in self._watched:
                continue
            if layer.progress.trained_by_layer:
                self._settle(layer)
            elif layer in self.with_gradient and _trains(layer):
                found.append(layer)
        if found:
            self._report(found)

    def close(self) -> None:
        """Remove what is left of the hooks."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _settle(self, layer: NMLayer) -> None:
        self._watched.pop(layer).remove()
        self._settled.add(layer)

    def _report(self, layers: Sequence[NMLayer]) -> None:
        """Raise or warn, unless compiled code may have run the layers themselves."""
        compiled = {module for part in compiled_parts(self._model) for module in part.modules()}
        names = [layer.name for layer in layers if layer.spec.module not in compiled]
        is_certain = not _compiled_graphs()
        if not is_certain and not any(layer.progress.trained_by_layer for layer in self._settled):
            names = []  # the whole model may be compiled
        if names and is_certain and self._is_error:
            raise ValueError(_message(names))
        for layer in layers:
            self._settle(layer)
        if names:
            doubt = "" if is_certain else "; unless compiled functions call them, which is not seen"
            warnings.warn(f"{_message(names)}{doubt}", stacklevel=2)


class _NoteGradient:
    """A hook of a parameter that notes a gradient of the local backward pass."""

    def __init__(self, noted: set[NMLayer], layer: NMLayer) -> None:
        self.noted = noted
        self.layer = layer

    def __call__(self, parameter: Tensor) -> None:
        self.noted.add(self.layer)


def _trains(layer: NMLayer) -> bool:
    """Whether the gradient is not all zero, as that of ``0 * weight.sum()``, by which DDP is told of unused layers."""
    grad = layer.view.optimizer_param.grad
    return grad is not None and bool(local_values(grad).any())


def _compiled_graphs() -> int:
    """How many graphs TorchDynamo has compiled in this process: calls in them are not seen."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by whoever compiles
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def _message(names: Sequence[str]) -> str:
    return (
        f"these masked layers have a gradient, but were not called: {', '.join(map(repr, names))}. Other code reads "
        "their weights, as F.linear(x, layer.weight) or a penalty in the loss does, and gets the dense values: they "
        "would train dense and be pruned at the end. Call the layers, name them in `exclude`, or allow it by "
        "direct_reads='warn'"
    )
