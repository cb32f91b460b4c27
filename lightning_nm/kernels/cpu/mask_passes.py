"""Passes over a weight and its forward mask on CPUs, each of which reads and writes every tensor once.

They compute what BAME and :func:`lightning_nm.functional.select.mask_` compute by torch. Every operation is rounded on
its own, as torch does. Only the sum of squares adds up in another order, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_nm.functional import masks
from lightning_nm.functional.evolution import (
    DECAY,
    EPSILON,
    LONGEST_BLOCK,
    SCALE,
    BlockGrid,
)
from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.kernels.cpu import library

DTYPES = {**library.DTYPES, torch.float16: 2}
"""The dtypes of weights, gradients and optimizer state, by their numbers in the library."""
MOST_STATES = 4
"""Tensors of the optimizer's state that an exchange takes."""
_FEW = 4096  # entries up to which calls of torch are as fast

# The library reads and writes the two lowest bits.
assert FORWARD_BIT == 1
assert BACKWARD_BIT == 2

# The numbers of dtypes in csrc/nm.h.
_SCORES = {**DTYPES, torch.float64: 3, torch.int32: 4, torch.int64: 5}
# As LONGEST of csrc/top.c, the size of its arrays.
_LONGEST_RANKED = 64  # entries of a block


def runs(*tensors: Tensor | None) -> bool:
    """Tell whether the library takes these tensors: on the CPU, in row-major order, of a dtype that it knows."""
    is_here = not torch.compiler.is_compiling() and not library.unavailable()
    return is_here and is_row_major(*tensors)


def is_row_major(*tensors: Tensor | None, device_type: str = "cpu") -> bool:
    """Tell whether a pass can read tensors by their address: on a device of this type, row-major, of a known dtype."""
    for tensor in tensors:
        if tensor is None:
            continue
        known_dtype = tensor.dtype in DTYPES or tensor.dtype in (torch.uint8, torch.bool)
        # A tensor of inference mode has no version counter that could tell of a write.
        if not known_dtype or not tensor.is_contiguous() or tensor.is_inference():
            return False
    return library.is_plain(*tensors, device_type=device_type)


def _run(name: str, bits: Tensor, *, written: Sequence[Tensor | None], **fields: Any) -> Any:
    """Run a pass by its name in csrc/nm.h, and return its description, the library's ``nm_evolution``, with results.

    Args:
        name: Its name.
        bits: The masks of the weight.
        written: The tensors that are written, of which torch is told.
        fields: Other fields of the description by their names, those of a :class:`BlockGrid` for passes that look at
            blocks; a tensor stands for its address, ``None`` for NULL.
    """
    fields |= {"bits": bits, "entries": bits.numel()}
    # One field serves both: where both are given, callers have compared their dtypes.
    typed = fields.get("weight", fields.get("grad"))
    if typed is not None:
        fields["dtype"] = DTYPES[typed.dtype]
    job = library.structure("nm_evolution *")
    for field, value in fields.items():
        if value is not None:  # else NULL
            # isinstance() takes ten times as long for a number.
            setattr(job, field, value.data_ptr() if hasattr(value, "data_ptr") else value)
    lib = library.load()
    if lib.nm_evolution_pass(library.level(), getattr(lib, f"NM_{name}"), job):
        raise MemoryError("there is no memory for a pass over a weight")
    # torch did not see these writes: autograd, and packs that are kept, go by the versions.
    for tensor in written:
        if tensor is not None:
            increment_version(tensor)
    return job


def mask_(x: Tensor, bits: Tensor) -> bool:
    """Set the entries of ``x`` whose forward bit is not set to +0.0 in place.

    Returns:
        Whether this was done; ``False`` for tensors that the library does not take, or that are small.
    """
    if x.numel() <= _FEW or x.shape != bits.shape or not runs(x, bits):
        return False
    _run("MASK", bits, weight=x, written=[x])
    return True


