"""Weights at rest of which kept entries alone are stored: their parameters in modules and optimizers.

A layer comes to rest when its mask never moves again and pruned entries have no values, see
:meth:`~lightning_nm.methods.Method.is_at_rest`. :func:`pack` then puts a parameter with the kept entries in the place
of the dense one, in its module and in the optimizer that owns it, with the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.storage import PackedStorage, pack_layer, unpack_layer, unpackable
from lightning_nm.nn.selection.selection import Rule

Storage = Literal["dense", "packed"]

_KNOWN = (Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SGD)


def check_storage(storage: str, rules: Iterable[Rule]) -> None:
    """Refuse an unknown ``storage``, or ``"packed"`` where no rule's masks ever come to rest, by a ``ValueError``."""
    if storage not in get_args(Storage):
        raise ValueError(f"storage={storage!r} is unknown: use 'dense' or 'packed'")
    if storage == "dense":
        return
    rules = list(rules)
    resting = [rule for rule in rules if rule.method.rests]
    if resting and all(rule.schedule and rule.schedule.dense_end for rule in resting):
        raise ValueError(
            "storage='packed' stores kept entries alone once the mask stays until training ends, which the schedule's "
            "dense_end never lets it: leave dense_end out, or use storage='dense'"
        )
    if not resting:
        names = ", ".join(sorted({type(rule.method).__name__ for rule in rules}))
        raise ValueError(
            f"storage='packed' stores kept entries alone once the forward mask stands still and is the only one, which "
            f"that of {names} never is: use the method 'asp', 'bame' or 'rigl', or storage='dense'"
        )


def check_packable(optimizer: Optimizer, layers: Sequence[NMLayer]) -> None:
    """Refuse an optimizer whose step depends on more than the entries of a weight, one by one.

    Raises:
        ValueError: With the optimizer's and a layer's name.
    """
    if layers and not isinstance(optimizer, _KNOWN):
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise ValueError(
            f"storage='packed' gives {type(optimizer).__name__} the kept entries of layer '{layers[0].name}' and "
            f"others as a parameter of another shape, which is known to be right for {known}: use one of them, or "
            "storage='dense'"
        )


def pack(layers: Iterable[NMLayer], optimizers: Sequence[Optimizer]) -> list[NMLayer]:
    """Store the kept entries alone of those layers that are at rest, and return these layers.

    Gradients that are there are packed, too; optimizer states by :func:`fit_states`.

    Args:
        layers: The layers of a model; packed ones are passed over.
        optimizers: All that may own their weights.
    """
    packed = []
    for layer in layers:
        if layer.storage is not None or unpackable(layer):
            continue
        dense = layer.param
        storage = pack_layer(layer)
        if dense.grad is not None:
            storage.parameter.grad = storage.pack(dense.grad)
        for optimizer in optimizers:
            _replace(optimizer, dense, storage.parameter)
        # The parameter of before stays for those who hold it, without its memory.
        dense.grad = None
        dense.data = dense.data.new_empty(0)
        packed.append(layer)
    return packed


def storage_summary(layers: Sequence[NMLayer]) -> str:
    """Return a line on what :func:`pack` has done: how many weights and entries are packed, and why others are not."""
    packed = [layer for layer in layers if layer.storage is not None]
    stored = sum(layer.param.numel() for layer in packed)
    entries = sum(layer.view.shape.numel() for layer in packed)
    text = (
        f"storage='packed': {len(packed)} of {len(layers)} masked weights are stored as their kept entries alone, "
        f"{stored:,} of {entries:,}."
    )
    dense_names: dict[str, list[str]] = {}
    for layer in layers:
        if layer.storage is None:
            reason = unpackable(layer) or "no optimizer trains it"
            dense_names.setdefault(reason, []).append(layer.name)
    for reason, names in dense_names.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text += f" '{names[0]}'{more}: dense, since {reason}."
    return text


def unpack(
    layers: Iterable[NMLayer], optimizers: Sequence[Optimizer]
) -> dict[nn.Parameter, PackedStorage]:
    """Give the packed ones among these layers their dense parameters back, in modules and optimizers.

    Args:
        layers: The layers of a model; dense ones are passed over.
        optimizers: All that may own their weights.

    Returns:
        The former storage of each parameter, for the states of the optimizers.
    """
    unpacked = {}
    for layer in layers:
        storage = layer.storage
        if storage is None:
            continue
        values = storage.parameter
        unpack_layer(layer)
        dense = layer.param
        if values.grad is not None:
            dense.grad = storage.unpack(values.grad)
        for optimizer in optimizers:
            _replace(optimizer, values, dense)
        unpacked[dense] = storage
    return unpacked


def unpack_states(optimizer: Optimizer, storages: Mapping[nn.Parameter, PackedStorage]) -> None:
    """Unpack the states of these parameters that are packed."""
    for parameter, storage in storages.items():
        _reshape_state(optimizer, parameter, storage.parameter.shape, storage.unpack)


def unpack_states_later(
    optimizer: Optimizer, storages: Mapping[nn.Parameter, PackedStorage]
) -> None:
    """Unpack the states of these parameters when the optimizer's next step begins.

    Most optimizers make no step after a training: their states need not take the memory of dense ones.
    """
    pending = dict(storages)

    # A hook cannot remove itself while torch calls all of them: it stays, and does nothing from its second call on.
    def unpack_pending(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        unpack_states(optimizer, pending)
        pending.clear()

    if pending:
        optimizer.register_step_pre_hook(unpack_pending)


def fit_states(optimizer: Optimizer, layers: Iterable[NMLayer]) -> None:
    """Give the states that an optimizer holds of these layers the shapes of their parameters.

    They differ once a layer was packed, and after a state of a run with another ``storage`` was loaded.
    """
    for layer in layers:
        if layer.storage is not None:
            layer.spec.method.place_state(layer, optimizer)
            _reshape_state(optimizer, layer.param, layer.storage.shape, layer.storage.pack)
        else:
            _fit_dense_state(optimizer, layer)
            layer.spec.method.place_state(layer, optimizer)


def _fit_dense_state(optimizer: Optimizer, layer: NMLayer) -> None:
    """Unpack the state of a dense layer if it is packed: that of a run with ``storage="packed"``."""
    state: dict[str, Any] = optimizer.state.get(layer.param, {})
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor)}
    if shapes <= {(), tuple(layer.view.shape)} or unpackable(layer):
        return
    # The positions are those of the mask.
    storage = pack_layer(layer)
    packed_shape = storage.parameter.shape
    unpack_layer(layer)
    _reshape_state(optimizer, layer.param, packed_shape, storage.unpack)


def _replace(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another one, with its state."""
    for group in optimizer.param_groups:
        for place, member in enumerate(group["params"]):
            if member is old:
                group["params"][place] = new
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


@torch.no_grad()
def _reshape_state(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    shape: torch.Size,
    change: Callable[[Tensor], Tensor],
) -> None:
    """Change the tensors of this shape in the state of a parameter; counters and the like stay."""
    state = optimizer.state.get(parameter)
    if state is None:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[name] = change(value)
