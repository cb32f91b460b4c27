"""The N:M pattern of a weight, found or checked, and where its blocks lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.safetensors_file import memory_of
from lightning_nm.functional import count_violations
from lightning_nm.functional.nm_format import MAX_M, PACKED_DTYPES, position_bits
from lightning_nm.nn.layer.layout import Layout
from lightning_nm.nn.layer.names import key_of_layer, plain_name
from lightning_nm.nn.packed.tensor import blocks_last
from lightning_nm.pattern import NMPattern

SOUGHT = (4, 8, 16, 32)
"""Lengths of blocks that are tried where no pattern is given."""

LARGEST = 0.75
"""A weight whose packed form would take more than this share of its memory stays dense."""

_SAME_BLOCKS: dict[str, Layout] = {"experts": "flat", "experts-transposed": "plain"}
"""The layouts of experts, and those in which a 3-D weight has the same blocks."""


class Found(NamedTuple):
    """What is known of one weight.

    Args:
        pattern: The pattern to pack it in; ``None`` leaves it dense.
        layout: Where the blocks lie.
        reason: Why it stays dense.
    """

    pattern: NMPattern | None
    layout: Layout = "plain"
    reason: str = ""


def possible_layouts(weight: Tensor) -> tuple[Layout, ...]:
    """The layouts that a weight of an unknown module may have, the most usual one first."""
    return ("plain", "transposed") if weight.dim() == 2 else ("plain", "flat")


@torch.no_grad()
def pattern_of(weight: Tensor, pattern: NMPattern | None = None, layouts: Sequence[Layout] | None = None) -> Found:
    """The pattern in which a weight takes the least memory.

    Args:
        weight: Any tensor.
        pattern: The only one to try; by default every N for blocks of :data:`SOUGHT`.
        layouts: Where blocks may lie; by default :func:`possible_layouts`.
    """
    if weight.dim() < 2 or weight.dtype not in PACKED_DTYPES or not weight.numel():
        return Found(None, reason=f"{str(weight.dtype).removeprefix('torch.')} of shape {list(weight.shape)}")
    blocked = [(layout, blocks_last(weight, layout)) for layout in layouts or possible_layouts(weight)]
    if pattern is not None:
        return _checked(blocked, pattern)
    best: tuple[float, Found] | None = None
    for layout, rows in blocked:
        for found in _sparsest(rows):
            share = _share(found, weight.dtype)
            if share <= LARGEST and (best is None or share < best[0]):
                best = share, Found(found, layout)
    if best is not None:
        return best[1]
    return Found(None, reason=_checked(blocked, NMPattern(2, 4)).reason or "packing would save little")


def _checked(blocked: Sequence[tuple[Layout, Tensor]], pattern: NMPattern) -> Found:
    if pattern.m > MAX_M:
        return Found(None, reason=f"blocks of more than {MAX_M} are not packed")
    best = None
    for layout, rows in blocked:
        if rows.shape[-1] % pattern.m:
            continue
        violations, blocks = int(count_violations(rows, pattern)), rows.numel() // pattern.m
        if not violations:
            return Found(pattern, layout)
        if best is None or violations < best[0]:
            best = violations, blocks
    if best is None:
        return Found(None, reason=f"no axis is a multiple of {pattern.m}")
    return Found(None, reason=f"{best[0]} of {best[1]} blocks hold more than {pattern.n} of {pattern.m}")


def _sparsest(rows: Tensor) -> Iterator[NMPattern]:
    """For each length of blocks the least N."""
    for m in SOUGHT:
        if rows.shape[-1] % m == 0:
            most = int(torch.count_nonzero(rows.reshape(-1, m), dim=1).max())
            if most < m:
                yield NMPattern(max(most, 1), m)


def _share(pattern: NMPattern, dtype: torch.dtype) -> float:
    """Packed over dense bytes."""
    return pattern.density + position_bits(pattern) / (pattern.m * 8 * dtype.itemsize)


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
            own = NMPattern.parse(layer["pattern"])
            layout = _SAME_BLOCKS.get(layer["layout"], layer["layout"])
            found[key] = pattern_of(weights[key], own, [layout])
    masked = {memory_of(weights[key]): each for key, each in found.items() if each.pattern is not None}
    return {key: masked.get(memory_of(weights[key]), each) for key, each in found.items()}  # tied weights, too
