"""What all kernels for 2:4 hardware share: its rules of patterns, shapes and layouts, padding, checks of operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.pattern import NMPattern, PatternLike

if TYPE_CHECKING:
    from lightning_nm.kernels.backends.probe import DeviceProbe

# Sizes of the dense matrix are multiples of 8 for 16-bit types (torch.sparse, SparseSemiStructuredTensorCUSPARSELT).
DENSE_MULTIPLE = 8

# Rows and depth of the sparse matrix are multiples of 16 for 16-bit types, on every device.
SPARSE_MULTIPLE = 16

# Bytes: torch tells cuSPARSELt that every operand starts at a multiple of 16, without looking.
ALIGNMENT = 16


def two_four_reason(pattern: PatternLike, depth: int | None = None) -> str:
    """Say why matrices of a pattern are not all 2:4; empty if they are.

    Every aligned group of four may hold two nonzeros. A block of 1:M gives a group one, and a group meets at most two
    blocks. Two blocks of 2:M may give it more than two, unless no group lies across them: 4 must divide M. With three
    entries in a block, a group may hold them all.

    Args:
        pattern: What :meth:`NMPattern.parse` reads.
        depth: Size of the axis along which the blocks lie, if it is known: groups of four must fill it.

    Returns:
        The reason, or an empty string.

    Example::

        >>> [pattern for pattern in ("1:2", "2:4", "4:8", "1:16", "2:6") if not two_four_reason(pattern)]
        ['1:2', '2:4', '1:16']
        >>> two_four_reason("1:2", depth=6)
        'an axis of 6 is not made of groups of four, as 2:4 hardware needs it'
    """
    pattern = NMPattern.parse(pattern)
    if pattern.n > 2 or (pattern.n == 2 and pattern.m % 4):
        return (
            f"{pattern} may put more than two nonzeros into a group of four, and the hardware knows 2:4 alone: "
            "patterns 1:M and 2:M with 4 dividing M fit"
        )
    if depth is not None and depth % 4:
        return f"an axis of {depth} is not made of groups of four, as 2:4 hardware needs it"
    return ""


def two_four_violation(nonzero: Tensor) -> str:
    """Say where a matrix is not 2:4; empty if each group of four along its last axis holds at most two nonzeros.

    Args:
        nonzero: A bool tensor ``[rows, depth]``, 4 dividing `depth`. Reading the answer synchronises with its device.

    Example::

        >>> two_four_violation(torch.tensor([[False, True, False, True, True, True, True, False]]))
        '1 of 2 groups of four holds more than two nonzeros, the first at row 0, columns 4 to 7'
    """
    crowded = nonzero.unflatten(1, (-1, 4)).sum(2) > 2
    count = int(crowded.sum())
    if not count:
        return ""
    row, group = (int(index) for index in crowded.nonzero()[0])
    hold = "holds" if count == 1 else "hold"
    return (
        f"{count} of {crowded.numel()} groups of four {hold} more than two nonzeros, "
        f"the first at row {row}, columns {4 * group} to {4 * group + 3}"
    )


def packed_width(depth: int, dtype: torch.dtype) -> int:
    """Columns of a packed matrix: half of the values, then 4 bits for each group of four, in words of the dtype.

    ``depth / 2 + ceil(depth / 8 / itemsize)``: 9/16 of `depth` for 16-bit types.

    Example::

        >>> packed_width(512, torch.bfloat16)
        288
    """
    return depth // 2 + -(-(depth // 8) // dtype.itemsize)


class TwoFourKernel(GemmKernel):
    """Products with a matrix that is 2:4 along its depth, kept as half of its values and their positions.

    Rows and depth of A are multiples of :meth:`multiple`, sizes of the dense matrix multiples of 8. Tokens are padded
    with zero rows where that is all that is missing, and cut again, because a batch may end anywhere. The sizes of a
    layer are not padded, as that would cost a copy in each product. Operands are contiguous matrices of one dtype, on
    one device; others are refused, because the hardware's library would read them wrongly without an error.

    A subclass gives ``dtypes`` and the three calls ``compress``, ``sparse_linear`` and ``sparse_matmul``, which see
    padded and checked operands. A subclass for hardware sets ``device_probe`` and gives :meth:`machine_reason`.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    device_probe: DeviceProbe | None = None
    """Checks a device before the first product on it; None for software that works everywhere."""

    def machine_reason(self, device: torch.device) -> str:
        """Why the kernel cannot run on a device, as far as can be said without a product; empty if it may."""
        return ""

    def probe(self, device: torch.device) -> str:
        """The reason that :class:`~lightning_nm.kernels.backends.probe.DeviceProbe` found against a device."""
        return "" if self.device_probe is None else self.device_probe.reason(device)

    def multiple(self, device: torch.device) -> int:
        """What rows and depth of A must be multiples of, on a device.

        Raises:
            RuntimeError: If the kernel did not pass the probe of this device.
        """
        return SPARSE_MULTIPLE if self.device_probe is None else self.device_probe.multiple(device)

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack ``A [rows, depth]`` into ``rows * packed_width(depth)`` values of its dtype."""
        raise NotImplementedError

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        raise NotImplementedError

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        raise NotImplementedError

    def supports(self, key: GemmKey) -> str:
        """Why a product cannot run: the probe's reason, its dtype, its pattern, or the first size that does not fit."""
        device = torch.device(key.device)
        return self.probe(device) or self._misfit(key, self.multiple(device))

    def static_reason(self, key: GemmKey) -> str:
        """Why no device runs a product: its dtype, its pattern, or a size that is no multiple of 16, or of 8."""
        return self._misfit(key, SPARSE_MULTIPLE)

    def _misfit(self, key: GemmKey, multiple: int) -> str:
        if key.dtype not in self.dtypes:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, self.dtypes))}"
        depth = _round_up(key.depth, multiple) if key.gemm == "wgrad" else key.depth
        if reason := two_four_reason(key.pattern, depth):
            return reason
        if 0 in (key.rows, key.depth, key.columns):
            return f"the product {key} is empty"
        for name, size in (("rows", key.rows), ("depth", depth)):
            if size % multiple:
                return f"{name}={size} is not a multiple of {multiple}"
        if key.gemm == "wgrad" and key.columns % DENSE_MULTIPLE:
            return f"columns={key.columns} is not a multiple of {DENSE_MULTIPLE}"
        return ""

    def pack(self, matrix: Tensor) -> Tensor:
        """Bring ``A [rows, depth]`` into one tensor ``[rows, packed_width(depth)]`` of its dtype.

        A depth that is no multiple of what the hardware needs is padded with zeros: the last tokens of a wgrad.

        Raises:
            ValueError: If `matrix` is not a contiguous, aligned matrix of one of the dtypes, or its rows do not fit.
            RuntimeError: If the library's packed form has another size.
        """
        self._check("the matrix to pack", matrix)
        multiple = self.multiple(matrix.device)
        if matrix.shape[0] % multiple:
            raise ValueError(
                f"{self.name}: a matrix of shape {tuple(matrix.shape)} cannot be packed, its rows are not a multiple "
                f"of {multiple}: keep this product dense, as `supports` says"
            )
        matrix = _pad(matrix, columns=_round_up(matrix.shape[1], multiple))
        rows, width = matrix.shape[0], packed_width(matrix.shape[1], matrix.dtype)
        packed = self.compress(matrix)
        if packed.numel() != rows * width:
            raise RuntimeError(
                f"{self.name}: a packed matrix of shape {tuple(matrix.shape)} has {packed.numel()} entries and not "
                f"{rows} x {width}: the library pads this shape, so keep this product dense"
            )
        return packed.view(rows, width)

    def linear(self, packed: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x A^T + bias``, as :meth:`GemmKernel.linear`; tokens are padded with zero rows to a multiple of 8.

        Raises:
            ValueError: If an operand is not contiguous, aligned, and of the packed matrix's dtype, device and sizes.
        """
        self._check("x", x, packed)
        self._check_packed(packed, x.shape[1], f"x of shape {tuple(x.shape)}")
        if bias is not None:
            self._check("bias", bias, packed, shape=packed.shape[:1])
        tokens = len(x)
        y = self.sparse_linear(packed, _pad(x, rows=_round_up(tokens, DENSE_MULTIPLE)), bias)
        return y[:tokens]

    def matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``, as :meth:`GemmKernel.matmul`; B gets zero rows where A's depth was padded.

        Raises:
            ValueError: If an operand is not contiguous, aligned, and of the packed matrix's dtype, device and sizes.
        """
        self._check("B", matrix, packed)
        depth = _round_up(matrix.shape[0], self.multiple(matrix.device))
        self._check_packed(packed, depth, f"B of shape {tuple(matrix.shape)}")
        if matrix.shape[1] % DENSE_MULTIPLE:
            raise ValueError(
                f"{self.name}: B of shape {tuple(matrix.shape)} has columns that are not a multiple of "
                f"{DENSE_MULTIPLE}: keep this product dense, as `supports` says"
            )
        return self.sparse_matmul(packed, _pad(matrix, rows=depth))

    def _check(self, name: str, tensor: Tensor, like: Tensor | None = None, shape: tuple[int, ...] = ()) -> None:
        """Refuse what the library would read wrongly: it looks neither at strides nor at a second operand's dtype."""
        if tensor.dtype not in self.dtypes:
            raise ValueError(f"{self.name}: {name} is {tensor.dtype}, not one of {', '.join(map(str, self.dtypes))}")
        if like is not None and (tensor.dtype != like.dtype or tensor.device != like.device):
            raise ValueError(
                f"{self.name}: {name} is {tensor.dtype} on {tensor.device}, but the packed matrix is {like.dtype} on "
                f"{like.device}: bring both to one dtype and device"
            )
        if (shape and tensor.shape != shape) or (not shape and tensor.dim() != 2) or not tensor.numel():
            wanted = f"of shape {tuple(shape)}" if shape else "a matrix that is not empty"
            raise ValueError(f"{self.name}: {name} must be {wanted}, not of shape {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.name}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: pass it contiguous"
            )
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{self.name}: {name} of shape {tuple(tensor.shape)} starts at an address that is not a multiple of "
                f"{ALIGNMENT} bytes: pass a clone"
            )

    def _check_packed(self, packed: Tensor, depth: int, other: str) -> None:
        """Refuse a packed matrix whose memory is not what :meth:`pack` returned, or whose depth is another."""
        self._check("the packed matrix", packed)
        if depth % self.multiple(packed.device) or packed.shape[1] != packed_width(depth, packed.dtype):
            raise ValueError(
                f"{self.name}: {other} does not fit a packed matrix of shape {tuple(packed.shape)}: pass what `pack` "
                "returned for a matrix of that depth"
            )


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


def _pad(matrix: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Add zeros up to so many rows and columns; a matrix that is large enough comes back as it is."""
    more_rows, more_columns = max(0, rows - matrix.shape[0]), max(0, columns - matrix.shape[1])
    return pad(matrix, (0, more_columns, 0, more_rows)) if more_rows or more_columns else matrix
