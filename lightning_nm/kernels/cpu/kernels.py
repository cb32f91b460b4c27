"""Kernels for CPUs: GEMMs with packed N:M and masked matrices, and gradients at kept entries alone.

A sparse matrix is packed as a layout and values. The layout is where the mask is; it is made when masks move. Values
are read from the weight, in one pass over kept entries, whenever the weight changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_nm.functional import nm_mask
from lightning_nm.kernels.api import Convolution, GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu.library import (
    DTYPES,
    EMPTY,
    PANEL,
    call,
    ffi,
    multiplies_pairs,
    permuted_lanes,
    run,
    structure,
    unavailable,
)
from lightning_nm.pattern import NMPattern

_CHUNK = 1 << 20
"""Entries that are unpacked at a time."""


class Packed(NamedTuple):
    """A sparse matrix: where its entries are, and their values."""

    layout: Any  # of the kernel that made it
    values: Tensor | None  # None where the GEMM needs the layout alone


# Compared by identity, as the other layouts: `==` of tensors is a tensor, which has no truth value.
@dataclass(frozen=True, eq=False)
class PermuteLayout:
    """A matrix that is N:M along its depth: for each tile of rows, block of the depth and slot the input of each row.

    ``inputs`` is uint8 ``[tiles, blocks, slots, 2 lanes]``: the input within the block of `lanes`, or 128 where a row
    has no nonzero. Where the CPU multiplies pairs of bfloat16 it is ``[tiles, blocks, slots / 2, 2 lanes, 2]``, with
    blocks of ``2 lanes``: such a layout is `paired`, and GEMMs of bfloat16 alone take it.
    """

    inputs: Tensor
    rows: int
    depth: int

    @cached_property
    def lanes(self) -> int:
        """Values in a register."""
        # The fourth axis is a tile of rows, which two registers hold.
        return self.inputs.shape[3] // 2

    @cached_property
    def paired(self) -> bool:
        """Whether two slots of a row lie next to each other."""
        return self.inputs.dim() == 5

    @cached_property
    def block(self) -> int:
        """Inputs in a register."""
        return 2 * self.lanes if self.paired else self.lanes

    @cached_property
    def slots(self) -> int:
        """Nonzeros of a row in one block, at most."""
        groups = self.inputs.shape[2]
        return 2 * groups if self.paired else groups

    @staticmethod
    def most_slots(pattern: NMPattern, block: int) -> int:
        """Nonzeros that a row of a pattern may have in an aligned block."""
        if block % pattern.m == 0:
            return pattern.n * (block // pattern.m)
        if pattern.m % block == 0:
            return min(pattern.n, block)
        # The blocks of the pattern and of the register cross: their nonzeros may all meet in one.
        return block

    @classmethod
    def of(cls, matrix: MaskedMatrix) -> PermuteLayout:
        """Lay out the mask of a matrix.

        Raises:
            ValueError: If the mask has no pattern, or is not of it.
        """
        pattern = matrix.pattern
        if pattern is None:
            raise ValueError("cpu-permute takes a mask of a pattern")
        lanes = permuted_lanes()
        rows, depth = matrix.shape
        # Where blocks of two registers cross blocks of M, they would need a slot for every input, see `most_slots`.
        # Blocks of one register, which `supports` wants to be aligned, take such a pattern, in float32.
        aligned = 2 * lanes % pattern.m == 0 or pattern.m % (2 * lanes) == 0
        paired = multiplies_pairs(matrix.dtype) and aligned
        beside = 2 if paired else 1
        block = lanes * beside
        # An odd number of slots is filled up to whole pairs.
        groups_of_slots = _divide_up(cls.most_slots(pattern, block), beside)
        slots = groups_of_slots * beside
        tiles = _divide_up(rows, 2 * lanes)  # a tile is two registers of outputs
        blocks = _divide_up(depth, block)
        shape = [tiles, blocks, groups_of_slots, 2 * lanes]
        if paired:
            shape.append(2)
        # Not filled here: the library writes every byte, EMPTY where there is no entry.
        inputs = torch.empty(shape, dtype=torch.uint8)
        # `_outlive` holds the tensors until the call is over: the structure has their addresses alone.
        mask, *_outlive = _mask(matrix)
        if call("nm_permute_layout", mask, lanes, slots, paired, inputs):
            raise ValueError(
                f"the mask of a matrix of shape {rows} x {depth} is not {pattern} along its last axis"
            )
        return cls(inputs, rows, depth)

    def __post_init__(self) -> None:
        """Refuse an index that is not within its block: the kernels do not, and would read beyond it."""
        if not call("nm_permute_valid", self.inputs, self.inputs.numel(), self.block):
            raise ValueError(
                f"an index of the layout is neither below {self.block} nor {EMPTY}: make it from a mask"
            )

    def values(self, matrix: MaskedMatrix) -> Tensor:
        """Values of the matrix at the entries of this layout, rounded to the matrix's dtype, float32 if not paired."""
        if self.paired and matrix.dtype != torch.bfloat16:
            raise ValueError(f"a paired layout has bfloat16 values, not {matrix.dtype}")
        # Pairs are multiplied as bfloat16; other instructions widen to float32, so that is done here once.
        dtype = torch.bfloat16 if self.paired else torch.float32
        values = torch.empty(self.inputs.shape, dtype=dtype)
        mask, *_outlive = _mask(matrix, (self.rows, self.depth))
        call("nm_permute_values", mask, self.lanes, self.slots, self.paired, self.inputs, values)
        return values

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors next to the values."""
        return [self.inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of the layout and its values: one of the position, two or four of the value."""
        return self.inputs.numel() * (3 if self.paired else 5)

    @property
    def tile(self) -> int:
        """Rows that lie together."""
        return 2 * self.lanes

    def part(self, tiles: slice, rows: int) -> PermuteLayout:
        """The rows of some tiles on the same memory, `rows` of which exist."""
        # Tiles are the first axis, so a slice of them is contiguous, as the library reads it.
        return PermuteLayout(self.inputs[tiles], rows, self.depth)

    def operand(self, values: Tensor | None = None) -> Any:
        """Return the matrix as the library takes it; the tensors must outlive the call."""
        start = 0 if values is None else values.data_ptr()
        return ffi.new("nm_permute *", (self.inputs.data_ptr(), start, self.slots, self.paired))


