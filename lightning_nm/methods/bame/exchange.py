"""The exchange of entries in one weight: the evidence for it, finding it, and making it.

Read from top to bottom: accumulated evidence, which is the value that each pruned entry would have by now, had it been
trained; where it lies between two steps; exchanges that it, or one gradient, speaks for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_nm.functional.evolution import (
    DECAY,
    EPSILON,
    LONGEST_BLOCK,
    SCALE,
    best_swaps,
    evidence_scores,
    expected_loss_change,
    look_ahead_scores,
    select_blocks,
)
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.functional.select import mask_, masked, merged
from lightning_nm.kernels.cpu import mask_passes
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.methods.base import SparseToSparse
from lightning_nm.methods.optimizer_state import (
    SECOND_MOMENTS,
    entry_states,
    group_of,
    is_adam_like,
    moment_correction,
    step_size,
    unsupported,
)
from lightning_nm.nn.layer import NMLayer, blocks_of
from lightning_nm.nn.weight import gather, is_sharded, local_shard, local_values
from lightning_nm.schedule import Phases
from lightning_nm.training.phases import zero_pruned_state

LOG_DECAY = math.log(DECAY)
_PLAUSIBLE = 1024
"""Times the size of kept weights. What is larger is no evidence: the state holds momentum, of other masks."""

# Names of the layer's buffers.
COUNT = "evidence_count"
VALUE = "evidence"
SQUARE = "evidence_square"

Places = tuple[str | None, str | None]
"""Names of the optimizer's tensors that hold U and V; ``None`` for a buffer of the layer."""


@dataclass
class Evidence:
    r"""The evidence of one weight; all tensors are full, also where processes shard the weight.

    For a dense gradient G and a step of size r,

    .. math::

        V \leftarrow \beta V + (1 - \beta) G^2, \qquad
        U \leftarrow (1 - d) U - r \, G / (\sqrt{V / (1 - \beta^t)} + \epsilon),

    where t counts the gradients, :math:`\beta` is 0.999 and :math:`\epsilon` is 1e-12. d is r divided by ``reach``
    times the size of kept weights. It holds a virtual weight back, as the loss does a real one: without it the noise of
    the gradients would add up as long as an entry stays pruned.

    Attributes:
        value: U, of the weight's shape, 0 at kept entries.
        square: V, of the same shape, of all entries.
        count: t, a scalar.
        places: Where U / SCALE and V are between two steps: in the pruned entries of these tensors.
        passes: The kernels that advanced it, and go on with it; ``None`` for torch operations.
    """

    value: Tensor
    square: Tensor
    count: Tensor
    places: Places = (None, None)
    passes: ModuleType | None = None

    @classmethod
    def none(cls, weight: Tensor, places: Places = (None, None)) -> Evidence:
        """No gradient was gathered yet."""
        # Steps of U are small against U: half precision would lose them.
        dtype = wide_dtype(weight)
        zero = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        count = torch.zeros((), dtype=torch.float32, device=weight.device)
        return cls(zero, zero.clone(), count, places)

    def add(self, grad: Tensor, mask: Tensor, size: Tensor) -> None:
        """Add a dense gradient of the loss to what is left of U; ``size`` is r."""
        grad = grad.to(self.square.dtype)
        # A new tensor: the layer's buffer keeps the old count in case the step is skipped.
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
        return -torch.expm1(self.count.clamp(min=1) * LOG_DECAY)


# ---------------------------------------------------------------------- passes over a weight
#
# Each reads and writes every tensor once. kernels/cpu/mask_passes.py has them for CPUs, in C, and
# kernels/gpu/evolution_triton.py for CUDA tensors, by functions of the same arguments. Other tensors are left to the
# torch operations here, which define the results. A training step calls:
#
# - `gather_evidence` before the optimizer's step: U and V advance by the gradient, which is masked then;
# - `exchange` after it: the weight is masked, the best exchange of every block is found (`best` of the Triton kernels),
#   the blocks that change are chosen and changed;
# - `keep_evidence`: U and V go to where they stay until the next step.


