"""Watches the operators of a model's eager forward passes, whichever module they begin in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.weight import is_sharded


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The modules that ``module.compile()`` or ``torch.compile(module)`` has compiled."""
    return [
        part
        for part in model.modules()
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules
    ]


def can_watch(model: nn.Module) -> bool:
    """Whether a mode sees all layers of a model: none is compiled, and torch lets modes be during compilation."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals") and not compiled_parts(model)


class WatchingMode(TorchDispatchMode):
    """A mode that sees every operator, and lets compiled functions be compiled as without it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch turns the mode off while it compiles."""
        return True


class OutermostCalls:
    """Keeps a dispatch mode active within calls of a model's modules, from the outermost call to its end.

    A loop may call any modules of the model itself, so all of them have hooks, until :meth:`close`. A model with
    compiled parts is not watched, because compiled layers cannot be told apart; nor is one with sharded weights, nor
    any model by a torch in which modes prevent compilation.

    Args:
        model: The model.
        mode: The mode.
    """

    def __init__(self, model: nn.Module, mode: WatchingMode) -> None:
        self.mode = mode
        self.open: list[nn.Module] = []
        """The modules whose calls have not ended, from the outermost one."""
        self.active = can_watch(model) and not any(map(is_sharded, model.parameters()))
        self._handles: list[
            tuple[nn.Module, list[RemovableHandle]]
        ] = []  # no dict: the hash of a metric changes
        self._model = model
        if not self.active:
            return
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                enter = module.register_forward_pre_hook(_Enter(self))
                leave = module.register_forward_hook(_Leave(self), always_call=True)
                self._handles.append((module, [enter, leave]))

    def close(self) -> None:
        """Stop watching. Hooks within compiled parts stay: without them, graphs would be compiled again."""
        self.active = False
        if self.open:  # an interruption left calls without their end
            self.open.clear()
            self.mode.__exit__(None, None, None)
        compiled = {id(module) for part in compiled_parts(self._model) for module in part.modules()}
        for module, handles in self._handles:
            for handle in handles if id(module) not in compiled else ():
                handle.remove()
        self._handles = [
            (module, handles) for module, handles in self._handles if id(module) in compiled
        ]

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if torch.compiler.is_compiling() or not self.active:
            return
        if not self.open:
            if compiled_parts(self._model):  # by now
                return
            self.mode.__enter__()
        self.open.append(module)

    def leave(self) -> None:
        """The call of a module ended, perhaps by an exception."""
        if torch.compiler.is_compiling() or not self.open:
            return
        self.open.pop()
        if not self.open:
            self.mode.__exit__(None, None, None)


class WatchingHook:
    """A hook of a module that does nothing in copies of the module: they are not watched."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""

    def __reduce__(self) -> Any:
        return WatchingHook, ()


class _Enter(WatchingHook):
    def __init__(self, calls: OutermostCalls) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.calls.enter(module)


class _Leave(WatchingHook):
    def __init__(self, calls: OutermostCalls) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.leave()
