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
    """``D = A B + beta C`` of bfloat16 matrices, ``A [rows, depth]`` 2:4 and ``B [depth, columns]``, all row-major."""

    def __init__(self, library: Any, rows: int, depth: int, columns: int) -> None:
        self.library, self.handle = library, library.init()
        shape = (ALIGNMENT, BFLOAT16, ROW_MAJOR)
        self.sparse = library.structured_descriptor_init(
            self.handle, rows, depth, depth, *shape, int(library.Sparsity.SPARSITY_50_PERCENT)
        )
        dense = library.dense_descriptor_init(self.handle, depth, columns, columns, *shape)
        result = library.dense_descriptor_init(self.handle, rows, columns, columns, *shape)
        compute = int(library.ComputeType.COMPUTE_32F)
        product = library.matmul_descriptor_init(self.handle, KEEP, KEEP, self.sparse, dense, result, result, compute)
        choice = library.matmul_alg_selection_init(self.handle, product, int(library.MatmulAlg.DEFAULT))
        self.plan = library.matmul_plan_init(self.handle, product, choice)
        size = library.matmul_get_workspace(self.handle, self.plan)
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.one = ctypes.c_float(1.0)

    def pack(self, matrix: Tensor, transposed: bool = False) -> Tensor:
        """Pack A, or its transpose where `transposed`, without a copy before."""
        size, scratch = self.library.sp_mma_compressed_size2(self.handle, self.sparse)
        packed = torch.empty(size, dtype=torch.uint8, device="cuda")
        buffer = torch.empty(max(scratch, 1), dtype=torch.uint8, device="cuda")
        self.library.sp_mma_compress2(
            self.handle,
            self.sparse,
            1,
            TRANSPOSE if transposed else KEEP,
            matrix.data_ptr(),
            packed.data_ptr(),
            buffer.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
        return packed

    def matmul(self, packed: Tensor, dense: Tensor, result: Tensor, beta: float = 0.0) -> Tensor:
        """``D = A B + beta D``, in place."""
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
        torch.cuda.synchronize()
        return result


def plan_cache(setting: Setting) -> dict[str, object]:
    """V11: "ctypes/nvmath plan cache: per-call host time; op=TRANSPOSE compress; sparse-B; beta=1"; not sparse-B."""
    if not find_spec("nvmath"):
        raise NotAsked("nvmath-python is not installed")
    setting.needs_gpu()
    rows, depth, columns = 4096, 4096, 256
    start = time.perf_counter()
    plan = Plan(import_module("nvmath.bindings.cusparseLt"), rows, depth, columns)
    planned = time.perf_counter() - start
    matrix, dense = setting.pruned(rows, depth), setting.random(depth, columns)
    result, packed = setting.random(rows, columns).zero_(), plan.pack(matrix)
    expected = matrix @ dense
    answer: dict[str, object] = {
        "plan seconds": planned,
        "product": judge(lambda: plan.matmul(packed, dense, result), expected),
        "beta=1": judge(lambda: plan.matmul(packed, dense, result, beta=1.0), 2 * expected),
        "packed from the transpose": judge(
            lambda: plan.matmul(plan.pack(matrix.t().contiguous(), transposed=True), dense, result), expected
        ),
    }
    start = time.perf_counter()
    for _ in range(CALLS):
        plan.matmul(packed, dense, result)
    answer["us a call, waited for"] = 1e6 * (time.perf_counter() - start) / CALLS
    return answer
