"""Accumulated evidence: the value that each pruned entry would have by now, had it been trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_nm.functional.select import mask_, masked, merged
from lightning_nm.methods.bame.optimizer_state import clear_entries, group_of, moment_correction
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.sharding import gather, local_shard, local_values

DECAY = 0.999  # of the second moment
EPSILON = 1e-12
SCALE = 2.0**64
"""U is kept divided by this power of two, which loses no bit. Otherwise a step with other masks, or after ``detach()``,
would take U for momentum."""
_PLAUSIBLE = 1024
"""Times the size of kept weights. What is larger is no evidence: the state holds momentum, of other masks."""

# Names of the layer's buffers.
COUNT = "evidence_count"
VALUE = "evidence"
SQUARE = "evidence_square"


@dataclass
class Evidence:
    r"""The evidence of one weight; all tensors are full, also where processes shard the weight.

    For a dense gradient G and a step of size r,

    .. math::

        V \leftarrow \beta V + (1 - \beta) G^2, \qquad
        U \leftarrow U - r \, G / (\sqrt{V / (1 - \beta^t)} + \epsilon),

    where t counts the gradients, :math:`\beta` is 0.999 and :math:`\epsilon` is 1e-12.

    Args:
        value: U, of the weight's shape, 0 at kept entries.
        square: V, likewise, of all entries.
        count: t, a scalar.
    """

    value: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def none(cls, weight: Tensor) -> Evidence:
        """No gradient was gathered yet."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        zero = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        return cls(zero, zero.clone(), torch.zeros((), device=weight.device))

    def add(self, grad: Tensor, mask: Tensor, size: Tensor) -> None:
        """Add a dense gradient of the loss; ``size`` is r."""
        grad = grad.to(self.square.dtype)
        self.count = self.count + 1
        self.square.mul_(DECAY).addcmul_(grad, grad, value=1 - DECAY)
        # r G / (sqrt(V / (1 - beta^t)) + epsilon), in the memory of one temporary.
        step = self.mean_square().sqrt_().add_(EPSILON).reciprocal_().mul_(grad).mul_(size)
        self.value.sub_(step)
        mask_(self.value, ~mask)

    def mean_square(self) -> Tensor:
        """The mean square of each entry's gradients, ``V / (1 - beta^t)``; 0 before the first."""
        return self.square / _correction(self.count.clamp(min=1))


def _correction(count: Tensor) -> Tensor:
    """``1 - beta^t``."""
    return -torch.expm1(count * math.log(DECAY))


def _size_of_kept(weight: Tensor, mask: Tensor) -> Tensor:
    """The root mean square of kept weights."""
    norm = masked(weight.detach().float(), mask).norm()
    return norm / mask.sum().clamp(min=1).sqrt()


def step_size(
    weight: Tensor, mask: Tensor, rate: float, optimizer: Optimizer, parameter: Tensor
) -> Tensor:
    """``rate`` times the root mean square of kept weights, in the shape of the learning-rate schedule.

    That shape is the learning rate over the largest one known: ``max_lr`` or ``initial_lr``, which schedulers keep in
    the parameter's group.
    """
    group = group_of(optimizer, parameter)
    now = float(group["lr"])
    # A group may have these keys with the value None.
    known = [now, float(group.get("max_lr") or 0), float(group.get("initial_lr") or 0)]
    largest = max(known)
    share = now / largest if largest else 0.0
    return rate * share * _size_of_kept(weight, mask)


def _places(optimizer: Optimizer, parameter: Tensor) -> tuple[str | None, str | None]:
    """The optimizer's tensors whose pruned entries hold U / SCALE and V; ``None`` for a buffer of the layer.

    While BAME trains, the optimizer does not need these entries: their gradient is zero, their weight is set to zero
    after each step, and what the step does to them is overwritten. Half precision would lose small steps.
    """
    if parameter.dtype in (torch.float32, torch.float64):
        if isinstance(optimizer, (Adam, AdamW, NAdam, RAdam)):
            return "exp_avg", "exp_avg_sq"
        if type(optimizer) is SGD and group_of(optimizer, parameter)["momentum"]:
            return "momentum_buffer", None
    return None, None


def _kept(layer: NMLayer, optimizer: Optimizer, key: str | None, name: str) -> Tensor | None:
    """The full tensor that is kept under a key of the optimizer's state, or under a name of a buffer."""
    if key is None:
        kept = layer.buffers.get(name)
    else:
        kept = optimizer.state.get(layer.param, {}).get(key)
    return None if kept is None else gather(kept)


def read_evidence(layer: NMLayer, optimizer: Optimizer, mask: Tensor) -> Evidence:
    """The evidence that :func:`write_evidence` kept; none where a part of it is not there any more."""
    value_key, square_key = _places(optimizer, layer.param)
    value = _kept(layer, optimizer, value_key, VALUE)
    square = _kept(layer, optimizer, square_key, SQUARE)
    count = layer.buffers.get(COUNT)
    if count is None or value is None or square is None:
        return Evidence.none(layer.weight)
    if square_key is None:
        square = square.clone()
    else:
        # Of kept entries it is the optimizer's own second moment, which counts from the optimizer's first step.
        own_square = square * (_correction(count) / moment_correction(optimizer, layer.param))
        square = merged(mask, own_square, square)
    # Of kept entries it is the optimizer's momentum.
    value = masked(value, ~mask).mul_(SCALE)
    implausible = value.abs() > _PLAUSIBLE * _size_of_kept(layer.weight, mask)
    return Evidence(mask_(value, ~implausible), square, count)


def write_evidence(layer: NMLayer, optimizer: Optimizer, mask: Tensor, evidence: Evidence) -> None:
    """Keep the evidence until the next step; ``mask`` is the forward mask that it is for."""
    state = optimizer.state.get(layer.param, {})
    layer.buffers[COUNT] = evidence.count
    value_key, square_key = _places(optimizer, layer.param)
    for key, name, tensor in (
        (value_key, VALUE, evidence.value / SCALE),
        (square_key, SQUARE, evidence.square),
    ):
        layer.buffers.pop(name, None)
        if key is None:
            layer.buffers[name] = tensor
        elif key in state:  # else the optimizer has not stepped this weight yet
            local_state = local_values(state[key])
            local_mask = local_shard(mask, state[key])
            local_evidence = local_shard(tensor, state[key])
            local_state.copy_(merged(local_mask, local_state, local_evidence))


def drop_evidence(layer: NMLayer, optimizer: Optimizer, mask: Tensor) -> None:
    """Free what :func:`write_evidence` kept: the optimizer's state of pruned entries is zero then."""
    for name in (COUNT, VALUE, SQUARE):
        layer.buffers.pop(name, None)
    clear_entries(optimizer, layer.param, ~mask, layer.name)
