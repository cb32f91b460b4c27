"""The rules of 2:4 hardware that its kernels share: patterns, shapes, layouts, padding and checks of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.pattern import NMPattern, PatternLike

if TYPE_CHECKING:
    from lightning_nm.kernels.gpu.probe import DeviceProbe

DENSE_MULTIPLE = 8
"""Divides the sizes of the dense matrix, for 16-bit types (torch.sparse, SparseSemiStructuredTensorCUSPARSELT)."""

ALIGNMENT = 16
"""Divides the addresses of operands: torch tells cuSPARSELt so, and checks nothing."""


def two_four_reason(pattern: PatternLike, depth: int | None = None) -> str:
    """Return why matrices of a pattern are not all 2:4; empty if they are.

    Every aligned group of four may hold two nonzeros. A group meets at most two blocks of 1:M, with one nonzero each.
    Two blocks of 2:M may give it more than two, unless 4 divides M, so that no group lies across them. Three entries
    of a block may lie in one group. Where ``depth``, the size of the blocks' axis, is known, 4 must divide it.

    Example::

        >>> [pattern for pattern in ("1:2", "2:4", "4:8", "1:16", "2:6") if not two_four_reason(pattern)]
        ['1:2', '2:4', '1:16']
        >>> two_four_reason("1:2", depth=6)
        'an axis of 6 is not made of groups of four, as 2:4 hardware needs it'
    """
    pattern = NMPattern.parse(pattern)
    # Blocks of 2:M with 4 dividing M begin at groups: no group has nonzeros of two blocks.
    if pattern.n > 2 or (pattern.n == 2 and pattern.m % 4):
        fault = f"{pattern} may put more than two nonzeros into a group of four, and the hardware knows 2:4 alone"
        return f"{fault}: patterns 1:M and 2:M with 4 dividing M fit"
    if depth is not None and depth % 4:
        return f"an axis of {depth} is not made of groups of four, as 2:4 hardware needs it"
    return ""


def two_four_violation(nonzero: Tensor) -> str:
    """Return where a matrix is not 2:4; empty if each group of four along its last axis holds at most two nonzeros.

    ``nonzero`` is a bool tensor ``[rows, depth]``, 4 dividing `depth`. The call synchronises with its device.

    Example::

        >>> two_four_violation(torch.tensor([[False, True, False, True, True, True, True, False]]))
        '1 of 2 groups of four holds more than two nonzeros, the first at row 0, columns 4 to 7'
    """
    crowded = nonzero.unflatten(1, (-1, 4)).sum(2) > 2  # [rows, groups]
    count = int(crowded.sum())
    if not count:
        return ""
    row, group = crowded.nonzero()[0].tolist()
    hold = "holds" if count == 1 else "hold"
    return (
        f"{count} of {crowded.numel()} groups of four {hold} more than two nonzeros, "
        f"the first at row {row}, columns {4 * group} to {4 * group + 3}"
    )


def packed_width(depth: int, dtype: torch.dtype) -> int:
    """Columns of a packed matrix: half of the values, then 4 bits for each group of four, in words of the dtype.

    ``depth / 2 + ceil(depth / 8 / itemsize)``: 9/16 of `depth` for 16-bit types.
    """
    position_bytes = depth // 8  # 4 bits for each group of four
    position_words = -(-position_bytes // dtype.itemsize)  # rounded up
    return depth // 2 + position_words


class TwoFourKernel(GemmKernel):
    """GEMMs with a matrix A that is 2:4 along its depth, packed into half of its values and their positions.

    Rows and depth of A are multiples of :meth:`multiple`, sizes of the dense matrix multiples of 8. Tokens are padded
    with zero rows to such a multiple, and the result is cut; the sizes of a layer are not padded, as that would copy an
    operand in each GEMM. Operands are contiguous matrices of one dtype, on one device; others are refused, because
    the library would read them wrongly without an error.

    A subclass defines ``dtypes``, ``compress``, ``sparse_linear`` and ``sparse_matmul``, which get padded and checked
    operands, and ``device_probe`` or :meth:`probe` and :meth:`multiple`.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    device_probe: DeviceProbe
    """Checks a device before the first GEMM on it."""
    one_pass: Callable[[Tensor], Tensor] | None = None
    """Does what `compress` does, faster; used on devices where the probe found equal bits."""

    def machine_reason(self, device: torch.device) -> str:
        """Return why the kernel cannot run on a device, as far as is known without a GEMM; empty if it may."""
        return ""

    def probe(self, device: torch.device) -> str:
        """Return the reason that :class:`~lightning_nm.kernels.gpu.probe.DeviceProbe` found against a device."""
        return self.device_probe.reason(device)

    def multiple(self, device: torch.device) -> int:
        """Return what divides rows and depth of A on a device.

        Raises:
            RuntimeError: If the kernel did not pass its probe there.
        """
        return self.device_probe.multiple(device)

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack ``A [rows, depth]`` into ``rows * packed_width(depth)`` values of its dtype."""
        raise NotImplementedError

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        raise NotImplementedError

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        raise NotImplementedError

    def supports(self, key: GemmKey) -> str:
        """Return why a GEMM cannot run: the probe's reason, its dtype, its pattern, or a size that does not fit."""
        device = torch.device(key.device)
        reason = self.probe(device)
        if reason:
            return reason
        multiple = self.multiple(device)  # only a device that passed the probe has one
        if key.dtype not in self.dtypes:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, self.dtypes))}"
        depth = key.depth
        if key.gemm == "wgrad":
            depth += -depth % multiple  # `pack` pads the tokens
        reason = two_four_reason(key.pattern, depth)
        if reason:
            return reason
        if 0 in (key.rows, key.depth, key.columns):
            return f"the GEMM {key} is empty"
        divisors = [("rows", key.rows, multiple), ("depth", depth, multiple)]
        if key.gemm == "wgrad":
            # The columns of the other GEMMs are tokens, which `linear` pads.
            divisors.append(("columns", key.columns, DENSE_MULTIPLE))
        for name, size, divisor in divisors:
            if size % divisor:
                return f"{name}={size} is not a multiple of {divisor}"
        return ""

    def pack(self, matrix: Tensor) -> Tensor:
        """Pack ``A [rows, depth]`` into one tensor ``[rows, packed_width(depth)]`` of its dtype.

        The depth, the tokens of a wgrad, is padded with zeros to a multiple that the hardware takes.

        Raises:
            ValueError: If `matrix` is not a contiguous, aligned matrix of one of the dtypes, or its rows do not fit.
            RuntimeError: If the library's packed form has another size.
        """
        self._check("the matrix to pack", matrix)
        multiple = self.multiple(matrix.device)
        if matrix.shape[0] % multiple:
            fault = f"a matrix of shape {tuple(matrix.shape)} has rows that are not a multiple of {multiple}"
            raise ValueError(f"{self.name}: {fault}: keep this GEMM dense, as `supports` says")
        missing = -matrix.shape[1] % multiple
        if missing:
            matrix = pad(matrix, (0, missing))
        rows, depth = matrix.shape
        width = packed_width(depth, matrix.dtype)
        # Not the other way round: a device that has no such form is not asked for it.
        if self.one_pass is not None and self.device_probe.packs_alike(matrix.device):
            packed = self.one_pass(matrix)
        else:
            packed = self.compress(matrix)
        if packed.numel() != rows * width:
            given = f"a packed matrix of shape {tuple(matrix.shape)}"
            fault = f"{given} has {packed.numel()} entries and not {rows} x {width}"
            raise RuntimeError(
                f"{self.name}: {fault}: the library pads this shape, so keep this GEMM dense"
            )
        return packed.view(rows, width)

    def linear(self, packed: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x A^T + bias``, as :meth:`GemmKernel.linear`.

        Raises:
            ValueError: If an operand does not fit the packed matrix.
        """
        self._check("x", x, packed)
        self._check_packed(packed, x.shape[1], "x", x)
        if bias is not None:
            self._check("bias", bias, packed, shape=packed.shape[:1])
        tokens = len(x)
        missing = -tokens % DENSE_MULTIPLE
        if missing:
            x = pad(x, (0, 0, 0, missing))
        # The first rows of a contiguous result are contiguous: nothing is copied.
        return self.sparse_linear(packed, x, bias)[:tokens]

    def matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """Compute ``A B``, as :meth:`GemmKernel.matmul`; B is padded as A's depth was.

        Raises:
            ValueError: If an operand does not fit the packed matrix.
        """
        self._check("B", matrix, packed)
        # `pack` padded A by as many columns of zeros.
        missing = -len(matrix) % self.multiple(matrix.device)
        self._check_packed(packed, len(matrix) + missing, "B", matrix)
        if matrix.shape[1] % DENSE_MULTIPLE:
            fault = f"B of shape {tuple(matrix.shape)} has columns that are not a multiple of {DENSE_MULTIPLE}"
            raise ValueError(f"{self.name}: {fault}: keep this GEMM dense, as `supports` says")
        if missing:
            matrix = pad(matrix, (0, 0, 0, missing))
        return self.sparse_matmul(packed, matrix)

    def _check(
        self, name: str, tensor: Tensor, like: Tensor | None = None, shape: tuple[int, ...] = ()
    ) -> None:
        """Refuse what the library would misread: it checks neither strides nor the dtype of a second operand.

        `like` is the packed matrix that the operand is multiplied with; without a `shape` any matrix will do.
        """
        # This runs for each operand of each GEMM, so it is one function: a call costs as much as a test.
        size = tuple(tensor.shape)
        fits = size == shape if shape else len(size) == 2
        if tensor.dtype not in self.dtypes:
            fault = f"is {tensor.dtype}, not one of {', '.join(map(str, self.dtypes))}"
        elif like is not None and (tensor.dtype != like.dtype or tensor.device != like.device):
            given = f"{tensor.dtype} on {tensor.device}"
            packed = f"{like.dtype} on {like.device}"
            fault = (
                f"is {given}, but the packed matrix is {packed}: bring both to one dtype and device"
            )
        elif not fits or not tensor.numel():
            wanted = f"of shape {tuple(shape)}" if shape else "a matrix that is not empty"
            fault = f"must be {wanted}, not of shape {size}"
        elif not tensor.is_contiguous():
            fault = f"of shape {size} has strides {tensor.stride()}: pass it contiguous"
        elif tensor.data_ptr() % ALIGNMENT:
            # A view into a larger tensor may start anywhere.
            fault = f"of shape {size} starts at an address that is not a multiple of {ALIGNMENT} bytes: pass a clone"
        else:
            return
        raise ValueError(f"{self.name}: {name} {fault}")

    def _check_packed(self, packed: Tensor, depth: int, name: str, dense: Tensor) -> None:
        """Refuse a packed matrix that :meth:`pack` did not return, or of another depth."""
        self._check("the packed matrix", packed)
        width = packed_width(depth, packed.dtype)
        # The width alone does not tell the depth, because it is rounded to whole words.
        if depth % self.multiple(packed.device) or packed.shape[1] != width:
            fault = f"{name} of shape {tuple(dense.shape)} does not fit a packed matrix of shape {tuple(packed.shape)}"
            raise ValueError(
                f"{self.name}: {fault}: pass what `pack` returned for a matrix of that depth"
            )
