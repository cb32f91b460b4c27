"""Which layers are the first and the last of a model, by data flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_nm.nn.adapters import adapter_of, find_adapter
from lightning_nm.nn.names import plain_name
from lightning_nm.training.forwards import WatchingHook, WatchingMode, can_watch

Sources = frozenset[str]
FIRST, LAST = "first convolution, by data flow", "last linear layer, by data flow"
"""Reasons to leave a layer dense."""
_ADDITIONS = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_)


class ValueFlow:
    """Follows values from layer to layer, in what runs within it as a context. Compiled models are not followed.

    A torch in which modes prevent compilation follows nothing. Otherwise, every tensor is known to come from the layers
    whose results entered it without passing through another layer. Integers come from none, so tokens that a model
    decodes and reads again do not count. A layer that is called several times in one batch counts with its first call.

    Args:
        model: The model; modules of its kinds of layers that have an adapter are its layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = _layers(model)
        self.feeds: dict[str, set[str]] = {}
        """For each layer that ran, the layers whose results it got."""
        self.added_to: dict[str, set[str]] = {}
        """For each layer, those with whose results an operator combined its own, in its own shape."""
        self._shapes: dict[str, torch.Size] = {}
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._model = model
        self._mode: _Follow | None = None
        self._called: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ValueFlow:
        if self._mode is None and can_watch(self._model):
            self._called.clear()
            self._mode = _Follow(self)
            self._mode.__enter__()
            for name, module in self.layers.items():
                self._handles.append(module.register_forward_hook(_Leave(self, name), with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)

    def ends(self, is_trained: Callable[[nn.Parameter], bool] | None, known: Mapping[str, str]) -> dict[str, str]:
        """The layers of the trained part that come first or last, by name, with the reason to leave them dense.

        Args:
            is_trained: Whether a weight is trained; ``None``: all are.
            known: The same by the order of registration. It stands for a role of which no trained layer ran, and for
                layers that did not run.
        """
        kinds = {name: _role(module, None) for name, module in self.layers.items()}
        roles = {name: _role(module, is_trained) for name, module in self.layers.items()}
        found = {name: reason for name, reason in known.items() if name not in self.feeds}
        for role, names, reason in (("convolution", self.inputs(), FIRST), ("linear", self.outputs(), LAST)):
            if any(roles[name] == role for name in self.feeds):
                found.update((name, reason) for name in names if roles[name] == role)
            else:
                found.update((name, reason) for name, reason in known.items() if kinds.get(name) == role)
        return found

    def inputs(self) -> set[str]:
        """Layers that got no other layer's result."""
        return {name for name, sources in self.feeds.items() if not sources}

    def outputs(self) -> set[str]:
        """Layers whose results no other layer reads.

        A residual branch, whose result is added to that of an earlier layer, is none: the last block of an encoder
        without a head is like its other blocks.
        """
        read = set().union(*self.feeds.values())
        return {name for name in self.feeds if name not in read and not self._is_branch(name)}

    def _is_branch(self, name: str) -> bool:
        return not self.added_to.get(name, set()).isdisjoint(self._before(name))

    def _before(self, name: str) -> set[str]:
        found, new = set(), set(self.feeds[name])
        while new:
            found |= new
            new = {source for each in new for source in self.feeds.get(each, ())} - found
        return found

    def sources(self, values: Any) -> Sources:
        """The layers that tensors come from."""
        found = (self._sources.get(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return frozenset().union(*(each for each in found if each))

    def made(self, output: Any, sources: Sources, *, adds: bool) -> None:
        """An operator made tensors of others that come from these layers, perhaps by an addition."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and sources and (tensor.is_floating_point() or tensor.is_complex()):
                self._sources[tensor] = sources
                for name in sources if adds and len(sources) > 1 else ():
                    if tensor.shape == self._shapes[name]:
                        self.added_to.setdefault(name, set()).update(sources - {name})

    def passed(self, name: str, given: Any, output: Any) -> None:
        """A layer was called."""
        if name not in self._called:
            self._called.add(name)
            self.feeds.setdefault(name, set()).update(self.sources(given))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._sources[tensor] = frozenset({name})
                self._shapes[name] = tensor.shape


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold weights of a known kind, by name; embeddings are inputs of the first layers."""
    found = {}
    for name, module in model.named_modules():
        adapter = adapter_of(plain_name(name), module)
        if (
            adapter is not None
            and adapter[0].role != "embedding"
            and any(True for _ in adapter[0].specs(module, "channels"))
        ):
            found[plain_name(name)] = module
    return found


def _role(module: nn.Module, is_trained: Callable[[nn.Parameter], bool] | None) -> str:
    """The role of a trained layer, empty for another one."""
    adapter = find_adapter(type(module))
    if adapter is None or not (is_trained is None or any(map(is_trained, module.parameters(recurse=False)))):
        return ""
    return adapter[0].role


class _Follow(WatchingMode):
    def __init__(self, flow: ValueFlow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        adds = getattr(func, "_overloadpacket", None) in _ADDITIONS
        self.flow.made(output, self.flow.sources((args, kwargs)), adds=adds)
        return output


class _Leave(WatchingHook):
    def __init__(self, flow: ValueFlow, name: str) -> None:
        self.flow, self.name = flow, name

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.flow.passed(self.name, (args, kwargs), output)
