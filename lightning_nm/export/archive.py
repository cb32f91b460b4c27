"""Check that a checkpoint file is not damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch


def check_archive(path: str | Path) -> None:
    """Compare the checksums of a file of ``torch.save``.

    ``torch.load`` finds a truncated file, but only the checksums reveal damage in the middle, for example after a power
    failure. Files without checksums or of other formats are not checked.

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
