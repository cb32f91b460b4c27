"""The library called directly, by nvmath-python, with one plan for many products: what torch's operators do not do."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.correctness import judge
from benchmarks.gpu.setting import NotAsked, Setting

# cudaDataType, cusparseOrder_t and cusparseOperation_t
BFLOAT16, ROW_MAJOR, KEEP, TRANSPOSE = 14, 2, 0, 1

ALIGNMENT = 16
CALLS = 200


class Plan:
    """``D = A B + beta D`` of bfloat16 matrices, all row-major: ``A [rows, depth]`` 2:4 and ``B [depth, columns]``.

    Args:
        library: ``nvmath.bindings.cusparseLt``.
        rows: Rows of A.
        depth: Columns of A.
        columns: Columns of B.
        transposed: Whether what is packed is ``A^T [depth, rows]``.
    """

    def __init__(
        self, library: Any, rows: int, depth: int, columns: int, transposed: bool = False
    ) -> None:
        self.library, self.handle = library, library.init()
        self.operation = TRANSPOSE if transposed else KEEP
        stored = (depth, rows) if transposed else (rows, depth)
        form = (ALIGNMENT, BFLOAT16, ROW_MAJOR)
        half = int(library.Sparsity.SPARSITY_50_PERCENT)
        self.sparse = library.structured_descriptor_init(
            self.handle, *stored, stored[1], *form, half
        )
        dense = library.dense_descriptor_init(self.handle, depth, columns, columns, *form)
        result = library.dense_descriptor_init(self.handle, rows, columns, columns, *form)
        compute = int(library.ComputeType.COMPUTE_32F)
        product = library.matmul_descriptor_init(
            self.handle, self.operation, KEEP, self.sparse, dense, result, result, compute
        )
        choice = library.matmul_alg_selection_init(
            self.handle, product, int(library.MatmulAlg.DEFAULT)
        )
        self.plan = library.matmul_plan_init(self.handle, product, choice)
        self.workspace = _bytes(library.matmul_get_workspace(self.handle, self.plan))
        self.one = ctypes.c_float(1.0)

    def pack(self, matrix: Tensor) -> Tensor:
        """Pack A, or A^T, as it lies."""
        size, scratch = self.library.sp_mma_compressed_size2(self.handle, self.sparse)
        packed, buffer = _bytes(size), _bytes(scratch)
        stream = torch.cuda.current_stream().cuda_stream
        self.library.sp_mma_compress2(
            self.handle,
            self.sparse,
            1,
            self.operation,
            matrix.data_ptr(),
            packed.data_ptr(),
            buffer.data_ptr(),
            stream,
        )
        return packed

    def matmul(self, packed: Tensor, dense: Tensor, result: Tensor, beta: float = 0.0) -> Tensor:
        """Write ``A B + beta D`` into D, on the default stream."""
        scale = ctypes.c_float(beta)
        self.library.matmul(
            self.handle,
            self.plan,
            ctypes.addressof(self.one),
            packed.data_ptr(),
            dense.data_ptr(),
            ctypes.addressof(scale),
            result.data_ptr(),
            result.data_ptr(),
            self.workspace.data_ptr(),
            0,
            0,
        )
        return result


def _bytes(size: int) -> Tensor:
    return torch.empty(max(size, ALIGNMENT), dtype=torch.uint8, device="cuda")


def plan_cache(setting: Setting) -> dict[str, object]:
    """V11: "ctypes/nvmath plan cache: per-call host time; op=TRANSPOSE compress; sparse-B; beta=1"; not sparse-B."""
    if not find_spec("nvmath"):
        raise NotAsked("nvmath-python is not installed")
    setting.needs_gpu()
    library, (rows, depth, columns) = import_module("nvmath.bindings.cusparseLt"), (4096, 2048, 256)
    start = time.perf_counter()
    plan = Plan(library, rows, depth, columns)
    planned = time.perf_counter() - start
    matrix, dense, result = (
        setting.pruned(rows, depth),
        setting.random(depth, columns),
        setting.random(rows, columns),
    )
    packed, expected = plan.pack(matrix), matrix @ dense

    def packed_as_transpose() -> Tensor:
        turned = Plan(library, rows, depth, columns, transposed=True)
        return turned.matmul(turned.pack(matrix.t().contiguous()), dense, result)

    answer: dict[str, object] = {
        "plan seconds": planned,
        "product": judge(lambda: plan.matmul(packed, dense, result), expected),
        "beta=1": judge(lambda: plan.matmul(packed, dense, result, beta=1.0), 2 * expected),
    }
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        plan.matmul(packed, dense, result)
    answer["host us"] = 1e6 * (time.perf_counter() - start) / CALLS
    torch.cuda.synchronize()
    answer["host and device us"] = 1e6 * (time.perf_counter() - start) / CALLS
    answer["packed as its transpose"] = judge(packed_as_transpose, expected)
    return answer
