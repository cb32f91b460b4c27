"""How far estimated weight gradients of one layer are from the exact ones."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.statistics import gradient_energies


class GradientObservation:
    """Compares ``dW = E(dY)^T X`` with ``dY^T X`` in some backward passes."""

    def __init__(self) -> None:
        self.active = False  # whether the coming backward passes are compared
        # It is None until a pass was compared.
        self.sums: Tensor | None = None
        """Of the last such window: sums of dW^2 and of its error's squares, nonzeros and entries of E(dY)."""
        self._clock = 0

    def begin_window(self, active: bool, estimating: bool) -> None:
        """Set whether the passes of the coming window are compared; without an estimator nothing is known."""
        self.active = active
        if not estimating:
            self.sums = None

    @torch.no_grad()
    def add(self, clock: int, estimate: Tensor, exact: Tensor, found: Tensor) -> None:
        """Add one backward pass; those at the same ``clock`` are added up.

        ``estimate`` is E(dY), ``exact`` is dW made of dY, and ``found`` is dW made of E(dY).
        """
        nonzeros = torch.count_nonzero(estimate).double()
        size = torch.full_like(nonzeros, estimate.numel())
        exact_energy, error_energy = gradient_energies(exact, found)
        sums = torch.stack([exact_energy, error_energy, nonzeros, size])
        # A GradScaler skips a step with infinite gradients.
        sums = torch.where(sums.isfinite().all(), sums, 0)
        is_same_window = self._clock == clock
        if self.sums is not None and is_same_window:
            sums = self.sums + sums
        self.sums = sums
        self._clock = clock

    def forget(self) -> None:
        """Other weights were loaded: what was observed is not of them."""
        self.sums = None

    def to(self, device: torch.device) -> None:
        """Move the sums to a device."""
        if self.sums is not None:
            self.sums = self.sums.to(device)
