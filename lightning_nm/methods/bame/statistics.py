"""What BAME reports of its masks' evolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_nm.functional import unpack_mask
from lightning_nm.nn.layer import NMLayer

_FEW = 1e-3
"""Exchanges a block. A phase with fewer of them has trained nearly a fixed mask."""


def evolution_statistics(layers: Sequence[NMLayer], *, expected_loss: bool) -> dict[str, float]:
    """The statistics of :meth:`BAME.statistics`; ``expected_loss`` adds the expected change of the loss."""
    blocks = oscillations = adapted = held = loss = alive = exchanges = 0.0
    for layer in layers:
        if not layer.buffers:
            continue
        counts = layer.buffers["oscillation"]
        blocks += len(counts)
        oscillations += int(counts.sum())
        mask = layer.masks.forward_view
        if mask is not None and "exchanges" in layer.buffers:
            # The last exchange of such an entry regrew it. Of those that regrew it before, each was undone.
            exchanged = unpack_mask(layer.buffers["exchanged"], mask.shape)
            alive += int((exchanged & mask).sum())
            exchanges += int(layer.buffers["exchanges"])
        start, stop = layer.progress.schedule
        if layer.progress.clock > max(stop, start + 1):
            held += len(counts)  # all blocks are frozen
        else:
            last_adapted, last_held, last_loss = layer.buffers["adaptation"].tolist()
            adapted += last_adapted
            held += last_held
            loss += last_loss
    blocks = max(blocks, 1)
    found = {
        "oscillation": oscillations / blocks,
        "adapted_blocks": adapted / blocks,
        "frozen_blocks": held / blocks,
        "regrown_alive": alive / max(exchanges, 1),
    }
    if expected_loss:
        found["predicted_loss_change"] = loss
    return found


@dataclass
class PhaseTotals:
    """What the layers of one method did in their adaptation phase, to tell a phase in which masks hardly moved."""

    blocks: int = 0
    exchanges: int = 0
    adaptations: int = 0

    def add(self, layer: NMLayer, every: int) -> None:
        """Count a layer whose phase has ended."""
        if layer.masks.forward_view is not None and "exchanges" in layer.buffers:
            start, stop = layer.progress.schedule
            self.blocks += layer.view.shape.numel() // layer.pattern.m
            self.exchanges += int(layer.buffers["exchanges"])
            self.adaptations = max(self.adaptations, min(layer.step, stop - start) // every)

    def idle(self) -> bool:
        """Whether masks hardly moved."""
        return self.blocks > 0 and self.exchanges <= _FEW * self.blocks

    def __str__(self) -> str:
        return (
            f"{self.exchanges} exchanges in {self.blocks} blocks at {self.adaptations} adaptations"
        )
