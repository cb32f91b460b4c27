"""A score for each N:M pattern of each block: what the methods that train such scores have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.soft import block_patterns
from lightning_nm.methods.checks import refuse_tensor_parallel
from lightning_nm.nn.layer import NMLayer, blocks_of

PATTERNS = "patterns"
"""The layer's buffer: uint8 ``[C, M]``, 1 where a pattern keeps an entry."""


def begin_scores(layer: NMLayer, what: str) -> tuple[int, int, int] | None:
    """Forget masks and buffers, and give a layer its patterns, for a method that owns ``what`` of all blocks.

    Returns:
        The shape of the scores, ``[out, blocks, C]``: Muon takes two dimensions for a matrix of a layer. ``None`` where
        the forward GEMM cannot be N:M.

    Raises:
        ValueError: If tensor parallelism cuts the weight, or for a pattern of more than 256 combinations.
    """
    # Before the first return, too: masks of weights that were replaced must not stay.
    layer.set_masks(None)
    layer.buffers.clear()
    if layer.spec.forward_reason:
        return None
    refuse_tensor_parallel(layer, f"{what} of all blocks")
    try:
        patterns = block_patterns(layer.pattern)
    except ValueError as error:
        raise ValueError(f"layer '{layer.name}': {error}") from None
    layer.buffers[PATTERNS] = patterns.to(layer.weight.device, torch.uint8)
    count, m = patterns.shape
    # A row counts its taps, too: each tap of a convolution has blocks of its own.
    rows = layer.view.rows(layer.weight)
    return len(rows), rows[0].numel() // m, count


def sum_by_pattern(layer: NMLayer, values: Tensor, scores: Tensor) -> Tensor:
    """Sum values of the weight's shape over the entries that each pattern keeps, in the shape and dtype of the scores.

    Of ``W dL/dW_F``, which a mask that were a real number would get, it is the gradient of the scores.
    """
    # One GEMM by the 0/1 matrix [C, M] sums all patterns of all blocks. In the dtype of the scores, at least float32:
    # half precision would make ties.
    patterns = layer.buffers[PATTERNS].to(scores.dtype)
    blocks = blocks_of(layer, values).to(scores.dtype)  # [blocks, M]
    return (blocks @ patterns.t()).view(scores.shape)
