"""Kernels for CPUs: products with packed N:M and masked matrices, and gradients at kept entries alone."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_nm.functional import nm_mask
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import Convolution, GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.layouts import CsrLayout, Packed, PermuteLayout
from lightning_nm.kernels.cpu.library import DTYPES
from lightning_nm.pattern import NMPattern

_Layout: TypeAlias = PermuteLayout | CsrLayout


class CpuKernel(GemmKernel):
    """The base of all kernels: the device, the dtypes, the products with a layout."""

    device_type = "cpu"
    keeps_packs = False  # packing costs no more than reading the weight
    layouts: Any  # the class of layouts that the kernel takes
    function: str  # of csrc/nm.h, for its products

    def probe(self, device: torch.device) -> str:
        """Return why the kernel does not work: another device, no library, or a small product that is wrong."""
        if device.type != "cpu":
            return f"it is for CPUs, not {device.type}"
        return library.unavailable() or self._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a product cannot run: its dtype or its sizes; empty if it can."""
        if key.dtype not in DTYPES:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, DTYPES))}"
        if 0 in (key.rows, key.depth, key.columns):
            return f"the product {key} is empty"
        # As in the product of a small bucket of tokens.
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
        y = x.new_empty(len(x), packed.layout.rows)
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
        """Call a product of the library by its name, and return its result.

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
        rows, depth, tokens = layout.rows, layout.depth, len(x)
        shape = tokens, depth
        if product == "NM_MATMUL":
            depth, tokens = len(x), x.shape[-1]
            shape = depth, tokens
        inputs = (x, shape), (bias, (rows,)), (grad, (tokens, rows))
        sizes, sparse = (rows, depth, tokens), layout.operand(packed.values)
        library.run(self.function, product, "nm_operands *", sizes, inputs, y, sparse)
        return y

    def _self_check(self) -> str:
        """Compare small products with float64 ones."""
        generator = torch.Generator().manual_seed(0)
        pattern = NMPattern(1, 8)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

        for dtype in DTYPES:
            # Sizes that leave parts of registers and panels unused.
            weight = normal(40, 48)
            x = normal(11, 48)
            grad = normal(11, 40)
            mask = nm_mask(weight.abs(), pattern)
            matrix = _matrix(weight, mask, pattern)
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
                    return f"its {what} product in {dtype} is wrong by {error:.2g} on this CPU"
        return ""


class CpuPermuteKernel(CpuKernel):
    """Products with a matrix that is N:M along its depth: a block fits a register, and a permutation picks its inputs.

    A register holds 8 (AVX2), 16 (AVX-512) or, with AVX512_BF16, 32 bfloat16 inputs of one token; its lanes are
    outputs. Inputs and outputs stay row-major. Patterns whose M divides, or is a multiple of, the lanes. bfloat16
    operands are summed in float32 and rounded once, to nearest even. The results have the same bits for every number
    of threads.
    """

    name = "cpu-permute"
    takes = frozenset({"n:m", "outputs"})
    layouts = PermuteLayout
    function = "nm_permute_product"

    def _self_check(self) -> str:
        if not library.permuted_lanes():
            return "the baseline instruction set has no permutation"
        return super()._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a product cannot run: also blocks that do not fit registers, or an operand N:M by tokens."""
        reason = super().supports(key)
        if reason:
            return reason
        # The instruction picks among the inputs of one token.
        if key.gemm == "wgrad" and key.sparsity == "n:m":
            return "it permutes inputs of a token, not tokens"
        if key.drawn:
            return "it packs masks that are kept"
        lanes = library.permuted_lanes()
        if lanes % key.pattern.m and key.pattern.m % lanes:
            return f"blocks of {key.pattern.m} do not fit registers of {lanes}"
        return ""

    def pack(self, matrix: Tensor) -> Packed:
        """Refuse a matrix without a mask, which a layout is made from."""
        raise NotImplementedError(f"{self.name} packs masked weights alone, see pack_masked")


class CpuCsrKernel(CpuKernel):
    """Products with any sparse matrix: 64 tokens are lanes, and a nonzero multiplies a row of a transposed panel.

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
        masked = _matrix(matrix, matrix.ne(0), None)
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


def _matrix(matrix: Tensor, mask: Tensor, pattern: NMPattern | None) -> MaskedMatrix:
    """A matrix with a mask in bool, as kernels take it."""
    return MaskedMatrix(
        values=matrix,
        bits=mask.view(torch.uint8),
        bit=FORWARD_BIT,
        pattern=pattern,
        dtype=matrix.dtype,
        order=None,
        dense=lambda: matrix,
    )


def _convolve(
    product: str,
    packed: Packed,
    conv: Convolution,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """Call a product of a convolution of the library by its name, and return its result.

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
    given = x if grad is None else grad
    assert given is not None
    images = len(given)
    of_x = (images, conv.inputs, *conv.size)
    of_y = (images, out, *positions)
    shapes = {"NM_FORWARD": of_y, "NM_DGRAD": of_x, "NM_WGRAD": (layout.rows, layout.depth)}
    result = given.new_empty(shapes[product])
    sizes = images, *conv, positions
    operands = (x, of_x), (bias, (out,)), (grad, of_y)
    sparse = layout.operand(packed.values)
    library.run("nm_conv_product", product, "nm_conv *", sizes, operands, result, sparse)
    return result
