"""The data that ``lightning-nm export --to executorch`` calibrates with: a file, or a data module."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_nm.export.files import read_file
from lightning_nm.export.graphs import import_class

_SUFFIXES = (".pt", ".pth", ".safetensors", ".npy")
_ROWS = 32  # rows of a file that make a batch


def calibration_data(text: str) -> Iterable[Any]:
    """Batches for a calibration.

    Args:
        text: A file with one tensor, whose first axis is that of samples (``.pt``, ``.safetensors``, ``.npy``), or with
            a list of them, one for each input of the model (``.pt``); or the import path of a ``LightningDataModule``
            that needs no arguments, whose training data are taken.

    Raises:
        ValueError: If there is no such file or class, or it holds something else.
    """
    path = Path(text)
    if path.is_file():
        return _batches_of(path)
    if path.suffix in _SUFFIXES:
        raise ValueError(f"--calibration {text}: there is no such file")
    cls = import_class(text, "--calibration", pl.LightningDataModule)
    try:
        data = cls()
        data.prepare_data()
        data.setup("fit")
        loader: Iterable[Any] = data.train_dataloader()
    except Exception as error:  # of a user's class
        raise ValueError(f"--calibration {text}: {type(error).__name__}: {error}") from error
    return loader


def _batches_of(path: Path) -> list[tuple[Tensor, ...]]:
    """The tensors of a file, in batches."""
    if path.suffix == ".npy":
        import numpy as np

        content: Any = torch.from_numpy(np.load(path, allow_pickle=False))
    else:
        content = read_file(path)
    if isinstance(content, Tensor):
        content = [content]
    elif (
        isinstance(content, dict) and len(content) == 1
    ):  # names of several do not tell their order
        content = list(content.values())
    is_sequence = isinstance(content, (list, tuple))
    if not is_sequence or not all(isinstance(each, Tensor) and each.dim() for each in content):
        raise ValueError(
            f"--calibration '{path}' holds no tensors of samples: save one tensor, or a list with one for each input"
        )
    return list(zip(*(each.split(_ROWS) for each in content), strict=False))
