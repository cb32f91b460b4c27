"""Byte-level language modelling over Python's own help pages."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nm.demo.data import ResumableDataModule, check_fraction, check_positive


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of `context` bytes of a text, uint8 `[L]`; their targets lie one byte later."""

    def __init__(self, text: Tensor, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"{len(text)} bytes of text are too short for a context of {context}")
        # Each window has one byte more than the context, the last target, which is the next window's first input.
        # A view: no byte is copied.
        self.windows = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: inputs and targets, both int64 `[B, context]`."""
        # int64, which cross entropy takes, for a batch alone: the text stays in bytes.
        windows = self.windows[torch.tensor(indices, dtype=torch.int64)].long()
        return windows[:, :-1], windows[:, 1:]


class HelpTopics(ResumableDataModule):
    """The text behind Python's `help("topic")`, about 465,000 bytes, one token per byte. Nothing to install.

    Batches are inputs and targets, both int64 `[B, context]` in [0, 256); a target is the input one byte later. The
    windows do not overlap. The last `val_fraction` of the text is held out for validation and test. The text differs a
    little between Python versions, so compare losses only under one version.

    Args:
        context: Bytes in a window.
        batch_size: Windows in a batch, on each process.
        val_fraction: Fraction of the text that is held out.
        train_size: Number of training windows; by default all.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Leave the held-out text alone and hold out the last `val_fraction` of the training text in its place, to
            choose settings by a text that a later test does not use.

    Raises:
        ValueError: If an argument is out of range; in `setup` if the text has fewer windows than `train_size`.
    """

    def __init__(
        self,
        context: int = 64,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        train_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        tuning: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_fraction("val_fraction", val_fraction)
        check_positive(context=context, train_size=train_size)
        self.context = context
        self.val_fraction = val_fraction
        self.train_size = train_size
        self.tuning = tuning

    def setup(self, stage: str) -> None:
        """Cut the text into windows."""
        # Only here: the module is the whole text.
        from pydoc_data.topics import topics

        # The order of the pages decides which of them are held out.
        pages = "\n".join(topics[name] for name in sorted(topics))
        # A bytearray, because torch warns of memory that cannot be written.
        text = torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8)
        cut = round(len(text) * (1 - self.val_fraction))
        if self.tuning:
            text = text[:cut]
            cut = round(len(text) * (1 - self.val_fraction))
        train = Windows(text[:cut], self.context)
        if self.train_size is not None and self.train_size > len(train):
            raise ValueError(
                f"train_size={self.train_size}, but the text has {len(train)} training windows"
            )
        train.windows = train.windows[: self.train_size]
        self.train_set = train
        self.val_set = Windows(text[cut:], self.context)
        self.test_set = self.val_set