def top_n_mask(blocks_bmi: Tensor, n: int, magnitude: bool) -> Tensor | None:
    """Return the mask of the N largest scores, or magnitudes, of blocks ``[B, M, I]``, as :func:`nm_mask` defines it.

    ``None`` where the library cannot be used.
    """
    blocks, m, inner = blocks_bmi.shape
    if m > _LONGEST_RANKED or not library.is_plain(blocks_bmi) or library.unavailable():
        return None
    # A mode that records or counts torch's operators does not see what the library writes.
    if torch._C._len_torch_dispatch_stack():
        return None
    if not blocks_bmi.is_floating_point() and blocks_bmi.itemsize < 4:
        # Magnitudes first: of an int8, that of -128 is -128.
        blocks_bmi = (blocks_bmi.abs() if magnitude else blocks_bmi).int()
        magnitude = False
    if blocks_bmi.dtype not in _SCORES:
        return None
    scores = blocks_bmi.contiguous()
    mask_bmi = torch.empty_like(scores, dtype=torch.bool)
    # The library counts the blocks of each of the `inner` columns.
    sizes = blocks * inner, inner, n, m
    addresses = scores.data_ptr(), mask_bmi.data_ptr()
    top = library.structure("nm_top *", *addresses, *sizes, _SCORES[scores.dtype], magnitude)
    library.call("nm_top_mask", library.level(), top)
    return mask_bmi


# `functional` lies below this package, and does not import it.
masks.by_library = top_n_mask


@torch.no_grad()
def decay_(grad: Tensor, weight: Tensor, bits: Tensor, factor: float) -> None:
    """Add ``factor`` times the entries of a weight whose forward bit is not set to its gradient, in place."""
    _run("DECAY", bits, weight=weight, grad=grad, size=factor, written=[grad])


@torch.no_grad()
def keep_largest(grid: BlockGrid, n: int, weight: Tensor, bits: Tensor) -> int:
    """Set the forward bits of the N entries of largest magnitude in every block, and clear the others, in place.

    Of equal entries the first are kept; NaN is below all numbers. Returns how many bits changed.
    """
    job = _run("LARGEST", bits, **vars(grid), weight=weight, n=n, written=[bits])
    return int(job.changed)


@torch.no_grad()
def keep_largest_of_columns(
    rows: Tensor, order: Tensor, n: int, m: int, weight: Tensor, bits: Tensor
) -> None:
    """Set the backward bits that :func:`lightning_nm.functional.backward_mask` sets, and clear the others, in place.

    Args:
        rows: ``[out, ...]``, a view of the weight that :func:`has_whole_rows` accepts.
        order: int64 ``[out]``, the row at each position: a permutation.
        n: Entries of a block that are kept.
        m: Rows of a block, a divisor of ``out``.
        weight: The weight.
        bits: uint8 of its shape, whose forward bits are read.
    """
    order = order.to(torch.int64).contiguous()
    _run(
        "LARGEST_OF_COLUMNS",
        bits,
        written=[bits],
        weight=weight,
        order=order,
        columns=rows[0].numel(),
        n=n,
        m=m,
    )


def has_whole_rows(rows: Tensor, weight: Tensor, m: int) -> bool:
    """Tell whether each row of these rows of a row-major weight is one run of its memory, and blocks of rows fit."""
    out = rows.shape[0]
    # Some layouts have rows that no view can show: then they are a copy.
    if rows.data_ptr() != weight.data_ptr():
        return False
    if m > LONGEST_BLOCK or not weight.numel() or out % m:
        return False
    return rows.stride(0) == weight.numel() // out


def size_of_kept(weight: Tensor, bits: Tensor) -> float:
    """The root mean square of the entries of a weight whose forward bit is set; 0 if there are none."""
    job = _run("SIZES", bits, weight=weight, written=[])
    return math.sqrt(job.kept_square / max(job.kept, 1))


def squares(tensor: Tensor, bits: Tensor) -> tuple[float, float]:
    """The sums of the squares of the entries whose forward bit is set, and of those whose bit is not."""
    job = _run("SIZES", bits, weight=tensor, written=[])
    return float(job.kept_square), float(job.pruned_square)


