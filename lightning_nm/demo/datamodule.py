"""The base class of the demo data modules, with a training loader that resumes exactly."""

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_nm.demo.loader import ResumableLoader
from lightning_nm.demo.seeding import keyed_generator


class ResumableDataModule(LightningDataModule):
    """A data module whose training batches after a resume are those of the uninterrupted run.

    A subclass sets `train_set`, `val_set` and `test_set` in `setup`; each returns a whole batch from `__getitems__`.

    The data module saves the position of the training loader in the checkpoint, and loads it into the loader that it
    makes when training resumes. Lightning does so, too, but up to 2.6.6 it does not load the state if
    `configure_optimizers` has asked for `trainer.estimated_stepping_batches` (Lightning#20550).

    A resume is exact after any batch, at a validation and at the end of an epoch, with worker processes and with
    `limit_train_batches`. The random state of dropout and the gradients of an unfinished accumulation window need
    `ExactResume`. Not exact is a run with `max_steps` that resumes from a checkpoint saved in `on_train_epoch_end`:
    Lightning 2.6.6 then counts batches twice. Save by `every_n_train_steps` or at the end of validation instead.

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
        self.train_set: Dataset[Any] | None = None
        self.val_set: Dataset[Any] | None = None
        self.test_set: Dataset[Any] | None = None
        self._loader: ResumableLoader[Any] | None = None
        self._resume: dict[str, int] = {}

    def train_dataloader(self) -> ResumableLoader[Any]:
        """The training batches, in an order that depends on seed and epoch."""
        if self.train_set is None:
            self.setup("fit")
        self._loader = ResumableLoader.over(
            self.train_set,
            self.batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            num_replicas=self.trainer.world_size if self.trainer else 1,
            rank=self.trainer.global_rank if self.trainer else 0,
            collate_fn=_as_is,
        )
        self._loader.load_state_dict(self._resume)
        self._resume = {}
        return self._loader

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation batches, always in the same order."""
        return self._evaluation_loader("val_set", "validate")

    def test_dataloader(self) -> DataLoader[Any]:
        """The test batches, always in the same order."""
        return self._evaluation_loader("test_set", "test")

    def _evaluation_loader(self, name: str, stage: str) -> DataLoader[Any]:
        if getattr(self, name) is None:
            self.setup(stage)
        # With a generator of its own, because validation must not change the global random state.
        return DataLoader(
            getattr(self, name),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            generator=keyed_generator(self.seed, "workers"),
            collate_fn=_as_is,
        )

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position of the training loader, and its settings."""
        return self._loader.state_dict() if self._loader is not None else {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the position for the next training loader. Ignored in testing and prediction."""
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._resume = state_dict


def check_positive(**values: int | None) -> None:
    """Raise `ValueError` for a value below 1; None is none."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _as_is(batch: Any) -> Any:
    """Collate function for datasets that return whole batches."""
    return batch


def check_fraction(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
