"""Is a checkpoint file whole?"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch


def check_archive(path: str | Path) -> None:
    """Refuse a file of ``torch.save`` whose contents are damaged, which ``torch.load`` does not see.

    ``torch.load`` refuses a file that is cut off, as its directory is at the end. A hole in the middle, as a power
    failure may leave it, is found by the checksums alone, which are compared here; the file is read once. Nothing is
    checked of files that are no zip archive, and under ``torch.serialization.set_crc32_options(False)``.

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
