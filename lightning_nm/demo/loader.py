"""A sampler and a DataLoader that can start in the middle of an epoch."""

import math
from collections.abc import Iterator, Sized
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_nm.demo.seeding import keyed_generator

T = TypeVar("T", covariant=True)


class ResumableSampler(DistributedSampler[int]):
    """Yields dataset indices in an order that depends only on `(seed, epoch)`.

    A pass starts at the first index, or after `load_state_dict` at the saved position, which `set_epoch` with another
    epoch drops. `position` counts the *consumed* samples: worker processes draw indices ahead of time, so the consumer
    of the batches must call `advance`, as `ResumableLoader` does. Each rank sees every `num_replicas`-th index; the
    order is padded from its own start so that all ranks get equally many. As it is a `DistributedSampler`, Lightning
    keeps it under DDP instead of wrapping it, which would hide `set_epoch`.

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
        self,
        data: Sized | int,
        seed: int = 0,
        shuffle: bool = True,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        size = data if isinstance(data, int) else len(data)
        if size < 1:
            raise ValueError(f"a sampler needs at least one sample, got {size}")
        super().__init__(
            range(size),  # type: ignore[arg-type]  # only its length is asked for
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
        )
        self.size = size
        self.position = 0
        self._start = 0

    def order(self) -> torch.Tensor:
        """The indices that this rank sees in the current epoch, int64 `[len(self)]`."""
        wanted = (
            torch.arange(self.rank, self.total_size, self.num_replicas, dtype=torch.int64)
            % self.size
        )
        if not self.shuffle:
            return wanted
        return torch.randperm(self.size, generator=keyed_generator(self.seed, "order", self.epoch))[
            wanted
        ]

    def __iter__(self) -> Iterator[int]:
        self.position, self._start = self._start, 0
        return iter(self.order()[self.position :].tolist())

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


class ResumableLoader(DataLoader[T]):
    """A `DataLoader` over a `ResumableSampler` with `state_dict` and `load_state_dict`. Create it with `over`.

    Lightning saves the state of such a loader in its checkpoints, and loads it when it resumes inside an epoch. The
    length is that of a whole epoch, also when a pass starts in the middle.

    - Batches are counted when they are returned, so worker processes that prefetch do not matter.
    - Iteration starts at the first `next`, since Lightning calls `iter` before it sets the epoch.
    - Worker seeds come from the loader's own generator, so a new pass does not change the global random state.
    - If the dataset has `set_epoch`, it is called before each pass.

    Example:
        >>> loader = ResumableLoader.over(range(10), batch_size=4, seed=0)
        >>> batches = [batch.tolist() for batch in loader]
        >>> loader.load_state_dict({**loader.state_dict(), "position": 4})
        >>> [batch.tolist() for batch in loader] == batches[1:]
        True
    """

    @classmethod
    def over(
        cls,
        dataset: Any,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        **kwargs: Any,
    ) -> "ResumableLoader[Any]":
        """Build the loader and its sampler for a sized map-style dataset; an epoch's last batch may be smaller."""
        return cls(
            cast("Dataset[Any]", dataset),
            batch_size=batch_size,
            sampler=ResumableSampler(
                dataset, seed=seed, shuffle=shuffle, num_replicas=num_replicas, rank=rank
            ),
            num_workers=num_workers,
            generator=keyed_generator(seed, "workers"),
            **kwargs,
        )

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        sampler, batch_size = self.sampler, self.batch_size or 1
        if not isinstance(sampler, ResumableSampler):
            # It was replaced, for example by Trainer(overfit_batches=...).
            yield from super().__iter__()
            return
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(sampler.epoch)
        for batch in super().__iter__():
            sampler.advance(batch_size)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last returned batch, and the settings; plain integers."""
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):
            return {}
        fixed = {"seed": sampler.seed, "size": sampler.size, "batch_size": self.batch_size or 1}
        return {**sampler.state_dict(), **fixed, "num_replicas": sampler.num_replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next pass at the saved position.

        Raises:
            ValueError: In the middle of an epoch, if seed, dataset size, batch size or number of replicas has changed.
        """
        sampler = self.sampler
        if not state or not isinstance(sampler, ResumableSampler):
            return
        ended = state["position"] >= math.ceil(state["size"] / state["num_replicas"])
        now = self.state_dict()
        changed = [k for k in ("seed", "size", "batch_size", "num_replicas") if state[k] != now[k]]
        if state["position"] and not ended and changed:
            what = ", ".join(f"{k} was {state[k]} and is {now[k]}" for k in changed)
            middle = f"cannot resume in the middle of epoch {state['epoch']}: {what}"
            raise ValueError(
                f"{middle}. Use the same data settings, or a checkpoint made at the end of an epoch."
            )
        sampler.load_state_dict({**state, "position": len(sampler)} if ended else state)
