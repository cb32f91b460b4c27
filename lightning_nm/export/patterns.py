"""The N:M pattern of a weight, found or checked, and where its blocks lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.atomic_write import Weights
from lightning_nm.export.packed_file import memory_of
from lightning_nm.functional import count_violations
from lightning_nm.functional.nm_format import MAX_M, PACKED_DTYPES, position_bits
from lightning_nm.nn.weight import Layout, key_of_layer, plain_name
from lightning_nm.packed.tensor import SAME_BLOCKS, blocks_last
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import some_of

SOUGHT = (4, 8, 16, 32)
"""Lengths of blocks that are tried where no pattern is given."""

LARGEST = 0.75
"""A weight whose packed form would take more than this fraction of its memory stays dense."""


class Found(NamedTuple):
    """The pattern that was found for one weight, and where its blocks lie.

    Args:
        pattern: The pattern to pack it in; ``None`` leaves it dense.
        layout: Where the blocks lie.
        reason: Why it stays dense.
    """

    pattern: NMPattern | None
    layout: Layout = Layout.PLAIN
    reason: str = ""


def _possible_layouts(weight: Tensor) -> tuple[Layout, ...]:
    """The layouts that a weight of an unknown module may have, the most usual one first."""
    # With two axes flat is the same as plain, and only such weights can be transposed.
    return (Layout.PLAIN, Layout.TRANSPOSED if weight.dim() == 2 else Layout.FLAT)


@torch.no_grad()
def pattern_of(
    weight: Tensor, pattern: NMPattern | None = None, layouts: Sequence[Layout] | None = None
) -> Found:
    """The pattern in which a weight takes the least memory.

    Args:
        weight: Any tensor.
        pattern: The only one to try; by default every N for blocks of :data:`SOUGHT`.
        layouts: Where blocks may lie; by default :func:`_possible_layouts`.
    """
    # An empty weight has no block whose nonzeros could be counted.
    packable = weight.dim() >= 2 and weight.dtype in PACKED_DTYPES and weight.numel()
    if not packable:
        dtype = str(weight.dtype).removeprefix("torch.")
        return Found(None, reason=f"{dtype} of shape {list(weight.shape)}")
    blocked = [
        (layout, blocks_last(weight, layout)) for layout in layouts or _possible_layouts(weight)
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
            # A full block: at this length nothing is pruned, and no pattern has N = M.
            if most == m:
                continue
            possible = NMPattern(most, m)
            # Packed over dense bytes.
            fraction = possible.density + position_bits(possible) / (m * weight.itemsize * 8)
            # A tie stays with what was found first: the usual layout, the shorter blocks. LARGEST itself is still
            # packed.
            if fraction < least or (best is None and fraction == least):
                least = fraction
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
        # The usual layout comes first, so that a weight which is N:M along several axes gets that one.
        violations = int(count_violations(rows, pattern))
        if not violations:
            return Found(pattern, layout)
        counts.append(violations)
    if not counts:
        return Found(None, reason=f"no axis is a multiple of {pattern.m}")
    blocks = blocked[0][1].numel() // pattern.m  # of every layout
    # The layout that is nearest to the pattern speaks for the weight.
    return Found(
        None, reason=f"{min(counts)} of {blocks} blocks hold more than {pattern.n} of {pattern.m}"
    )


def patterns_in(
    weights: Mapping[str, Tensor],
    states: Sequence[Mapping[str, Any]],
    pattern: PatternLike | None,
    owner: str = "",
) -> dict[str, Found]:
    """The pattern of every tensor of a checkpoint.

    Args:
        weights: Its state dict.
        states: Its sparsifier states: where there is one, only the layers that it masks are packed, as it masks them.
        pattern: Overrides both, for all weights.
        owner: What must have an N:M weight, for the message.

    Raises:
        ValueError: If the owner has none, with the reasons.
    """
    given = None if pattern is None else NMPattern.parse(pattern)
    # A pattern of the caller counts more than what the training masked.
    if given is not None or not states:
        found = {key: pattern_of(weight, given) for key, weight in weights.items()}
    else:
        # A head that is N:M by chance stays dense: where the training tells what it masked, zeros are not searched.
        found = {key: Found(None, reason="not masked in training") for key in weights}
        masked = {}
        for state in states:
            for key, layer in masked_layers(weights, state):
                layout = Layout(layer["layout"])
                # Files know no layouts of experts: one of three axes with the same blocks stands for them.
                layouts = [SAME_BLOCKS.get(layout, layout)]
                found[key] = pattern_of(weights[key], NMPattern.parse(layer["pattern"]), layouts)
                if found[key].pattern is not None:
                    masked[memory_of(weights[key])] = found[key]
        # Tied weights have several keys, and a state names one of them.
        found = {key: masked.get(memory_of(weights[key]), each) for key, each in found.items()}
    # The caller that names no owner has a message of its own for a model without N:M weights.
    if owner and not any(each.pattern for each in found.values()):
        # Vectors are never packed: their reasons tell nothing.
        matrices = [key for key, weight in weights.items() if weight.dim() >= 2]
        reasons = some_of([f"'{key}': {found[key].reason}" for key in matrices])
        fault = f"no weight of {owner} is {given or 'N:M'} sparse: {reasons}"
        if given is not None:
            # The likeliest mistake is a wrong pattern: the one that most matrices have is named.
            own = [pattern_of(weights[key]).pattern for key in matrices]
            for other, number in Counter(filter(None, own)).most_common(1):
                fault += f". {number} of {len(matrices)} matrices are {other}: give that pattern"
        raise ValueError(fault)
    return found


def masked_layers(
    weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The layers of a sparsifier state, each with the key of its weight.

    Raises:
        ValueError: If there is no such weight.
    """
    # Keys of a compiled or wrapped model have wrappers in them, which the names of the state may lack.
    keys = {plain_name(key): key for key in weights}
    for name, layer in state["layers"].items():
        plain = key_of_layer(plain_name(name), layer["parameter"])
        if plain not in keys:
            raise ValueError(f"the file has masks for '{name}' but no weight '{plain}'")
        yield keys[plain], layer


