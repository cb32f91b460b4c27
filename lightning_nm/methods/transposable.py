"""Transposable masks: one mask that is N:M along `in` and along `out`, for the forward and the dgrad GEMM alike."""

from __future__ import annotations

from lightning_nm.functional import transposable_mask
from lightning_nm.methods.checks import check_count
from lightning_nm.methods.ste import SRSTE, Decay, DecayAt, DecayScale
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment


class TransposableMask(SRSTE):
    """One mask for both directions (Hubara et al., NeurIPS 2021, arXiv 2102.08124): dgrad is N:M and unbiased.

    Every M x M tile of ``[out, in]`` keeps N entries in every row and every column, those of most magnitude together.
    The input gradient uses the weight of the forward, so unlike Bi-Mask's it is exact; the mask keeps less (0.944 of
    the row-wise mask's magnitude for Gaussian weights at 2:4, 0.967 at 4:8). Latent weights are trained by the
    straight-through estimator. A layer whose output rows do not come in blocks of M gets the row-wise mask, and its
    dgrad is only masked.

    Args:
        update_every: Optimizer steps between two selections of the mask (the paper's 40).
        decay: The decay of pruned weights, see :class:`SRSTE`. The paper has none, which is 0. The default is this
            project's: without a decay every selection exchanges entries that the other weights do not fit
            (docs/recipes.md).
        dense_start: How long training stays dense before the first masks: training steps, or a fraction of them.
        dense_end: How long it is dense again at the end, in the same units: **the trained model is dense then**.
        first_update: Optimizer steps before the mask that was selected at the start is first replaced; ``None`` for
            ``update_every``. The authors' code counts forward passes from 1, so its number is 39.
        decay_scale: A factor of the decay. ``"world-size"`` is the number of processes, as in the authors' code.
        decay_at: ``"before-clipping"``: the decay is clipped with the gradient. ``"after-clipping"``: it is added when
            the optimizer's step begins.

    Raises:
        ValueError: If ``update_every`` or ``first_update`` is below 1, and what :class:`SRSTE` refuses.
    """

    short_name = "transposable"
    transposable = True  # and not `sparse_dgrad`: without a forward mask there is none for dgrad

    def __init__(
        self,
        update_every: int = 40,
        decay: Decay = 0.03,
        dense_start: Moment = 0,
        dense_end: Moment = 0,
        first_update: int | None = None,
        decay_scale: DecayScale = 1.0,
        decay_at: DecayAt = "before-clipping",
    ) -> None:
        super().__init__(decay, dense_start, dense_end, decay_scale, decay_at)
        check_count("update_every", update_every, 1)
        check_count("first_update", first_update, 1)
        self.update_every = update_every
        self.first_update = first_update

    def due(self, layer: NMLayer) -> bool:
        """Every ``update_every`` steps."""
        return layer.progress.crossed(self.update_every, self.first_update or self.update_every)

    def select(self, layer: NMLayer) -> None:
        """Select the mask from the weight as it is now: row-wise where it cannot be transposable."""
        # Tiles need blocks along both axes.
        if layer.spec.dgrad_reason or layer.spec.forward_reason:
            super().select(layer)
            return
        rows = layer.view.rows(layer.weight)
        mask = transposable_mask(rows, layer.pattern, layer.spec.groups)
        layer.set_masks(layer.view.unrows(mask))
