"""The N:M pattern of a weight, found or checked, and where its blocks lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.packed_file import memory_of
from lightning_nm.functional import count_violations
from lightning_nm.functional.nm_format import MAX_M, PACKED_DTYPES, position_bits
from lightning_nm.nn.packed.layers import SAME_BLOCKS
from lightning_nm.nn.packed.tensor import blocks_last
from lightning_nm.nn.weight import Layout, key_of_layer, plain_name
from lightning_nm.pattern import NMPattern

SOUGHT = (4, 8, 16, 32)
"""Lengths of blocks that are tried where no pattern is given."""

LARGEST = 0.75
"""A weight whose packed form would take more than this share of its memory stays dense."""


class Found(NamedTuple):
    """What is known of one weight.

    Args:
        pattern: The pattern to pack it in; ``None`` leaves it dense.
        layout: Where the blocks lie.
        reason: Why it stays dense.
    """

    pattern: NMPattern | None
    layout: Layout = Layout.PLAIN
    reason: str = ""


def possible_layouts(weight: Tensor) -> tuple[Layout, ...]:
    """The layouts that a weight of an unknown module may have, the most usual one first."""
    return (Layout.PLAIN, Layout.TRANSPOSED if weight.dim() == 2 else Layout.FLAT)


@torch.no_grad()
def pattern_of(
    weight: Tensor, pattern: NMPattern | None = None, layouts: Sequence[Layout] | None = None
) -> Found:
    """The pattern in which a weight takes the least memory.

    Args:
        weight: Any tensor.
        pattern: The only one to try; by default every N for blocks of :data:`SOUGHT`.
        layouts: Where blocks may lie; by default :func:`possible_layouts`.
    """
    packable = weight.dim() >= 2 and weight.dtype in PACKED_DTYPES and weight.numel()
    if not packable:
        dtype = str(weight.dtype).removeprefix("torch.")
        return Found(None, reason=f"{dtype} of shape {list(weight.shape)}")
    blocked = [
        (layout, blocks_last(weight, layout)) for layout in layouts or possible_layouts(weight)
    ]
    if pattern is not None:
        return _checked(blocked, pattern)
    best = None
    least = LARGEST
    for layout, rows in blocked:
        for m in SOUGHT:
            if rows.shape[-1] % m:
                continue
            # The least N for these blocks; a weight that is all zero needs one value a block, too.
            most = max(int(torch.count_nonzero(rows.reshape(-1, m), dim=1).max()), 1)
            if most == m:
                continue
            possible = NMPattern(most, m)
            # Packed over dense bytes.
            share = possible.density + position_bits(possible) / (m * weight.itemsize * 8)
            if share < least or (best is None and share == least):
                least = share
                best = Found(possible, layout)
    if best is not None:
        return best
    # The usual pattern gives the reason.
    reason = _checked(blocked, NMPattern(2, 4)).reason
    return Found(None, reason=reason or "packing would save little")


def _checked(blocked: Sequence[tuple[Layout, Tensor]], pattern: NMPattern) -> Found:
    if pattern.m > MAX_M:
        return Found(None, reason=f"blocks of more than {MAX_M} are not packed")
    counts = []
    for layout, rows in blocked:
        if rows.shape[-1] % pattern.m:
            continue
        violations = int(count_violations(rows, pattern))
        if not violations:
            return Found(pattern, layout)
        counts.append(violations)
    if not counts:
        return Found(None, reason=f"no axis is a multiple of {pattern.m}")
    blocks = blocked[0][1].numel() // pattern.m  # of every layout
    return Found(
        None, reason=f"{min(counts)} of {blocks} blocks hold more than {pattern.n} of {pattern.m}"
    )


def patterns_in(
    weights: Mapping[str, Tensor], states: Sequence[Mapping[str, Any]], pattern: NMPattern | None
) -> dict[str, Found]:
    """The pattern of every tensor of a checkpoint.

    Args:
        weights: Its state dict.
        states: Its sparsifier states: where there is one, only the layers that it masks are packed, as it masks them.
        pattern: Overrides both, for all weights.
    """
    if pattern is not None or not states:
        return {key: pattern_of(weight, pattern) for key, weight in weights.items()}
    found = {key: Found(None, reason="not masked in training") for key in weights}
    keys = {plain_name(key): key for key in weights}
    for state in states:
        for name, layer in state["layers"].items():
            key = keys.get(key_of_layer(plain_name(name), layer["parameter"]))
            if key is None:
                raise ValueError(f"the file has masks for '{name}' but no weight for it")
            own_pattern = NMPattern.parse(layer["pattern"])
            layout = Layout(layer["layout"])
            found[key] = pattern_of(weights[key], own_pattern, [SAME_BLOCKS.get(layout, layout)])
    # Tied weights have several keys, and a state names one of them.
    masked = {
        memory_of(weights[key]): each for key, each in found.items() if each.pattern is not None
    }
    return {key: masked.get(memory_of(weights[key]), each) for key, each in found.items()}