# Without a sparsifier state, a weight with fewer violating blocks than this fraction is broken, others are dense.
_DENSE_FROM = 0.5

# Integers that may be the values of a quantised weight; wider ones are indices.
_QUANTISED = {torch.int8, torch.uint8, torch.qint8, torch.quint8, torch.qint32}

# Where blocks were found.
_AXES = {
    Layout.PLAIN: "along dim 1",
    Layout.TRANSPOSED: "along dim 0",
    Layout.FLAT: "along the flattened filter",
}

# Another pattern is named if nonzeros fill this fraction of its places: zeros at random places fit some pattern, too.
_FULL = 0.95


@dataclass(frozen=True)
class Verdict:
    """The result for one weight.

    Args:
        key: Key in the state dict.
        verdict: ``"N:M"``, ``"dense"`` or ``"broken"``.
        pattern: The pattern that the weight was checked against.
        blocks: Number of blocks.
        violations: Blocks with more than N nonzeros.
        density: Fraction of nonzeros.
        note: The axis, or the reason why nothing was checked.
        nonfinite: Number of entries that are NaN or infinite.
        stage: The stage of the training's schedule, and when the pattern's own is, if the weight lies in another one.
        own_pattern: The pattern that a weight has which is not N:M in this one, if it has one.
    """

    key: str
    verdict: str
    pattern: str
    blocks: int = 0
    violations: int = 0
    density: float = 1.0
    note: str = ""
    nonfinite: int = 0
    stage: str = ""
    own_pattern: str = ""


def is_matrix(dtype: torch.dtype, axes: int) -> bool:
    """Whether a tensor may be a weight that is N:M: of two or more axes, floating-point, complex or quantised."""
    is_number = dtype.is_floating_point or dtype.is_complex or dtype in _QUANTISED
    return axes >= 2 and is_number


def matrices_in(weights: Mapping[str, Tensor]) -> Weights:
    """The tensors that may be N:M, by key."""
    return {key: weight for key, weight in weights.items() if is_matrix(weight.dtype, weight.dim())}


def comparable(key: str, weight: Tensor) -> Tensor:
    """A weight as a strided tensor of a dtype that torch compares, with the same zeros.

    Raises:
        ValueError: If torch cannot make one.
    """
    try:
        # Asked first: a meta tensor passes all conversions below, and fails only where its values are read.
        if weight.is_meta:
            raise TypeError("it has no values (meta device)")
        if weight.layout != torch.strided:
            weight = weight.to_dense()
        if weight.is_quantized:
            weight = weight.dequantize()
        # Of the floating-point dtypes float8 alone takes one byte. float32 holds it exactly, so that zeros stay zeros.
        is_float8 = weight.is_floating_point() and weight.itemsize == 1
        return weight.float() if is_float8 else weight
    except (RuntimeError, TypeError, MemoryError) as error:
        kind = f"{weight.dtype}, {weight.layout}, {list(weight.shape)}"
        # Some errors of torch list all of its backends after the first line.
        reason = str(error).split("\n")[0]
        raise ValueError(f"'{key}' ({kind}) cannot be read: {reason}") from error


