"""Byte-level language modelling over the source of installed Python packages."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files

import torch
from torch import Tensor

from studies.data.held_out_files import HeldOutFiles


class PythonSource(HeldOutFiles):
    """The Python files of installed packages, one token per byte: 52.8 million bytes with transformers 5.23.0.

    Args:
        packages: Names of the packages, as `pip` knows them.
        context: This and the rest as in :class:`~studies.data.held_out_files.HeldOutFiles`.
        batch_size: Windows in a batch.
        val_fraction: Fraction of the bytes that is held out.
        val_size: Windows for validation and test.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Hold out training files in place of the held-out ones.
        digest: SHA-256 of the text; other versions of the packages have other ones.

    Raises:
        ValueError: As there, and in `setup` if a package is missing or has no Python files.
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
        super().__init__(
            context, batch_size, val_fraction, val_size, seed, num_workers, tuning, digest
        )
        self.packages = tuple(packages)

    def files(self) -> tuple[str, dict[str, bytes]]:
        """The packages, and their Python files."""
        found: dict[str, bytes] = {}
        for package in self.packages:
            found |= _sources(package)
        return ", ".join(self.packages), found

    def tokens(self, contents: list[bytes]) -> Tensor:
        """The bytes, uint8 ``[L]``."""
        joined = bytearray(b"".join(contents))
        return (
            torch.frombuffer(joined, dtype=torch.uint8)
            if joined
            else torch.empty(0, dtype=torch.uint8)
        )


def _sources(package: str) -> dict[str, bytes]:
    """The Python files of a package by path."""
    try:
        installed = files(package) or []
    except PackageNotFoundError:
        raise ValueError(
            f"package {package!r} is not installed: run `pip install {package}`"
        ) from None
    found = {path.as_posix(): path.read_binary() for path in installed if path.suffix == ".py"}
    if not found:
        raise ValueError(f"package {package!r} has no Python files")
    return found
