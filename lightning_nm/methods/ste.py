"""Magnitude masks with a straight-through gradient: STE and SR-STE."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import LONGEST_BLOCK, BlockGrid
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.functional.select import masked
from lightning_nm.kernels.cpu import mask_passes
from lightning_nm.methods.base import MaskMethod, largest_entries
from lightning_nm.methods.checks import check_number, check_option
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import as_sharded, gather, sum_of_shards
from lightning_nm.schedule import Moment, Phases, Steps, check_window, resolve_window, within
from lightning_nm.training.ranks import processes


class STE(MaskMethod):
    r"""Straight-through estimator: the forward weight is re-masked by magnitude after every step.

    :math:`W_F = m \odot W` with :math:`m = \mathrm{nm\_mask}(|W|)`, and :math:`dL/dW = dL/dW_F` for every entry, pruned
    ones included. dgrad uses the same masked weight, which is not N:M along `out`.

    Args:
        dense_start: How long training stays dense before the first masks: an integer counts training steps (batches
            after which an optimizer stepped), a float in [0, 1] is a fraction of the planned ones.
        dense_end: How long it is dense again at the end, in the same units. **The trained model is dense then**, as in
            FST (arXiv 2404.01847), which uses N:M to pre-train faster. An N:M sparse model needs 0.

    Raises:
        TypeError: If one of them is no number.
        ValueError: If a fraction is not within [0, 1] or no step is left between them; when training starts, if it
            takes the number of planned steps and that is not known.
    """

    short_name = "ste"
    # Class attributes, so that a subclass need not define __init__, or call it.
    dense_start: Moment = 0
    dense_end: Moment = 0

    def __init__(self, dense_start: Moment = 0, dense_end: Moment = 0) -> None:
        check_window(dense_start, dense_end)
        self.dense_start = dense_start
        self.dense_end = dense_end

    def schedule(self, planned_steps: int | None) -> Steps:
        """The training steps at which the masks come and go; ``()`` if they are always there."""
        return resolve_window(self, self.dense_start, self.dense_end, planned_steps)

    def phases(self, layer: NMLayer) -> Phases:
        """Masks are there between the dense phases."""
        return Phases(layer.progress.schedule)

    def init_masks(self, layer: NMLayer) -> None:
        """Select the first masks, unless training starts dense."""
        # By phases(), not by the schedule itself, which has more moments in some subclasses.
        if within(self.phases(layer).sparse, layer.progress.clock):
            self.select(layer)
        else:
            layer.set_masks(None)

    def update(self, layer: NMLayer) -> None:
        """Select the masks again when it is time; none in a dense phase."""
        # The first masks do not wait until a selection is due.
        begins = layer.masks.bits is None
        if not within(self.phases(layer).sparse, layer.progress.clock):
            layer.set_masks(None)
        elif begins or self.due(layer):
            self.select(layer)

    def due(self, layer: NMLayer) -> bool:
        """Whether the masks are to be selected after this step."""
        return True

    def select(self, layer: NMLayer) -> None:
        """Select the masks from the weight as it is now."""
        pattern = self.current_pattern(layer)
        assert pattern is not None  # the masks of this class always hold to one
        # The forward GEMM of this layer stays dense: it is here for its backward pass.
        if layer.spec.forward_reason:
            return
        # Masks that are there move in place, in one pass; the first ones have no bits to write to.
        grid = grid_to_move(layer, backward=False)
        if grid is None:
            layer.set_masks(largest_entries(layer, pattern))
            return
        masks = layer.masks
        assert masks.bits is not None
        weight = layer.weight.detach()
        masks.count_moved(mask_passes.keep_largest(grid, pattern.n, weight, masks.bits))


def grid_to_move(layer: NMLayer, *, backward: bool) -> BlockGrid | None:
    """The blocks of a weight whose masks the library of CPU kernels can move in place; ``None`` where it cannot.

    Args:
        layer: The layer.
        backward: Whether there must be a backward mask, else there must be none.
    """
    masks = layer.masks
    has_these = masks.has_forward and masks.has_backward == backward
    weight = layer.param.detach()
    # Patterns that narrow to N:M have the same M, so the blocks are the same for all of them.
    m = layer.pattern.m
    if not has_these or masks.bits is None or m > LONGEST_BLOCK:
        return None
    return layer.view.blocks(m) if mask_passes.runs(weight, masks.bits) else None


Decay = float | Literal["relative"]
DecayAt = Literal["before-clipping", "after-clipping"]
DecayScale = float | Literal["world-size"]

RELATIVE = 0.5
"""The norm of a relative decay, over that of the gradient at kept entries."""
LEAST = 1e-4
"""The norm that pruned weights have at least in a relative decay, over that of the kept ones."""
LARGEST = 1e30
"""A larger factor is none: in float32 it may be infinite."""


class SRSTE(STE):
    r"""Sparse-refined STE (Zhou et al., 2021, arXiv 2102.04010): STE with a decay on pruned weights.

    :math:`g \leftarrow g + s \lambda (1 - m) \odot W`, once per real optimizer step; :math:`s` is 1 unless it is set.
    The decay makes it costly to revive an entry and so steadies the mask.

    A fixed :math:`\lambda` that suits SGD is far too weak under Adam, which divides the gradient by its own size, and
    its best value differs between models and batch sizes. The default is relative to the gradient G, in each weight:

    .. math:: \lambda = \frac{\lVert m \odot G \rVert}{2 \lVert (1 - m) \odot W \rVert},

    so that :math:`\lambda (1 - m) \odot W` is half as long as the gradient at kept entries; of experts, for each by
    itself. Let the gradients at pruned entries be noise as large as those at kept ones, and u how far one of them moves
    an entry in all: about the learning rate under Adam. At each entry the decay then has the size of
    :math:`a = \sqrt{N / (M - N)} / 2` gradients. Pruned entries walk at random by u and are pulled back by a u, so they
    stay within about u / 2a of zero: u at 2:4, 4 u at 1:16, under SGD and Adam alike. Pruned weights count as at least
    1e-4 times as long as kept ones.

    Args:
        decay: :math:`\lambda`; ``"relative"`` is the formula above, which is this project's. The paper has 2e-4, and
            values in use begin at 6e-5 (FST under AdamW, arXiv 2404.01847). The authors' runs on G GPUs add up G
            decays, so that 2e-4 has the effect of 1.6e-3 on 8 GPUs; see ``decay_scale``.
        dense_start: How long training stays dense before the first masks: training steps, or a fraction of them.
        dense_end: How long it is dense again at the end, in the same units: **the trained model is dense then**.
        decay_scale: :math:`s`, a factor of the decay. ``"world-size"`` is the number of processes, as in the authors'
            code: every process adds the decay to its own gradient, and the all-reduce takes the sum.
        decay_at: ``"before-clipping"``: the decay is clipped with the gradient. ``"after-clipping"``: it is added when
            the optimizer's step begins, as FST does; the gradient's norm does not count it.

    Raises:
        TypeError: If ``decay`` is neither a number nor ``"relative"``.
        ValueError: If ``decay`` or ``decay_scale`` is negative, for an unknown ``decay_scale`` or ``decay_at``, and
            what :class:`STE` refuses.
    """

    short_name = "sr-ste"

    def __init__(
        self,
        decay: Decay = "relative",
        dense_start: Moment = 0,
        dense_end: Moment = 0,
        decay_scale: DecayScale = 1.0,
        decay_at: DecayAt = "before-clipping",
    ) -> None:
        super().__init__(dense_start, dense_end)
        if decay != "relative":
            why = "it pulls pruned weights to zero; 0 is 'ste', 'relative' goes by the gradient"
            check_number("decay", decay, why, zero=True)
        if decay_scale != "world-size":
            check_number("decay_scale", decay_scale, "a factor, or 'world-size'", zero=True)
        check_option("decay_at", decay_at, DecayAt)
        self.decay = decay
        self.decay_scale = decay_scale
        self.decay_at = decay_at

    def defined_hooks(self) -> frozenset[str]:
        """The hooks of a step, without that of the other place of the decay."""
        hooks = super().defined_hooks()
        unused = "before_step" if self.decay_at == "after-clipping" else "after_clipping"
        # A subclass, or a function set on the object, may use the hook for something else.
        is_of_this_class = getattr(type(self), unused) is vars(SRSTE)[unused]
        if is_of_this_class and unused not in vars(self):
            return hooks - {unused}
        return hooks

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Add the decay of the pruned entries to the gradient, if it is to be clipped, too."""
        if self.decay_at == "before-clipping":
            self._add_decay(layer)

    def lost_without_before_step(self, layer: NMLayer) -> str:
        """The decay, where there are pruned entries and a gradient, and it is not added after clipping."""
        does_more = type(self).before_step is not SRSTE.before_step
        if does_more or "penalty" in self.defined_hooks():
            return super().lost_without_before_step(layer)
        decays = self.decay and self.decay_scale and self.decay_at == "before-clipping"
        if decays and layer.masks.has_forward and layer.view.local_grad is not None:
            return "the decay of pruned weights"
        return ""

    def after_clipping(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Add the decay of the pruned entries to the gradient, if it is not to be clipped."""
        if self.decay_at == "after-clipping":
            self._add_decay(layer)

    def _add_decay(self, layer: NMLayer) -> None:
        mask = layer.masks.forward_view
        grad = layer.view.local_grad
        if not self.decay or not self.decay_scale or mask is None or grad is None:
            return
        # Of each entry by itself: a process adds the decay of its own shard, and no weight is gathered.
        weight = layer.view.local
        kept = layer.view.shard_of(mask)
        bits = None if layer.masks.bits is None else layer.view.shard_of(layer.masks.bits)
        # A pass reads both tensors in one dtype. A shard of the bits may have gaps where that of the weight has none.
        if grad.dtype != weight.dtype or not mask_passes.runs(grad, weight, bits):
            bits = None
        # Each process adds the decay before the all-reduce in the authors' code, so that their decays add up.
        scale = processes() if self.decay_scale == "world-size" else float(self.decay_scale)
        if self.decay != "relative":
            factor = torch.tensor(scale * self.decay, dtype=torch.float64)
        elif layer.view.layout.has_experts:
            # Each expert has a matrix of its own, and may get few tokens. A pass has one factor for all.
            factor = scale * _of_each_expert(layer, grad, weight, kept)
            bits = None
        else:
            # Stays a tensor: its value would wait for the device.
            factor = scale * _of_whole_weight(layer, grad, weight, kept, bits)
        if bits is not None:
            mask_passes.decay_(grad, weight, bits, float(factor))
            return
        # Half precision is rounded once, by the sum.
        pull = masked(weight, ~kept).to(wide_dtype(weight))
        grad.add_(pull.mul_(factor))


def _of_whole_weight(
    layer: NMLayer, grad: Tensor, weight: Tensor, kept: Tensor, bits: Tensor | None
) -> Tensor:
    r"""The :math:`\lambda` of a relative decay, over the shards of all processes.

    Args:
        layer: The layer.
        grad: This process's shard of the gradient.
        weight: That of the weight.
        kept: That of the forward mask.
        bits: That of the masks' bits, if the library of CPU kernels reads all of them.
    """
    if bits is not None:
        sums = (mask_passes.squares(grad, bits)[0], *mask_passes.squares(weight, bits))
        squares = torch.tensor(sums, dtype=torch.float64)
    else:
        parts = masked(grad, kept), masked(weight, kept), masked(weight, ~kept)
        # In float64, so that the order of summation hardly ever changes the result.
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        squares = torch.stack(norms).square()
    return _relative(*sum_of_shards(squares, layer.param))


def _of_each_expert(layer: NMLayer, grad: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    r"""The :math:`\lambda` of each expert, in the shape of this process's shard of the weight ``[experts, ...]``."""
    parts = masked(grad, kept), masked(weight, kept), masked(weight, ~kept)
    squares = [
        gather(as_sharded(part.double().square(), layer.param).sum((1, 2), keepdim=True))
        for part in parts
    ]
    return layer.view.shard_of(_relative(*squares).expand(layer.view.shape))


def _relative(gradient: Tensor, kept: Tensor, pruned: Tensor) -> Tensor:
    """The factor of a relative decay from sums of squares: of the gradient at kept entries, kept and pruned weights."""
    # The few leftovers of weights that were set to zero would get the pull of all.
    factor = RELATIVE * (gradient / pruned.clamp(min=LEAST**2 * kept)).sqrt()
    # Nothing to decay is 0 / 0. The gradient of a step that a scaler skips is infinite: times a zero it would be NaN.
    return torch.where(factor < LARGEST, factor, 0.0)
