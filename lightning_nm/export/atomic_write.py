"""Files that are written to a temporary path and take the place of an older file when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from torch import Tensor

FilePath: TypeAlias = str | os.PathLike[str]

Weights: TypeAlias = dict[str, Tensor]
"""Tensors by their keys in a state dict."""


def check_folder(path: Path) -> None:
    """Refuse a path in a folder that does not exist or cannot be written, by an ``OSError`` that names the folder.

    Example:
        >>> check_folder(Path("missing/model.pt"))
        Traceback (most recent call last):
        FileNotFoundError: there is no folder 'missing' for 'model.pt': make it first
    """
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}' for '{path.name}': make it first")
    # To make an entry in a folder takes both rights.
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"nothing can be written into the folder '{folder}'")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path of the same name, for a file or a new folder, which becomes `path` unless there is an error.

    Raises:
        OSError: If the folder does not exist, or the file cannot be written: the message names `path`. An older file
            is then as it was.

    Example:
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "note.txt"
        ...     with replacing(path) as new:
        ...         size = new.write_text("complete")
        ...     path.read_text()
        'complete'
    """
    # Before the caller's work, which may take minutes.
    check_folder(path)
    # No file can be renamed to the name of a folder.
    if path.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder: name a file")
    try:
        # On the same file system, so that it can be renamed when it is complete.
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            new = Path(folder) / path.name
            yield new
            # Atomic: a reader finds the old content or the new one, also if the process is killed.
            new.replace(path)
    except OSError as error:
        # The name of a temporary file tells nothing.
        # Within a new folder, files are written by a replacing() of their own, which has wrapped the error already.
        fault = error.__cause__ or error
        reason = getattr(fault, "strerror", None) or fault
        raise type(error)(f"'{path}' was not written: {reason}") from error
    except RuntimeError as error:
        # torch.save reports a full disk in these words, and by no class of its own.
        if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        raise OSError(
            f"'{path}' was not written: torch could not write the whole file, as on a full disk"
        ) from error


def check_suffix(path: FilePath, suffixes: tuple[str, ...], to: str) -> None:
    """Refuse a file of another suffix, by a ``ValueError`` that names the form of the export."""
    if Path(path).suffix not in suffixes:
        raise ValueError(f"--to {to} writes {' or '.join(suffixes)}, not '{path}'")
