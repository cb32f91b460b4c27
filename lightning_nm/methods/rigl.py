"""RigL in N:M blocks: sparse-to-sparse training that drops the smallest entries and grows by a batch's gradient."""

from __future__ import annotations

import math
import warnings

from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import drop_and_grow
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.methods.bame.exchange import (
    Exchange,
    ExchangingMethod,
    dense_gradient_was_used,
    forgotten_call,
    make_exchange,
)
from lightning_nm.methods.base import has_ended, largest_entries
from lightning_nm.methods.checks import check_count, check_number
from lightning_nm.nn.layer import NMLayer, blocks_of
from lightning_nm.schedule import Moment, check_moment


class RigL(ExchangingMethod):
    r"""RigL (Evci et al., ICML 2020, arXiv 1911.11134) in N:M blocks.

    Every block keeps N of M entries, as every row keeps its fan-in in SRigL (Lasby et al., ICLR 2024, arXiv
    2305.02299). There are no latent weights: pruned entries are exactly zero in the parameter after every step. Every
    ``every`` steps until ``stop``, the dense gradient G of that step moves the mask of each layer:

    .. math:: k = \left\lfloor K \, \frac{drop}{2} \left(1 + \cos \frac{\pi t}{stop}\right) \right\rfloor,

    where K is the number of kept entries and t the training step: the k kept entries of least :math:`|W|` are dropped,
    and a block that lost d of them grows the d entries of largest :math:`|G|` among those that it does not keep then. A
    dropped entry that is grown again stays as it was. Other grown entries start at zero.

    A batch whose gradient moves the masks is trained on, too: the optimizer steps with the entries kept so far, and the
    exchange follows. The authors' code leaves that step out. The optimizer's state of exchanged entries starts again:
    at 0, and second moments of grown entries at the mean of their block, so that they take no larger steps than others.

    It is the baseline of :class:`BAME`, which exchanges one entry of a block at a time, by accumulated evidence.

    Args:
        every: Optimizer steps between two updates of the masks (the paper's 100).
        stop: When they end: an integer counts training steps, a float in [0, 1] is a fraction of those that the
            training is planned to take (the paper's 25000 of 32000 on ImageNet).
        drop: The fraction of kept entries that is dropped at first, in (0, 1] (the paper's 0.3).

    Raises:
        TypeError: If ``stop`` is neither an integer nor a float.
        ValueError: For a setting out of its range; when training starts, if a fraction is given but no number of steps,
            or the optimizer's state cannot be matched to entries of the weight.

    Example:
        >>> RigL(stop=0.5).schedule(planned_steps=1000)
        (500,)
    """

    short_name = "rigl"
    headline = "flip_rate"
    _scheduled = ("stop",)

    def __init__(self, every: int = 100, stop: Moment = 0.75, drop: float = 0.3) -> None:
        check_count("every", every, 1)
        check_moment("stop", stop)
        check_number("drop", drop, "it is a fraction of the kept entries", most=1)
        self.every = every
        self.stop = stop
        self.drop = drop

    def check(self, planned_steps: int | None) -> None:
        """Warn if the masks never move."""
        (stop,) = self.schedule(planned_steps)
        last = stop if planned_steps is None else min(stop, planned_steps)
        # The first turn is the step after `every` steps, which must come before the end.
        if last <= self.every:
            warnings.warn(
                f"RigL never moves a mask: every={self.every} steps do not fit before step {last}, where it ends; "
                "use a smaller `every`",
                stacklevel=2,
            )

    def needs_dense_gradient(self, layer: NMLayer) -> bool:
        """Whether the coming window's gradient moves the mask: it is its turn, or an earlier one could not."""
        if not layer.masks.has_forward or has_ended(layer):
            return False
        # The layer's own steps, so that layers whose optimizers alternate all have their turns.
        step = layer.progress.step
        is_turn = step > 0 and step % self.every == 0
        return is_turn or layer.progress.dense_gradient

    def init_masks(self, layer: NMLayer) -> None:
        """Keep the largest entries."""
        layer.pending = None
        layer.set_masks(None if layer.spec.forward_reason else largest_entries(layer))

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Find the exchange that the dense gradient speaks for, then leave the optimizer that of kept entries."""
        mask = layer.masks.forward_view
        if mask is None or dense_gradient_was_used(layer, mask):
            return
        # An exchange that is left here belongs to a step that was skipped, and to its gradient.
        layer.pending = None
        grad = layer.view.local_grad
        if grad is None or not layer.progress.dense_gradient:
            return
        # While the gradient of pruned entries is there.
        layer.pending = self._find_exchange(layer, mask)
        layer.zero_pruned(grad)

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did; then make the exchange."""
        mask = layer.masks.forward_view
        if mask is None:
            return
        # By the mask before the exchange: entries that grow must start at zero.
        super().after_step(layer, optimizer)
        exchange: Exchange | None = layer.pending
        layer.pending = None
        if layer.progress.dense_gradient and layer.view.local_grad is not None:
            if exchange is None:
                raise forgotten_call(layer, "move")
            layer.progress.dense_gradient = False
        if exchange is not None:
            layer.set_masks(make_exchange(layer, optimizer, mask, exchange))

    def _find_exchange(self, layer: NMLayer, mask: Tensor) -> Exchange:
        """The entries to exchange, by the weight and the dense gradient as they are before the step."""
        assert layer.weight.grad is not None
        mask_bm = blocks_of(layer, mask)
        # At least float32: half precision would make ties of values that differ.
        dtype = wide_dtype(layer.weight)
        weight_bm = blocks_of(layer, layer.weight.detach()).to(dtype)
        grad_bm = blocks_of(layer, layer.weight.grad).to(dtype)
        (stop,) = layer.progress.schedule
        decay = 0.5 * (1 + math.cos(math.pi * layer.progress.clock / stop))
        # Rounding errors must not lose an entry: 6.999999999999999 is 7.
        drops = int(round(int(mask_bm.sum()) * self.drop * decay, 6))
        moved_bm = drop_and_grow(weight_bm, grad_bm, mask_bm, drops)
        # Both are in the order of the blocks, each of which loses as many entries as it grows: they are pairs.
        blocks, pruned = (mask_bm & ~moved_bm).nonzero(as_tuple=True)
        _, grown = (moved_bm & ~mask_bm).nonzero(as_tuple=True)
        grid = layer.view.blocks(layer.pattern.m)
        return Exchange(blocks, grid.places(blocks, pruned), grid.places(blocks, grown))