@dataclass(frozen=True, eq=False)
class CsrLayout:
    """Any mask by rows: entries ``start[row] .. start[row + 1]``, each with its column times 64 as its offset.

    Columns are those of the matrix in memory: an order of its depth is not used. ``source`` and ``slot`` are the places
    of the entries in the weight's memory and in this layout, in the order of memory among the rows that one thread laid
    out.
    """

    start: Tensor  # int32 [rows + 1]; the others are int32 [entries]
    offset: Tensor
    source: Tensor
    slot: Tensor
    rows: int
    depth: int

    @classmethod
    def of(cls, matrix: MaskedMatrix) -> CsrLayout:
        """Lay out the mask of a matrix.

        Raises:
            ValueError: If it has 2^31 entries or more.
        """
        rows, depth = matrix.shape
        # Entries are counted, and columns times 64 stored, in 32 bits.
        if max(rows * depth, depth * PANEL) >= 2**31:
            raise ValueError(f"a matrix of shape {rows} x {depth} is too large for 32-bit offsets")
        mask, *_outlive = _mask(matrix._replace(order=None))
        # So are places in the weight's memory, which may have gaps.
        last_place = (rows - 1) * mask.row_stride + (depth - 1) * mask.depth_stride
        if last_place >= 2**31:
            raise ValueError(
                f"a mask with strides {matrix.bits.stride()} is too large for 32-bit offsets"
            )
        # The first pass counts the entries of each row, the second one fills them in.
        start = torch.empty(rows + 1, dtype=torch.int32)
        entries = call("nm_csr_start", mask, start)
        # Work space: the next free slot of each row.
        following = torch.empty(rows, dtype=torch.int32)
        offset = torch.empty(entries, dtype=torch.int32)
        source = torch.empty_like(offset)
        slot = torch.empty_like(offset)
        call("nm_csr_fill", mask, start, following, offset, source, slot)
        return cls(start, offset, source, slot, rows, depth)

    def __post_init__(self) -> None:
        """Refuse an entry that is not within the matrix: the kernels do not, and would read beyond it."""
        entries = len(self.offset)
        if not call("nm_csr_valid", self.start, self.rows, self.offset, entries, self.depth):
            raise ValueError(
                f"an entry of the layout is not in its {self.rows} x {self.depth}: make it from a mask"
            )

    def values(self, matrix: MaskedMatrix) -> Tensor:
        """Values of the matrix at the entries of this layout, float32, rounded to the matrix's dtype."""
        mask, *_outlive = _mask(matrix._replace(order=None), (self.rows, self.depth))
        values = torch.empty(self.offset.shape, dtype=torch.float32)
        call("nm_csr_values", mask, self.source, self.slot, len(self.offset), values)
        return values

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors next to the values."""
        return [self.start, self.offset]

    @property
    def nbytes(self) -> int:
        """Bytes of the layout and its values, without the places in the weight's memory."""
        return self.start.nbytes + 2 * self.offset.nbytes

    def used_depth(self) -> int:
        """Return one more than the last column with an entry."""
        if not self.offset.numel():
            return 0
        return int(self.offset.max()) // PANEL + 1

    def operand(self, values: Tensor | None = None) -> Any:
        """Return the matrix as the library takes it; the tensors must outlive the call."""
        start = 0 if values is None else values.data_ptr()
        return ffi.new("nm_csr *", (self.start.data_ptr(), self.offset.data_ptr(), start))


