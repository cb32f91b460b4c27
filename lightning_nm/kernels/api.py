"""The protocol of kernels: one product with an N:M operand, described by a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_nm.pattern import NMPattern

GemmName = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True)
class GemmKey:
    """What decides which kernel is fastest: ``A [rows, depth]``, N:M along `depth`, times a dense matrix.

    Args:
        gemm: Which of the three products of a layer. The forward has ``A = W_F [out, in]``, dgrad ``A = W_B^T
            [in, out]``, wgrad ``A = E(dY)^T [out, tokens]``.
        rows: Rows of A.
        depth: Columns of A, the contraction axis.
        columns: The other size of the dense matrix: tokens for forward and dgrad, `in` for wgrad.
        dtype: Of both operands and the result.
        pattern: N:M pattern of A along `depth`.
        device: The device's type and index, for example ``"cuda:0"``.
        permuted: Whether the entries of each row of the dense matrix must first be brought into the order of A's
            columns, as dgrad's output gradients for a permuted W_B.
    """

    gemm: GemmName
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype
    pattern: NMPattern
    device: str
    permuted: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"[{self.rows}, {self.depth}] x [{self.depth}, {self.columns}]"
        return f"{self.gemm} {sizes}{', permuted' * self.permuted}, {self.pattern}, {dtype}, {self.device}"


class GemmKernel:
    """Executes products of an N:M matrix ``A [rows, depth]`` with dense ones.

    The base class is the reference: dense products, on every device and dtype.
    """

    name = "reference"

    def probe(self, device: torch.device) -> str:
        """Why this kernel does not work on a device; empty if a live numeric check passed."""
        return ""

    def remark(self, device: torch.device) -> str:
        """What a user of this kernel should know about a device on which it works; mostly empty."""
        return ""

    def supports(self, key: GemmKey) -> str:
        """Why this kernel cannot execute a product; empty if it can."""
        return ""

    def pack(self, matrix: Tensor) -> Tensor:
        """Bring ``A [rows, depth]``, contiguous and N:M along `depth`, into the form that the products take."""
        return matrix

    def linear(self, packed: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, ``bias [rows]``, result ``[tokens, rows]``, all contiguous."""
        return torch.nn.functional.linear(x, packed, bias)

    def matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``, all contiguous.

        A may have more columns than B has rows; they hold zeros: the padding of a number of tokens.
        """
        return packed[:, : len(matrix)] @ matrix
