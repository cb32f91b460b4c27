"""Bi-Mask: separate masks for the forward and the backward direction."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.functional import magnitude_mask, search_permutation
from lightning_nm.functional.masks import checked_permutation
from lightning_nm.functional.permutation import Criterion, Search
from lightning_nm.kernels.cpu import mask_passes
from lightning_nm.methods.base import backward_entries
from lightning_nm.methods.checks import check_count, check_option
from lightning_nm.methods.ste import SRSTE, Decay, DecayAt, DecayScale, grid_to_move
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment


class BiMask(SRSTE):
    r"""Bi-directional masks (Zhang et al., ICML 2023, arXiv 2302.06058): forward and dgrad are both N:M.

    The forward mask is the magnitude mask along `in`, :math:`m_F = \mathrm{nm\_mask}(|W|)`. The backward mask is chosen
    among the entries that the forward mask keeps: the rows of :math:`V = m_F \odot W` are permuted, every M consecutive
    rows keep their N largest entries per column, and the permutation is undone, so :math:`m_B \subseteq m_F`. Then

    .. math:: Y = X (m_F \odot W)^T, \quad dX = dY (m_B \odot W), \quad
              g = dY^T X + \lambda (1 - m_F) \odot W.

    The input gradient is biased by the entries that only the forward keeps; the permutation is searched so that few
    are lost. While the masks are installed this holds for every input gradient, also for saliency maps in a validation.
    Both masks follow the weights after every step, the permutation after every search.

    Args:
        permute_every: Optimizer steps between two permutation searches (the paper's 100).
        candidates: Effort of one search (the paper's 100 candidates).
        search: ``"swap"`` starts from the current permutation, exchanges rows and never gets worse. ``"random"`` takes
            the best of the current and ``candidates`` random permutations. ``"redraw"`` leaves out the current one, as
            the authors' code does, so that it may get worse.
        criterion: What a permutation should keep: ``"retained"`` nonzeros (the authors' code), ``"eligible"`` blocks
            that lose nothing (the paper's wording) or the retained magnitude ``"l1"``.
        decay: The decay of pruned weights, see :class:`SRSTE`; the paper has 2e-4.
        dense_start: How long training stays dense before the first masks: training steps, or a fraction of them.
        dense_end: How long it is dense again at the end, in the same units: **the trained model is dense then**.
        first_search: Optimizer steps before the first search, with the rows in their own order until then. The authors'
            code counts forward passes from 1 and searches before the 100th, so its number is 99.
        decay_scale: A factor of the decay. ``"world-size"`` is the number of processes, as in the authors' code.
        decay_at: ``"before-clipping"``: the decay is clipped with the gradient. ``"after-clipping"``: it is added when
            the optimizer's step begins.

    Raises:
        ValueError: For an unknown ``search`` or ``criterion``, ``permute_every`` or ``candidates`` below 1, a negative
            ``first_search``, and what :class:`SRSTE` refuses.
    """

    short_name = "bi-mask"
    sparse_dgrad = True
    headline = "overlap"

    def __init__(
        self,
        permute_every: int = 100,
        candidates: int = 100,
        search: Search = "swap",
        criterion: Criterion = "retained",
        decay: Decay = "relative",
        dense_start: Moment = 0,
        dense_end: Moment = 0,
        first_search: int = 0,
        decay_scale: DecayScale = 1.0,
        decay_at: DecayAt = "before-clipping",
    ) -> None:
        super().__init__(decay, dense_start, dense_end, decay_scale, decay_at)
        check_count("permute_every", permute_every, 1)
        check_count("candidates", candidates, 1)
        check_count("first_search", first_search, 0)
        check_option("search", search, Search)
        check_option("criterion", criterion, Criterion)
        self.permute_every = permute_every
        self.candidates = candidates
        self.first_search = first_search
        self.search = search
        self.criterion = criterion

    def init_masks(self, layer: NMLayer) -> None:
        """Select both masks, with the first permutation, unless training starts dense."""
        # An order that suited other weights is not kept: the first selection searches again.
        layer.masks.set_permutation(None)
        super().init_masks(layer)

    def select(self, layer: NMLayer) -> None:
        """Select both masks from the weight as it is now; search the permutation when it is due."""
        due = layer.progress.crossed(self.permute_every, self.first_search)
        if self._move_in_place(layer, due):
            return
        forward = backward = None
        if not layer.spec.forward_reason:
            # Not by largest_entries(): the backward mask needs the whole weight, which is gathered once.
            rows = layer.view.rows(layer.weight.detach())
            forward = layer.view.unrows(magnitude_mask(rows, layer.pattern, dim=1))
        if not layer.spec.dgrad_reason:
            backward = self.select_backward(layer, forward, search=due)
        layer.set_masks(forward, backward)

    def _move_in_place(self, layer: NMLayer, due: bool) -> bool:
        """Move both masks by the library of CPU kernels; whether it can. ``due``: search the permutation."""
        masks = layer.masks
        weight = layer.weight.detach()
        rows = layer.view.rows(weight)
        n, m = layer.pattern.n, layer.pattern.m
        grid = grid_to_move(layer, backward=True)
        if grid is None or masks.permutation is None:
            return False
        if not mask_passes.has_whole_rows(rows, weight, m):
            return False
        # A saved state may be damaged, and the library reads and writes wherever the permutation says.
        checked_permutation(masks.permutation, rows, layer.spec.groups)
        assert masks.bits is not None
        # The forward bits first: the backward mask keeps a part of them.
        flips = mask_passes.keep_largest(grid, n, weight, masks.bits)
        if due:
            self._search(layer, rows, masks.forward)
        mask_passes.keep_largest_of_columns(rows, masks.permutation, n, m, weight, masks.bits)
        masks.count_moved(flips)
        if due:
            assert masks.backward is not None
            masks.measure_backward(masks.backward)
        return True

    def select_backward(self, layer: NMLayer, forward: Tensor | None, *, search: bool) -> Tensor:
        """The backward mask for a forward mask, or None for a dense forward weight.

        A search replaces the layer's permutation in place. A first selection searches, too, unless it is too early.
        """
        masks = layer.masks
        rows = layer.view.rows(layer.weight.detach())
        if masks.permutation is None:
            search = layer.step >= self.first_search
            if not search:
                # The identity and not None: the next selection is not the first one any more.
                masks.set_permutation(checked_permutation(None, rows, layer.spec.groups))
        if search:
            self._search(layer, rows, forward)
        backward = backward_entries(layer, forward)
        if search:
            # Measuring waits for the device, and the density hardly changes between two searches.
            masks.measure_backward(backward)
        return backward

    def _search(self, layer: NMLayer, rows: Tensor, forward: Tensor | None) -> None:
        """Search the layer's permutation, beginning with the present one."""
        found = search_permutation(
            rows,
            None if forward is None else layer.view.rows(forward),
            layer.pattern,
            search=self.search,
            candidates=self.candidates,
            criterion=self.criterion,
            initial=layer.masks.permutation,
            groups=layer.spec.groups,
            # Of the seed, the name and the step alone: all processes find the same permutation.
            generator=layer.generator(),
        )
        layer.masks.set_permutation(found)
