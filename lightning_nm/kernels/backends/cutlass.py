"""2:4 products on GPUs of compute capability 8.x: the CUTLASS kernels in torch core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.kernels.backends.probed import ProbedKernel, cuda_reason

# The operators refuse all others themselves, Hopper included.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9))


class CutlassKernel(ProbedKernel):
    """2:4 products by ``torch._sparse_semi_structured_mm``: for a torch without cuSPARSELt.

    | product | call |
    |---|---|
    | ``pack(A)`` | ``sparse_semi_structured_from_dense_cutlass(A)``, about twenty operations of torch |
    | ``linear(A, x, bias)`` | ``_sparse_semi_structured_addmm(bias, values, metadata, x.t())``, transposed by a copy |
    | ``matmul(A, B)`` | ``_sparse_semi_structured_mm(values, metadata, B)`` |

    The operators write their result by rows of A, so `linear` pays for a copy of it; packing is slow. Both are in the
    measured times, so that a chooser sees whether the kernel pays. A packed matrix is the values ``[rows, depth / 2]``
    and then the metadata, int16 ``[rows, depth / 16]``, in one tensor of 9/16 of A's size; views of it are passed on.
    The operators take rows in multiples of 32 and depth in multiples of 64; the kernel keeps to 64 for both.

    It has not run on a GPU yet: the packing was tested against torch's own way back, the products in software.

    Args:
        check: Look into every matrix to pack for a group of more than two entries that are not ``+0``.

    Source: torch's aten/src/ATen/native/sparse/cuda/SparseSemiStructuredOps.cu and
    torch/sparse/_semi_structured_conversions.py.
    """

    name = "cutlass"
    trials = ((128, (256, 512, 256)), (64, (192, 320, 72)))
    ops: Any = torch  # what holds the two operators

    def machine_reason(self, device: torch.device) -> str:
        """Why the operators cannot run on a device, as far as can be said without trying; empty if they may."""
        return cuda_reason("torch's CUTLASS kernel", device, CAPABILITIES)

    def remark(self, device: torch.device) -> str:
        """Say that nobody has run it yet."""
        if self.machine_reason(device):
            return ""
        return f"kernel '{self.name}' was not tested on hardware: if it passes its probe here, please report it"

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack values and metadata into one tensor; with ``check``, refuse what the conversion would drop.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        # Private: a torch without it is a reason against this kernel, and none against importing it.
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

        self.refuse_crowded(matrix)
        values, metadata = sparse_semi_structured_from_dense_cutlass(matrix)
        return torch.cat((values.view(torch.int16).flatten(), metadata.flatten())).view(matrix.dtype)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        if bias is None:
            y = self.ops._sparse_semi_structured_mm(*parts(packed), x.t())
        else:
            y = self.ops._sparse_semi_structured_addmm(bias, *parts(packed), x.t())
        return y.t().contiguous()

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        return self.ops._sparse_semi_structured_mm(*parts(packed), matrix)


def parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The values ``[rows, depth / 2]`` and the metadata, int16 ``[rows, depth / 16]``, of a packed 16-bit matrix."""
    rows, width = packed.shape
    values, metadata = packed.flatten().split((rows * width // 9 * 8, rows * width // 9))
    return values.view(rows, -1), metadata.view(torch.int16).view(rows, -1)
