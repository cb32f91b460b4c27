"""Questions whose answer is right or wrong: what torch's cuSPARSELt operators do with each kind of operand.

Each function answers one question of README.md. Errors are Frobenius norms relative to the dense GEMM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.setting import Operators, Setting
from lightning_nm.functional import nm_mask
from lightning_nm.kernels.gpu.two_four import packed_width
from lightning_nm.kernels.tuner import TOLERANCE, DeviceTimer

REPEATS = 5


def relative(result: Tensor, expected: Tensor) -> float:
    """``|result - expected|_F / |expected|_F``."""
    difference = torch.linalg.vector_norm(result - expected, dtype=torch.float64)
    return float(difference / torch.linalg.vector_norm(expected, dtype=torch.float64))


def judge(product: Callable[[], Tensor], expected: Tensor) -> dict[str, object]:
    """Say whether a GEMM is right, wrong, or refused."""
    try:
        result = product()
        if result.shape != expected.shape:
            return {
                "verdict": "wrong",
                "shape": tuple(result.shape),
                "expected": tuple(expected.shape),
            }
        difference = relative(result, expected)
    except Exception as error:
        return {"verdict": "refused", "message": f"{type(error).__name__}: {error}"[:200]}
    return {"verdict": "right" if difference < TOLERANCE else "wrong", "error": difference}


def packed_sizes(setting: Setting) -> dict[str, object]:
    """V4: "packed shape == rows x cols 9/16 for %128 shapes; what happens at %16"."""
    shapes = setting.pick(
        ((128, 128), (256, 512), (11008, 4096), (16, 16), (32, 64), (48, 80), (144, 176)),
        ((16, 16), (48, 80)),
    )
    operators = setting.operators
    answer: dict[str, object] = {}
    for rows, depth in shapes:
        matrix, x = setting.pruned(rows, depth), setting.random(64, depth)
        packed: list[Tensor] = []

        def product(
            matrix: Tensor = matrix, x: Tensor = x, packed: list[Tensor] = packed
        ) -> Tensor:
            packed.append(operators.pack(matrix))
            return operators.linear(packed[0], x)

        row = judge(product, x @ matrix.t())
        row["packed"] = packed[0].numel() if packed else None
        row["9/16"] = rows * packed_width(depth, matrix.dtype)
        row["as expected"] = row["packed"] == row["9/16"] and row["verdict"] == "right"
        answer[f"{rows}x{depth}"] = row
    return answer


def tile(setting: Setting) -> dict[str, object]:
    """V5: "`tile(use_cutlass=False)` + `_cslt_sparse_mm` on sm_90: confirm wrong numerics"."""
    setting.needs_gpu()
    weight, x, operators = setting.random(256, 512), setting.random(256, 512), setting.operators
    packed, meta, _, _, marks = torch._sparse_semi_structured_tile(
        weight, algorithm="largest_abs_values_greedy", use_cutlass=False
    )
    dense = torch._sparse_semi_structured_apply_dense(weight, marks)
    kept, expected = dense != 0, x @ dense.t()
    size = len(weight) * packed_width(weight.shape[1], weight.dtype)
    if packed.numel() != size:  # values alone
        packed = torch.cat((packed.flatten(), meta.flatten().view(packed.dtype)))
    return {
        "packed by tile": judge(
            lambda: operators.linear(packed.view(len(weight), -1), x), expected
        ),
        "masked by tile, packed by compress": judge(
            lambda: operators.linear(operators.pack(dense), x), expected
        ),
        "the mask is 2:4 along rows": bool((kept.unflatten(1, (-1, 4)).sum(2) <= 2).all()),
        "along columns": bool((kept.unflatten(0, (-1, 4)).sum(1) <= 2).all()),
        "magnitude kept": float(
            dense.abs().sum(dtype=torch.float64) / weight.abs().sum(dtype=torch.float64)
        ),
    }


def traps(setting: Setting) -> dict[str, object]:
    """V7: "compress on unpruned input; with -0.0; with a transposed view (expect silent errors)".

    The unpruned matrix is compared with its own GEMM, all others with that of the pruned one.
    """
    weight, x, operators = setting.random(256, 512), setting.random(128, 512), setting.operators
    mask = nm_mask(weight.abs(), "2:4")
    matrix = torch.where(mask, weight, 0)
    expected = x @ matrix.t()

    def product(operand: Tensor) -> Tensor:
        return operators.linear(operators.pack(operand), x)

    return {
        "pruned": judge(partial(product, matrix), expected),
        "minus zeros": judge(partial(product, weight * mask), expected),
        "unpruned": judge(partial(product, weight), x @ weight.t()),
        "a transposed view": judge(partial(product, matrix.t().contiguous().t()), expected),
    }


def layouts(setting: Setting) -> dict[str, object]:
    """V8: "TT->row (wgrad) correctness and speed vs TN"."""
    out, columns, tokens = setting.pick((11008, 4096, 16384), (64, 32, 128))
    grad, x, operators = (
        setting.pruned(out, tokens),
        setting.random(tokens, columns),
        setting.operators,
    )
    packed, turned, expected = operators.pack(grad), x.t().contiguous(), grad @ x
    return {
        "TT, B row-major": judge(lambda: operators.matmul(packed, x), expected),
        "TN, B transposed": judge(lambda: operators.matmul(packed, turned.t()), expected),
        "TN, result transposed": judge(lambda: operators.linear(packed, turned), expected.t()),
        "ms": setting.medians(
            {
                "dense": lambda: grad @ x,
                "TT, B row-major": lambda: operators.matmul(packed, x),
                "TN, B transposed": lambda: operators.matmul(packed, turned.t()),
                "TN, result transposed": lambda: operators.linear(packed, turned),
            }
        ),
    }


def algorithms(setting: Setting, gemm: str, dtype: torch.dtype) -> dict[str, object]:
    """V10: "`mm_search` cost, max ids per layout, sweep for wrong ids", and the time of each."""
    product, expected, search = _swept(setting, gemm, dtype)
    start = time.perf_counter()
    found = search()
    setting.synchronize()
    seconds = time.perf_counter() - start
    timer = DeviceTimer(1, setting.pick(3, 1), setting.pick(3, 1))

    def time_of(algorithm: int) -> dict[str, object]:
        row = judge(lambda: product(algorithm), expected)
        if row["verdict"] != "refused":
            row["ms"] = 1e3 * timer.time(lambda: product(algorithm), setting.device)
        return row

    rows = _each(setting, range(found[3] + 1), time_of)
    right = {name: float(str(row["ms"])) for name, row in rows.items() if row["verdict"] == "right"}
    return {
        "search seconds": seconds,
        "found": dict(zip(("algorithm", "split_k", "mode", "largest id"), found, strict=True)),
        "ms": right,
        "fastest": min(right, key=lambda name: right[name], default=None),
        "not right": {name: row for name, row in rows.items() if row["verdict"] != "right"},
    }


def repeatable(setting: Setting, gemm: str, dtype: torch.dtype) -> dict[str, object]:
    """V12: "bitwise repeatability per alg id"."""
    product, _, search = _swept(setting, gemm, dtype)

    def verdict(algorithm: int) -> dict[str, object]:
        try:
            first = product(algorithm)
            equal = all(torch.equal(first, product(algorithm)) for _ in range(REPEATS))
        except RuntimeError as error:
            return {"verdict": "refused", "message": str(error)[:200]}
        return {"verdict": "equal" if equal else "differs"}

    rows = _each(setting, range(search()[3] + 1), verdict)
    verdicts: dict[str, list[str]] = {}
    for name, row in rows.items():
        verdicts.setdefault(str(row["verdict"]), []).append(name)
    return {"repeats": REPEATS, **verdicts}


def _swept(
    setting: Setting, gemm: str, dtype: torch.dtype
) -> tuple[Callable[[int], Tensor], Tensor, Callable[[], tuple[int, ...]]]:
    """A GEMM by an algorithm's id, what it should be, and the library's search for it."""
    out, columns, tokens = setting.pick((4096, 4096, 8192), (64, 32, 128))
    operators: Operators = setting.operators
    if gemm == "linear":
        matrix, other = (
            setting.pruned(out, columns, dtype),
            setting.random(tokens, columns, dtype=dtype),
        )
        packed, expected = operators.pack(matrix), other @ matrix.t()
        return (
            lambda algorithm: operators.linear(packed, other, algorithm),
            expected,
            lambda: operators.search(packed, other.t(), True),
        )
    matrix, other = setting.pruned(out, tokens, dtype), setting.random(tokens, columns, dtype=dtype)
    packed, expected = operators.pack(matrix), matrix @ other
    return (
        lambda algorithm: operators.matmul(packed, other, algorithm),
        expected,
        lambda: operators.search(packed, other, False),
    )


def _each(
    setting: Setting, ids: Iterable[int], ask: Callable[[int], dict[str, object]]
) -> dict[str, dict[str, object]]:
    """Ask for each id until the device no longer answers, after an illegal access for example."""
    rows = {}
    for algorithm in ids:
        rows[str(algorithm)] = ask(algorithm)
        try:
            setting.synchronize()
        except RuntimeError as error:
            rows[str(algorithm)] = {
                "verdict": "the device failed, and no further id was tried",
                "message": str(error),
            }
            break
    return rows
