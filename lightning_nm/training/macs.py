"""Multiply-adds of every weight's GEMM, counted in real forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.adapters import find_adapter
from lightning_nm.nn.names import layer_name, plain_name


class MacsCounter:
    """Adds up the dense forward multiply-adds of each weight of a known layer kind, until it is closed.

    Batches, and several calls of a module in one batch, are added up, so only the shares of the counts have a meaning.
    It watches the model through forward hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.macs: dict[str, int] = {}
        self.least: dict[str, int] = {}
        """The multiply-adds of the smallest call in training mode."""
        self.known = False
        """Whether the counts were loaded, and stay."""
        self._model = model
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._seen: set[nn.Module] = set()
        self._over = False
        for name, module in model.named_modules():
            if find_adapter(type(module)) is not None:
                self._handles[module] = module.register_forward_hook(_Hook(self, plain_name(name)), with_kwargs=True)

    def hidden(self) -> set[nn.Module]:
        """Return watched modules that were not seen and are part of a compiled module of the model."""
        compiled = (  # block.compile(), and block = torch.compile(block)
            part
            for part in self._model.modules()
            if part._compiled_call_impl is not None or "_orig_mod" in part._modules
        )
        return {module for part in compiled for module in part.modules()} & (self._handles.keys() - self._seen)

    def settle(self) -> None:
        """Stop counting after a batch; the counts of a model with hidden parts are dropped as incomplete."""
        hidden, self._over = self.hidden(), True
        if hidden:
            self.macs.clear()
            self.least.clear()
        for module in self._handles.keys() - hidden:  # removing a hook that was traced would recompile its graph
            self._handles.pop(module).remove()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class _Hook:
    def __init__(self, counter: MacsCounter, name: str) -> None:
        self.counter, self.name = counter, name

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = find_adapter(type(module))
        # A compiled graph must not depend on a counter.
        if found is None or torch.compiler.is_compiling() or self.counter._over:
            return
        self.counter._seen.add(module)
        for spec in found[0].specs(module, "channels"):
            key = layer_name(self.name, spec.parameter)
            cost = found[0].macs(module, spec.parameter, args, kwargs, output)
            if not self.counter.known:
                self.counter.macs[key] = self.counter.macs.get(key, 0) + cost
            if module.training:
                self.counter.least[key] = min(cost, self.counter.least.get(key, cost))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # a copied model must not carry a copy of the counter
