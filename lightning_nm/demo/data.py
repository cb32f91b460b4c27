"""The base class of the demo data modules, whose training data resume exactly."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A new CPU generator that is a pure function of `(seed, *key)`.

    `key` says what the numbers are for, for example `"order", epoch`. It is hashed, not added: `(seed=0, epoch=1)` and
    `(seed=1, epoch=0)` give unrelated streams.

    Example:
        >>> a, b = (torch.randperm(5, generator=keyed_generator(0, "order", 3)) for _ in range(2))
        >>> bool(torch.equal(a, b))
        True
    """
    # Four bytes: torch's CPU generator starts from the low 32 bits of its seed. Not Python's hash(), which differs
    # between processes for texts.
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class SeededSampler(DistributedSampler[int]):
    """Yields indices in an order that depends only on `(seed, epoch)`; rank `r` of `R` takes every `R`-th one from `r`.

    As it is a `DistributedSampler`, Lightning sets its epoch, and keeps it under DDP. Data that have
    `set_epoch`, as augmented ones do, are told of the epoch.

    Example:
        >>> sampler = SeededSampler(range(6), num_replicas=1, rank=0, seed=1)
        >>> whole = list(sampler)
        >>> sampler.start = 4
        >>> list(sampler) == whole[4:], list(sampler) == whole
        (True, True)
    """

    start = 0
    """Samples of this process that the next pass leaves out: a resumed run has trained on them."""

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch; another one starts from its beginning."""
        # The same epoch may be set again before a resumed run's first batch: its start must stay.
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        # A generator: it runs at the first `next`, because Lightning calls `iter` before it sets the epoch.
        start, self.start = self.start, 0
        size = len(self.dataset)  # type: ignore[arg-type]
        order = torch.randperm(size, generator=keyed_generator(self.seed, "order", self.epoch))
        # All ranks get equally many: the order begins again at its end.
        own = torch.arange(self.rank, self.total_size, self.num_replicas, dtype=torch.int64) % size
        # These may be fewer than len() says: Lightning adds the batches before the resume to those that it fetches.
        yield from order[own][start:].tolist()


class _Loader(DataLoader[Any]):
    """A loader that Lightning takes for one that resumes: the data module does that for it."""

    # Lightning 2.6.6 loads no state of a loader that `trainer.estimated_stepping_batches` has made (Lightning#20550).

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class ResumableDataModule(LightningDataModule):
    """A data module whose training batches after a resume are those of the uninterrupted run.

    A subclass sets `train_set`, `val_set` and `test_set` in `setup`; each returns a whole batch from `__getitems__`.

    A checkpoint holds the epoch and how many of its samples were trained on; the sampler of a resumed run leaves these
    out. This is exact after any batch, at a validation and at the end of an epoch, with worker processes and with
    `limit_train_batches`. The random state of dropout and the gradients of an unfinished accumulation window need
    `ExactResume`. Not exact is a run with `max_steps` that resumes from a checkpoint saved in `on_train_epoch_end`:
    Lightning 2.6.6 then counts batches twice. Save by `every_n_train_steps` or at the end of validation instead. For
    data of your own, docs/guarantees.md has a loader of torchdata that resumes.

    Args:
        batch_size: Samples in a batch, on each process.
        seed: Seed of the training order and of augmentation. Splits do not depend on it.
        num_workers: Worker processes of each loader. The data is in memory, so 0 is usually fastest.

    Raises:
        ValueError: If `batch_size` is below 1 or `num_workers` is negative.
    """

    def __init__(self, batch_size: int, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        check_positive(batch_size=batch_size)
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        # Data sets, once they are set up.
        self.train_set: Any = None
        self.val_set: Any = None
        self.test_set: Any = None
        self._sampler: SeededSampler | None = None
        self._resume: dict[str, int] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        """The training batches, in an order that depends on seed and epoch."""
        # Without a Trainer nobody has called setup().
        if self.train_set is None:
            self.setup("fit")
        replicas, rank, epoch = 1, 0, 0
        if trainer := self.trainer:
            replicas, rank, epoch = trainer.world_size, trainer.global_rank, trainer.current_epoch
        self._sampler = sampler = SeededSampler(self.train_set, replicas, rank, seed=self.seed)
        # Lightning may ask for a loader before it knows the epoch, and for another one later.
        resumed = self._resume.get("epoch", 0)
        sampler.set_epoch(max(epoch, resumed))
        # A position in an earlier epoch means nothing for this one.
        if resumed >= epoch:
            # Of all processes, whose number may have changed: together they took the first ones of the order.
            sampler.start = self._resume.get("samples", 0) // replicas
        return self._loader(self.train_set, sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation batches, always in the same order."""
        if self.val_set is None:
            self.setup("validate")
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test batches, always in the same order."""
        if self.test_set is None:
            self.setup("test")
        return self._loader(self.test_set)

    def _loader(self, data: Any, sampler: SeededSampler | None = None) -> DataLoader[Any]:
        return _Loader(
            data,
            self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            # Without one of its own, a new pass would change the global random state.
            generator=keyed_generator(self.seed, "workers"),
            collate_fn=_as_is,
        )

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its samples that all processes have taken."""
        trainer = self.trainer
        # Outside of a Trainer, or in evaluation, there is no position.
        if trainer is None or self._sampler is None:
            return {}
        # Lightning's count of batches, not the loader's: worker processes read ahead.
        # `ready` includes the batch at whose end the checkpoint is saved; `completed` does not yet.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        samples = batches * self.batch_size * trainer.world_size
        return {"epoch": self._sampler.epoch, "samples": samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the position for the next training loader. Ignored in testing and prediction."""
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._resume = state_dict

    def teardown(self, stage: str) -> None:
        """Forget the position: another fit is a new one."""
        self._resume = {}


def _as_is(batch: Any) -> Any:
    """Collate function for datasets that return whole batches."""
    return batch


def check_positive(**values: int | None) -> None:
    """Raise `ValueError` for a value below 1; None is none."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_fraction(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` lies strictly between 0 and 1."""
    # Written so that NaN is refused, too.
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
