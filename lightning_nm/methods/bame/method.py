"""BAME: sparse-to-sparse training whose masks evolve by prune-and-regrow in chosen blocks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional import unpack_mask
from lightning_nm.functional.evolution import count_oscillations, swap_budget
from lightning_nm.methods.bame.exchange import (
    COUNT,
    Evidence,
    Exchange,
    ExchangingMethod,
    dense_gradient_was_used,
    drop_evidence,
    exchange_in_one_pass,
    find_exchange,
    forgotten_call,
    gather_evidence,
    make_exchange,
    unpack_evidence,
    write_evidence,
)
from lightning_nm.methods.base import largest_entries
from lightning_nm.methods.bi_mask import BiMask
from lightning_nm.methods.checks import (
    check_count,
    check_number,
    check_option,
    check_span,
    resolve_span,
)
from lightning_nm.methods.optimizer_state import group_of
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment
from lightning_nm.training.phases import zero_pruned_state

Source = Literal["accumulated", "batch"]
"""What speaks for an exchange, see :class:`BAME`."""
DgradMask = Literal["masked", "bi-mask"]
"""Whose mask the backward weight has, see :class:`BAME`."""

_FEW = 1e-3
"""Exchanges a block. A phase with fewer of them has trained nearly a fixed mask."""


@dataclass
class PendingStep:
    """Data passed from ``before_step`` to ``after_step``."""

    fresh: bool = False  # the masks are new: pruned entries of the weight and the optimizer's state may be nonzero
    ready: bool = False  # before_step() has run for the coming step
    # To be made after that step; afterwards the last one that was made by torch operations, until the batch ends.
    exchange: Exchange | None = None
    # With the coming step's gradient: it counts once the optimizer has stepped.
    evidence: Evidence | None = None
    due: bool = False  # an exchange by evidence follows the coming step


@dataclass
class PhaseTotals:
    """Totals of one method's adaptation phase over all layers, to warn if masks hardly moved."""

    blocks: int = 0
    exchanges: int = 0
    adaptations: int = 0


def _is_fresh(layer: NMLayer) -> bool:
    """Whether the masks are new, and the optimizer's state at pruned entries is no evidence yet, which must stay."""
    # With a count a saved state was loaded: a layer that was loaded has no pending step.
    return COUNT not in layer.buffers and (layer.pending is None or layer.pending.fresh)


