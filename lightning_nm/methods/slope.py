"""SLoPe: a fixed forward mask, and a backward mask that the pruned weight is pruned by once more."""

from __future__ import annotations

from lightning_nm.methods.asp import ASP, Init
from lightning_nm.methods.base import backward_entries
from lightning_nm.methods.checks import check_count
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment, within


class SLoPe(ASP):
    r"""Double-pruned training (Mozaffari et al., ICLR 2025, arXiv 2405.16325).

    The forward mask F keeps the largest entries along `in` and never moves. There is no latent weight: pruned entries
    get no gradient, and are set to zero after every step. The backward weight is that weight pruned again, so that
    every M consecutive rows keep at most their N largest entries per column:

    .. math:: Y = X (F \odot W)^T, \quad dX = dY (B \odot W), \quad B = F \land \mathrm{nm\_mask}_{out}(|F \odot W|),
              \quad g = F \odot dY^T X.

    B is selected again every ``refresh_every`` steps; the values under it follow the weight at every step. The input
    gradient is biased by the entries that only the forward keeps: at 2:4 and random weights three of sixteen. B is
    Bi-Mask's, with rows in their own order and a forward mask that stands still.

    The paper's low-rank adapters of the last steps are a recipe with peft, see docs/huggingface.md.

    Args:
        refresh_every: Optimizer steps between two selections of the backward mask (the paper's 100).
        first_refresh: Optimizer steps before the first selection after that of the start; ``None`` for
            ``refresh_every``. The authors' code selects after 99, 199, ... steps, so its number is 99.
        start: When to prune: an integer is a training step, a float a fraction of the planned ones. The paper prunes
            before the first step.
        init: ``"magnitude"`` keeps the largest entries. ``"zeros"`` keeps the nonzeros of a model that is already N:M
            sparse.

    Raises:
        ValueError: If ``refresh_every`` or ``first_refresh`` is below 1, and what :class:`ASP` refuses.

    Example:
        >>> SLoPe(start=0.25).schedule(planned_steps=1000)
        (250,)
    """

    short_name = "slope"
    sparse_dgrad = True
    headline = "overlap"

    def __init__(
        self,
        refresh_every: int = 100,
        first_refresh: int | None = None,
        start: Moment = 0,
        init: Init = "magnitude",
    ) -> None:
        super().__init__(start, init)
        check_count("refresh_every", refresh_every, 1)
        check_count("first_refresh", first_refresh, 1)
        self.refresh_every = refresh_every
        self.first_refresh = first_refresh

    def init_masks(self, layer: NMLayer) -> None:
        """Choose both masks if training has begun to prune."""
        super().init_masks(layer)
        if within(layer.progress.schedule, layer.progress.clock):
            self._choose_backward(layer)

    def update(self, layer: NMLayer) -> None:
        """Prune when the clock reaches ``start``; select the backward mask again when it is time."""
        # Pruning in this update selects both masks: the backward one is not due again.
        was_pruned = layer.masks.bits is not None
        super().update(layer)
        every = self.refresh_every
        if was_pruned and layer.progress.crossed(every, self.first_refresh or every):
            self._choose_backward(layer)

    def _choose_backward(self, layer: NMLayer) -> None:
        """Select the backward mask from the weight as it is now; the forward mask stays."""
        if layer.spec.dgrad_reason:
            return
        forward = layer.masks.forward
        backward = backward_entries(layer, forward)
        if forward is None:
            # The forward GEMM cannot be N:M in this layer, and is dense.
            layer.set_masks(None, backward)
        else:
            layer.masks.set_backward(backward)
        # Reading the density waits for the device, which is rare enough.
        layer.masks.measure_backward(backward)