@torch.no_grad()
def gather_evidence(
    bits: Tensor,
    grad: Tensor | None,
    old_value: Tensor,
    old_square: Tensor,
    *,
    fraction: float,
    own_ratio: float,
    limit: Tensor,
    correction: Tensor,
    size: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Return U, which is 0 at kept entries, and V after one more gradient; without one, as they were.

    Args:
        bits: The masks, uint8.
        grad: The dense gradient G of the weight, whose pruned entries become +0.0 afterwards.
        old_value: What :func:`keep_evidence` kept of U, float32.
        old_square: The same of V.
        fraction: What the old U is multiplied by.
        own_ratio: What the old V of kept entries is multiplied by.
        limit: Old values beyond it in magnitude are set to 0; float32 without axes, as the next two.
        correction: :math:`1 - \beta^t`, of the gradients so far including this one.
        size: r, see :class:`lightning_nm.methods.bame.exchange.Evidence`.
    """
    value = torch.empty_like(old_value)
    square = torch.empty_like(old_square)
    _run(
        "GATHER",
        bits,
        written=[grad],
        grad=grad,
        old_value=old_value,
        old_square=old_square,
        value=value,
        square=square,
        # A power of two loses no bit: one product is rounded as that by the fraction alone.
        unit=SCALE * fraction,
        own_ratio=own_ratio,
        limit=float(limit),
        # In double precision: the library subtracts it from 1 before it rounds both to float32.
        decay=DECAY,
        correction=float(correction),
        epsilon=EPSILON,
        size=float(size),
    )
    return value, square


def keep_evidence(
    bits: Tensor,
    value: Tensor,
    square: Tensor,
    kept_value: Tensor,
    kept_square: Tensor,
    *,
    whole_value: bool,
    whole_square: bool,
) -> None:
    """Write U divided by :data:`SCALE`, and V: all entries, or only those whose forward bit is not set."""
    _run(
        "KEEP",
        bits,
        written=[kept_value, kept_square],
        value=value,
        square=square,
        old_value=kept_value,
        old_square=kept_square,
        unit=SCALE,
        whole_value=whole_value,
        whole_square=whole_square,
    )


def exchange(
    grid: BlockGrid,
    bits: Tensor,
    weight: Tensor,
    grad: Tensor | None,
    value: Tensor,
    square: Tensor,
    oscillation: Tensor,
    exchanged: Tensor,
    states: Sequence[Tensor],
    are_squares: Sequence[bool],
    budget: int,
    correction: Tensor,
    moment: float,
) -> tuple[int, int | Tensor]:
    r"""Exchange entries by evidence, in place, and set the entries of the weight that were pruned before to +0.0.

    Args:
        grid: The blocks of the weight.
        bits: The masks, uint8.
        weight: The weight.
        grad: Its gradient, which becomes 0 at pruned entries; ``None`` if there is none.
        value: U.
        square: V.
        oscillation: Oscillations of each block, uint8.
        exchanged: Whether each entry was exchanged before, one bit each.
        states: Tensors of the optimizer's state.
        are_squares: Whether each of them is a second moment. Those of a regrown entry become
            :math:`V / (1 - \beta^t)` times ``moment``; all others become 0.
        budget: How many blocks may change.
        correction: :math:`1 - \beta^t` of the evidence, without axes.
        moment: The same of the optimizer's second moment.

    Returns:
        The number of blocks that changed, and of those that did not, though an exchange would raise their score; a
        tensor where only the device knows it.
    """
    job = _run(
        "EXCHANGE",
        bits,
        **vars(grid),
        written=[bits, weight, grad, oscillation, exchanged, *states],
        weight=weight,
        grad=grad,
        value=value,
        square=square,
        oscillation=oscillation,
        exchanged=exchanged,
        states=len(states),
        # These three are arrays of NM_STATES in nm_evolution; what is left over stays zero.
        state=[state.data_ptr() for state in states],
        state_dtype=[DTYPES[state.dtype] for state in states],
        state_is_square=are_squares,
        correction=float(correction),
        moment=moment,
        budget=budget,
    )
    return int(job.changed), int(job.better - job.changed)
