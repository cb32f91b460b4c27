"""BAME: sparse-to-sparse training whose masks evolve by prune-and-regrow in chosen blocks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional import magnitude_mask, pack_mask, unpack_mask
from lightning_nm.functional.evolution import (
    Score,
    Selection,
    Swaps,
    as_blocks,
    best_swaps,
    block_index,
    chosen_swaps,
    select_blocks,
    swap_budget,
)
from lightning_nm.methods.bame.exchange import Exchange, PendingExchange, exchange_entries
from lightning_nm.methods.bame.optimizer_state import check_optimizer, clear_entries, step_size
from lightning_nm.methods.base import MaskMethod, check_option
from lightning_nm.methods.bi_mask import BiMask
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment, check_moment, resolve_moment

_CHUNK = 1 << 20  # weights that an adaptation handles at a time: it bounds the temporaries


def _pending(layer: NMLayer) -> PendingExchange:
    """What the layer keeps for the next call of this step; a layer that was loaded keeps nothing yet."""
    return layer.pending or PendingExchange(fresh=True)


class BAME(MaskMethod):
    r"""Block-aware mask evolution (Yang et al., ICML 2025, OpenReview XAZKPGUcQm), a reconstruction.

    There are no latent weights: pruned entries are exactly zero in the parameter after every step, and between
    adaptations only kept entries receive a gradient. Every ``every`` steps from ``start`` to ``stop`` a step's dense
    gradient G shows, for each block, which kept entry to exchange for which pruned one (loss-aware mask adaption), and
    the most promising blocks that did not go back and forth too often adapt (oscillation-aware block freezing). The
    exchanges follow the step. A regrown entry starts at zero. After ``stop`` the mask is frozen.

    The paper's exact score was not public when this was written. This follows its abstract and its reviews, with
    :math:`\eta` the effective step size read from the optimizer:

    * an entry's score under ``"virtual"`` is :math:`|m W - \eta G|`, its magnitude one dense step ahead; under
      ``"taylor-abs"`` :math:`|G W|` for kept entries, :math:`\eta G^2` for pruned ones;
    * a block's gain R is what its exchanges raise the score by; the predicted loss change, whatever the score, is
      :math:`\sum_{pruned} (-G W + \eta G^2) - \sum_{regrown} \eta G^2`;
    * a block's oscillation f counts the adaptations that undid an earlier one of the same entry;
    * at a share p of the window, at most :math:`\lceil B \cdot budget \cdot (1 + \cos \pi p) / 2 \rceil` of the B
      blocks of a layer adapt, in the order of :math:`R / (1 + f)`.

    Args:
        start: When adaptations begin: an integer counts training steps (batches after which an optimizer stepped), a
            float in [0, 1] is a share of those that the training is planned to take when it begins.
        stop: When they end, likewise.
        every: Training steps between two adaptations.
        score: ``"virtual"`` or ``"taylor-abs"``, as above.
        selection: ``"ratio"``, as above, or ``"quantile"``: the tenth of the blocks that oscillated most is frozen, the
            others adapt in the order of R. The latter suits noisy gradients.
        budget: The share of a layer's blocks that may adapt at first, in (0, 1].
        max_swaps_per_block: Exchanges in a block at one adaptation.
        rank_by: ``"score"`` takes R as above; ``"loss"`` takes the predicted decrease of the loss for it.
        oscillation: ``"return"`` counts as above, ``"flip"`` counts every adaptation that changes the block.
        dgrad: ``"masked"`` uses the forward weight for the input gradient, as the paper's arithmetic does; it is not
            N:M along `out`, so hardware gains nothing there. ``"bi-mask"`` gives dgrad a mask of its own, as
            :class:`BiMask` does.

    Raises:
        ValueError: For a setting out of its range; when training starts, if ``stop`` comes before ``start``, a share is
            given but no number of steps, or the optimizer's state cannot be matched to entries of the weight.

    Example:
        >>> BAME(stop=0.5, every=50).schedule(planned_steps=1000)
        (0, 500)
    """

    short_name = "bame"
    restores_masks = True
    latent = False
    paper_counts_masked = True
    fixed = ("dgrad",)
    headline = "adapted_blocks"

    def __init__(
        self,
        start: Moment = 0,
        stop: Moment = 0.66,
        every: int = 100,
        score: Score = "virtual",
        selection: Selection = "ratio",
        budget: float = 0.3,
        max_swaps_per_block: int = 1,
        rank_by: Literal["score", "loss"] = "score",
        oscillation: Literal["return", "flip"] = "return",
        dgrad: Literal["masked", "bi-mask"] = "masked",
    ) -> None:
        check_moment("start", start)
        check_moment("stop", stop)
        if isinstance(start, float) == isinstance(stop, float) and stop < start:
            raise ValueError(f"stop={stop} lies before start={start}: no adaptation could happen")
        for name, number in (("every", every), ("max_swaps_per_block", max_swaps_per_block)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number} must be an integer of at least 1")
        if not 0 < budget <= 1:
            raise ValueError(f"budget={budget} is not a share of the blocks: it must lie in (0, 1]")
        check_option("score", score, *get_args(Score))
        check_option("selection", selection, *get_args(Selection))
        check_option("rank_by", rank_by, "score", "loss")
        check_option("oscillation", oscillation, "return", "flip")
        check_option("dgrad", dgrad, "masked", "bi-mask")
        self.start, self.stop, self.every = start, stop, every
        self.score: Score = score
        self.selection: Selection = selection
        self.budget, self.max_swaps_per_block = budget, max_swaps_per_block
        self.rank_by, self.oscillation, self.dgrad = rank_by, oscillation, dgrad
        self._bi_mask = BiMask() if dgrad == "bi-mask" else None

    @property
    def sparse_dgrad(self) -> bool:  # type: ignore[override]
        """Whether dgrad has a mask of its own."""
        return self._bi_mask is not None

    def schedule(self, planned_steps: int | None) -> tuple[int, int]:
        """The first training step at which an adaptation may happen, and the one from which on none may."""
        return (
            resolve_moment(self, "start", self.start, planned_steps),
            resolve_moment(self, "stop", self.stop, planned_steps),
        )

    def check(self, planned_steps: int | None) -> None:
        """Refuse an empty window, and warn of one in which ``every`` leaves no room to evolve."""
        start, stop = self.schedule(planned_steps)
        if stop < start:
            raise ValueError(f"stop={self.stop} is step {stop} of {planned_steps}, before start={self.start} ({start})")
        last = max(stop - 1, start) if planned_steps is None else min(max(stop - 1, start), planned_steps - 1)
        if last < start:
            warnings.warn(f"BAME never adapts: it starts at step {start} of {planned_steps}", stacklevel=2)
        elif start < last < start + self.every:
            room = f"every={self.every} steps do not fit between step {start} and step {last}"
            warnings.warn(f"BAME adapts once and never again: {room}; use a smaller `every`", stacklevel=2)

    def needs_dense_gradient(self, layer: NMLayer) -> bool:
        """Whether the coming window adapts: it is its turn, or an earlier one could not."""
        start, stop = layer.schedule
        if layer.forward_mask is None or not (start <= layer.clock < stop or layer.clock == start == stop):
            return False
        return layer.dense_gradient or (layer.clock - start) % self.every == 0

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Only in a window that adapts."""
        return layer.dense_gradient

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose state cannot be matched to entries of the weight."""
        check_optimizer(optimizer, layer.param, layer.name)

    @torch.no_grad()
    def init_masks(self, layer: NMLayer) -> None:
        """Keep the largest entries; nothing has oscillated yet."""
        layer.masks.set_permutation(None)
        layer.pending = PendingExchange(fresh=True)
        layer.buffers.clear()
        forward = None
        if not layer.forward_reason:
            forward = layer.by_rows(lambda rows: magnitude_mask(rows, layer.pattern, dim=1))
            size, device = layer.param.numel(), layer.param.device
            layer.buffers.update(
                {
                    # Entries that were exchanged at least once, one bit each; oscillations of each block, up to 255.
                    "exchanged": torch.zeros((size + 7) // 8, dtype=torch.uint8, device=device),
                    "oscillation": torch.zeros(size // layer.pattern.m, dtype=torch.uint8, device=device),
                    # Of the last adaptation: blocks adapted, blocks held back, predicted change of the loss.
                    "adaptation": torch.zeros(3, device=device),
                }
            )
        layer.set_masks(forward, self._select_backward(layer, forward, search=False))
        if layer.step and forward is not None:  # weights that replace trained ones, which had no latent values either
            layer.local_weight.masked_fill_(~layer.local_shard(forward), 0)

    def _select_backward(self, layer: NMLayer, forward: Tensor | None, *, search: bool) -> Tensor | None:
        """The backward mask for a forward mask; ``None`` where dgrad has none."""
        if self._bi_mask is None or layer.dgrad_reason:
            return None
        weight, mask = layer.rows(layer.weight.detach()), None if forward is None else layer.rows(forward)
        return layer.unrows(self._bi_mask.select_backward(layer, weight, mask, search=search))

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Pruned entries receive no gradient, except in a window that adapts."""
        mask = None if layer.dense_gradient else layer.forward_mask_view
        return (grad if mask is None else grad.masked_fill_(~mask, 0),)

    @torch.no_grad()
    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Find the exchanges from the dense gradient, then leave the optimizer the gradient of kept entries."""
        mask = layer.forward_mask_view
        if mask is None:
            return
        exchange = None
        grad = layer.local_grad if layer.dense_gradient else None
        if grad is not None:
            exchange = self._find(layer, optimizer, layer.rows(mask))
            grad.masked_fill_(~layer.local_shard(mask), 0)
        layer.pending = PendingExchange(_pending(layer).fresh, ready=True, exchange=exchange)

    @torch.no_grad()
    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did; then exchange what was found before the step."""
        mask, pending = layer.forward_mask_view, _pending(layer)
        if mask is None:
            return
        layer.local_weight.masked_fill_(~layer.local_shard(mask), 0)
        if pending.fresh:  # not earlier: a fit that fails before its first step has cost the user no weight
            clear_entries(optimizer, layer.param, ~mask, layer.name)
        if pending.ready and pending.exchange is not None:
            self._apply(layer, optimizer, mask, pending.exchange)
            layer.progress.release_dense_gradient()
        elif layer.dense_gradient and layer.param.grad is not None and not pending.ready:
            raise RuntimeError(
                f"the optimizer stepped without before_step() for layer '{layer.name}', so its mask cannot adapt: call "
                "sparsifier.before_step(optimizer) first; with Lightning, step the optimizer of self.optimizers()"
            )
        layer.pending = PendingExchange(exchange=pending.exchange if pending.ready else None)

    @torch.no_grad()
    def update(self, layer: NMLayer) -> None:
        """Let the backward mask follow the weights; the forward mask moved right after the step."""
        layer.pending = replace(_pending(layer), exchange=None)
        if self._bi_mask is not None and layer.crossed(self._bi_mask.permute_every):
            backward = self._select_backward(layer, layer.forward_mask, search=True)
            if backward is not None:
                layer.masks.set_backward(backward)

    def _find(self, layer: NMLayer, optimizer: Optimizer, mask: Tensor) -> Exchange:
        """Choose the exchanges, a few rows of the weight at a time, so that the temporaries stay small."""
        weight, m = layer.weight.detach(), layer.pattern.m
        assert layer.weight.grad is not None
        size = step_size(optimizer, layer.param)
        max_swaps = min(self.max_swaps_per_block, layer.pattern.n, m - layer.pattern.n)
        rows = [layer.rows(tensor) for tensor in (weight, layer.weight.grad)]
        rows += [mask] if size.moment is None else [mask, layer.rows(size.moment)]
        per_chunk = max(1, _CHUNK * len(mask) // mask.numel())
        parts = []
        for chunk in zip(*(tensor.split(per_chunk) for tensor in rows), strict=True):
            w, g, keep, *moment = (as_blocks(tensor, m) for tensor in chunk)
            # Half precision would make ties of scores that differ.
            w, g, *moment = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (w, g, *moment))
            g = -g if size.maximize else g
            step = size.of_blocks(moment[0] if moment else None, g, keep)
            parts.append(best_swaps(w, g, keep, step, self.score, max_swaps))
        swaps = Swaps(*(torch.cat(column) for column in zip(*parts, strict=True)))
        del parts
        start, stop = layer.schedule
        progress = (layer.clock - start) / (stop - start) if stop > start else 0.0
        value = swaps.gain if self.rank_by == "score" else torch.where(swaps.improving > 0, -swaps.loss_change, 0)
        budget = swap_budget(len(value), self.budget, progress)
        chosen = select_blocks(value, layer.buffers["oscillation"], budget, self.selection)
        blocks, pruned, regrown, _ = chosen_swaps(swaps, chosen)
        return Exchange(
            blocks,
            layer.locate(block_index(mask.shape, m, blocks, pruned)),
            layer.locate(block_index(mask.shape, m, blocks, regrown)),
            len(chosen),
            (value > 0).sum() - len(chosen),
            swaps.loss_change[chosen].sum(),
        )

    def _apply(self, layer: NMLayer, optimizer: Optimizer, mask: Tensor, exchange: Exchange) -> None:
        """Make the exchanges: weights, optimizer state, masks, and the count of oscillations."""
        weight = layer.weight.detach()
        exchange_entries(optimizer, layer, mask, exchange)
        weight[exchange.pruned] = 0
        if layer.weight.grad is not None:  # gradients that are not zeroed before the next window
            layer.weight.grad[exchange.pruned] = 0
        forward = mask.clone()
        forward[exchange.pruned] = False
        forward[exchange.regrown] = True
        layer.set_masks(forward, self._select_backward(layer, forward, search=False))

        exchanged = unpack_mask(layer.buffers["exchanged"], weight.shape)
        again = (exchanged[exchange.pruned] | exchanged[exchange.regrown]) | (self.oscillation == "flip")
        oscillation = layer.buffers["oscillation"]
        blocks = exchange.blocks[again]  # a block that occurs twice counts once
        oscillation[blocks] = oscillation[blocks].clamp(max=254) + 1
        exchanged[exchange.pruned] = True
        exchanged[exchange.regrown] = True
        layer.buffers["exchanged"].copy_(pack_mask(exchanged))
        figures = (torch.as_tensor(exchange.adapted), exchange.held, exchange.loss_change)
        layer.buffers["adaptation"].copy_(torch.stack([x.to(weight.device, torch.float32) for x in figures]))

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """Statistics of the evolution.

        ``oscillation``: accumulated oscillations per block. Of the last adaptation, ``adapted_blocks``: share of blocks
        that changed; ``frozen_blocks``: share of blocks that did not, though an exchange promised a gain;
        ``predicted_loss_change``: sum over the layers. After the window 0, 1 and 0.
        """
        blocks = oscillations = adapted = held = loss = 0.0
        for layer in layers:
            if not layer.buffers:
                continue
            counts = layer.buffers["oscillation"]
            blocks += len(counts)
            oscillations += int(counts.sum())
            if layer.clock > max(layer.schedule[1], layer.schedule[0] + 1):
                held += len(counts)
            else:
                last = layer.buffers["adaptation"].tolist()
                adapted, held, loss = adapted + last[0], held + last[1], loss + last[2]
        blocks = max(blocks, 1)
        return {
            "oscillation": oscillations / blocks,
            "adapted_blocks": adapted / blocks,
            "frozen_blocks": held / blocks,
            "predicted_loss_change": loss,
        }
