"""Random numbers of one layer: functions of a seed, the layer's name and counters."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nm.functional import fold_seed


class LayerNoise:
    """The layer's random numbers.

    Masks depend on the seed, the name and the step alone, so they are equal on all ranks. The noise of gradient
    estimators also depends on the rank and on the number of the draw.

    Args:
        seed: Base of all random choices of the model.
        name: The layer's name.
        by_process: Whether each process draws its own numbers, as for a weight that tensor parallelism cuts.
    """

    def __init__(self, seed: int, name: str, by_process: bool = False) -> None:
        self.seed = seed
        self.name = name
        self.by_process = by_process
        # The process's part of the global batch, where that is not its rank.
        self.data_rank: int | None = None
        self.draws = 0  # number of the last draw; the only state that is saved
        # Int64 [4], for the estimator's random numbers; None without an estimator.
        self.words: Tensor | None = None
        self._calls: dict[int, int] = {}

    def reseed(self, seed: int) -> None:
        """Take the seed of a saved training."""
        self.seed = seed

    def follow_data(self, data_rank: int | None) -> None:
        """Set which part of the global batch this process sees; ``None``: as many parts as processes."""
        self.data_rank = data_rank

    def generator(self, step: int) -> torch.Generator:
        """A generator that depends on the seed, the name and the step alone: equal on all ranks and after a resume."""
        key = hashlib.sha256(f"{self.seed}/{self.name}/{step}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)

    def draw(self, device: torch.device, number: int | None = None) -> None:
        """Make the words of a draw, the next one by default, in a new tensor: graphs made with the old one keep it."""
        rank = self.data_rank
        if rank is None or self.by_process:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.draws = self.draws + 1 if number is None else number
        self._calls.clear()
        self.words = fold_seed(self.seed, self.name, self.draws, rank).to(device, non_blocking=True)

    def for_call(self, words: Tensor, row: int) -> Tensor:
        """The words of one backward pass, which differ for each part of a joint projection, by its first output row.

        In eager code they also differ for each call of a module in a micro-batch; a graph would be compiled for each.
        """
        if torch.compiler.is_compiling():
            return words + row
        count = self._calls[row] = self._calls.get(row, 0) + 1
        return words + (row + (count - 1) * 0x9E3779B1)

    def to(self, device: torch.device) -> None:
        """Move the words to a device."""
        self.words = None if self.words is None else self.words.to(device)
