"""The CPU kernel for a packed weight: its layout, and the choice between it and the dense GEMM."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_nm.functional.nm_format import position_numbers
from lightning_nm.kernels.api import GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import (
    CpuCsrKernel,
    CpuInt8Kernel,
    CpuPermuteKernel,
    CsrLayout,
    Int8Layout,
    PermuteLayout,
)
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.kernels.cpu.library import DTYPES
from lightning_nm.kernels.tuner import (
    Decisions,
    DeviceTimer,
    KernelRegistry,
    Tuner,
    decisions_file,
    environment_of,
)
from lightning_nm.packed.tensor import PackedTensor
from lightning_nm.pattern import NMPattern

Kernels = Literal["auto", "sparse", "reference"]
"""``"auto"``: a kernel while it is measured to be no slower than the dense GEMM, then the dense weight.
``"sparse"``: a kernel where one takes the GEMM, ``"reference"``: none; both hold the weight packed."""

KernelLayout: TypeAlias = PermuteLayout | CsrLayout | Int8Layout

_KERNELS = {kind.layouts: kind for kind in (CpuPermuteKernel, CpuCsrKernel, CpuInt8Kernel)}

DECISIONS = "~/.cache/lightning_nm/packed.json"
"""Where measured choices are kept, by CPU, instruction set and number of threads; nowhere without a home directory.

Those for int8 weights are in a file next to it, see :func:`_file_of`."""

BUDGET_S = 1.0
"""Seconds that the GEMMs of one packed model are measured by default; the last measurement may exceed them."""

LARGEST_TOKENS = 4096
"""GEMMs of more tokens are taken to be as fast, by the token, as GEMMs of this many."""

LARGEST = 0.75
"""A kernel's layout that takes more than this fraction of the dense weight's memory is not made."""


@functools.cache
def registry_of(name: str) -> KernelRegistry:
    """The kernel with this name alone, as all packed layers use it."""
    # Kept for the process: a kernel that failed for a GEMM is switched off for it in every model.
    return KernelRegistry([kind() for kind in _KERNELS.values() if kind.name == name])


@dataclass(eq=False)
class Operand:
    """A matrix ``[rows, depth]`` in a kernel's layout; the dense and the packed weight are not kept next to it.

    Attributes:
        layout: Where the nonzeros are.
        values: Their values, in the layout's order.
        pattern: The pattern of the blocks.
        tag: An empty tensor whose size is the handle of the weight that has this operand, as graphs take it.
    """

    layout: KernelLayout
    values: Tensor
    pattern: NMPattern
    tag: Tensor | None = None
    _parts: dict[tuple[int, int], Operand] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """The kernel that takes the layout."""
        return _KERNELS[type(self.layout)].name

    @property
    def packed(self) -> Packed:
        """The matrix as the kernel takes it."""
        return Packed(self.layout, self.values)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the layout; the scales of int8 values are those of the packed weight."""
        return [self.values, *self.layout.tensors]

    def part(self, rows: tuple[int, int] | None) -> Operand | None:
        """Some rows as an operand on the same memory; ``None`` if they are not whole tiles."""
        layout = self.layout
        if rows is None or rows == (0, layout.rows):
            return self
        # Cross-attention asks for the same parts at each call.
        if rows in self._parts:
            return self._parts[rows]
        # It has no tiles to be cut at.
        if isinstance(layout, CsrLayout):
            return None
        first, end = rows
        tile = layout.tile
        # Only the last tile of a matrix may have fewer rows of its own than a tile holds.
        if first % tile or (end % tile and end != layout.rows):
            return None
        tiles = slice(first // tile, math.ceil(end / tile))
        own = layout.part(tiles, end - first)
        # Two threads that make one part both get the first.
        return self._parts.setdefault(rows, Operand(own, self.values[tiles], self.pattern))


def lay_out(matrix: Tensor, pattern: NMPattern | None, *, convolution: bool) -> Operand | None:
    """The matrix of a packed weight in the layout of the kernel for it.

    Args:
        matrix: ``[rows, depth]``, contiguous.
        pattern: Its pattern along the depth; ``None`` if it has none.
        convolution: Whether its GEMMs are convolutions.

    Returns:
        ``None`` if no kernel takes it, the layout would be larger than :data:`LARGEST`, or the matrix holds NaN, whose
        bits a layout does not keep.
    """
    if matrix.device.type != "cpu" or matrix.dtype not in DTYPES:
        return None
    if not matrix.numel() or bool(matrix.isnan().any()):
        return None
    integers = matrix.view(torch.int32 if matrix.itemsize == 4 else torch.int16)
    # A key must have a pattern: this one is for cpu-csr, which does not read it.
    given = NMPattern(1, 2) if pattern is None else pattern
    masked = MaskedMatrix.of(matrix, integers.ne(0), given)  # negative zeros are kept
    # One token stands for all numbers: what these kernels support depends on the matrix.
    key = GemmKey("forward", *masked.shape, 1, matrix.dtype, given, "cpu")
    # The faster one first.
    for name in ["cpu-csr"] if pattern is None or convolution else ["cpu-permute", "cpu-csr"]:
        registry = registry_of(name)
        if registry.reason_against(name, key):
            continue
        try:
            layout = registry.kernels[name].layout(masked)
        except ValueError:
            continue  # the matrix is too large for the kernel
        # A 2:4 matrix in bfloat16 takes just 0.75 in cpu-permute with AVX512_BF16, and more in other layouts.
        if layout.nbytes > LARGEST * matrix.nbytes:
            continue
        values = layout.values(masked)
        if isinstance(layout, CsrLayout):
            # The places in the weight's memory are for reading other values.
            none = layout.source.new_empty(0)
            layout = replace(layout, source=none, slot=none)
        return Operand(layout, values, given)
    return None


def lay_out_int8(packed: PackedTensor) -> Operand | None:
    """A packed weight with int8 values in the layout of the kernel for it.

    Args:
        packed: The weight; the rows of its blocks are those of the GEMM, but a convolution's may have taps between
            them and the blocks.

    Returns:
        ``None`` if the kernel does not take it, or the layout would be larger than :data:`LARGEST`.
    """
    if packed.scales is None or packed.values.device.type != "cpu":
        return None
    pattern, _, _, dtype, _ = packed.kind
    # [rows, blocks, N]: the taps of a convolution become part of the depth.
    values = packed.values.flatten(1, -2)
    rows, blocks, _ = values.shape
    depth = blocks * pattern.m
    name = CpuInt8Kernel.name
    key = GemmKey("forward", rows, depth, 1, dtype, pattern, "cpu")
    if registry_of(name).reason_against(name, key):
        return None
    numbers = position_numbers(packed.positions, pattern, rows * blocks).view(values.shape)
    taps = packed.kind.taps
    layout, ordered = Int8Layout.of(values, numbers, packed.scales, pattern, taps)
    if layout.nbytes > LARGEST * rows * depth * dtype.itemsize:
        return None
    return Operand(layout, ordered, pattern)


class KernelChoice:
    """Kernel settings of one packed model: the mode, and the time that is left for measuring.

    Args:
        kernels: ``"auto"``, ``"sparse"`` or ``"reference"``, see :func:`lightning_nm.pack`.
        budget_s: The time in all, in ``"auto"``.

    Raises:
        ValueError: If `kernels` is unknown, or the time is negative or NaN.
    """

    def __init__(self, kernels: Kernels, budget_s: float) -> None:
        if kernels not in get_args(Kernels):
            raise ValueError(f"kernels={kernels!r} is unknown: use 'auto', 'sparse' or 'reference'")
        if not budget_s >= 0:  # also NaN
            raise ValueError(f"budget_s={budget_s!r} must be 0 or more seconds")
        self.kernels = kernels
        self.left_s = budget_s

    def takes(self, name: str, key: GemmKey, packed: Packed) -> tuple[bool, bool]:
        """Whether a kernel runs a matmul with a packed operand, and whether this decision is final.

        A kernel that can run it does, in ``"auto"`` if it is no slower than the dense matmul. For that :func:`coarse`
        GEMMs are timed once, while the budget lasts, and kept in :data:`DECISIONS`. After that, and while another
        thread measures, the nearest timed one decides; without one, the kernel runs.
        """
        # Of this very size, not of the coarse one: the kernel may have failed at it.
        if registry_of(name).reason_against(name, key):
            return False, True
        if self.kernels != "auto":
            return True, True
        key = coarse(key)
        with _MAKING:
            tuner = _tuner(name, torch.get_num_threads())
        decision = tuner.recall(key)
        to_measure = decision is None and self.left_s > 0
        # A request does not wait while another thread measures; warm_up(), whose budget is infinite, does.
        if to_measure and _MEASURING.acquire(blocking=math.isinf(self.left_s)):
            try:
                start = perf_counter()
                decision = tuner.decide(key, packed)
                tuner.decisions.keep(_file_of(name))
                return_freed_memory()
                self.left_s -= perf_counter() - start
            finally:
                _MEASURING.release()
            return decision.kernel == name, True
        decision = decision or tuner.nearest(key)
        # Without any measurement the smaller weight stays. The choice is not final while another thread measures.
        return decision is None or decision.kernel == name, not to_measure


@functools.cache
def _tuner(name: str, threads: int) -> Tuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    decisions = Decisions.load(_file_of(name), environment_of(torch.device("cpu")))
    # A pack is never made again, and a kernel is taken if it is as fast: its weight is smaller.
    return Tuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=1 << 30, hysteresis=0.0)


