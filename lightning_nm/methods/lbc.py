"""Learning Best Combination: all N:M patterns of a block have scores, and the lowest are removed one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_nm.functional import pack_mask, unpack_mask
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.functional.select import masked
from lightning_nm.methods.base import (
    Gradients,
    SparseToSparse,
    has_ended,
    kept_gradient,
    set_tensor,
    weighted_mean,
)
from lightning_nm.methods.checks import warn_of_late_stop
from lightning_nm.methods.pattern_scores import PATTERNS, begin_scores, sum_by_pattern
from lightning_nm.nn.layer import NMLayer, from_blocks_of
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import Moment, check_moment

SCORES = "scores"
"""The layer's parameter: a score for each pattern of each block, ``[out, blocks, C]``; 0 once it is removed."""
REMOVED = "removed"
"""The layer's buffer: whether each of them is removed, one bit each."""


class LBC(SparseToSparse):
    r"""Learning Best Combination (Zhang et al., NeurIPS 2022, arXiv 2206.06662): patterns compete within each block.

    Each block has a score for each of its :math:`C = \binom{M}{N}` patterns, at first :math:`1 / \binom{M-1}{N-1}`.
    An entry is kept while any pattern that is left keeps it, so training starts dense. After training step t the
    lowest scores of each block are removed for good until

    .. math:: 1 + \lceil (C - 1) (1 - t / t_f)^3 \rceil

    are left; of equal ones, that whose entries have the smallest sum of magnitudes. **Masks are N:M from** ``stop``
    **on**: before, no GEMM counts as N:M, and ``violations`` counts the blocks that keep more.

    The score s of a pattern P that is left gets the straight-through gradient :math:`dL/ds = \sum_{i \in P} W_i\,
    dL/dW_{F,i}`. Weights get the gradient of kept entries. Pruned entries never return, and are zero in the parameter.

    Scores are trained by the optimizer of the weight, in its parameter group, as in the paper. They take C / M numbers
    of at least 32 bits for each weight, and the optimizer's state for them: 1.5 at 2:4, 1 at 1:16, 8.75 at 4:8.

    Args:
        stop: :math:`t_f`, from which one pattern is left: an integer counts training steps, a float in [0, 1] is a
            fraction of the planned ones. The paper's is 0.5. 0 keeps the largest magnitudes from the first step on.

    Raises:
        TypeError: If ``stop`` is neither an integer nor a float.
        ValueError: If ``stop`` is negative or a fraction above 1; when training starts, if a fraction is given but no
            number of steps, or, naming the layer, if the pattern has more than 256 combinations or tensor parallelism
            cuts the weight.

    Example:
        >>> LBC(stop=0.5).schedule(planned_steps=1000)
        (500,)
    """

    short_name = "lbc"
    # The paper counts all three GEMMs by the fraction of kept entries.
    paper_counts_masked = True
    _scheduled = ("stop",)
    _refused = {
        "dense_start": "it starts dense anyway, and removes entries until its `stop`",
        "ramp": "its scores are of the combinations of one pattern, and masks narrow to it until its `stop`",
        "dense_end": "it trains scores, and masks that narrow to N:M until its `stop`; without masks nothing of that "
        "would be left",
    }

    def __init__(self, stop: Moment = 0.5) -> None:
        check_moment("stop", stop)
        self.stop = stop

    def check(self, planned_steps: int | None) -> None:
        """Warn of a stop that the training does not reach."""
        warn_of_late_stop(self, planned_steps, "LBC's masks never become N:M")

    def current_pattern(self, layer: NMLayer) -> NMPattern | None:
        """The layer's pattern once one combination of each block is left, ``None`` before."""
        return layer.spec.pattern if has_ended(layer) else None

    def init_masks(self, layer: NMLayer) -> None:
        """Give all patterns the same score, so that every entry is kept."""
        shape = begin_scores(layer, "scores")
        if shape is None:
            return
        weight = layer.weight
        device = weight.device
        n, m = layer.pattern.n, layer.pattern.m
        # One pattern in C(M-1, N-1) keeps a certain entry: the scores of those that do add up to 1.
        score = 1 / math.comb(m - 1, n - 1)
        dtype = wide_dtype(weight)
        scores = torch.full(shape, score, dtype=dtype, device=device)
        set_tensor(layer.parameters, SCORES, nn.Parameter(scores))
        layer.buffers[REMOVED] = pack_mask(torch.zeros_like(scores, dtype=torch.bool))
        # A mask of ones and not none: it narrows in place, and a compiled graph goes on reading the same bits.
        layer.set_masks(torch.ones(layer.view.shape, dtype=torch.bool, device=device))
        self._remove_patterns(layer)

    def update(self, layer: NMLayer) -> None:
        """Remove the lowest scores of each block, as many as it is time for, and what they alone kept."""
        if SCORES in layer.parameters:
            self._remove_patterns(layer)
            # Before the first step the weight keeps its entries: a fit that fails until then has changed nothing.
            if layer.step:
                layer.zero_pruned()

    def _remove_patterns(self, layer: NMLayer) -> None:
        """Remove the scores that are due, and move the mask; the weight stays."""
        scores = layer.parameters[SCORES].detach()
        (stop,) = layer.progress.schedule
        total = scores.shape[-1]
        # 1 + ceil((C - 1) (1 - t / t_f)^3), in integers: no rounding moves a removal to another step.
        ahead = max(stop - layer.progress.clock, 0)
        left = 1 - (-(total - 1) * ahead**3 // max(stop, 1) ** 3)
        removed = _removed(layer)
        # The same number in all blocks.
        if left >= total - int(removed[0, 0].sum()):
            return
        # In the order in which they go: those gone already, then by score, then by magnitude.
        magnitudes = sum_by_pattern(layer, layer.weight.detach().abs(), scores)
        # Two stable sorts, the minor key first: equal scores stay in the order of their magnitudes.
        by_magnitude = magnitudes.argsort(dim=-1, stable=True)
        ranked = scores.masked_fill(removed, -torch.inf).gather(-1, by_magnitude)
        worst_first = by_magnitude.gather(-1, ranked.argsort(dim=-1, stable=True))
        removed.scatter_(-1, worst_first[..., : total - left], True)
        layer.buffers[REMOVED].copy_(pack_mask(removed))
        # By the 0, weight_gradient() knows what is removed without unpacking bits in every pass.
        scores.masked_fill_(removed, 0)
        patterns = layer.buffers[PATTERNS]
        # [blocks, C] x [C, M]: how many patterns that are left keep each entry.
        # In float32, since torch multiplies no matrices of bool; sums of at most 256 ones are exact.
        keepers = (~removed).flatten(0, 1).float() @ patterns.float()
        layer.set_masks(from_blocks_of(layer, keepers > 0))

    # A pruned entry is in no pattern that is left, so no score needs its gradient.
    gradient_at_pruned = SparseToSparse.gradient_at_pruned

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> Gradients:
        """The gradient at kept entries, and that of the scores that are left."""
        kept_grad = kept_gradient(layer, grad)
        scores = layer.parameters.get(SCORES)
        if scores is None:
            return (kept_grad,)
        of_scores = sum_by_pattern(layer, kept_grad * weight, scores)
        return kept_grad, masked(of_scores, scores.detach() != 0)

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Leave the last scores, which decide on nothing any more, without a gradient: clipping does not count it."""
        if SCORES in layer.parameters and has_ended(layer):
            layer.parameters[SCORES].grad = None

    def lost_without_before_step(self, layer: NMLayer) -> str:
        """An empty text: the gradient of the last scores changes no mask."""
        return ""

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries and removed scores at zero, whatever the optimizer did."""
        super().after_step(layer, optimizer)
        scores = layer.parameters.get(SCORES)
        if scores is not None:
            scores.detach().masked_fill_(_removed(layer), 0)

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """``surviving_patterns``: patterns that are left in a block, on average; 1 from ``stop`` on."""
        scored = [layer for layer in layers if SCORES in layer.parameters]
        left = (~_removed(layer) for layer in scored)
        # `each` is [out, blocks, C], and `each[..., 0]` has one entry for each block.
        return weighted_mean(
            "surviving_patterns", ((int(each.sum()), each[..., 0].numel()) for each in left)
        )


def _removed(layer: NMLayer) -> Tensor:
    """Whether each score is removed, bool of their shape."""
    return unpack_mask(layer.buffers[REMOVED], tuple(layer.parameters[SCORES].shape))
