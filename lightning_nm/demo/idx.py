"""Reader for IDX files, the format of MNIST and similar data sets."""

import gzip
from pathlib import Path

import torch
from torch import Tensor


def read_idx(path: str | Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not.

    The format is two zero bytes, a type code (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the values in row-major order.

    Args:
        path: The file; if its name ends in `.gz` it is decompressed.

    Returns:
        A uint8 tensor of the shape that the file states.

    Raises:
        ValueError: If the file is not an IDX file of bytes, or holds fewer or more values than it states.
    """
    path = Path(path)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    header = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    values = torch.tensor(shape).prod().item()
    if len(raw) != header + values:
        raise ValueError(f"{path} states shape {shape}, {values} values, but holds {len(raw) - header}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)