def classify(key: str, weight: Tensor, pattern: NMPattern) -> Verdict:
    """Check a weight along all axes on which blocks may lie; the axis with the fewest violations counts.

    Args:
        key: Key in the state dict.
        weight: Of two or more dimensions.
        pattern: The pattern.

    Raises:
        ValueError: If its values cannot be read.
    """
    # Pruned entries lie at the zero point of a quantised weight, in uint8 often 128, which a state dict does not tell.
    if weight.dtype == torch.uint8:
        unknown = "uint8: the file does not tell which value stands for zero"
        return Verdict(key, "dense", str(pattern), note=unknown)
    # Named before the conversion, which widens these dtypes.
    stored = f", {str(weight.dtype).removeprefix('torch.')}" if weight.itemsize == 1 else ""
    weight = comparable(key, weight)
    # Some layers store weights as [in, out]; the blocks of a convolution may lie along the flattened filter.
    verdicts = []
    for layout in _possible_layouts(weight):
        rows = blocks_last(weight, layout)
        if rows.shape[-1] % pattern.m:
            continue
        note = _AXES[layout]
        # A weight of three axes is that of a 1-d convolution, or one matrix for each expert, with the same blocks.
        if layout is Layout.FLAT and weight.dim() == 3 and weight.shape[2] % pattern.m == 0:
            note = "along dim 2"
        # Nothing says that it was masked: with violations in most blocks it counts as dense, not as broken.
        verdicts.append(judge(key, rows, pattern, note, masked=False))
    if not verdicts:
        return Verdict(
            key, "dense", str(pattern), note=f"shape {tuple(weight.shape)} has no axis of blocks"
        )
    # All have as many blocks.
    found = min(verdicts, key=lambda verdict: verdict.violations)
    own_pattern = ""
    # A denser weight has no pattern that pattern_of() returns, and a weight of zeros has every one.
    if found.verdict != "N:M" and 0 < found.density <= LARGEST:
        # Its zeros may have another pattern.
        own = pattern_of(weight).pattern
        if own is not None and found.density >= _FULL * own.density:
            own_pattern = str(own)
    return replace(found, note=f"{found.note}{stored}", own_pattern=own_pattern)


def judge(key: str, rows: Tensor, pattern: NMPattern, note: str, *, masked: bool) -> Verdict:
    """Check a weight along its last axis.

    Args:
        key: Key in the state dict.
        rows: The weight, its blocks along the last axis.
        pattern: The pattern.
        note: Of the verdict.
        masked: Whether the weight is known to be masked: any violation then makes it broken.
    """
    violations = int(count_violations(rows, pattern))
    blocks = rows.numel() // pattern.m
    # An empty weight has no entries to divide by.
    density = float(torch.count_nonzero(rows)) / max(rows.numel(), 1)
    if not violations:
        # A weight that is all zero is N:M in every pattern.
        verdict = "N:M" if masked or density else "dense"
        note = note if density else f"{note}, all zero".removeprefix(", ")
    else:
        verdict = "broken" if masked or violations < _DENSE_FROM * blocks else "dense"
    nonfinite = count_nonfinite(rows)
    return Verdict(
        key, verdict, str(pattern), blocks, violations, density, note, nonfinite=nonfinite
    )


def count_nonfinite(tensor: Tensor, *, infinite: bool = True) -> int:
    """Number of entries of a tensor that are NaN or, with `infinite`, infinite.

    Example:
        >>> count_nonfinite(torch.tensor([1.0, torch.nan, torch.inf]))
        2
        >>> count_nonfinite(torch.tensor([1.0, complex(torch.nan, torch.inf)]))
        1
    """
    if tensor.is_complex():
        # An entry with one such part is one entry: torch has no aminmax() of them.
        return int((~tensor.isfinite() if infinite else tensor.isnan()).sum())
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    # torch has no isfinite() of float8.
    values = tensor if tensor.itemsize > 1 else tensor.float()
    # NaN is the least and the largest where there is one. On a CPU this takes a twentieth of the time of isfinite().
    if torch.stack(torch.aminmax(values)).isfinite().all():
        return 0
    # Counting is slower, and only a tensor with such entries gets here.
    return int((~values.isfinite() if infinite else values.isnan()).sum())
