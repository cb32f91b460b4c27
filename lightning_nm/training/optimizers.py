"""Following optimizers: which layers each trains, and when it really made a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.sharding import held


class OptimizerFollower:
    """Counts the real steps of optimizers for the layers whose weights they hold.

    Args:
        layers: The masked layers.
    """

    def __init__(self, layers: Sequence[NMLayer]) -> None:
        self.layers = layers
        self.stepped = False
        """Whether any optimizer made a step since this was last set to ``False``."""
        self._handles: list[RemovableHandle] = []
        self._optimizers: dict[int, Optimizer] = {}  # held, so that an id stays its own
        self._owners: dict[int, tuple[int, list[NMLayer]]] = {}
        self._depth: dict[int, int] = {}
        self._expected: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is any optimizer."""
        return bool(self._optimizers)

    def add(self, optimizer: Optimizer) -> None:
        """Follow an optimizer; harmless when done before.

        Raises:
            ValueError: If a method cannot work with the optimizer, naming it and the layer.
        """
        if id(optimizer) in self._optimizers:
            return
        for layer in self._held(optimizer):
            layer.method.check_optimizer(layer, optimizer)
        self._optimizers[id(optimizer)] = optimizer
        self._handles.append(optimizer.register_step_pre_hook(self._enter_step))
        self._handles.append(optimizer.register_step_post_hook(self._leave_step))
        self.owned(optimizer)

    def release(self, *, keep_parameters: bool = False) -> None:
        """Forget all optimizers.

        Args:
            keep_parameters: Leave the parameters that methods own in them, with their state.
        """
        for handle in self._handles:
            handle.remove()
        own = {id(parameter): parameter for layer in self.layers for parameter in layer.parameters.values()}
        for optimizer in () if keep_parameters else self._optimizers.values():
            for parameter in own.values():
                optimizer.state.pop(parameter, None)
            for group in optimizer.param_groups:
                kept = [k for k, member in enumerate(group["params"]) if id(member) not in own]
                for key in ("params", "param_names"):
                    if key in group:
                        group[key] = [group[key][k] for k in kept]
        for book in (self._handles, self._optimizers, self._owners, self._depth, self._expected):
            book.clear()

    def owned(self, optimizer: Optimizer) -> list[NMLayer]:
        """The layers whose weight the optimizer holds now: parameters may join while training.

        Raises:
            RuntimeError: If the optimizer is not followed.
            ValueError: If a method cannot work with the optimizer of a layer that joined.
        """
        if id(optimizer) not in self._optimizers:
            raise RuntimeError("this optimizer is not registered: call sparsifier.register(optimizer) before training")
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._owners.get(id(optimizer))
        if known is None or known[0] != count:
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            layers = self._held(optimizer)
            for layer in layers:
                if known is not None and layer not in known[1]:
                    layer.method.check_optimizer(layer, optimizer)
                for name, parameter in layer.parameters.items():
                    if id(parameter) not in groups:
                        _join(groups[id(layer.home)], optimizer, layer, name, parameter)
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            self._owners[id(optimizer)] = (count, layers)
        return self._owners[id(optimizer)][1]

    def expect(self, optimizer: Optimizer) -> None:
        """A step of the training follows, whatever it moves: processes that hold zeros alone must count it, too."""
        self._expected.add(id(optimizer))

    def unowned(self) -> list[NMLayer]:
        """The layers that no optimizer holds."""
        owned = {layer.name for optimizer in self._optimizers.values() for layer in self.owned(optimizer)}
        return [layer for layer in self.layers if layer.name not in owned]

    def settle(self) -> bool:
        """Between steps: whether any optimizer made one since the last call."""
        self._depth.clear()  # a step that raised may have left something
        self._expected.clear()  # a scaler may have skipped one
        stepped, self.stepped = self.stepped, False
        return stepped

    def _held(self, optimizer: Optimizer) -> list[NMLayer]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [layer for layer in self.layers if id(layer.home) in held]

    def _enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1

    def _leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 1) - 1
        if depth > 0:  # a subclass's step that calls its base's runs the hooks twice
            return
        expected = id(optimizer) in self._expected
        self._expected.discard(id(optimizer))
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # a fused optimizer that skipped the step by itself
            return
        if not expected and _moves_nothing(optimizer):
            return
        self.stepped = True
        for layer in self.owned(optimizer):
            layer.count_step()
            with layer.whole(gradient=True):
                layer.method.after_step(layer, optimizer)
            layer.draw_seed()  # a batch may hold several steps


def _moves_nothing(optimizer: Optimizer) -> bool:
    """Whether this was no step of a training: distributed checkpoints make one of them to have the state allocated."""
    rates = [group.get("lr", 1) for group in optimizer.param_groups]
    if any((isinstance(rate, Tensor) and rate.device.type != "cpu") or float(rate) for rate in rates):
        return False  # theirs is on the CPU, and waiting for a GPU in each step is too dear
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not any(bool(held(grad).any()) for grad in grads)


def _join(group: dict[str, Any], optimizer: Optimizer, layer: NMLayer, name: str, parameter: nn.Parameter) -> None:
    """Add a method's parameter to the group of the layer's weight, whose schedule and decay then apply to it."""
    if type(optimizer).__name__ == "Muon" and parameter.dim() != 2:
        raise ValueError(
            f"Muon trains matrices only, but {type(layer.method).__name__} owns a parameter of shape "
            f"{tuple(parameter.shape)} at layer '{layer.name}': use another optimizer for this method"
        )
    group["params"].append(parameter)
    if "param_names" in group:
        group["param_names"].append(f"{layer.name}.{name}")
