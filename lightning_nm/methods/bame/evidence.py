"""Accumulated evidence: the value that each pruned entry would have by now, had it been trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_nm.functional.select import mask_, masked, merged
from lightning_nm.kernels.blocks import EvidenceStep
from lightning_nm.kernels.cpu import evolution
from lightning_nm.kernels.evolution import passes_for
from lightning_nm.methods.bame.optimizer_state import clear_entries, group_of, moment_correction
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import gather, is_sharded, local_shard, local_values

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

    Attributes:
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
        return cls(zero, zero.clone(), torch.zeros((), dtype=torch.float32, device=weight.device))

    def add(self, grad: Tensor, mask: Tensor, size: Tensor) -> None:
        """Add a dense gradient of the loss; ``size`` is r."""
        grad = grad.to(self.square.dtype)
        self.count = self.count + 1
        # Product and sum rounded apart, as by the kernels, which take the same steps in one pass.
        self.square.mul_(DECAY).add_(grad.square().mul_(1 - DECAY))
        # r G / (sqrt(V / (1 - beta^t)) + epsilon), in the memory of one temporary. The root by rsqrt, which is rounded
        # alike everywhere: that of sqrt depends on the library behind it.
        size_of_grad = self.mean_square().rsqrt_().reciprocal_()
        step = size_of_grad.add_(EPSILON).reciprocal_().mul_(grad).mul_(size)
        self.value.sub_(step)
        mask_(self.value, ~mask)

    def mean_square(self) -> Tensor:
        """The mean square of each entry's gradients, ``V / (1 - beta^t)``; 0 before the first."""
        return self.square / self.correction()

    def correction(self) -> Tensor:
        """``1 - beta^t``, without axes; that of one gradient before the first."""
        return bias_correction(self.count.clamp(min=1))


def bias_correction(count: Tensor) -> Tensor:
    """``1 - beta^t``."""
    return -torch.expm1(count * math.log(DECAY))


def _size_of_kept(layer: NMLayer, mask: Tensor) -> Tensor:
    """The root mean square of kept weights, float32 without axes."""
    weight = layer.weight.detach()
    bits = layer.masks.bits
    if bits is not None and evolution.runs(weight, bits):
        return torch.tensor(evolution.size_of_kept(weight, bits), dtype=torch.float32)
    # In float64, so that the order of summation hardly ever changes the result.
    norm = torch.linalg.vector_norm(masked(weight, mask), dtype=torch.float64)
    mean_square = norm.square() / mask.sum().clamp(min=1)
    return mean_square.sqrt().float()


def _rate_now(rate: float, optimizer: Optimizer, parameter: Tensor) -> float:
    """``rate`` in the shape of the learning-rate schedule, negative for an optimizer that climbs.

    That shape is the learning rate over the largest one known: ``max_lr`` or ``initial_lr``, which schedulers keep in
    the parameter's group.
    """
    group = group_of(optimizer, parameter)
    now = float(group["lr"])
    # A group may have these keys with the value None.
    known = [now, float(group.get("max_lr") or 0), float(group.get("initial_lr") or 0)]
    largest = max(known)
    share = now / largest if largest else 0.0
    return -rate * share if group.get("maximize") else rate * share


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
    buffer = layer.buffers.get(name)
    if key is None:
        return None if buffer is None else gather(buffer)
    kept = optimizer.state.get(layer.param, {}).get(key)
    if kept is None:
        return None
    mask = layer.masks.forward_view
    if buffer is not None and mask is not None and not is_sharded(kept):
        # Version 0.3 kept the evidence of packed weights in buffers, until the next step here.
        kept = merged(mask, kept, buffer)
    return gather(kept)


@dataclass
class _Stored:
    """The full tensors in which :func:`write_evidence` kept the evidence."""

    value: Tensor  # U / SCALE; of kept entries perhaps the optimizer's momentum
    square: Tensor
    count: Tensor
    own_ratio: float | None
    """What V of kept entries is multiplied by: it is the optimizer's own, which counts from its first step."""


def _stored(layer: NMLayer, optimizer: Optimizer) -> _Stored | None:
    """What is kept; ``None`` where a part of it is not there any more."""
    value_key, square_key = _places(optimizer, layer.param)
    value = _kept(layer, optimizer, value_key, VALUE)
    square = _kept(layer, optimizer, square_key, SQUARE)
    count = layer.buffers.get(COUNT)
    if count is None or value is None or square is None:
        return None
    own_ratio = None
    if square_key is not None:
        own_ratio = _own_ratio(layer, optimizer)
    return _Stored(value, square, count, own_ratio)


def _own_ratio(layer: NMLayer, optimizer: Optimizer) -> float:
    """What makes V of the optimizer's own second moment, which counts from its first step."""
    count = layer.buffers[COUNT]
    return float(bias_correction(count) / moment_correction(optimizer, layer.param))