def _file_of(name: str) -> Path | None:
    """Where the choices for a kernel are kept."""
    if name != CpuInt8Kernel.name:
        return decisions_file(DECISIONS)
    # GEMMs in int8 have the keys of those in the dtype of their inputs: in one file they would replace each other.
    return decisions_file(DECISIONS.replace(".json", "-int8.json"))


_MAKING = threading.Lock()  # two threads must not have two tuners, each with decisions of its own
_MEASURING = threading.Lock()  # two measurements at a time would slow each other down


def coarse(key: GemmKey) -> GemmKey:
    """The GEMM that is timed in place of this one: its tokens rounded up to a power of two, at most 4096.

    Of convolutions the images are rounded up, and limited to those of 4096 positions, but for one image.

    Example::

        >>> from lightning_nm import NMPattern
        >>> key = GemmKey("forward", 64, 64, 1000, torch.float32, NMPattern(2, 4), "cpu")
        >>> coarse(key).columns, coarse(replace(key, columns=9000)).columns
        (1024, 4096)
    """
    unit = 1 if key.conv is None else math.prod(key.conv.positions)
    count = max(key.columns // unit, 1)
    power = 1 << (count - 1).bit_length()
    most = max(LARGEST_TOKENS // unit, 1)  # at least one image
    return replace(key, columns=unit * min(power, most))


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system: it keeps most of the dense weights and layouts that were made.

    Of a model of 190 MB, packed 2:4 to 145 MB, a process held 236 MB before it and 150 MB after it.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            # CDLL(None) has the functions of the process, among them those of its C library.
            ctypes.CDLL(None).malloc_trim(0)
