"""A packed weight in the layout of a CPU kernel, and the choice between that kernel and the dense product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import Convolution, GemmKey, HasHandle, MaskedMatrix
from lightning_nm.kernels.cpu import CsrLayout, Int8Layout, PermuteLayout
from lightning_nm.kernels.cpu.int8 import ROWS
from lightning_nm.kernels.cpu.layouts import Packed
from lightning_nm.kernels.cpu.library import DTYPES, EMPTY, PANEL
from lightning_nm.nn.packed.kernel_choice import (
    Budget,
    Choice,
    Kernels,
    PackedKernel,
    choose,
    coarse,
    kernel_of,
    registry_of,
)
from lightning_nm.nn.packed.tensor import PackedTensor
from lightning_nm.nn.products import plain
from lightning_nm.pattern import NMPattern

_CHUNK = 1 << 20
"""Entries that are unpacked at a time."""

Layout: TypeAlias = PermuteLayout | CsrLayout | Int8Layout
"""Of a kernel."""

_KERNELS = {PermuteLayout: "cpu-permute", CsrLayout: "cpu-csr", Int8Layout: "cpu-int8"}

_MOST_SIZES = 1 << 12
"""Sizes of products whose choice is remembered."""

LARGEST = 0.75
"""A kernel's layout that takes more than this share of the dense weight's memory is not made."""


class Operand(HasHandle):
    """A matrix ``[rows, depth]`` in a kernel's layout; the dense and the packed weight are not kept beside it.

    Args:
        layout: Where the nonzeros are.
        values: Their values, in the layout's order.
        pattern: The pattern of the blocks.
        dtype: Of the weight.
        kernels: ``"auto"`` holds the dense matrix from the first product on that is faster with it, or that the kernel
            cannot make; ``"sparse"`` makes that matrix for each product that the kernel cannot make.
        budget: How long products may be measured.

    Attributes:
        matrix: The dense matrix after :meth:`become_dense`; then there is no layout.
        hold: Asks the owner to hold the dense matrix, and to call :meth:`become_dense`.
    """

    def __init__(
        self,
        layout: Layout,
        values: Tensor,
        pattern: NMPattern,
        dtype: torch.dtype,
        kernels: Kernels,
        budget: Budget,
    ) -> None:
        self._held: tuple[Layout, Tensor] | None = (layout, values)
        self.rows = layout.rows
        self.depth = layout.depth
        self.kernel = _KERNELS[type(layout)]
        """The kernel that takes the layout."""
        self.pattern = pattern
        self.dtype = dtype
        self.kernels = kernels
        self.budget = budget
        self.handle_tensor = torch.empty(self.handle, 0, dtype=torch.float32)
        """An empty tensor whose size is the handle, as graphs take it."""
        self.matrix: Tensor | None = None
        self.hold: Callable[[], None] = lambda: None
        self._keys: dict[tuple[int, Convolution | None], tuple[GemmKey, int]] = {}
        self._takes: dict[Any, bool] = {}
        self._parts: dict[tuple[int, int], Operand] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the layout."""
        held = self._held
        if held is None:
            return []
        layout, values = held
        return _tensors(layout, values)

    def dense(self) -> Tensor:
        """The matrix ``[rows, depth]``."""
        # Read once: another thread may let this operand become dense at any time.
        held = self._held
        if held is None:
            assert self.matrix is not None
            return self.matrix
        layout, values = held
        if isinstance(layout, Int8Layout):
            return layout.dense(values, self.dtype)
        return dense_matrix(_tensors(layout, values), self.rows, self.depth, self.dtype)

    def become_dense(self, matrix: Tensor) -> None:
        """Keep the dense matrix instead of the layout, and use it for all products from now on."""
        # Set first: a part that another thread adds after the copy below finds it.
        self.matrix = matrix
        for (first, end), part in self._parts.copy().items():
            part.become_dense(matrix[first:end])
        self._held = None

    def part(self, first: int, end: int) -> Operand | None:
        """Rows ``first .. end`` as an operand on the same memory; ``None`` if they are not whole tiles."""
        held = self._held
        if (first, end) == (0, self.rows):
            return self
        if (first, end) in self._parts:
            return self._parts[first, end]
        if held is None:
            return None
        layout, values = held
        if isinstance(layout, CsrLayout):
            return None
        tile = (
            ROWS if isinstance(layout, Int8Layout) else 2 * layout.lanes
        )  # rows that lie together
        ends_with_tile = end % tile == 0 or end == self.rows
        if first % tile or not ends_with_tile:
            return None
        tiles = slice(first // tile, math.ceil(end / tile))
        own: Layout
        if isinstance(layout, Int8Layout):
            own = layout.part(tiles, end - first)
        else:
            own = PermuteLayout(layout.inputs[tiles], end - first, layout.depth)
        part = Operand(own, values[tiles], self.pattern, self.dtype, self.kernels, self.budget)
        part.hold = self.hold
        # Another thread may have added it meanwhile, or let this operand become dense.
        part = self._parts.setdefault((first, end), part)
        if self.matrix is not None:
            part.become_dense(self.matrix[first:end])
        return part

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias`` for ``x [tokens, depth]``."""

        def dense() -> Tensor:
            return F.linear(x, self._matrix_for(x), bias)

        def sparse(kernel: PackedKernel, packed: Packed) -> Tensor:
            plain_bias = None if bias is None else plain(bias)
            return kernel.linear(packed, plain(x), plain_bias)

        return self._product(x, len(x), None, sparse, dense)

    def conv(self, x: Tensor, conv: Convolution, bias: Tensor | None) -> Tensor:
        """The convolution of ``x [images, in, height, width]``, in its memory format."""

        def dense() -> Tensor:
            weight = self._matrix_for(x).view(conv.weight_shape)
            return F.conv2d(x, weight, bias, *conv.arguments)

        def sparse(kernel: PackedKernel, packed: Packed) -> Tensor:
            plain_bias = None if bias is None else plain(bias)
            return kernel.conv(packed, plain(x), conv, plain_bias)

        output_positions = len(x) * math.prod(conv.positions)
        found = self._product(x, output_positions, conv, sparse, dense)
        memory_format = torch.contiguous_format
        # A tensor of one channel is contiguous in both orders.
        if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            memory_format = torch.channels_last
        return found.contiguous(memory_format=memory_format)

    def _product(
        self,
        x: Tensor,
        tokens: int,
        conv: Convolution | None,
        sparse: Callable[[PackedKernel, Packed], Tensor],
        dense: Callable[[], Tensor],
    ) -> Tensor:
        held = self._held
        if held is None or not x.numel() or not self._takes_it(tokens, conv, held):
            return dense()
        key, _ = self._key(tokens, conv)
        kernel = kernel_of(self.kernel)
        packed = Packed(*held)
        # If the kernel fails, the product is made dense, now and in the future.
        return registry_of(kernel.name).attempt(kernel, key, lambda: sparse(kernel, packed), dense)

    def _matrix_for(self, x: Tensor) -> Tensor:
        """The dense matrix for a product that the kernel does not make; in ``"auto"`` it is held from now on."""
        if self.matrix is None and self.kernels == "auto" and x.numel():
            self.hold()
        return self.dense()

    def _key(self, tokens: int, conv: Convolution | None) -> tuple[GemmKey, int]:
        """The key of a product, and the tokens of the sizes that share its choice."""
        found = self._keys.get((tokens, conv))
        # Kept, because to make it takes longer than to multiply one token.
        if found is None:
            key = GemmKey(
                "forward", self.rows, self.depth, tokens, self.dtype, self.pattern, "cpu", conv=conv
            )
            found = key, coarse(key).columns
            if len(self._keys) >= _MOST_SIZES:
                self._keys.clear()
            self._keys[tokens, conv] = found
        return found

    def _takes_it(self, tokens: int, conv: Convolution | None, held: tuple[Layout, Tensor]) -> bool:
        """Whether the kernel makes this product: it can, and is in ``"auto"`` no slower than the dense one."""
        # What the choice depends on. Requests of nearly the same size share one.
        key, columns = self._key(tokens, conv)
        threads = torch.get_num_threads()
        deterministic = torch.are_deterministic_algorithms_enabled()
        name = (columns, conv, threads, deterministic)
        found = self._takes.get(name)
        if found is not None:
            return found
        if registry_of(self.kernel).reason(kernel_of(self.kernel), key):
            choice = Choice(kernel=False, settled=True)
        elif self.kernels == "sparse":
            choice = Choice(kernel=True, settled=True)
        else:
            choice = choose(self.kernel, key, self.budget, Packed(*held))
        if choice.settled:
            if len(self._takes) >= _MOST_SIZES:
                self._takes.clear()
            self._takes[name] = choice.kernel
        return choice.kernel

    def takes(self, tokens: int) -> bool:
        """Whether the kernel makes products of `tokens` tokens; asked anew, also if the budget was used up before."""
        self.forget()
        held = self._held
        return held is not None and self._takes_it(tokens, None, held)

    def forget(self) -> None:
        """Ask anew which products the kernel makes; those that were measured are not measured again."""
        self._takes.clear()
        for part in list(self._parts.values()):
            part.forget()


def _tensors(layout: Layout, values: Tensor) -> list[Tensor]:
    if isinstance(layout, PermuteLayout):
        return [values, layout.inputs]
    if isinstance(layout, Int8Layout):
        # The scales are those of the packed weight.
        return [values, layout.positions, layout.offset]
    return [values, layout.start, layout.offset]


def dense_matrix(tensors: Sequence[Tensor], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """The matrix of :attr:`Operand.tensors`, not of int8; graphs that are traced or exported can hold it."""
    if len(tensors) == 3:
        values, start, offset = tensors
        return _dense_of_csr(values, start, offset, rows, depth, dtype)
    values, index = tensors
    tiles = len(index)
    rows_of_tile = index.shape[3]
    tiles_at_a_time = max(_CHUNK // (rows_of_tile * depth), 1)
    # Graphs hold no loop over sizes; fake tensors are no plain tensors.
    in_graph = torch.compiler.is_compiling() or type(values) is not Tensor
    if tiles <= tiles_at_a_time or in_graph:
        return _dense_of_tiles(values, index, depth, dtype)[:rows]
    found = values.new_empty(rows, depth, dtype=dtype)
    for first in range(0, tiles, tiles_at_a_time):
        end = first + tiles_at_a_time
        part = _dense_of_tiles(values[first:end], index[first:end], depth, dtype)
        first_row = first * rows_of_tile
        # The last tile may be filled up with rows that the matrix does not have.
        found[first_row : end * rows_of_tile] = part[: rows - first_row]
    return found


def _dense_of_tiles(values: Tensor, index: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The rows of whole tiles of a permute layout, those that only fill the last tile included."""
    tiles, blocks, _, tile = index.shape[:4]
    is_paired = index.dim() == 5
    block = tile if is_paired else tile // 2
    # As [tiles, tile, blocks, slots], from [tiles, blocks, slots, tile] or [tiles, blocks, slots / 2, tile, 2].
    if is_paired:
        index = index.permute(0, 3, 1, 2, 4).flatten(3)
        values = values.permute(0, 3, 1, 2, 4).flatten(3)
    else:
        index = index.permute(0, 3, 1, 2)
        values = values.permute(0, 3, 1, 2)
    slots = index.shape[3]
    # Empty slots go to one more column, which is cut off.
    places = torch.where(index == EMPTY, block, index).reshape(-1, slots).long()
    found = torch.zeros(tiles * tile * blocks, block + 1, dtype=dtype, device=values.device)
    found.scatter_(1, places, values.reshape(-1, slots).to(dtype))
    return found[:, :block].reshape(tiles * tile, blocks * block)[:, :depth]


def _dense_of_csr(
    values: Tensor, start: Tensor, offset: Tensor, rows: int, depth: int, dtype: torch.dtype
) -> Tensor:
    first = torch.arange(rows, dtype=torch.int64, device=values.device) * depth
    row = torch.repeat_interleave(first, start.diff(), output_size=len(offset))
    found = torch.zeros(rows * depth, dtype=dtype, device=values.device)
    # The layout keeps offsets into the input, whose rows are panels.
    column = offset // PANEL
    return found.scatter_(0, row + column, values.to(dtype)).view(rows, depth)


def lay_out(
    matrix: Tensor,
    pattern: NMPattern | None,
    kernels: Kernels,
    *,
    convolution: bool,
    budget: Budget | None = None,
) -> Operand | None:
    """The matrix of a packed weight in the layout of the kernel for it.

    Args:
        matrix: ``[rows, depth]``, contiguous.
        pattern: Its pattern along the depth; ``None`` if it has none.
        kernels: As :class:`Operand`'s; ``"reference"`` makes no layout.
        convolution: Whether its products are convolutions.
        budget: As :class:`Operand`'s.

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
    names = ["cpu-csr"]
    if pattern is not None and not convolution:
        names = ["cpu-permute", "cpu-csr"]  # the faster one first
    for name in names:
        kernel = kernel_of(name)
        if registry_of(name).reason(kernel, key):
            continue
        try:
            layout = kernel.layout(masked)
        except ValueError:
            continue  # the matrix is too large for the kernel
        if _bytes(layout) > LARGEST * matrix.nbytes:
            continue
        values = layout.values(masked)
        return Operand(_small(layout), values, given, matrix.dtype, kernels, budget or Budget())
    return None


def _bytes(layout: PermuteLayout | CsrLayout) -> int:
    """Bytes of a layout and its values that are kept."""
    if isinstance(layout, CsrLayout):
        return layout.start.nbytes + 2 * layout.offset.nbytes
    bytes_of_entry = 3 if layout.paired else 5  # one of the position, two or four of the value
    return layout.inputs.numel() * bytes_of_entry


def _small(layout: PermuteLayout | CsrLayout) -> PermuteLayout | CsrLayout:
    """A layout without the places in the weight's memory, which are for reading other values."""
    if isinstance(layout, PermuteLayout):
        return layout
    none = layout.source.new_empty(0)
    return replace(layout, source=none, slot=none)


def lay_out_int8(
    packed: PackedTensor, kernels: Kernels, budget: Budget | None = None
) -> Operand | None:
    """A packed weight with int8 values in the layout of the kernel for it.

    Args:
        packed: The weight; the rows of its blocks are those of the product, but a convolution's may have taps between
            them and the blocks.
        kernels: As for :func:`lay_out`.
        budget: As :class:`Operand`'s.

    Returns:
        ``None`` if the kernel does not take it, or the layout would be larger than :data:`LARGEST`.
    """
    if kernels == "reference" or packed.scales is None or packed.values.device.type != "cpu":
        return None
    values = packed.values.flatten(1, -2)
    rows, blocks, _ = values.shape
    depth = blocks * packed.pattern.m
    taps = math.prod(packed.shape[2:]) if packed.layout == "plain" else 1
    name = _KERNELS[Int8Layout]
    key = GemmKey("forward", rows, depth, 1, packed.dtype, packed.pattern, "cpu")
    if registry_of(name).reason(kernel_of(name), key):
        return None
    numbers = packed.numbers().view(values.shape)
    layout, ordered = Int8Layout.of(values, numbers, packed.scales, depth, packed.pattern, taps)
    if layout.nbytes > LARGEST * rows * depth * packed.dtype.itemsize:
        return None
    return Operand(layout, ordered, packed.pattern, packed.dtype, kernels, budget or Budget())
