"""A sampler whose order is a pure function of (seed, epoch) and whose position can be resumed."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import DistributedSampler

from lightning_nm.demo.seeding import keyed_generator


class ResumableSampler(DistributedSampler[int]):
    """Yields dataset indices in an order that depends only on `(seed, epoch)`.

    A pass starts at the first index, or at the saved position after `load_state_dict`. `set_epoch` with another epoch
    drops that position.

    `position` counts the *consumed* samples. Worker processes draw indices ahead of time, so the consumer of the
    batches must count them with `advance`, as `ResumableLoader` does.

    It is a `DistributedSampler` so that Lightning keeps it under DDP instead of wrapping it, which would hide
    `set_epoch`. Each rank sees every `num_replicas`-th index; the order is padded from its own start so that all ranks
    get equally many.

    Args:
        data: The dataset, or the number of samples in it.
        seed: Seed of the order.
        shuffle: If false, the order is 0, 1, 2, ...
        num_replicas: Number of processes that share the data.
        rank: Index of this process.

    Raises:
        ValueError: If there are no samples, or if `rank` is not below `num_replicas`.

    Example:
        >>> sampler = ResumableSampler(6, seed=1)
        >>> whole = list(sampler)
        >>> sampler.load_state_dict({"epoch": 0, "position": 4})
        >>> list(sampler) == whole[4:], list(sampler) == whole
        (True, True)
    """

    def __init__(
        self, data: Sized | int, seed: int = 0, shuffle: bool = True, num_replicas: int = 1, rank: int = 0
    ) -> None:
        size = data if isinstance(data, int) else len(data)
        if size < 1:
            raise ValueError(f"a sampler needs at least one sample, got {size}")
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.size = size
        self.position = 0
        self._start = 0

    def order(self) -> torch.Tensor:
        """The indices that this rank sees in the current epoch, int64 `[len(self)]`."""
        if self.shuffle:
            order = torch.randperm(self.size, generator=keyed_generator(self.seed, "order", self.epoch))
        else:
            order = torch.arange(self.size)
        wanted = torch.arange(self.rank, self.total_size, self.num_replicas)
        return order[wanted % self.size]

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        self.position = start
        return iter(self.order()[start:].tolist())

    def advance(self, samples: int) -> None:
        """Count `samples` more samples as consumed."""
        self.position = min(self.position + samples, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch; a different one starts from its beginning."""
        if epoch != self.epoch:
            self.epoch, self.position, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples that were consumed."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next pass at the saved position."""
        self.epoch = state["epoch"]
        self.position = self._start = state["position"]
