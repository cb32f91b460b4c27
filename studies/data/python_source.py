"""Byte-level language modelling over the source of installed Python packages."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files

import torch
from torch import Tensor

from lightning_nm.demo.data import ResumableDataModule, check_fraction, check_positive
from lightning_nm.demo.help_topics import Windows


class PythonSource(ResumableDataModule):
    """The Python files of installed packages, one token per byte: 52.8 million bytes with transformers 5.23.0.

    Batches are inputs and targets, both int64 `[B, context]` in [0, 256); a target is the input one byte later. The
    windows do not overlap. Whole files are held out: in the order of the hashes of their paths, the last ones that
    make up `val_fraction` of the bytes. Of their windows, `val_size` that are equally far apart are for validation and
    test.

    Args:
        packages: Names of the packages, as `pip` knows them.
        context: Bytes in a window.
        batch_size: Windows in a batch, on each process.
        val_fraction: Share of the bytes that is held out.
        val_size: Windows for validation and test; at most all that are held out.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Leave the held-out files alone and hold out the last files of the training text in their place, to
            choose settings by a text that a later test does not use.
        digest: SHA-256 of the text, if only one text will do, as in a comparison; other versions of the packages have
            other ones. The error that a wrong one causes names the right one.

    Raises:
        ValueError: If an argument is out of range; in `setup` if a package is missing or has no Python files, if the
            digest is another one, or if a part of the text is shorter than a window.
    """

    def __init__(
        self,
        packages: Sequence[str] = ("transformers",),
        context: int = 128,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        val_size: int = 4000,
        seed: int = 0,
        num_workers: int = 0,
        tuning: bool = False,
        digest: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_fraction("val_fraction", val_fraction)
        check_positive(context=context, val_size=val_size)
        self.packages = tuple(packages)
        self.context = context
        self.val_fraction = val_fraction
        self.val_size = val_size
        self.tuning = tuning
        self.digest = digest

    def setup(self, stage: str) -> None:
        """Read the files and cut them into windows."""
        if self.train_set is not None:
            return
        sources = [source for package in self.packages for source in _sources(package)]
        self._check_digest(sources)
        training, held_out = _split(sources, self.val_fraction)
        if self.tuning:
            training, held_out = _split(training, self.val_fraction)
        self.train_set = Windows(_text(training), self.context)
        held = Windows(_text(held_out), self.context)
        size = min(self.val_size, len(held))
        chosen = torch.arange(size, dtype=torch.int64) * len(held) // size
        held.windows = held.windows[chosen]
        self.val_set = self.test_set = held

    def _check_digest(self, sources: list[bytes]) -> None:
        if self.digest is None:
            return
        digest = hashlib.sha256(b"".join(sources)).hexdigest()
        if digest != self.digest:
            packages = ", ".join(self.packages)
            raise ValueError(
                f"the text of {packages} has the SHA-256 {digest}, not digest={self.digest!r}: install the versions of "
                "that text, or leave digest out and compare with no results of another text"
            )


def _sources(package: str) -> list[bytes]:
    """The Python files of a package, in the order of the hashes of their paths."""
    try:
        installed = files(package) or []
    except PackageNotFoundError:
        raise ValueError(
            f"package {package!r} is not installed: run `pip install {package}`"
        ) from None
    paths = [path for path in installed if path.suffix == ".py"]
    if not paths:
        raise ValueError(f"package {package!r} has no Python files")
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    return [path.read_binary() for path in paths]


def _split(sources: list[bytes], val_fraction: float) -> tuple[list[bytes], list[bytes]]:
    """The files for training, and the last ones that make up at least a share of the bytes."""
    wanted = val_fraction * sum(map(len, sources))
    first = len(sources)
    while wanted > 0:
        first -= 1
        wanted -= len(sources[first])
    return sources[:first], sources[first:]


def _text(sources: list[bytes]) -> Tensor:
    """uint8 `[L]`."""
    joined = bytearray(b"".join(sources))
    return (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
