"""Language modelling over files of which whole ones are held out."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_nm.demo.data import ResumableDataModule, check_fraction, check_positive
from lightning_nm.demo.help_topics import Windows


class HeldOutFiles(ResumableDataModule):
    """The files that a subclass names, as windows of its tokens.

    Batches are inputs and targets, both int64 ``[B, context]``; a target is the input one token later. The windows do
    not overlap. Whole files are held out: in the order of the hashes of their paths, the last ones that make up
    `val_fraction` of the bytes. Of their windows, `val_size` that are equally far apart are for validation and test.

    Args:
        context: Tokens in a window.
        batch_size: Windows in a batch, on each process.
        val_fraction: Fraction of the bytes that is held out.
        val_size: Windows for validation and test; at most all that are held out.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Leave the held-out files alone and hold out the last files of the training text in their place, to
            choose settings by a text that a later test does not use.
        digest: SHA-256 of the text, if only one text will do, as in a comparison. The error that a wrong one causes
            names the right one.

    Raises:
        ValueError: If an argument is out of range; in `setup` if there are no files or all are empty, the digest is
            another one, or a part of the text is shorter than a window.
    """

    def __init__(
        self,
        context: int,
        batch_size: int,
        val_fraction: float,
        val_size: int,
        seed: int,
        num_workers: int,
        tuning: bool,
        digest: str | None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_fraction("val_fraction", val_fraction)
        check_positive(context=context, val_size=val_size)
        self.context = context
        self.val_fraction = val_fraction
        self.val_size = val_size
        self.tuning = tuning
        self.digest = digest

    @abstractmethod
    def files(self) -> tuple[str, Mapping[str, bytes]]:
        """What the files are of, for errors, and their contents by path."""

    @abstractmethod
    def tokens(self, contents: list[bytes]) -> Tensor:
        """The tokens of some of the files, ``[L]``."""

    def setup(self, stage: str) -> None:
        """Read the files and cut them into windows."""
        if self.train_set is not None:
            return
        training, held_out = self._split(self._contents())
        if self.tuning:
            training, held_out = self._split(training)
        self.train_set = self._windows(training, "training")
        held = self._windows(held_out, "validation and test")
        size = min(self.val_size, len(held))
        chosen = torch.arange(size, dtype=torch.int64) * len(held) // size
        held.windows = held.windows[chosen]
        self.val_set = self.test_set = held

    def held_out(self) -> bytes:
        """The held-out files, joined by line breaks."""
        return b"\n".join(self._split(self._contents())[1])

    def _windows(self, contents: list[bytes], purpose: str) -> Windows:
        """The windows of a part of the files, which has at least one."""
        tokens = self.tokens(contents) if contents else torch.empty(0)
        if len(tokens) <= self.context:
            raise ValueError(
                f"the {len(contents)} files for {purpose} have {len(tokens)} tokens, no more than context="
                f"{self.context}: give more files, a smaller context or another val_fraction than {self.val_fraction}"
            )
        return Windows(tokens, self.context)

    def _contents(self) -> list[bytes]:
        """The files' contents, in the order of the hashes of their paths."""
        origin, files = self.files()
        order = sorted(files, key=lambda path: hashlib.sha256(path.encode()).digest())
        contents = [files[path] for path in order]
        if not any(contents):
            raise ValueError(
                f"all {len(contents)} files of {origin} are empty: give some with text"
            )
        digest = hashlib.sha256(b"".join(contents)).hexdigest()
        if self.digest not in (None, digest):
            raise ValueError(
                f"the text of {origin} has the SHA-256 {digest}, not digest={self.digest!r}: install the version of "
                "that text, or leave digest out and compare with no results of another text"
            )
        return contents

    def _split(self, contents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The files for training, and the last ones that make up at least a fraction of the bytes."""
        wanted = self.val_fraction * sum(map(len, contents))
        first = len(contents)
        while wanted > 0:
            first -= 1
            wanted -= len(contents[first])
        return contents[:first], contents[first:]
