"""Check that a checkpoint file is not damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch


def check_archive(path: str | Path) -> None:
    """Compare the checksums of a file of ``torch.save``, which ``torch.load`` does not.

    ``torch.load`` refuses a truncated file, since its directory is at the end. Only the checksums reveal a hole in the
    middle, which a power failure may leave. The file is read once. Files that are no zip archive are not checked, and
    none is under ``torch.serialization.set_crc32_options(False)``.

    Args:
        path: The file.

    Raises:
        ValueError: Naming the file and the damaged record.
    """
    if not torch.serialization.get_crc32_options() or not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"'{path}' is damaged: the contents of its record '{damaged}' do not match their checksum. Use another "
            "checkpoint; if this one was saved under torch.serialization.set_crc32_options(False), set that here, too"
        )