def gather_evidence(
    layer: NMLayer, optimizer: Optimizer, mask: Tensor, rate: float, *, fresh: bool
) -> Evidence:
    """The evidence so far, with the gradient of the coming step if that is dense; this gradient is masked then.

    Args:
        layer: The layer.
        optimizer: Keeps the evidence, see :func:`write_evidence`.
        mask: The forward mask.
        rate: The largest r relative to the size of kept weights.
        fresh: Whether the masks are new: there is no evidence yet.
    """
    grad = layer.weight.grad if layer.progress.dense_gradient else None
    stored = None if fresh else _stored(layer, optimizer)
    if stored is None:
        none = Evidence.none(layer.weight)
        if grad is None:
            return none
        stored = _Stored(none.value, none.square, none.count, None)
    size_of_kept = _size_of_kept(layer, mask)
    size = _rate_now(rate, optimizer, layer.param) * size_of_kept
    limit = _PLAUSIBLE * size_of_kept
    passes = _passes_of(layer, stored.value, stored.square)
    masks_grad = False
    if passes is not None:
        assert layer.masks.bits is not None
        # oneDNN returns the weight gradients of convolutions in another memory order: the pass reads a copy.
        masks_grad = grad is not None and passes_for(grad) is passes
        evidence = _gather_in_one_pass(
            passes, layer.masks.bits, stored, grad, size, limit, mask_grad=masks_grad
        )
    else:
        evidence = _read(stored, mask, limit)
        if grad is not None:
            evidence.add(grad, mask, size)
    local_grad = layer.view.local_grad
    if grad is not None and not masks_grad and local_grad is not None:
        layer.zero_pruned(local_grad)
    return evidence


def _read(stored: _Stored, mask: Tensor, limit: Tensor) -> Evidence:
    square = stored.square
    if stored.own_ratio is None:
        square = square.clone()
    else:
        square = merged(mask, square * stored.own_ratio, square)
    value = masked(stored.value, ~mask).mul_(SCALE)
    implausible = value.abs() > limit
    return Evidence(mask_(value, ~implausible), square, stored.count)


def _passes_of(layer: NMLayer, value: Tensor, square: Tensor) -> ModuleType | None:
    """The passes that take the tensors of a layer; ``None`` if torch operations must do."""
    in_single_precision = value.dtype == square.dtype == torch.float32
    bits = layer.masks.bits
    if not in_single_precision or bits is None:
        return None
    return passes_for(layer.param.detach(), bits, value, square)


def _gather_in_one_pass(
    passes: ModuleType,
    bits: Tensor,
    stored: _Stored,
    grad: Tensor | None,
    size: Tensor,
    limit: Tensor,
    *,
    mask_grad: bool,
) -> Evidence:
    count = stored.count if grad is None else stored.count + 1
    step = EvidenceStep(
        unit=SCALE,
        own_ratio=1.0 if stored.own_ratio is None else stored.own_ratio,
        limit=limit,
        correction=bias_correction(count.clamp(min=1)),
        size=size,
        decay=DECAY,
        epsilon=EPSILON,
    )
    grad = None if grad is None else grad.contiguous()
    value, square = passes.gather_evidence(
        bits, grad, stored.value, stored.square, step, mask_grad=mask_grad
    )
    return Evidence(value, square, count)


def write_evidence(layer: NMLayer, optimizer: Optimizer, mask: Tensor, evidence: Evidence) -> None:
    """Keep the evidence until the next step; ``mask`` is the forward mask that it is for."""
    state = optimizer.state.get(layer.param, {})
    layer.buffers[COUNT] = evidence.count
    value_key, square_key = _places(optimizer, layer.param)
    for name in (VALUE, SQUARE):
        layer.buffers.pop(name, None)
    if _write_in_one_pass(layer, state, value_key, square_key, evidence):
        return
    for key, name, tensor in (
        (value_key, VALUE, evidence.value / SCALE),
        (square_key, SQUARE, evidence.square),
    ):
        if key is None:
            layer.buffers[name] = tensor
        elif key in state:  # else the optimizer has not stepped this weight yet
            local_state = local_values(state[key])
            local_mask = local_shard(mask, state[key])
            local_evidence = local_shard(tensor, state[key])
            local_state.copy_(merged(local_mask, local_state, local_evidence))


def _write_in_one_pass(
    layer: NMLayer,
    state: Mapping[str, Any],
    value_key: str | None,
    square_key: str | None,
    evidence: Evidence,
) -> bool:
    """Do it by a kernel; return whether that was possible."""
    if any(key is not None and key not in state for key in (value_key, square_key)):
        return False
    value = torch.empty_like(evidence.value) if value_key is None else state[value_key]
    square = torch.empty_like(evidence.square) if square_key is None else state[square_key]
    bits = layer.masks.bits
    passes = _passes_of(layer, value, square)
    if bits is None or passes is None or passes_for(evidence.value, evidence.square) is not passes:
        return False
    passes.keep_evidence(
        bits,
        evidence.value,
        evidence.square,
        value,
        square,
        SCALE,
        whole_value=value_key is None,
        whole_square=square_key is None,
    )
    if value_key is None:
        layer.buffers[VALUE] = value
    if square_key is None:
        layer.buffers[SQUARE] = square
    return True


def drop_evidence(layer: NMLayer, optimizer: Optimizer) -> None:
    """Free what :func:`write_evidence` kept: the optimizer's state of pruned entries is zero then."""
    for name in (COUNT, VALUE, SQUARE):
        layer.buffers.pop(name, None)
    mask = layer.masks.forward_view
    assert mask is not None
    clear_entries(optimizer, layer.param, ~mask, layer.name)
