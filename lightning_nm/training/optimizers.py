"""Which layers an optimizer owns, and the parameters of methods in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.layer import NMLayer, blocks_of, from_blocks_of
from lightning_nm.nn.weight import local_values


@dataclass(eq=False)
class RegisteredOptimizer:
    """An optimizer, the layers whose weight it holds, and how far its step is."""

    optimizer: Optimizer
    layers: list[NMLayer] = field(default_factory=list)
    parameter_count: int = -1  # how many it held when the layers were found
    handles: list[RemovableHandle] = field(default_factory=list)
    depth: int = 0  # of nested calls of step()
    in_closure: bool = False  # whether its step is computing its gradients
    announced: bool = False  # whether methods have shaped the gradients of its next step
    steps_in_batch: int = 0  # real steps since the last end of a batch

    def find_layers(
        self,
        layers: Sequence[NMLayer],
        check: Callable[[Optimizer, Sequence[NMLayer]], None] | None = None,
    ) -> None:
        """Find the layers whose weight the optimizer holds, and add the parameters that their methods own.

        Methods do not check the optimizer again for the layers that it had before. ``check`` comes after them.

        Raises:
            ValueError: If a method cannot work with the optimizer, naming it and the layer, or ``check`` raises it;
                nothing is added then.
        """
        # By id: `in` a list of tensors would compare their entries.
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        owned = [layer for layer in layers if id(layer.view.optimizer_param) in groups]
        for layer in owned:
            if layer not in self.layers:
                layer.spec.method.check_optimizer(layer, self.optimizer)
            for parameter in layer.parameters.values():
                # By its name: not every supported torch has the class.
                if type(self.optimizer).__name__ == "Muon" and parameter.dim() != 2:
                    raise ValueError(
                        f"Muon trains matrices only, but {type(layer.spec.method).__name__} owns a parameter of shape "
                        f"{tuple(parameter.shape)} at layer '{layer.name}': use another optimizer for this method"
                    )
        if check is not None:
            check(self.optimizer, layers)
        methods_own = [parameter for layer in owned for parameter in layer.parameters.values()]
        if any(id(parameter) not in groups for parameter in methods_own):
            # All again, in the order of the layers: optimizers save their state by position, and a resumed run may mask
            # layers at once that this one masks one after the other.
            _take_out(self.optimizer, owned)
            for layer in owned:
                for name, parameter in layer.parameters.items():
                    # In the group of the weight, whose schedule and decay then apply.
                    group = groups[id(layer.view.optimizer_param)]
                    group["params"].append(parameter)
                    # In groups made of named_parameters(): torch keeps a name for every parameter of such a group.
                    if "param_names" in group:
                        group["param_names"].append(f"{layer.name}.{name}")
        self.layers = owned

    def remove_hooks(self) -> None:
        """Remove the hooks of its steps."""
        for handle in self.handles:
            handle.remove()


def unpack_state(optimizer: Optimizer, layer: NMLayer) -> None:
    """Make an optimizer's state of kept entries alone dense: version 0.3 saved it so for packed weights."""
    mask = layer.forward_mask
    if mask is None or layer.view.is_sharded:
        return
    blocks_bm = blocks_of(layer, mask)
    out = len(layer.view.rows(mask))
    packed_shape = (out, len(blocks_bm) // out, layer.pattern.n)
    state = optimizer.state.get(layer.param, {})
    for name, value in state.items():
        # The last comparison: a weight of three dimensions may have that very shape, and its state is dense.
        if isinstance(value, Tensor) and value.shape == packed_shape != layer.param.shape:
            # Of each block the kept entries follow one another in the order of their positions.
            dense_bm = value.new_zeros(blocks_bm.shape)
            dense_bm[blocks_bm] = value.flatten()
            dense = from_blocks_of(layer, dense_bm)
            # In the memory order of the weight, as torch makes such state.
            state[name] = torch.empty_like(layer.param, dtype=value.dtype).copy_(dense)


def remove_parameters(optimizer: Optimizer, layers: Sequence[NMLayer]) -> None:
    """Take the parameters that methods own, and their state, out of an optimizer."""
    for layer in layers:
        for parameter in layer.parameters.values():
            optimizer.state.pop(parameter, None)
    _take_out(optimizer, layers)


def _take_out(optimizer: Optimizer, layers: Sequence[NMLayer]) -> None:
    """Take the parameters that methods own out of the groups of an optimizer; their state stays."""
    own = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    for group in optimizer.param_groups:
        # By position: names and parameters must be cut alike.
        kept = [k for k, member in enumerate(group["params"]) if id(member) not in own]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][k] for k in kept]


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps within wrappers that hold it as ``optimizer``, as Accelerate's and Lightning's do."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer = inner
        inner = getattr(optimizer, "optimizer", None)
    return optimizer


def held_by(optimizers: Iterable[Optimizer] | None) -> Callable[[nn.Parameter], bool]:
    """Whether a parameter, frozen or not, is in one of the optimizers; without optimizers always."""
    held: set[int] = set()
    for optimizer in optimizers or ():
        for group in optimizer.param_groups:
            held.update(id(parameter) for parameter in group["params"])

    def is_held(parameter: nn.Parameter) -> bool:
        return not held or id(parameter) in held

    return is_held


def trained_layer(layer: NMLayer, optimizers: Iterable[Optimizer]) -> bool:
    """Whether the optimizers train a layer: its weight, or the parameters that its method owns."""
    parameter = layer.view.optimizer_param
    can_train = parameter.requires_grad or not layer.spec.method.trains_weight
    return can_train and held_by(optimizers)(parameter)


def changes_nothing(optimizer: Optimizer) -> bool:
    """Whether a step did not train: distributed checkpoints make one at learning rate 0 to allocate state."""
    for group in optimizer.param_groups:
        # An optimizer without a rate is taken to train.
        rate = group.get("lr", 1)
        # Theirs is on the CPU, and waiting for a GPU in each step would take too long.
        on_gpu = isinstance(rate, Tensor) and rate.device.type != "cpu"
        if on_gpu or float(rate):
            return False
    # A warm-up may begin at rate 0: its steps count, since they have gradients. Those of such an allocation are zero.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and bool(local_values(parameter.grad).any()):
                return False
    return True
