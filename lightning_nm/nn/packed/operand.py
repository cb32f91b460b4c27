"""A packed weight in the layout of a CPU kernel, and the choice between that kernel and the dense product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional.mask_bits import FORWARD_BIT
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import Convolution, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, CsrLayout, PermuteLayout
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.kernels.cpu.library import DTYPES, EMPTY, PANEL
from lightning_nm.kernels.router.handles import HasHandle
from lightning_nm.nn.packed.kernel_choice import (
    Budget,
    Choice,
    Kernels,
    choose,
    coarse,
    kernel_of,
    registry_of,
)
from lightning_nm.nn.products.routed_ops import plain

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
        kernels: ``"auto"`` holds the dense matrix from the first product on that is faster with it, or that the kernel
            cannot make; ``"sparse"`` makes that matrix for each product that the kernel cannot make.
        budget: How long products may be measured.

    Attributes:
        matrix: The dense matrix after :meth:`become_dense`; then there is no layout.
        hold: Asks the owner to hold the dense matrix, and to call :meth:`become_dense`.
    """

    def __init__(
        self,
        layout: PermuteLayout | CsrLayout,
        values: Tensor,
        pattern: NMPattern,
        dtype: torch.dtype,
        kernels: Kernels,
        budget: Budget,
    ) -> None:
        self._held: tuple[PermuteLayout | CsrLayout, Tensor] | None = layout, values
        self.rows, self.depth = layout.rows, layout.depth
        self.kernel = "cpu-permute" if isinstance(layout, PermuteLayout) else "cpu-csr"
        """The kernel that takes the layout."""
        self.pattern, self.dtype, self.kernels = pattern, dtype, kernels
        self.budget = budget
        self.handle_tensor = torch.empty(self.handle, 0)
        """An empty tensor whose size is the handle, as graphs take it."""
        self.matrix: Tensor | None = None
        self.hold: Callable[[], None] = lambda: None
        self._takes: dict[Any, bool] = {}
        self._parts: dict[tuple[int, int], Operand] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the layout."""
        return [] if self._held is None else _tensors(*self._held)

    def dense(self) -> Tensor:
        """The matrix ``[rows, depth]``."""
        held = self._held  # once: another thread may let it become dense
        if held is None:
            assert self.matrix is not None
            return self.matrix
        return dense_matrix(_tensors(*held), self.rows, self.depth, self.dtype)

    def become_dense(self, matrix: Tensor) -> None:
        """Keep the dense matrix instead of the layout, and use it for all products from now on."""
        self.matrix = matrix  # first: a part that another thread adds after the copy finds it
        for (first, end), part in self._parts.copy().items():
            part.become_dense(matrix[first:end])
        self._held = None

    def part(self, first: int, end: int) -> Operand | None:
        """Rows ``first .. end`` as an operand on the same memory; ``None`` if they are not whole tiles."""
        held = self._held
        if (first, end) == (0, self.rows):
            return self
        if (first, end) not in self._parts:
            layout, values = held or (None, None)
            tile = 2 * layout.lanes if isinstance(layout, PermuteLayout) else 0
            whole = tile and first % tile == 0 and (end % tile == 0 or end == self.rows)
            if not isinstance(layout, PermuteLayout) or values is None or not whole:
                return None
            tiles = slice(first // tile, -(-end // tile))
            own = PermuteLayout(layout.inputs[tiles], end - first, layout.depth)
            part = Operand(own, values[tiles], self.pattern, self.dtype, self.kernels, self.budget)
            part.hold = self.hold
            part = self._parts.setdefault((first, end), part)
            if self.matrix is not None:  # another thread let this operand become dense meanwhile
                part.become_dense(self.matrix[first:end])
        return self._parts[first, end]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias`` for ``x [tokens, depth]``."""

        def dense() -> Tensor:
            return F.linear(x, self._matrix_for(x), bias)

        def sparse(kernel: CpuPermuteKernel | CpuCsrKernel, packed: Packed) -> Tensor:
            return kernel.linear(packed, plain(x), None if bias is None else plain(bias))

        return self._product(x, self._key(len(x)), sparse, dense)

    def conv(self, x: Tensor, conv: Convolution, bias: Tensor | None) -> Tensor:
        """The convolution of ``x [images, in, height, width]``, in its memory format."""

        def dense() -> Tensor:
            return F.conv2d(x, self._matrix_for(x).view(conv.weight_shape), bias, *conv.arguments)

        def sparse(kernel: CpuPermuteKernel | CpuCsrKernel, packed: Packed) -> Tensor:
            return kernel.conv(packed, plain(x), conv, None if bias is None else plain(bias))

        found = self._product(x, self._key(len(x) * math.prod(conv.positions), conv), sparse, dense)
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return found.contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def _product(
        self,
        x: Tensor,
        key: GemmKey,
        sparse: Callable[[CpuPermuteKernel | CpuCsrKernel, Packed], Tensor],
        dense: Callable[[], Tensor],
    ) -> Tensor:
        held, kernel = self._held, kernel_of(self.kernel)
        if held is None or not x.numel() or not self._takes_it(key, held):
            return dense()
        return registry_of(kernel.name).attempt(
            kernel, key, lambda: sparse(kernel, Packed(*held)), dense
        )

    def _matrix_for(self, x: Tensor) -> Tensor:
        """The dense matrix for a product that the kernel does not make; in ``"auto"`` it is held from now on."""
        if self.matrix is None and self.kernels == "auto" and x.numel():
            self.hold()
        return self.dense()

    def _key(self, tokens: int, conv: Convolution | None = None) -> GemmKey:
        return GemmKey(
            "forward", self.rows, self.depth, tokens, self.dtype, self.pattern, "cpu", conv=conv
        )

    def _takes_it(self, key: GemmKey, held: tuple[PermuteLayout | CsrLayout, Tensor]) -> bool:
        """Whether the kernel makes this product: it can, and is in ``"auto"`` no slower than the dense one."""
        threads, deterministic = (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        )
        name = coarse(key).columns, key.conv, threads, deterministic
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
        """Whether the kernel makes products of so many tokens; asked anew, also if the budget was used up before."""
        self.forget()
        held = self._held
        return held is not None and self._takes_it(self._key(tokens), held)

    def forget(self) -> None:
        """Ask anew which products the kernel makes; those that were measured are not measured again."""
        self._takes.clear()
        for part in list(self._parts.values()):
            part.forget()


