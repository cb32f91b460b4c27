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
    estimators and of drawn backward weights also depends on the rank and on the number of the draw.

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
        # Int64 [4], for random numbers in backward passes; None where nothing is random there.
        self.words: Tensor | None = None
        # The backward passes since the last draw, by first output row: dW's, and dX's.
        self._calls: dict[int, int] = {}
        self._weight_calls: dict[int, int] = {}

    def reseed(self, seed: int) -> None:
        """Take the seed of a saved training."""
        self.seed = seed

    def follow_data(self, data_rank: int | None) -> None:
        """Set which part of the global batch this process sees; ``None``: as many parts as processes."""
        self.data_rank = data_rank

    def generator(self, step: int) -> torch.Generator:
        """A generator that depends on the seed, the name and the step alone: equal on all ranks and after a resume."""
        text = f"{self.seed}/{self.name}/{step}"
        digest = hashlib.sha256(text.encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        return torch.Generator().manual_seed(seed >> 1)  # a generator takes 63 bits

    def draw(self, device: torch.device, number: int | None = None) -> None:
        """Make the words of a draw, the next one by default, in a new tensor: graphs made with the old one keep it."""
        if number is None:
            number = self.draws + 1
        self.draws = number
        self._calls.clear()
        self._weight_calls.clear()
        words = fold_seed(self.seed, self.name, self.draws, self._rank())
        self.words = words.to(device, non_blocking=True)

    def _rank(self) -> int:
        """Which part of the data, or of a weight that is cut, this process has."""
        if self.data_rank is not None and not self.by_process:
            return self.data_rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        return 0

    def for_call(self, words: Tensor, row: int) -> Tensor:
        """The words of one estimate of dY, which differ for each part of a joint projection, by its first output row.

        In eager code they also differ for each call of a module in a micro-batch; a graph would be compiled for each.
        """
        return _words_of_call(words, row, self._calls)

    def for_weight(self, words: Tensor, row: int) -> Tensor:
        """The words of one draw of the backward weight, likewise; they are not those of an estimate of dY."""
        # In the other order they are another key and another counter of the generator.
        return _words_of_call(words.flip(0), row, self._weight_calls)

    def to(self, device: torch.device) -> None:
        """Move the words to a device."""
        if self.words is not None:
            self.words = self.words.to(device)


def _words_of_call(words: Tensor, row: int, calls: dict[int, int]) -> Tensor:
    """The words of one call with this first output row, which is counted in ``calls``."""
    if torch.compiler.is_compiling():
        return words + row
    calls_before = calls.get(row, 0)
    calls[row] = calls_before + 1
    # An odd constant near 2^32 over the golden ratio: no call and row have the words of others.
    return words + (row + calls_before * 0x9E3779B1)