class BAME(ExchangingMethod):
    r"""Block-aware mask evolution (Yang et al., ICML 2025, OpenReview XAZKPGUcQm), a reconstruction.

    There are no latent weights: pruned entries are exactly zero in the parameter after every step, and but for the
    steps whose dense gradient the masks need, only kept entries receive a gradient. From ``start`` to ``stop`` masks
    adapt every ``every`` steps of the layer's optimizer: in the blocks that promise most and did not go back and forth
    too often, a kept entry is exchanged for a pruned one. After ``stop`` the masks are frozen.

    The paper's exact score was not public when this was written. ``evidence`` selects one of two:

    * ``"accumulated"`` (ours): each pruned entry has a virtual weight U, which takes the steps that training would
      have made with it: :math:`U \leftarrow (1 - r / (s \cdot reach))\, U - r\, G / (\sqrt{\hat V} + \epsilon)` for
      the dense gradient G, the mean square :math:`\hat V` of its own gradients and the root mean square s of the
      layer's kept weights. r is ``evidence_rate`` times s, times the learning rate over its maximum. An
      exchange prunes the kept entry of the least :math:`|W|`, whose U starts at 0, for the pruned entry of the largest
      :math:`|U|`, which starts at U. A block's gain R is :math:`|U| - |W|`.
    * ``"batch"``: the paper's abstract and reviews. With the dense gradient G of the step and :math:`\eta` the
      effective step size read from the optimizer, an entry's score is :math:`|m W - \eta G|`, its magnitude one dense
      step ahead; R is what the exchange raises the score by, and the regrown entry starts at zero.

    In both, a block's oscillation f counts the adaptations that undid an earlier one of the same entry, and at a
    fraction p of the phase, at most :math:`\lceil B \cdot budget \cdot (1 + \cos \pi p) / 2 \rceil` of the B blocks of
    a layer adapt, in the order of :math:`R / (1 + f)`.

    U and V are kept in the optimizer's state of pruned entries, which is zero otherwise. For weights of 32 or more
    bits, Adam, AdamW, NAdam and RAdam need no memory for them, and SGD with momentum needs one more tensor of the
    weight's size until ``stop``. Other cases need two. While the optimizer steps there is a copy of both. A checkpoint
    has them, and a skipped step changes nothing. U is stored divided by 2^64, which loses no bit, so that left-over
    evidence never acts as momentum. U steps like Adam under every optimizer: steps like SGD's did worse than a fixed
    mask on images. Regrown entries start at U: from zero the gain was lost.

    Args:
        start: When adaptations begin: an integer counts training steps (batches after which an optimizer stepped), a
            float in [0, 1] is a fraction of those that the training is planned to take when it begins.
        stop: When they end, in the same units.
        every: Steps between two adaptations, from ``start`` on: by default 1, and steps of the layer's optimizer, with
            accumulated evidence; 100, and training steps, with that of a batch.
        evidence: ``"accumulated"`` or ``"batch"``, as above.
        gradient_every: Steps between two dense gradients for accumulated evidence. Each then counts for more: r is
            multiplied by the root of this number.
        evidence_rate: Step size of U relative to the size of kept weights, see above.
        budget: The fraction of a layer's blocks that may adapt at first, in (0, 1].
        dgrad: ``"masked"`` uses the forward weight for the input gradient, as the paper's arithmetic does; it is not
            N:M along `out`, so tensor cores gain nothing there. ``"bi-mask"`` gives dgrad a mask of its own, as
            :class:`BiMask` does.
        reach: The size that U tends to under gradients of one size and sign, relative to that of kept weights, at least
            one step. Older gradients fade: of one, half is left after 0.7 ``reach / evidence_rate`` later ones.
            ``None`` keeps all of them, as version 0.3 did with an ``evidence_rate`` of 0.015.

    Raises:
        ValueError: For a setting out of its range; when training starts, if ``stop`` comes before ``start``, a fraction
            is given but no number of steps, or the optimizer's state cannot be matched to entries of the weight.

    Example:
        >>> BAME(stop=0.5).schedule(planned_steps=1000)
        (0, 500)
    """

    short_name = "bame"
    # Evidence and counts are for steps: passes use W under the masks alone.
    passes_read_buffers = False
    # It decides whether a saved state has a backward mask and a permutation.
    fixed = ("dgrad",)
    headline = "adapted_blocks"
    # The first training step at which an adaptation may happen, and the one from which on none may.
    _scheduled = ("start", "stop")

    def __init__(
        self,
        start: Moment = 0,
        stop: Moment = 0.66,
        every: int | None = None,
        evidence: Source = "accumulated",
        gradient_every: int = 1,
        evidence_rate: float = 0.04,
        budget: float = 0.3,
        dgrad: DgradMask = "masked",
        reach: float | None = 1.0,
    ) -> None:
        check_span(start, stop, "no adaptation could happen")
        check_option("evidence", evidence, Source)
        check_option("dgrad", dgrad, DgradMask)
        if every is None:
            # By default, accumulated evidence takes a dense gradient at every step anyway. With that of a batch each
            # adaptation costs one.
            every = 1 if evidence == "accumulated" else 100
        check_count("every", every, 1)
        check_count("gradient_every", gradient_every, 1, optional=False)
        if evidence == "batch" and gradient_every != 1:
            raise ValueError(
                f"gradient_every={gradient_every} has no meaning for evidence='batch', whose dense gradients come "
                "with `every` adaptation: leave it out"
            )
        check_number("evidence_rate", evidence_rate, "the default is 0.04")
        if reach is not None:
            check_number("reach", reach, "the default is 1, and None is no bound")
        if not 0 < budget <= 1:
            raise ValueError(
                f"budget={budget} is not a fraction of the blocks: it must lie in (0, 1]"
            )
        self.start = start
        self.stop = stop
        self.every = every
        self.evidence = evidence
        self.gradient_every = gradient_every
        self.evidence_rate = evidence_rate
        self.reach = reach
        self.budget = budget
        self.dgrad = dgrad
        # It selects the masks for dgrad; its own hooks are not called.
        self._bi_mask = BiMask() if dgrad == "bi-mask" else None
        self._totals = PhaseTotals()

    @property
    def sparse_dgrad(self) -> bool:  # type: ignore[override]
        """Whether dgrad has a mask of its own."""
        return self._bi_mask is not None

    def check(self, planned_steps: int | None) -> None:
        """Refuse an empty window, and warn of one in which ``every`` leaves no room to evolve."""
        start, stop = resolve_span(self, planned_steps)
        # The last step of the phase. An empty phase has one step all the same.
        last = max(stop - 1, start)
        if planned_steps is not None:
            last = min(last, planned_steps - 1)
        if last < start:
            warnings.warn(
                f"BAME never adapts: it starts at step {start} of {planned_steps}", stacklevel=2
            )
        elif start < last < start + self.every:
            warnings.warn(
                f"BAME adapts once and never again: every={self.every} steps do not fit between step {start} and "
                f"step {last}; use a smaller `every`",
                stacklevel=2,
            )

    def check_optimizer_state(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Bring evidence that version 0.3 saved into the form of this version."""
        if COUNT in layer.buffers:
            unpack_evidence(layer, optimizer)

    def init_masks(self, layer: NMLayer) -> None:
        """Keep the largest entries; nothing has oscillated yet."""
        layer.masks.set_permutation(None)
        layer.pending = PendingStep(fresh=True)
        layer.buffers.clear()
        forward = None
        if not layer.spec.forward_reason:
            forward = largest_entries(layer)
            entries, device = layer.param.numel(), layer.param.device
            blocks = entries // layer.pattern.m
            layer.buffers.update(
                # Whether each entry was exchanged at least once, one bit each.
                exchanged=torch.zeros((entries + 7) // 8, dtype=torch.uint8, device=device),
                # How often each block oscillated, up to 255.
                oscillation=torch.zeros(blocks, dtype=torch.uint8, device=device),
                # Of the last adaptation: blocks that adapted, blocks held back, the predicted change of the loss.
                adaptation=torch.zeros(3, dtype=torch.float32, device=device),
                # All exchanges so far.
                exchanges=torch.zeros((), dtype=torch.int64, device=device),
            )
        layer.set_masks(forward, self._select_backward(layer, forward, search=False))

    def _select_backward(
        self, layer: NMLayer, forward: Tensor | None, *, search: bool
    ) -> Tensor | None:
        """The backward mask for a forward mask; ``None`` where dgrad has none."""
        if self._bi_mask is None or layer.spec.dgrad_reason:
            return None
        return self._bi_mask.select_backward(layer, forward, search=search)

    # A window begins: will its gradient be dense?

    def needs_dense_gradient(self, layer: NMLayer) -> bool:
        """Whether the coming window's gradient is to be dense: it is its turn, or an earlier one could not."""
        if not self._adapting(layer):
            return False
        progress = layer.progress
        # Accumulated evidence counts the layer's own steps, so that layers whose optimizers alternate have their turns.
        counted, every = progress.step, self.gradient_every
        if self.evidence == "batch":
            counted, every = progress.clock, self.every
        # The gradient that the last window was asked for may not have been used.
        return progress.dense_gradient or (counted - progress.schedule[0]) % every == 0

    def _adapting(self, layer: NMLayer) -> bool:
        """Whether the coming window lies in the adaptation phase."""
        if not layer.masks.has_forward:
            return False
        start, stop = layer.progress.schedule
        clock = layer.progress.clock
        # An empty phase, start == stop, has one adaptation.
        return start <= clock < stop or clock == start == stop

    # The optimizer steps.

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Use the dense gradient, then leave the optimizer the gradient of kept entries."""
        mask = layer.masks.forward_view
        if mask is None or dense_gradient_was_used(layer, mask):
            return
        progress = layer.progress
        # What is found now counts in after_step() alone, which a step that a scaler skips does not reach.
        pending = PendingStep(fresh=_is_fresh(layer), ready=True)
        if self.evidence == "accumulated" and self._adapting(layer):
            rate = self.evidence_rate * self.gradient_every**0.5
            param = layer.param
            group = group_of(layer, optimizer)
            # It masks the gradient, too.
            pending.evidence = gather_evidence(layer, optimizer, group, mask, rate, self.reach)
            # At learning rate 0, as a warm-up may begin, the weight stands still, and so does its mask.
            trains = param.grad is not None and bool(group["lr"])
            pending.due = trains and (progress.step - progress.schedule[0]) % self.every == 0
        elif progress.dense_gradient:
            # The evidence of a batch; or a gradient that was asked for accumulated evidence whose phase has ended
            # since.
            dense_grad = layer.view.local_grad
            if dense_grad is not None:
                if self.evidence == "batch":
                    budget = self._budget(layer)
                    pending.exchange = find_exchange(layer, optimizer, mask, None, budget)
                layer.zero_pruned(dense_grad)
        layer.pending = pending

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did; then make the exchange, and keep the evidence."""
        mask = layer.masks.forward_view
        if mask is None:
            return
        param = layer.param
        progress = layer.progress
        # A layer that was loaded keeps nothing yet.
        pending: PendingStep = layer.pending or PendingStep(fresh=True)
        if _is_fresh(layer):
            # Not earlier: a fit that fails before its first step has cost the user no weight.
            self.check_optimizer(layer, optimizer)
            zero_pruned_state(layer, mask, [optimizer])
        has_evidence = COUNT in layer.buffers
        holds_evidence = self.evidence == "accumulated" and has_evidence and self._adapting(layer)
        evidence = pending.evidence
        exchange = pending.exchange if pending.ready else None
        done = None
        if evidence is not None and pending.due:
            # By kernels, which also zero what was pruned before, or else by torch operations.
            budget = self._budget(layer)
            done = exchange_in_one_pass(layer, optimizer, evidence, budget)
            if done is None:
                exchange = find_exchange(layer, optimizer, mask, evidence, budget)
        if done is None:
            super().after_step(layer, optimizer)
        else:
            self._count(layer, *done, 0.0)
        if param.grad is not None and (progress.dense_gradient or holds_evidence):
            # The optimizer has used the gradient of pruned entries, or the evidence in its state as if it were
            # momentum.
            if not pending.ready:
                raise forgotten_call(layer, "adapt")
            # It has been used, so needs_dense_gradient() does not ask for it again.
            progress.dense_gradient = False
        if exchange is not None:
            self._exchange(layer, optimizer, mask, exchange, evidence)
        # After the exchange: the evidence is kept in the entries that are pruned from now on.
        if evidence is not None:
            write_evidence(layer, optimizer, evidence)
        layer.pending = PendingStep(exchange=exchange)

        if has_evidence and not holds_evidence:
            # The phase has ended.
            drop_evidence(layer, optimizer)
        # By the next step of any layer, the phase of all layers has ended.
        if self._totals.blocks and progress.clock >= progress.schedule[1]:
            self._warn_of_idleness()

    def _budget(self, layer: NMLayer) -> int:
        """How many blocks may change at this point of the phase."""
        start, stop = layer.progress.schedule
        fraction_done = 0.0
        if stop > start:
            fraction_done = (layer.progress.clock - start) / (stop - start)
        return swap_budget(len(layer.buffers["oscillation"]), self.budget, fraction_done)

    def _exchange(
        self,
        layer: NMLayer,
        optimizer: Optimizer,
        mask: Tensor,
        exchange: Exchange,
        evidence: Evidence | None,
    ) -> None:
        """Make the exchanges by torch operations: all tensors, the masks, and the counts of oscillations."""
        forward = make_exchange(layer, optimizer, mask, exchange, evidence)
        # Both masks at once: the backward mask is a part of the forward mask.
        layer.set_masks(forward, self._select_backward(layer, forward, search=False))
        blocks = exchange.blocks
        counts, exchanged = layer.buffers["oscillation"], layer.buffers["exchanged"]
        count_oscillations(counts, exchanged, blocks, exchange.pruned, exchange.regrown)
        self._count(layer, len(blocks), exchange.held, exchange.loss_change)

    @staticmethod
    def _count(
        layer: NMLayer, blocks: int, held: Tensor | int, loss_change: Tensor | float
    ) -> None:
        """Count an adaptation; its numbers stay on their device."""
        layer.buffers["exchanges"] += blocks
        for place, number in enumerate((blocks, held, loss_change)):
            layer.buffers["adaptation"][place] = number

    # The batch ends.

    def update(self, layer: NMLayer) -> None:
        """Let the backward mask follow the weights; the forward mask moved right after the step."""
        if layer.pending is not None:
            layer.pending.exchange = None
        if self._bi_mask is not None and layer.progress.crossed(self._bi_mask.permute_every):
            backward = self._select_backward(layer, layer.forward_mask, search=True)
            if backward is not None:
                layer.masks.set_backward(backward)
        start, stop = layer.progress.schedule
        # Once, when the phase ends: reading the count of exchanges waits for the device.
        if layer.progress.clock == stop and layer.masks.has_forward and layer.buffers:
            totals = self._totals
            totals.blocks += len(layer.buffers["oscillation"])
            totals.exchanges += int(layer.buffers["exchanges"])
            adaptations = min(layer.step, stop - start) // self.every
            totals.adaptations = max(totals.adaptations, adaptations)

    def _warn_of_idleness(self) -> None:
        """Warn if masks hardly moved in a phase that was long enough, and forget the phase."""
        totals = self._totals
        self._totals = PhaseTotals()
        if self.evidence == "accumulated":
            # By then a virtual weight with steady gradients is as large as the kept ones.
            was_long_enough = totals.adaptations * self.every * self.evidence_rate >= 1
            advice = f"raise evidence_rate={self.evidence_rate}"
            if self.reach is not None:
                advice += f" or reach={self.reach}"
        else:
            was_long_enough = totals.adaptations >= 5
            advice = "use evidence='accumulated' with every=1"
        if totals.exchanges <= _FEW * totals.blocks and was_long_enough:
            warnings.warn(
                f"BAME's masks hardly moved, so this trains nearly a fixed mask: {totals.exchanges} exchanges in "
                f"{totals.blocks} blocks at {totals.adaptations} adaptations; {advice}",
                stacklevel=2,
            )

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """Statistics of the evolution.

        ``oscillation``: accumulated oscillations per block. ``regrown_alive``: the fraction of exchanges that still
        stand: their regrown entry has been kept ever since. Of the last adaptation, ``adapted_blocks``: fraction of
        blocks that changed; ``frozen_blocks``: fraction of blocks that did not, though an exchange promised a gain;
        with the evidence of a batch also ``predicted_loss_change``, summed over the layers. After the phase these are
        0, 1 and 0.
        """
        blocks = oscillations = alive = exchanges = 0.0
        # Of the last adaptation: blocks that adapted, blocks held back, the predicted change of the loss.
        last = torch.zeros(3, dtype=torch.float64)
        for layer in layers:
            if not layer.buffers:
                continue
            buffers = layer.buffers
            counts = buffers["oscillation"]
            blocks += len(counts)
            oscillations += int(counts.sum())
            mask = layer.masks.forward_view
            if mask is not None:
                # The last exchange of such an entry regrew it. Of those that regrew it before, each was undone.
                alive += int((unpack_mask(buffers["exchanged"], mask.shape) & mask).sum())
                exchanges += int(buffers["exchanges"])
            start, stop = layer.progress.schedule
            # An empty phase has one adaptation, after step `start`, whose numbers are shown.
            if layer.progress.clock > max(stop, start + 1):
                last[1] += len(counts)  # all blocks are frozen
            else:
                last += buffers["adaptation"].cpu()
        blocks = max(blocks, 1)
        found = {
            "oscillation": oscillations / blocks,
            "adapted_blocks": float(last[0] / blocks),
            "frozen_blocks": float(last[1] / blocks),
            "regrown_alive": alive / max(exchanges, 1),
        }
        if self.evidence == "batch":
            found["predicted_loss_change"] = float(last[2])
        return found
