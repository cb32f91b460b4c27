"""Multiply-adds of every weight's GEMM, counted in real forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_nm.nn.adapters.adapter import Adapter, find_adapter, original_class
from lightning_nm.nn.weight import is_sharded, layer_name, plain_name
from lightning_nm.training.watch import compiled_parts

OTHERS = "(weights of other kinds)"
"""The key of all GEMMs with weights that no adapter knows."""
READ = " (read by other code)"
"""The end of the key of GEMMs with a layer's weight outside of the layer's calls: masks do not reach them."""


def can_watch(model: nn.Module) -> bool:
    """Whether a mode sees all layers of a model: none is compiled, and torch lets modes be during compilation."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals") and not compiled_parts(model)


class WatchingHook:
    """A hook of a module that does nothing in copies of the module: they are not watched."""

    def __init__(self, call: Callable[..., None] = lambda *_: None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        """Run what is given at the start, but in copies."""
        self.call(*args)

    def __reduce__(self) -> Any:
        return WatchingHook, ()


class MacsCounter(TorchDispatchMode):
    """Adds up the dense forward multiply-adds of each weight, until it is closed.

    Weights of kinds that have an adapter are counted by their modules' forward hooks, one by one. GEMMs with any
    other weight are counted by torch's formulas for operators: together as :data:`OTHERS`, those of experts that are
    not masked one by one, and those of a weight that other code reads, as in ``F.linear(x, layer.weight)``, under the
    layer's name and :data:`READ`. Products of two activations, as in attention, are not counted. Batches, and several
    calls of a module in one batch, are added up, so only the fractions of the counts have a meaning.

    As a mode it is active within calls of the model's modules, from the outermost call to its end. A loop may call any
    modules of the model itself, so all of them have hooks. Operators are not watched in a model with compiled parts,
    whose layers cannot be told apart, nor in one with sharded weights, nor by a torch in which modes prevent
    compilation.
    """

    # Otherwise torch refuses these operators, such as flex_attention, while the mode is active.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch turns the mode off while it compiles: functions are compiled as without it."""
        return True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.macs: dict[str, int] = {}
        self.least: dict[str, int] = {}
        """The multiply-adds of the smallest call in training mode."""
        self.known = False
        """Whether the counts were loaded, and stay."""
        self._model = model
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._seen: set[nn.Module] = set()
        self._over = False
        self._names: dict[int, str] = {}  # of layers, by the id of the weight
        self._count_themselves: set[int] = set()  # ids of modules
        # The weight's name in its module, and the key of its GEMMs, by its id and that of the module in whose call
        # they are.
        self._keys: dict[tuple[int, int], tuple[str, str]] = {}
        for wrapped_name, module in model.named_modules():
            name = plain_name(wrapped_name)
            found = find_adapter(type(module))
            if found is None:
                continue
            adapter, handled = found
            # The calls of a derived class with a forward of its own may take and return anything.
            has_own_forward = original_class(module).forward is not handled.forward
            # Where the class's own forward runs, it may multiply by its weights in any way.
            by_operators = adapter.wraps_forward or has_own_forward
            # The call tells the adapter the cost: of all weights, or with wraps_forward of the masked ones.
            if adapter.wraps_forward or not has_own_forward:
                hook = WatchingHook(partial(self._count_call, name, adapter))
                self._handles[module] = module.register_forward_hook(hook, with_kwargs=True)
            if not by_operators:
                self._count_themselves.add(id(module))
            # Any layout: how blocks lie does not change the number of multiply-adds.
            for spec in adapter.specs(module, "channels"):
                key = layer_name(name, spec.parameter)
                weight = id(getattr(module, spec.parameter))
                # A tied weight goes by the first module that holds it.
                self._names.setdefault(weight, key)
                if by_operators:
                    self._keys[weight, id(module)] = spec.parameter, key
        self._open: list[nn.Module] = []  # whose calls have not ended, from the outermost one
        # Tensors that were made of weights alone, and what _kind() says of them.
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # No dict: the hash of a metric changes.
        self._watched: list[tuple[nn.Module, list[RemovableHandle]]] = []
        self._watching = can_watch(model) and not any(map(is_sharded, model.parameters()))
        for module in model.modules() if self._watching else ():
            # Script modules refuse hooks.
            if not isinstance(module, torch.jit.ScriptModule):
                enter = module.register_forward_pre_hook(WatchingHook(self._enter_call))
                # Called also after an exception: else the mode would stay on.
                leave = module.register_forward_hook(
                    WatchingHook(self._leave_call), always_call=True
                )
                self._watched.append((module, [enter, leave]))

    def watch_step(self) -> None:
        """Count the operators outside of the modules' calls, too, until :meth:`close`: those of a training step."""
        self._enter_call(self._model)

    def hidden(self) -> set[nn.Module]:
        """Return counted modules that were not seen and are part of a compiled module of the model."""
        return compiled_parts(self._model) & (self._handles.keys() - self._seen)

    def end_batch(self) -> None:
        """Stop counting after a batch; the counts of a model with hidden parts are dropped as incomplete."""
        hidden = self.hidden()
        self._over = True
        self._stop_watching()
        if hidden:
            self.macs.clear()
            self.least.clear()
        # Hooks of hidden modules stay: removing one that was traced would recompile its graph.
        for module in self._handles.keys() - hidden:
            self._handles.pop(module).remove()

    def close(self) -> None:
        """Remove all hooks."""
        self._stop_watching()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _stop_watching(self) -> None:
        """Count no more operators. Hooks within compiled parts stay: without them, graphs would be compiled again."""
        self._watching = False
        if self._open:  # an interruption left calls without their end
            self._open.clear()
            self.__exit__(None, None, None)
        compiled = set(map(id, compiled_parts(self._model)))
        for module, handles in self._watched:
            for handle in handles if id(module) not in compiled else ():
                handle.remove()

    def _count_call(
        self,
        name: str,
        adapter: type[Adapter],
        module: Any,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        # A compiled graph must not depend on a counter.
        if torch.compiler.is_compiling() or self._over:
            return
        self._seen.add(module)
        for spec in adapter.specs(module, "channels"):
            key = layer_name(name, spec.parameter)
            cost = adapter.macs(module, spec.parameter, args, kwargs, output)
            # Without one its operators are counted, where they are watched. That it was called is known in any case.
            self._add(key, cost or 0)
            # Batches of evaluation may be smaller, and no estimator works in them.
            if cost is not None and module.training:
                self.least[key] = min(cost, self.least.get(key, cost))
        if isinstance(module, Adapter):
            return  # it calls its children, whose own hooks count
        for child in adapter.reads_children:
            key = f"{name}.{child}".lstrip(".")
            self._add(key, adapter.macs_of_child(module, child, output))

    def _add(self, key: str, cost: int) -> None:
        if not self.known:
            self.macs[key] = self.macs.get(key, 0) + cost

    def _enter_call(self, module: nn.Module, *_: Any) -> None:
        """A module is called."""
        if torch.compiler.is_compiling() or not self._watching:
            return
        if not self._open:
            if compiled_parts(self._model):  # by now
                return
            self.__enter__()
        self._open.append(module)

    def _leave_call(self, *_: Any) -> None:
        """The call of a module ended, perhaps by an exception."""
        if torch.compiler.is_compiling() or not self._open:
            return
        self._open.pop()
        if not self._open:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch takes the mode off the stack for this call, so it does not come back here.
        output = func(*args, **kwargs)
        # An operator that calls others has no formula, and no packet of overloads to look it up by.
        if self._over or isinstance(func, torch._ops.HigherOrderOperator):
            return output
        if self._open and id(self._open[-1]) in self._count_themselves:
            return output  # the module's hook counts its GEMMs
        if func._overloadpacket is torch.ops.aten.embedding:
            return output  # rows that tokens chose are activations
        kinds = [self._kind(leaf) for leaf in tensors_in((args, kwargs))]
        if not any(kinds):
            return output
        # One operand whose GEMMs a hook counts is enough: the operator must not count them again.
        kind = "known" if "known" in kinds else next(filter(None, kinds))
        cost = _cost(func._overloadpacket, args, kwargs, output)
        if cost:
            if kind != "known":
                self._add(kind, cost)
        # What is made of weights alone is one of them, too, and so is W_F: it is made of a known weight and its mask.
        elif kind == "known" or all(kinds):
            for made in tensors_in(output):
                self._made[made] = kind
        return output

    def _kind(self, tensor: Tensor) -> str:
        """The key of a weight, also for what was made of it; ``"known"`` if a module's hook counts it; else empty."""
        # Biases and the scales of norms are in no GEMM.
        if not isinstance(tensor, nn.Parameter) or tensor.dim() < 2:
            return self._made.get(tensor, "")
        # Within a call of the module that holds the weight, at any depth, the GEMM is its own: no other code reads it.
        for module in self._open:
            found = self._keys.get((id(tensor), id(module)))
            if found is not None:
                parameter, key = found
                # The module's own hook counts what is masked.
                is_masked = isinstance(module, Adapter) and parameter in module.nm_layers
                return "known" if is_masked else key
        name = self._names.get(id(tensor))
        return OTHERS if name is None else name + READ


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards the mode of each module is as before."""
    # Not `model.train(...)` afterwards: submodules may be in different modes.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def forward_macs(model: nn.Module, inputs: Any) -> dict[str, int]:
    """Run a model in evaluation mode, and return the multiply-adds of each weight's dense forward GEMM by name.

    Args:
        model: The model, without masks; the mode of each module is restored.
        inputs: A tensor, a tuple of positional arguments or a dictionary of keyword arguments.
    """
    with evaluation(model), closing(MacsCounter(model)) as counter:
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return counter.macs


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _cost(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Multiply-adds of an operator, 0 if it is no GEMM.

    torch has no formula for the grouped GEMM, the recurrent layers of CPUs and the bilinear operator.
    """
    name = str(operator)
    if name == "aten._grouped_mm":  # [tokens, in] by [groups, in, out], and variants of it
        return math.prod(args[0].shape) * args[1].shape[-1]
    if name in ("aten.mkldnn_rnn_layer", "aten._trilinear"):  # each token meets every weight once
        matrices = sum(t.numel() for t in args if isinstance(t, nn.Parameter) and t.dim() > 1)
        return matrices * math.prod(args[0].shape[:-1])
    formula = flop_registry.get(operator)
    # torch's formulas count a multiply-add as two operations.
    return int(formula(*args, **kwargs, out_val=output)) // 2 if formula else 0