def passes_for(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the module whose passes take these tensors; ``None`` if torch operations must do.

    A pass takes tensors of one device in row-major order: weights, gradients and optimizer state of float32, bfloat16
    or float16, U and V of float32, and masks of bytes.
    """
    if torch.compiler.is_compiling():
        return None
    tensors = first, *others
    # The first question is the cheaper one, and answers most.
    on_cpu = first.device.type == "cpu" and "TRITON_INTERPRET" not in os.environ
    if on_cpu or not triton_use.runs_on(first.device):
        return mask_passes if mask_passes.runs(*tensors) else None
    for tensor in tensors:
        if tensor is not None and (tensor.device != first.device or not tensor.numel()):
            return None
    if not mask_passes.is_row_major(*tensors, device_type=first.device.type):
        return None
    return triton_use.kernels("evolution_triton")


def gather_evidence(
    layer: NMLayer,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    mask: Tensor,
    rate: float,
    reach: float | None,
) -> Evidence:
    """The evidence so far, with the gradient of the coming step if that is dense; this gradient is masked then.

    Args:
        layer: The layer.
        optimizer: Keeps the evidence, see :func:`write_evidence`.
        group: The optimizer's group of the weight.
        mask: The forward mask.
        rate: The largest r relative to the size of kept weights.
        reach: Where U stops under gradients of one size and sign, in the same unit; ``None`` for nowhere.
    """
    weight = layer.weight.detach()
    grad = layer.weight.grad if layer.progress.dense_gradient else None
    places = _places(optimizer, group, weight)
    state = optimizer.state.get(layer.param, {})
    buffers = layer.buffers
    value_key, square_key = places
    value = buffers.get(VALUE) if value_key is None else state.get(value_key)
    square = buffers.get(SQUARE) if square_key is None else state.get(square_key)
    count = buffers.get(COUNT)
    # The value is U / SCALE, and of kept entries perhaps momentum; V of kept entries may be the optimizer's own.
    own_ratio = 1.0
    # An optimizer that is new, or was loaded without its state, has none of it: evidence begins again.
    if count is None or value is None or square is None:
        evidence = Evidence.none(weight, places)
        if grad is None:
            return evidence
    else:
        if square_key is not None:
            # For kept entries V / (1 - beta^t) is to be what v / (1 - beta_2^T) is in the optimizer.
            # The optimizer's counts from its first step.
            correction = -torch.expm1(count * LOG_DECAY)
            own_ratio = float(correction / moment_correction(group, state))
        evidence = Evidence(gather(value), gather(square), count, places)
    bits = layer.masks.bits
    # oneDNN returns the weight gradients of convolutions in another memory order: a pass reads and masks a copy.
    row_major = None if grad is None else grad.contiguous()
    passes = None
    # The kernels take U and V in float32 alone.
    is_single = evidence.value.dtype == evidence.square.dtype == torch.float32
    if bits is not None and is_single and not layer.view.is_sharded:
        # Sharded parameters are left to torch.
        passes = passes_for(weight, bits, evidence.value, evidence.square, row_major)
    # The root mean square of kept weights.
    if bits is not None and mask_passes.runs(weight, bits):
        size_of_kept = torch.tensor(mask_passes.size_of_kept(weight, bits), dtype=torch.float32)
    else:
        # In float64, so that the order of summation hardly ever changes the result.
        norm = torch.linalg.vector_norm(masked(weight, mask), dtype=torch.float64)
        mean_square = norm.square() / mask.sum().clamp(min=1)
        size_of_kept = mean_square.sqrt().float()
    # In the shape of the learning-rate schedule, negative for an optimizer that climbs: the learning rate over the
    # largest one known, which schedulers keep in the group. A group may have these keys with the value None.
    now = float(group["lr"])
    largest = max(now, float(group.get("max_lr") or 0), float(group.get("initial_lr") or 0))
    rate *= now / largest if largest else 0.0
    size = (-rate if group.get("maximize") else rate) * size_of_kept
    limit = _PLAUSIBLE * size_of_kept
    # Of the old U, what is left.
    fraction = 1.0 if grad is None or reach is None else max(0.0, 1 - rate / reach)

    if passes is not None:
        evidence.passes = passes
        if grad is not None:
            # As Evidence.add() does, whose place the pass takes.
            evidence.count = evidence.count + 1
        evidence.value, evidence.square = passes.gather_evidence(
            bits,
            row_major,
            evidence.value,
            evidence.square,
            fraction=fraction,
            own_ratio=own_ratio,
            limit=limit,
            correction=evidence.correction(),
            size=size,
        )
    else:
        # Into new tensors: the optimizer's step still reads its state.
        evidence.square = merged(mask, evidence.square * own_ratio, evidence.square)
        value = masked(evidence.value, ~mask).mul_(SCALE * fraction)
        evidence.value = mask_(value, ~(value.abs() > limit))
        if grad is not None:
            evidence.add(grad, mask, size)
    # A pass has masked the gradient that it read, unless that was a copy.
    if grad is not None and (passes is None or row_major is not grad):
        local_grad = layer.view.local_grad
        assert local_grad is not None
        layer.zero_pruned(local_grad)
    return evidence


# Between two steps U / SCALE and V are in the optimizer's state of pruned entries, or else in buffers of the layer.


def _places(optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor) -> Places:
    """The optimizer's tensors whose pruned entries hold U / SCALE and V; ``None`` for a buffer of the layer.

    While BAME trains, the optimizer does not need these entries: their gradient is zero, their weight is set to zero
    after each step, and what the step does to them is overwritten. Half precision would lose small steps.
    """
    if weight.dtype in (torch.float32, torch.float64):
        if isinstance(optimizer, (Adam, AdamW, NAdam, RAdam)):
            return "exp_avg", "exp_avg_sq"
        # Not a subclass: it may use its momentum in another way.
        if type(optimizer) is SGD and group["momentum"]:
            return "momentum_buffer", None
    return None, None


def write_evidence(layer: NMLayer, optimizer: Optimizer, evidence: Evidence) -> None:
    """Keep the evidence until the next step, for the layer's masks as they are now."""
    state = optimizer.state.get(layer.param, {})
    layer.buffers[COUNT] = evidence.count
    tensors = (evidence.value, evidence.square)
    targets = []
    for key, name, tensor in zip(evidence.places, (VALUE, SQUARE), tensors, strict=True):
        layer.buffers.pop(name, None)
        if key is None:
            layer.buffers[name] = torch.empty_like(tensor)
        # The optimizer may not have stepped this weight yet.
        targets.append(layer.buffers[name] if key is None else state.get(key))
    value, square = targets
    passes = evidence.passes
    has_places = value is not None and square is not None
    is_single = has_places and value.dtype == square.dtype == torch.float32
    if passes is not None and is_single and passes_for(value, square) is passes:
        passes.keep_evidence(
            layer.masks.bits,
            *tensors,
            value,
            square,
            whole_value=evidence.places[0] is None,
            whole_square=evidence.places[1] is None,
        )
        return
    mask = layer.masks.forward_view
    assert mask is not None
    tensors = (evidence.value / SCALE, evidence.square)
    for target, key, tensor in zip(targets, evidence.places, tensors, strict=True):
        if key is None:
            target.copy_(tensor)
        elif target is not None:
            # Kept entries have the optimizer's own state, which stays.
            local_state = local_values(target)
            local_mask = local_shard(mask, target)
            local_state.copy_(merged(local_mask, local_state, local_shard(tensor, target)))


def unpack_evidence(layer: NMLayer, optimizer: Optimizer) -> None:
    """Read evidence that version 0.3 kept in buffers, for packed weights, into the optimizer's state."""
    if layer.view.is_sharded:
        return
    state = optimizer.state.get(layer.param, {})
    mask = layer.masks.forward_view
    places = _places(optimizer, group_of(layer, optimizer), layer.param)
    for key, name in zip(places, (VALUE, SQUARE), strict=True):
        if mask is not None and key in state and name in layer.buffers:
            state[key].copy_(merged(mask, state[key], layer.buffers[name]))


def drop_evidence(layer: NMLayer, optimizer: Optimizer) -> None:
    """Free what :func:`write_evidence` kept: the optimizer's state of pruned entries is zero then."""
    for name in (COUNT, VALUE, SQUARE):
        layer.buffers.pop(name, None)
    mask = layer.masks.forward_view
    assert mask is not None
    zero_pruned_state(layer, mask, [optimizer])


# ------------------------------------------------------------------------------------------- exchanges


@dataclass
class Exchange:
    """The entries to exchange, each for another one of its block.

    Args:
        blocks: Block of each exchange, as :func:`~lightning_nm.functional.evolution.as_blocks` counts, int64 ``[K]``.
        pruned: The number of each pruned entry in the weight, in row-major order, int64 ``[K]``.
        regrown: That of each regrown entry.
        held: Number of blocks that do not change, though an exchange would raise their score.
        loss_change: The expected change of the loss; 0 where nothing was expected of a certain batch.
    """

    blocks: Tensor
    pruned: Tensor
    regrown: Tensor
    held: Tensor | int = 0
    loss_change: Tensor | float = 0.0


class ExchangingMethod(SparseToSparse):
    """Exchanges kept entries for pruned ones after steps of the optimizer, until the last moment of its schedule."""

    paper_counts_masked = True

    def phases(self, layer: NMLayer) -> Phases:
        """Masks move until ``stop``."""
        return Phases(moves_until=layer.progress.schedule[-1])

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse an optimizer that is neither SGD nor like Adam, or keeps state of other shapes than the weight's."""
        name = type(optimizer).__name__
        # Before its first step, after which it has state that cannot be read.
        if name.endswith(("8bit", "4bit", "Fp8")):
            raise unsupported(layer, optimizer, "quantises its state")
        state = optimizer.state.get(layer.param, {})
        known = (is_adam_like(optimizer, group, state) for group in optimizer.param_groups)
        if not isinstance(optimizer, SGD) and not all(known):
            why = "is neither SGD nor of the Adam family"
            raise unsupported(layer, optimizer, why)
        entry_states(layer, optimizer)

    def lost_without_before_step(self, layer: NMLayer) -> str:
        """An empty text: where a mask cannot move without that call, :meth:`after_step` raises an error."""
        return ""


def dense_gradient_was_used(layer: NMLayer, mask: Tensor) -> bool:
    """Whether an earlier call before the same optimizer step has used this dense gradient: it zeroes pruned entries.

    An optimizer that computes the gradient several times in a step, as with a closure, brings a new one.
    """
    progress = layer.progress
    # First what costs nothing: looking at the gradient waits for the device.
    if not progress.shaped or not progress.dense_gradient:
        return False
    grad = layer.weight.grad
    return grad is not None and not masked(grad, ~mask).any()


def forgotten_call(layer: NMLayer, lost: str) -> RuntimeError:
    """The error of a step whose dense gradient no ``before_step`` has used; ``lost``: what the mask cannot do."""
    return RuntimeError(
        f"the optimizer stepped without before_step() for layer '{layer.name}', so its mask cannot {lost}: "
        "call sparsifier.before_step(optimizer) first; with Lightning, step the optimizer of "
        "self.optimizers()"
    )


def find_exchange(
    layer: NMLayer, optimizer: Optimizer, mask: Tensor, evidence: Evidence | None, budget: int
) -> Exchange:
    """Find the exchanges that the evidence speaks for, after the optimizer's step.

    Without evidence, those that one dense gradient speaks for, before it. At most ``budget`` blocks change.
    """
    # In blocks [B, M], and at least float32: half precision would make ties of scores that differ.
    keep = blocks_of(layer, mask)
    dtype = wide_dtype(layer.weight)
    weight = blocks_of(layer, layer.weight.detach()).to(dtype)
    expected = None
    if evidence is None:
        assert layer.weight.grad is not None
        grad = blocks_of(layer, layer.weight.grad).to(dtype)
        if group_of(layer, optimizer).get("maximize"):
            grad = -grad
        # One step ahead of the optimizer.
        step = step_size(layer, optimizer, grad, keep)
        swaps = best_swaps(look_ahead_scores(weight, grad, keep, step), keep)
        expected = expected_loss_change(weight, grad, keep, step, swaps)
    else:
        scores = evidence_scores(weight, blocks_of(layer, evidence.value), keep)
        swaps = best_swaps(scores, keep)
    chosen = select_blocks(swaps.gain, layer.buffers["oscillation"], budget)
    grid = layer.view.blocks(layer.pattern.m)
    return Exchange(
        chosen,
        grid.places(chosen, swaps.pruned[chosen]),
        grid.places(chosen, swaps.regrown[chosen]),
        held=(swaps.gain > 0).sum() - len(chosen),
        loss_change=0.0 if expected is None else expected[chosen].sum(),
    )


def make_exchange(
    layer: NMLayer,
    optimizer: Optimizer,
    mask: Tensor,
    exchange: Exchange,
    evidence: Evidence | None = None,
) -> Tensor:
    """Make the exchanges in weight, gradient, evidence and the optimizer's state; returns the forward mask after them.

    Pruned entries become 0. Regrown ones start at their evidence, or at 0, and their state at 0, but for what scales
    steps: that is the mean square of the entry's gradients in the evidence; without evidence, the mean over the entries
    of the block that ``mask`` kept before the exchange.
    """
    param = layer.param
    # As an index for each axis: a weight in channels last has no flat view in row-major order.
    pruned = torch.unravel_index(exchange.pruned, mask.shape)
    regrown = torch.unravel_index(exchange.regrown, mask.shape)
    for key, kept_state in entry_states(layer, optimizer).items():
        # Entries are numbered over the whole weight, so sharded state is gathered.
        state = gather(kept_state)
        start: Tensor | float = 0.0
        if key in SECOND_MOMENTS and evidence is not None:
            # The optimizer will divide by its own correction, so the mean square is multiplied by it.
            scale = moment_correction(group_of(layer, optimizer), optimizer.state[param])
            start = (evidence.mean_square()[regrown] * scale).to(state.dtype)
        elif key in SECOND_MOMENTS:
            kept = blocks_of(layer, mask)[exchange.blocks]  # [K, M]
            state_of_blocks = blocks_of(layer, state)[exchange.blocks]
            start = torch.where(kept, state_of_blocks, 0).sum(1) / kept.sum(1)
        state[pruned] = 0
        state[regrown] = start
        if is_sharded(kept_state):
            local_values(kept_state).copy_(local_shard(state, kept_state))

    weight = layer.weight.detach()
    weight[pruned] = 0
    if evidence is not None:
        weight[regrown] = evidence.value[regrown].to(weight.dtype)
        # A kept entry has no virtual weight. Of the pruned one U is 0 already.
        evidence.value[regrown] = 0
    if layer.weight.grad is not None:
        # A loop may go on adding to gradients that it does not zero.
        layer.weight.grad[pruned] = 0
    forward = mask.clone()
    forward[pruned] = False
    forward[regrown] = True
    return forward


def exchange_in_one_pass(
    layer: NMLayer, optimizer: Optimizer, evidence: Evidence, budget: int
) -> tuple[int, int | Tensor] | None:
    """Find and make the exchanges that the evidence speaks for, by kernels.

    Weight, gradient, evidence, optimizer state, masks and counts of oscillation change as by :func:`find_exchange` and
    :func:`make_exchange`.

    Returns:
        The number of blocks that changed, and of those that did not, though an exchange would raise their score;
        ``None``, and nothing changed, where no kernel takes the tensors.
    """
    masks = layer.masks
    passes = evidence.passes
    # A backward mask has to be selected again with the forward mask, which the torch operations do.
    if passes is None or masks.has_backward:
        return None
    param = layer.param
    weight = param.detach()
    states = entry_states(layer, optimizer)
    m = layer.pattern.m
    grad = param.grad
    if grad is not None and not (grad.is_contiguous() and grad.dtype == weight.dtype):
        grad = None  # it is masked apart
    fits = m <= LONGEST_BLOCK and len(states) <= mask_passes.MOST_STATES
    if not fits or passes_for(weight, grad, *states.values()) is not passes:
        return None
    state = optimizer.state.get(param, {})
    blocks, held = passes.exchange(
        layer.view.blocks(m),
        masks.bits,
        weight,
        grad,
        evidence.value,
        evidence.square,
        layer.buffers["oscillation"],
        layer.buffers["exchanged"],
        list(states.values()),
        [name in SECOND_MOMENTS for name in states],
        budget,
        evidence.correction(),
        moment_correction(group_of(layer, optimizer), state),
    )
    # An exchange clears one forward bit and sets another.
    masks.count_moved(2 * blocks)
    if grad is None and param.grad is not None:
        layer.zero_pruned(param.grad)
    return blocks, held
