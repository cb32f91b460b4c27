"""Keys that are alike share a decision: token counts fall into buckets, and a key is a line that people can read."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import torch

from lightning_nm.kernels.api import GemmKey, GemmName
from lightning_nm.pattern import NMPattern


def token_bucket(tokens: int) -> int:
    """Round a number of tokens up to the next of ``{4, 5, 6, 7} 2^k``; a number up to 8 is its own bucket.

    The largest number of a bucket is less than 25 % above its smallest. The bucket of a multiple of a power of two is
    one as well, so that what a kernel demands of a size holds for its bucket.

    Example::

        >>> [token_bucket(tokens) for tokens in (3, 9, 1000, 1024, 1025)]
        [3, 10, 1024, 1024, 1280]
    """
    step = 1 << max((tokens - 1).bit_length() - 3, 0)
    return -(-tokens // step) * step


@lru_cache(maxsize=1 << 14)
def bucketed(key: GemmKey) -> GemmKey:
    """Replace the tokens of a key, its columns or for wgrad its depth, by their bucket."""
    if key.gemm == "wgrad":
        return replace(key, depth=token_bucket(key.depth))
    return replace(key, columns=token_bucket(key.columns))


def multiply_adds(key: GemmKey) -> int:
    """Count the multiply-adds of the dense product, ``rows depth columns``."""
    return key.rows * key.depth * key.columns


def format_key(key: GemmKey) -> str:
    """Write a key as ``gemm rowsxdepthxcolumns dtype pattern device``, with ``permuted`` after it if it is.

    :func:`parse_key` reads it back.

    Example::

        >>> format_key(GemmKey("dgrad", 1024, 4096, 8192, torch.bfloat16, NMPattern(2, 4), "cuda:0"))
        'dgrad 1024x4096x8192 bfloat16 2:4 cuda:0'
    """
    dtype = str(key.dtype).removeprefix("torch.")
    permuted = " permuted" * key.permuted
    return f"{key.gemm} {key.rows}x{key.depth}x{key.columns} {dtype} {key.pattern} {key.device}{permuted}"


def parse_key(text: str) -> GemmKey:
    """Read what :func:`format_key` wrote.

    Raises:
        ValueError: If the text is not a key.
    """
    match = re.fullmatch(r"(forward|dgrad|wgrad) (\d+)x(\d+)x(\d+) (\w+) (\d+:\d+) (\S+)( permuted)?", text)
    dtype = getattr(torch, match[5], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"cannot read {text!r} as a key: it is written 'forward 4096x1024x8192 bfloat16 2:4 cuda'")
    rows, depth, columns = (int(match[group]) for group in (2, 3, 4))
    gemm: GemmName = match[1]  # type: ignore[assignment]
    return GemmKey(gemm, rows, depth, columns, dtype, NMPattern.parse(match[6]), match[7], match[8] is not None)