def dense_matrix(tensors: Sequence[Tensor], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """The matrix of the values and the tensors of a layout; graphs that are traced or exported can hold it."""
    # Told apart by their number, because a graph holds tensors and no layout.
    if len(tensors) == 3:
        values, start, offset = tensors
        return _dense_of_csr(values, start, offset, rows, depth, dtype)
    values, index = tensors
    tiles = len(index)
    rows_of_tile = index.shape[3]
    # The places within are int64: for a whole weight they could take more memory than the result.
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
    # Blocks of a paired layout are two registers wide, as its tiles are.
    block = tile if index.dim() == 5 else tile // 2
    # As [tiles, tile, blocks, slots], from [tiles, blocks, slots, tile] or [tiles, blocks, slots / 2, tile, 2].
    index, values = (
        each.view(*each.shape[:4], -1).permute(0, 3, 1, 2, 4).flatten(3) for each in (index, values)
    )
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
    # With the size given, no graph has a size that depends on the values of `start`.
    row = torch.repeat_interleave(first, start.diff(), output_size=len(offset))
    found = torch.zeros(rows * depth, dtype=dtype, device=values.device)
    # The layout keeps offsets into the input, whose rows are panels.
    column = offset // PANEL
    return found.scatter_(0, row + column, values.to(dtype)).view(rows, depth)


def _divide_up(size: int, part: int) -> int:
    """How many parts cover a size."""
    return -(-size // part)


def _mask(matrix: MaskedMatrix, shape: tuple[int, int] | None = None) -> tuple[Any, Tensor, Tensor]:
    """The mask and the weight as the library takes them, and their tensors.

    The structure has the tensors' addresses alone: they must outlive its use. `shape` is that of the layout whose
    values are read.

    Raises:
        ValueError: If the matrix is of another shape than its layout, or the library cannot read it.
    """
    bits, order = matrix.bits, matrix.order
    rows, depth = bits.shape
    if shape is not None and shape != (rows, depth):
        raise ValueError(
            f"a layout of {shape[0]} x {shape[1]} is not one of a matrix of {rows} x {depth}"
        )
    if 1 not in bits.stride():
        raise ValueError(f"a mask with strides {bits.stride()} has no contiguous axis")
    if order is not None:
        # The library permutes the depth only where each of its entries is a contiguous line of memory, as in the
        # transposed view of a weight. A weight that lies in memory the other way is copied.
        if bits.stride(0) != 1:
            bits = bits.t().contiguous().t()
        if order.dtype != torch.int64 or order.shape != (depth,) or not order.is_contiguous():
            raise ValueError(
                f"the order of a depth of {depth} is {order.dtype} of shape {tuple(order.shape)}"
            )
    # Autograd must not record the copies below.
    weight = matrix.values.detach()
    if weight.dtype not in DTYPES:
        weight = weight.float()
    if weight.stride() != bits.stride():
        # The library reads both by the strides of the mask.
        weight = torch.empty_strided(bits.shape, bits.stride(), dtype=weight.dtype).copy_(weight)
    row_stride, depth_stride = bits.stride()
    if rows == 1:  # its stride may be anything
        row_stride = 1
    bit = matrix.bit.bit_length() - 1  # its number
    # In the order of the fields of nm_mask. The last one asks for values that are rounded to bfloat16.
    mask = structure(
        "nm_mask *",
        *(bits.data_ptr(), bit, rows, depth, row_stride, depth_stride),
        0 if order is None else order.data_ptr(),
        *(weight.data_ptr(), DTYPES[weight.dtype], matrix.dtype == torch.bfloat16),
    )
    return mask, weight, bits


# ------------------------------------------------------------------------------------------------------ the kernels

_Layout: TypeAlias = PermuteLayout | CsrLayout


class CpuKernel(GemmKernel):
    """The base of all kernels: the device, the dtypes, the GEMMs with a layout."""

    device_type = "cpu"
    keeps_packs = False  # packing costs no more than reading the weight
    layouts: Any  # the class of layouts that the kernel takes
    function: str  # of csrc/nm.h, for its GEMMs

    def probe(self, device: torch.device) -> str:
        """Return why the kernel does not work: another device, no library, or a small GEMM that is wrong."""
        if device.type != "cpu":
            return f"it is for CPUs, not {device.type}"
        return unavailable() or self._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a GEMM cannot run: its dtype or its sizes; empty if it can."""
        if key.dtype not in DTYPES:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, DTYPES))}"
        if 0 in (key.rows, key.depth, key.columns):
            return f"the GEMM {key} is empty"
        # As in the GEMM of a small bucket of tokens.
        if key.conv is not None and not key.images:
            return f"{key.tokens} tokens are less than an image of {key.conv}"
        return ""

    def layout(self, matrix: MaskedMatrix) -> Any:
        """Lay out the mask of a matrix."""
        return self.layouts.of(matrix)

    def pack_masked(self, matrix: MaskedMatrix, layout: Any) -> Packed:
        """Read the values at the entries of the layout."""
        return Packed(layout, layout.values(matrix))

    def linear(self, packed: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, ``bias [rows]``, result ``[tokens, rows]``.

        All are contiguous.
        """
        y = x.new_empty(x.shape[0], packed.layout.rows)  # len() of a tensor takes as long as this
        return self._multiply("NM_LINEAR", packed, y, x, bias)

    def sampled(self, layout: _Layout, grad: Tensor, x: Tensor) -> Tensor:
        """Compute ``grad^T x`` at the entries of a mask, zero elsewhere: ``[rows, depth]``."""
        y = x.new_empty(layout.rows, layout.depth)
        return self._multiply("NM_SAMPLED", Packed(layout, None), y, x, grad=grad)

    def _multiply(
        self,
        product: str,
        packed: Packed,
        y: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> Tensor:
        """Call a GEMM of the library by its name, and return its result.

        Args:
            product: ``"NM_LINEAR"``, ``"NM_SAMPLED"`` or ``"NM_MATMUL"``.
            packed: ``A [rows, depth]``; not in the layout of another kernel, which the library would misread.
            y: For the result.
            x: ``[tokens, depth]``, or for ``"NM_MATMUL"`` ``[depth, tokens]``, of which the last rows may be missing.
            bias: ``[rows]``.
            grad: ``[tokens, rows]``.
        """
        layout = packed.layout
        if not isinstance(layout, self.layouts):
            raise ValueError(
                f"{self.name} takes a layout of class {self.layouts.__name__}, not {type(layout).__name__}"
            )
        if isinstance(layout, PermuteLayout) and layout.paired and x.dtype != torch.bfloat16:
            raise ValueError(
                f"an operand is {x.dtype}, but a paired layout takes torch.bfloat16 alone"
            )
        rows, depth, tokens = layout.rows, layout.depth, x.shape[0]
        shape = tokens, depth
        if product == "NM_MATMUL":
            depth, tokens = x.shape[0], x.shape[-1]
            shape = depth, tokens
        inputs = (x, shape), (bias, (rows,)), (grad, (tokens, rows))
        sizes, sparse = (rows, depth, tokens), layout.operand(packed.values)
        run(self.function, product, "nm_operands *", sizes, inputs, y, sparse)
        return y

    def _self_check(self) -> str:
        """Compare small GEMMs with float64 ones."""
        generator = torch.Generator().manual_seed(0)
        # Blocks of 8 fit the registers of every level, so that all kernels take them.
        pattern = NMPattern(1, 8)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

        for dtype in DTYPES:
            # Sizes that leave parts of registers and panels unused.
            weight = normal(40, 48)
            x = normal(11, 48)
            grad = normal(11, 40)
            mask = nm_mask(weight.abs(), pattern)
            matrix = MaskedMatrix.of(weight, mask, pattern)
            layout = self.layout(matrix)
            packed = self.pack_masked(matrix, layout)
            masked = torch.where(mask, weight, 0).double()
            full_grad = grad.double().t() @ x.double()  # [rows, depth]
            comparisons = (
                ("linear", self.linear(packed, x), x.double() @ masked.t()),
                ("sampled", self.sampled(layout, grad, x), torch.where(mask, full_grad, 0)),
            )
            for what, found, expected in comparisons:
                difference = found.double() - expected
                error = float(difference.norm() / expected.norm())
                if not error < 4 * torch.finfo(dtype).eps:  # true of NaN
                    return f"its {what} GEMM in {dtype} is wrong by {error:.2g} on this CPU"
        return ""


class CpuPermuteKernel(CpuKernel):
    """GEMMs with a matrix that is N:M along its depth: a block fits a register, and a permutation picks its inputs.

    A register holds 8 (AVX2), 16 (AVX-512) or, with AVX512_BF16, 32 bfloat16 inputs of one token; its lanes are
    outputs. Inputs and outputs stay row-major. Patterns whose M divides, or is a multiple of, the lanes. bfloat16
    operands are summed in float32 and rounded once, to nearest even. The results have the same bits for every number
    of threads.
    """

    name = "cpu-permute"
    # Not "masked": without blocks along the depth nothing bounds the nonzeros of a row in a register.
    takes = frozenset({"n:m", "outputs"})
    layouts = PermuteLayout
    function = "nm_permute_product"

    def _self_check(self) -> str:
        if not permuted_lanes():
            return "the baseline instruction set has no permutation"
        return super()._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a GEMM cannot run: also blocks that do not fit registers, or an operand N:M by tokens."""
        reason = super().supports(key)
        if reason:
            return reason
        # The instruction picks among the inputs of one token.
        if key.gemm == "wgrad" and key.sparsity == "n:m":
            return "it permutes inputs of a token, not tokens"
        if key.drawn:
            return "it packs masks that are kept"
        lanes = permuted_lanes()
        if lanes % key.pattern.m and key.pattern.m % lanes:
            return f"blocks of {key.pattern.m} do not fit registers of {lanes}"
        return ""

    def pack(self, matrix: Tensor) -> Packed:
        """Refuse a matrix without a mask, which a layout is made from."""
        raise NotImplementedError(f"{self.name} packs masked weights alone, see pack_masked")


class CpuCsrKernel(CpuKernel):
    """GEMMs with any sparse matrix: 64 tokens are lanes, and a nonzero multiplies a row of a transposed panel.

    It takes the dgrad of any mask, and a wgrad whose operand is N:M along the tokens. In convolutions the lanes are
    positions of a padded plane, which a nonzero reads shifted by its tap: no input is copied for each tap.
    """

    name = "cpu-csr"
    takes = frozenset({"n:m", "masked", "outputs"})
    ordered = False  # any mask will do, so its depth stays in the order of memory
    convolutions = True
    layouts = CsrLayout
    function = "nm_csr_product"

    def pack(self, matrix: Tensor) -> Packed:
        """Pack the nonzeros of a contiguous matrix."""
        # NaN differs from 0, so it is kept: the NaNs of an estimate have to reach dW, where a GradScaler finds them.
        masked = MaskedMatrix.of(matrix, matrix.ne(0), None)
        return self.pack_masked(masked, self.layout(masked))

    def matmul(self, packed: Packed, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``, all contiguous."""
        layout = packed.layout
        given = len(matrix)
        if given > layout.depth:
            raise ValueError(f"a matrix of {given} rows does not fit {layout.depth} columns")
        # The tokens of A may be padded with zeros, those of B not.
        if given < layout.depth and layout.used_depth() > given:
            raise ValueError(
                f"a matrix of {layout.depth} columns has nonzeros beyond the {given} rows of its operand"
            )
        y = matrix.new_empty(layout.rows, matrix.shape[-1])
        return self._multiply("NM_MATMUL", packed, y, matrix)

    def conv(
        self, packed: Packed, x: Tensor, conv: Convolution, bias: Tensor | None = None
    ) -> Tensor:
        """Convolve `x` with the packed ``W [out, in / groups * taps]``."""
        return _convolve("NM_FORWARD", packed, conv, x, bias)

    def conv_input(self, packed: Packed, grad: Tensor, conv: Convolution) -> Tensor:
        """Compute the gradient of a convolution's input, with W packed as for :meth:`conv`."""
        return _convolve("NM_DGRAD", packed, conv, grad=grad)

    def conv_sampled(self, layout: CsrLayout, grad: Tensor, x: Tensor, conv: Convolution) -> Tensor:
        """Compute the gradient of a convolution's weight at the entries of a mask, zero elsewhere: as a matrix."""
        # The weight is the result, so its layout is needed alone.
        return _convolve("NM_WGRAD", Packed(layout, None), conv, x, grad=grad)


def _convolve(
    product: str,
    packed: Packed,
    conv: Convolution,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """Call a GEMM of a convolution of the library by its name, and return its result.

    Raises:
        ValueError: If the layout is that of another weight, or the convolution has no outputs.
    """
    layout, positions = packed.layout, conv.positions
    out, inputs, height, width = conv.weight_shape
    fits = layout.rows == out and layout.depth == inputs * height * width
    if not isinstance(layout, CsrLayout) or not fits:
        raise ValueError(
            f"a layout of {layout.rows} x {layout.depth} is not one of the convolution {conv}"
        )
    if min(positions) < 1 or conv.inputs % conv.groups or conv.outputs % conv.groups:
        raise ValueError(f"the convolution {conv} does not exist")
    # The forward has x alone, dgrad dY alone, and wgrad both, of as many images.
    given = x if grad is None else grad
    assert given is not None
    images = len(given)
    of_x = (images, conv.inputs, *conv.size)
    of_y = (images, out, *positions)
    shapes = {"NM_FORWARD": of_y, "NM_DGRAD": of_x, "NM_WGRAD": (layout.rows, layout.depth)}
    result = given.new_empty(shapes[product])
    # In the order of the fields of nm_conv, among which those of Convolution have their own order.
    sizes = images, *conv, positions
    operands = (x, of_x), (bias, (out,)), (grad, of_y)
    sparse = layout.operand(packed.values)
    run("nm_conv_product", product, "nm_conv *", sizes, operands, result, sparse)
    return result
