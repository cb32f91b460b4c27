"""A packed weight in the layout of a CPU kernel, and the choice between that kernel and unpacking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional.mask_bits import FORWARD_BIT
from lightning_nm.kernels.api import Convolution, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import CsrLayout, PermuteLayout
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.kernels.cpu.library import DTYPES, EMPTY, PANEL
from lightning_nm.kernels.handles import HasHandle
from lightning_nm.nn.packed.choice import Kernels, decide, kernel_of, registry_of
from lightning_nm.nn.routed_ops import plain
from lightning_nm.pattern import NMPattern

_CHUNK = 1 << 20  # entries that are unpacked at a time

_MOST_SIZES = 1 << 12  # of products whose choice is remembered

LARGEST = 0.75
"""A kernel's layout that takes more than this share of the dense weight's memory is not made."""


class Operand(HasHandle):
    """A matrix ``[rows, depth]`` in a kernel's layout; the dense and the packed weight are not kept beside it.

    Args:
        layout: Where the nonzeros are.
        values: Their values, in the layout's order.
        pattern: The pattern of the blocks.
        dtype: Of the weight.
        kernels: ``"auto"`` takes the kernel where it is measured faster than unpacking, ``"sparse"`` always.
    """

    def __init__(
        self,
        layout: PermuteLayout | CsrLayout,
        values: Tensor,
        pattern: NMPattern,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self.layout, self.values, self.pattern, self.dtype, self.kernels = layout, values, pattern, dtype, kernels
        self.handle_tensor = torch.empty(self.handle, 0)
        """An empty tensor whose size is the handle, as graphs take it."""
        self._takes: dict[Any, bool] = {}
        self._parts: dict[tuple[int, int], Operand] = {}

    @property
    def kernel(self) -> str:
        """The kernel that takes the layout."""
        return "cpu-permute" if isinstance(self.layout, PermuteLayout) else "cpu-csr"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it keeps."""
        layout = self.layout
        index = [layout.inputs] if isinstance(layout, PermuteLayout) else [layout.start, layout.offset]
        return [self.values, *index]

    def dense(self) -> Tensor:
        """The matrix ``[rows, depth]``."""
        return dense_matrix(self.tensors, self.layout.rows, self.layout.depth, self.dtype)

    def part(self, first: int, end: int) -> Operand | None:
        """Rows ``first .. end`` as an operand on the same memory; ``None`` if they are not whole tiles."""
        if (first, end) == (0, self.layout.rows):
            return self
        layout = self.layout
        tile = 2 * layout.lanes if isinstance(layout, PermuteLayout) else 0
        if not isinstance(layout, PermuteLayout) or first % tile or (end % tile and end != layout.rows):
            return None
        if (first, end) not in self._parts:
            tiles = slice(first // tile, -(-end // tile))
            own = PermuteLayout(layout.inputs[tiles], end - first, layout.depth)
            self._parts[first, end] = Operand(own, self.values[tiles], self.pattern, self.dtype, self.kernels)
        return self._parts[first, end]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias`` for ``x [tokens, depth]``."""
        key = self._key(len(x))

        def dense() -> Tensor:
            return F.linear(x, self.dense(), bias)

        def sparse() -> Tensor:
            return kernel.linear(packed, plain(x), None if bias is None else plain(bias))

        kernel, packed = kernel_of(self.kernel), Packed(self.layout, self.values)
        return registry_of(kernel.name).attempt(kernel, key, sparse, dense) if self._takes_it(key) else dense()

    def conv(self, x: Tensor, conv: Convolution, bias: Tensor | None) -> Tensor:
        """The convolution of ``x [images, in, height, width]``, in its memory format."""
        key = self._key(len(x) * math.prod(conv.positions), conv)

        def dense() -> Tensor:
            return F.conv2d(x, self.dense().view(conv.weight_shape), bias, *conv.arguments)

        def sparse() -> Tensor:
            return kernel.conv(packed, plain(x), conv, None if bias is None else plain(bias))

        kernel, packed = kernel_of("cpu-csr"), Packed(self.layout, self.values)
        found = registry_of(kernel.name).attempt(kernel, key, sparse, dense) if self._takes_it(key) else dense()
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return found.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    def _key(self, tokens: int, conv: Convolution | None = None) -> GemmKey:
        rows, depth = self.layout.rows, self.layout.depth
        return GemmKey("forward", rows, depth, tokens, self.dtype, self.pattern, "cpu", conv=conv)

    def _takes_it(self, key: GemmKey) -> bool:
        """Whether the kernel makes this product: it can, and is faster than unpacking the matrix and a dense one."""
        name = key.columns, key.conv, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        if name not in self._takes:
            if len(self._takes) >= _MOST_SIZES:
                self._takes.clear()
            can = not registry_of(self.kernel).reason(kernel_of(self.kernel), key)
            faster = self.kernels == "sparse" or decide(self.kernel, key, self.dense).kernel == self.kernel
            self._takes[name] = can and faster
        return self._takes[name]


def dense_matrix(tensors: Sequence[Tensor], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """The matrix of :attr:`Operand.tensors`; graphs that are traced or exported can hold it."""
    values, index, *rest = tensors
    if rest:
        return _dense_of_csr(values, index, rest[0], rows, depth, dtype)
    tiles, tile = len(index), index.shape[3]
    step = max(_CHUNK // (tile * depth), 1)
    if tiles <= step or torch.compiler.is_compiling() or type(values) is not Tensor:
        return _dense_of_tiles(values, index, depth, dtype)[:rows]
    found = values.new_empty(rows, depth, dtype=dtype)
    for first in range(0, tiles, step):
        part = _dense_of_tiles(values[first : first + step], index[first : first + step], depth, dtype)
        found[first * tile : (first + step) * tile] = part[: rows - first * tile]
    return found


def _dense_of_tiles(values: Tensor, index: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The rows of whole tiles of a permute layout, those that only fill the last tile included."""
    tiles, blocks, tile, paired = index.shape[0], index.shape[1], index.shape[3], index.dim() == 5
    block = tile if paired else tile // 2
    if paired:  # [tiles, blocks, slots / 2, tile, 2] as [tiles, tile, blocks, slots]
        index, values = (each.permute(0, 3, 1, 2, 4).flatten(3) for each in (index, values))
    else:
        index, values = (each.permute(0, 3, 1, 2) for each in (index, values))
    slots = index.shape[3]
    # Empty slots go to one more column, which is cut off.
    places = torch.where(index == EMPTY, block, index).reshape(-1, slots).long()
    found = torch.zeros(tiles * tile * blocks, block + 1, dtype=dtype, device=values.device)
    found.scatter_(1, places, values.reshape(-1, slots).to(dtype))
    return found[:, :block].reshape(tiles * tile, blocks * block)[:, :depth]


def _dense_of_csr(values: Tensor, start: Tensor, offset: Tensor, rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    first = torch.arange(rows, device=values.device) * depth
    row = torch.repeat_interleave(first, start.diff(), output_size=len(offset))
    found = torch.zeros(rows * depth, dtype=dtype, device=values.device)
    return found.scatter_(0, row + offset // PANEL, values.to(dtype)).view(rows, depth)


def lay_out(matrix: Tensor, pattern: NMPattern | None, kernels: Kernels, *, convolution: bool) -> Operand | None:
    """The matrix of a packed weight in the layout of the kernel for it.

    Args:
        matrix: ``[rows, depth]``, contiguous.
        pattern: Its pattern along the depth; ``None`` if it has none.
        kernels: As :class:`Operand`'s; ``"reference"`` makes no layout.
        convolution: Whether its products are convolutions.

    Returns:
        ``None`` if no kernel takes it, the layout would be larger than :data:`LARGEST`, or the matrix holds NaN, whose
        bits a layout does not keep.
    """
    if kernels == "reference" or matrix.device.type != "cpu" or matrix.dtype not in DTYPES:
        return None
    if not matrix.numel() or bool(matrix.isnan().any()):
        return None
    integers = matrix.view(torch.int32 if matrix.itemsize == 4 else torch.int16)
    bits = integers.ne(0).view(torch.uint8)  # negative zeros are kept
    given = NMPattern(1, 2) if pattern is None else pattern
    masked = MaskedMatrix(matrix, bits, FORWARD_BIT, given, matrix.dtype, None, lambda: matrix)
    key = GemmKey("forward", *masked.shape, 1, matrix.dtype, given, "cpu")
    for name in ("cpu-csr",) if convolution or pattern is None else ("cpu-permute", "cpu-csr"):
        kernel = kernel_of(name)
        if registry_of(name).reason(kernel, key):
            continue
        with suppress(ValueError):  # it is too large for the kernel
            layout = kernel.layout(masked)
            if _bytes(layout) <= LARGEST * matrix.nbytes:
                return Operand(_small(layout), layout.values(masked), given, matrix.dtype, kernels)
    return None


def _bytes(layout: PermuteLayout | CsrLayout) -> int:
    """Bytes of a layout and its values that are kept."""
    if isinstance(layout, CsrLayout):
        return layout.start.nbytes + 2 * layout.offset.nbytes
    return layout.inputs.numel() * (3 if layout.paired else 5)


def _small(layout: PermuteLayout | CsrLayout) -> PermuteLayout | CsrLayout:
    """A layout without the places in the weight's memory, which are for reading other values."""
    if isinstance(layout, PermuteLayout):
        return layout
    none = layout.source.new_empty(0)
    return CsrLayout(layout.start, layout.offset, none, none, layout.rows, layout.depth)
