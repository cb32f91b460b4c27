"""Multiply-adds of every weight's GEMM, counted in real forward passes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_nm.nn.adapters import find_adapter
from lightning_nm.nn.names import layer_name, plain_name
from lightning_nm.training.forwards import OutermostCalls, WatchingHook, WatchingMode, compiled_parts

OTHERS = "(weights of other kinds)"
"""The key of all products with weights that no adapter knows."""


class MacsCounter:
    """Adds up the dense forward multiply-adds of each weight, until it is closed.

    Weights of kinds that have an adapter are counted by their modules' forward hooks, one by one. Products with any
    other weight are counted together as :data:`OTHERS`, by torch's formulas for operators, in models without compiled
    or sharded parts. Products of two activations, as in attention, are not counted. Batches, and several calls of a
    module in one batch, are added up, so only the shares of the counts have a meaning.
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
        known: set[int] = set()
        for name, module in model.named_modules():
            if (found := find_adapter(type(module))) is not None:
                self._handles[module] = module.register_forward_hook(_Leave(self, plain_name(name)), with_kwargs=True)
                if found[0].role != "embedding":  # what is made of its rows are activations
                    known.update(id(getattr(module, spec.parameter)) for spec in found[0].specs(module, "channels"))
        self._calls = OutermostCalls(model, _OtherProducts(self, known))

    def hidden(self) -> set[nn.Module]:
        """Return watched modules that were not seen and are part of a compiled module of the model."""
        parts = compiled_parts(self._model)
        return {module for part in parts for module in part.modules()} & (self._handles.keys() - self._seen)

    def settle(self) -> None:
        """Stop counting after a batch; the counts of a model with hidden parts are dropped as incomplete."""
        hidden, self._over = self.hidden(), True
        self._calls.close()
        if hidden:
            self.macs.clear()
            self.least.clear()
        for module in self._handles.keys() - hidden:  # removing a hook that was traced would recompile its graph
            self._handles.pop(module).remove()

    def close(self) -> None:
        """Remove all hooks."""
        self._calls.close()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def add(self, key: str, cost: int) -> None:
        """Add multiply-adds."""
        if not self.known:
            self.macs[key] = self.macs.get(key, 0) + cost


class _Leave(WatchingHook):
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
            self.counter.add(key, cost)
            if module.training:
                self.counter.least[key] = min(cost, self.counter.least.get(key, cost))


class _OtherProducts(WatchingMode):
    """Counts products with a parameter, or with what was made of parameters alone, but for those of known modules.

    Args:
        counter: Gets the counts.
        known: The ids of the weights of known modules.
    """

    def __init__(self, counter: MacsCounter, known: set[int]) -> None:
        super().__init__()
        self.counter, self.known = counter, known
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.counter._over or isinstance(func, torch._ops.HigherOrderOperator):
            return output
        if func._overloadpacket is torch.ops.aten.embedding:  # rows that tokens chose are activations
            return output
        given = [self._kind(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if not any(given):
            return output
        if cost := _cost(func._overloadpacket, args, kwargs, output):
            if "known" not in given:
                self.counter.add(OTHERS, cost)
            return output
        # W_F is made of a known weight and its mask.
        kind = "known" if "known" in given else "other" if all(given) else ""
        if kind:
            self._made.update((made, kind) for made in tree_leaves(output) if isinstance(made, Tensor))
        return output

    def _kind(self, tensor: Tensor) -> str:
        """``"known"`` or ``"other"`` for weights and what was made of them, empty for activations."""
        if isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
            return "known" if id(tensor) in self.known else "other"
        return self._made.get(tensor, "")


def _cost(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Multiply-adds of an operator, 0 if it is no product.

    torch has no formula for the grouped product, the recurrent layers of CPUs and the bilinear operator.
    """
    name = str(operator)
    if name == "aten._grouped_mm":  # [tokens, in] by [groups, in, out], and variants of it
        return math.prod(args[0].shape) * args[1].shape[-1]
    if name in ("aten.mkldnn_rnn_layer", "aten._trilinear"):  # each token meets every weight once
        matrices = sum(t.numel() for t in args if isinstance(t, nn.Parameter) and t.dim() > 1)
        return matrices * math.prod(args[0].shape[:-1])
    formula = flop_registry.get(operator)
    return int(formula(*args, **kwargs, out_val=output)) // 2 if formula else 0