def _tensors(layout: PermuteLayout | CsrLayout, values: Tensor) -> list[Tensor]:
    index = [layout.inputs] if isinstance(layout, PermuteLayout) else [layout.start, layout.offset]
    return [values, *index]


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
        part = _dense_of_tiles(
            values[first : first + step], index[first : first + step], depth, dtype
        )
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


def _dense_of_csr(
    values: Tensor, start: Tensor, offset: Tensor, rows: int, depth: int, dtype: torch.dtype
) -> Tensor:
    first = torch.arange(rows, device=values.device) * depth
    row = torch.repeat_interleave(first, start.diff(), output_size=len(offset))
    found = torch.zeros(rows * depth, dtype=dtype, device=values.device)
    return found.scatter_(0, row + offset // PANEL, values.to(dtype)).view(rows, depth)


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
    for name in ("cpu-csr",) if convolution or pattern is None else ("cpu-permute", "cpu-csr"):
        kernel = kernel_of(name)
        if registry_of(name).reason(kernel, key):
            continue
        with suppress(ValueError):  # it is too large for the kernel
            layout = kernel.layout(masked)
            if _bytes(layout) <= LARGEST * matrix.nbytes:
                values = layout.values(masked)
                return Operand(
                    _small(layout), values, given, matrix.dtype, kernels, budget or Budget()
                )
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
