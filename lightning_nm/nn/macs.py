"""Multiply-adds of every weight's GEMM, counted in real forward passes: only the shares matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.adapters import Adapter, find_adapter
from lightning_nm.nn.names import layer_name


class MacsCounter:
    """Adds up the dense forward multiply-adds of each weight of a known layer kind, until it is closed.

    A module that runs twice in a batch counts twice. Batches are added up, so the counts of two layers compare as
    their costs do; they are no cost of one batch.

    Args:
        model: The model to watch, through forward hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.macs: dict[str, int] = {}
        self.least: dict[str, int] = {}
        """The multiply-adds of the smallest call in training mode."""
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            kind = type(module).nm_base if isinstance(module, Adapter) else type(module)
            if find_adapter(kind) is not None:
                self._handles.append(module.register_forward_hook(_Hook(self, name), with_kwargs=True))

    def close(self) -> None:
        """Stop counting; harmless when closed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    def __init__(self, counter: MacsCounter, name: str) -> None:
        self.counter, self.name = counter, name

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = find_adapter(type(module).nm_base if isinstance(module, Adapter) else type(module))
        if found is None or torch.compiler.is_compiling():  # a compiled graph must not depend on a counter
            return
        inputs = (*args, *(kwargs[key] for key in ("query", "key", "value") if key in kwargs))
        for spec in found[0].specs(module, "channels"):
            key = layer_name(self.name, spec.parameter)
            cost = found[0].macs(module, spec.parameter, inputs, output)
            self.counter.macs[key] = self.counter.macs.get(key, 0) + cost
            if module.training:
                self.counter.least[key] = min(cost, self.counter.least.get(key, cost))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # a copied model must not carry a copy of the counter
