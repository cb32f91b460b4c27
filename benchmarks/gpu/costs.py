"""Questions whose answer is a time or a size: what 2:4 GEMMs and their packing cost, on the device and on the host.

Each function answers one question of README.md. Times are medians in milliseconds of random operands that rotate past
the L2 cache. In a graph a kernel's time stands alone; without one it is the longer of device and host.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.correctness import judge
from benchmarks.gpu.setting import NotAsked, Setting
from lightning_nm.kernels import CuSparseLtKernel
from lightning_nm.kernels.gpu.cusparselt import library_version
from lightning_nm.kernels.tuner import copies_past_cache, rotated

# [out, in] and tokens of forward GEMMs.
SHAPES = {
    "4096^3": (4096, 4096, 4096),
    "8192^3": (8192, 8192, 8192),
    "7b up, 8k": (11008, 4096, 8192),
    "7b up, 16k": (11008, 4096, 16384),
    "7b down, 16k": (4096, 11008, 16384),
    "vit-l fc1, 50k": (4096, 1024, 50432),
    "3072x10240, 3k": (3072, 10240, 3072),  # of pytorch#177866
}
TINY = {"tiny": (64, 32, 48)}


def versions(setting: Setting) -> dict[str, object]:
    """V1: "cuSPARSELt version present (expect 800) and whether 0.8.1 is faster".

    The second half is the difference of two runs, with two releases of torch, in the answers to V2.
    """
    kernel = CuSparseLtKernel()
    return {
        "cusparselt": library_version(),
        "torch was compiled with": torch.backends.cusparselt.version(),
        "refused": kernel.probe(setting.device),
        "remark": kernel.remark(setting.device),
        "sizes are multiples of": None
        if kernel.probe(setting.device)
        else kernel.multiple(setting.device),
    }


def gains(setting: Setting, dtype: torch.dtype) -> dict[str, object]:
    """V2: "dense vs sparse kernel time ..., alg 0 vs best; gives the real s".

    `dense` multiplies the pruned matrix, as training with masks does, and `unpruned` one without zeros, which needs
    more power. The best algorithm is the one that the library's search finds; V10 times them all.
    """
    answer: dict[str, object] = {}
    for name, shape in setting.pick(SHAPES, TINY).items():
        try:
            answer[name] = _gain(setting, *shape, dtype)
        except Exception as error:  # the other shapes are still asked
            answer[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return answer


def _gain(
    setting: Setting, out: int, columns: int, tokens: int, dtype: torch.dtype
) -> dict[str, object]:
    operators = setting.operators
    matrices = [setting.pruned(out, columns, dtype) for _ in range(_copies(setting, out * columns))]
    inputs = [
        setting.random(tokens, columns, dtype=dtype)
        for _ in range(_copies(setting, tokens * columns))
    ]
    packs = [operators.pack(matrix) for matrix in matrices]
    full = [setting.random(out, columns, dtype=dtype) for _ in matrices]
    found = operators.search(packs[0], inputs[0].t(), True)[0]
    functions = {
        "dense": rotated(torch.nn.functional.linear, inputs, matrices),
        "unpruned": rotated(torch.nn.functional.linear, inputs, full),
        "algorithm 0": rotated(operators.linear, packs, inputs),
        "searched": rotated(operators.linear, packs, inputs, [found]),
    }
    answer: dict[str, Any] = {"searched id": found, "ms": setting.medians(functions)}
    if not setting.dry_run:
        try:
            times = setting.medians({name: graph(function) for name, function in functions.items()})
            answer["graph ms"] = {name: ms / GRAPH_CALLS for name, ms in times.items()}
        except RuntimeError as error:
            answer["graph error"] = str(error)[:200]
    for kind in [name for name in ("ms", "graph ms") if name in answer]:
        row = answer[kind]
        answer[f"gain by {kind}"] = row["dense"] / min(row["algorithm 0"], row["searched"])
    expected = torch.nn.functional.linear(inputs[0], matrices[0])
    return answer | {
        "searched": judge(lambda: operators.linear(packs[0], inputs[0], found), expected)
    }


def _copies(setting: Setting, entries: int, itemsize: int = 2) -> int:
    return copies_past_cache(entries * itemsize, setting.device)


GRAPH_CALLS = 4


def graph(function: Callable[[], object]) -> Callable[[], None]:
    """Capture some calls of a function in a CUDA graph, and return what replays them all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(GRAPH_CALLS):
            function()
    return captured.replay


def host(setting: Setting) -> dict[str, object]:
    """V3: "host time per `_cslt_sparse_mm` (expect 0.1-0.5 ms) and whether it synchronises".

    The host's time of a call is that of many in a row, none waited for. Before the last, the device is put to sleep: a
    call that comes back while it sleeps does not synchronise.
    """
    out, columns, tokens = setting.pick((4096, 4096, 256), (64, 32, 48))
    operators, calls = setting.operators, setting.pick(200, 2)
    matrix, x = setting.pruned(out, columns), setting.random(tokens, columns)
    packed = operators.pack(matrix)
    functions: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: torch.nn.functional.linear(x, matrix),
        "sparse": lambda: operators.linear(packed, x),
        "pack": lambda: operators.pack(matrix),
    }
    answer: dict[str, object] = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        setting.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        middle = time.perf_counter()
        setting.synchronize()
        end = time.perf_counter()
        row: dict[str, object] = {
            "host us": 1e6 * (middle - start) / calls,
            "host and device us": 1e6 * (end - start) / calls,
        }
        if not setting.dry_run:
            done = torch.cuda.Event()
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            done.record()
            function()
            row["synchronises"] = done.query()
            setting.synchronize()
        answer[name] = row
    return answer


def packing(setting: Setting) -> dict[str, object]:
    """V6: "`_cslt_compress` time and GB/s for 11008x4096, 4096x50k, 11008x16k"; 2 bytes read and 1.125 written."""
    shapes = setting.pick(((11008, 4096), (4096, 50432), (11008, 16384)), ((64, 32),))
    answer: dict[str, object] = {}
    for rows, depth in shapes:
        matrices = [setting.pruned(rows, depth) for _ in range(_copies(setting, rows * depth))]
        times = setting.medians(
            {"pack": rotated(setting.operators.pack, matrices), "copy": rotated(_copy, matrices)}
        )
        rate = {"pack": 3.125, "copy": 4.0}
        answer[f"{rows}x{depth}"] = {
            name: {"ms": ms, "GB/s": rate[name] * rows * depth / ms / 1e6}
            for name, ms in times.items()
        }
    return answer


def _copy(matrix: Tensor) -> Tensor:
    return matrix.clone()


def captured_product(setting: Setting) -> dict[str, object]:
    """V9: "CUDA-graph capture of `_cslt_compress` and `_cslt_sparse_mm`", of the latter."""
    setting.needs_gpu()
    packed, x = setting.operators.pack(setting.pruned(1024, 512)), setting.random(256, 512)
    return _replayed(lambda: setting.operators.linear(packed, x), x, setting.random(256, 512))


def captured_packing(setting: Setting) -> dict[str, object]:
    """V9, of `_cslt_compress` and a GEMM after it."""
    setting.needs_gpu()
    matrix, x = setting.pruned(1024, 512), setting.random(256, 512)
    operators = setting.operators
    return _replayed(
        lambda: operators.linear(operators.pack(matrix), x), matrix, setting.pruned(1024, 512)
    )


def _replayed(function: Callable[[], Tensor], operand: Tensor, other: Tensor) -> dict[str, object]:
    """Capture a function, write other numbers into its operand, replay, and compare with a plain call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = function()
    operand.copy_(other)
    captured.replay()
    return judge(lambda: result, function())


def compiled(setting: Setting) -> dict[str, object]:
    """V9: "also `torch.compile(mode="reduce-overhead")`", of the GEMM."""
    setting.needs_gpu()
    from torch._dynamo.utils import counters

    operators = setting.operators
    packed, x = operators.pack(setting.pruned(1024, 512)), setting.random(256, 512)

    def function(x: Tensor) -> Tensor:
        return operators.linear(packed, x * 2)

    fast = torch.compile(function, mode="reduce-overhead")
    for _ in range(4):
        result = fast(x).clone()
    return judge(lambda: result, function(x)) | {
        "graph breaks": {str(why)[:200]: count for why, count in counters["graph_break"].items()},
        "without CUDA graphs": counters["inductor"]["cudagraph_skips"],
        "ms": setting.medians({"eager": lambda: function(x), "compiled": lambda: fast(x)}),
    }


def growth(setting: Setting) -> dict[str, object]:
    """V13: "host/device memory growth over 10^5 calls", or as many as 10 seconds allow."""
    operators = setting.operators
    packed, x = operators.pack(setting.pruned(256, 256)), setting.random(64, 256)

    def calls(most: int, seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0
        while count < most and time.monotonic() < end:
            operators.linear(packed, x)
            count += 1
        setting.synchronize()
        return count

    calls(setting.pick(1000, 1), 2)
    host, free = _resident(), 0 if setting.dry_run else torch.cuda.mem_get_info(setting.device)[0]
    count = calls(setting.pick(100_000, 2), 10)
    left = 0 if setting.dry_run else torch.cuda.mem_get_info(setting.device)[0]
    return {
        "calls": count,
        "host bytes a call": (_resident() - host) / count,
        "device bytes": free - left,
    }


def _resident() -> int:
    """Bytes of this process that are in memory, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def power(setting: Setting) -> dict[str, object]:
    """V15: "clocks/power via nvidia-smi to test the power explanation", two seconds each of dense and of sparse."""
    setting.needs_gpu()
    size = setting.pick(8192, 64)
    matrix, full, x = (
        setting.pruned(size, size),
        setting.random(size, size),
        setting.random(size, size),
    )
    operators = setting.operators
    packed = operators.pack(matrix)
    functions: dict[str, Callable[[], Tensor]] = {
        "dense, unpruned": lambda: torch.nn.functional.linear(x, full),
        "dense, pruned": lambda: torch.nn.functional.linear(x, matrix),
        "sparse": lambda: operators.linear(packed, x),
    }
    return {name: _watched(function) for name, function in functions.items()}


WATCHED_S = 2.0


def _watched(function: Callable[[], Tensor]) -> dict[str, object]:
    """Call a function for some time while nvidia-smi reads the power and the clock."""
    query = (
        "nvidia-smi",
        "--query-gpu=power.draw,power.limit,clocks.sm",
        "--format=csv,noheader,nounits",
    )
    watcher = subprocess.Popen(
        [*query, "-i", "0", "-lms", "100"], stdout=subprocess.PIPE, text=True
    )
    start, calls = time.monotonic(), 0
    try:
        while time.monotonic() - start < WATCHED_S:
            for _ in range(10):
                function()
            torch.cuda.synchronize()
            calls += 10
        taken = time.monotonic() - start
    finally:
        watcher.terminate()
        lines, _ = watcher.communicate()
    return {"ms": 1e3 * taken / calls} | readings(lines)


def readings(lines: str) -> dict[str, object]:
    r"""Median power, its limit and clock of the later half of nvidia-smi's lines, once the device is warm.

    Example::

        >>> readings("90, 700, 345\n698.5, 700, 1500\n[N/A], 700, 1510")
        {'watts': 698.5, 'limit watts': 700.0, 'SM MHz': 1505.0}
    """
    rows = [line.split(",") for line in lines.splitlines() if line.count(",") == 2]
    answer: dict[str, object] = {}
    for name, column in zip(
        ("watts", "limit watts", "SM MHz"), zip(*rows[len(rows) // 2 :], strict=True), strict=False
    ):
        numbers = [float(word) for word in column if re.fullmatch(r"[\d.]+", word.strip())]
        answer[name] = median(numbers) if numbers else None
    return answer


def fp8(setting: Setting) -> dict[str, object]:
    """V16: "FP8 E4M3 sparse vs `_scaled_mm`", at 8192^3."""
    setting.needs_gpu()
    size = setting.pick(8192, 64)
    matrix, x = (
        tensor.to(torch.float8_e4m3fn)
        for tensor in (setting.pruned(size, size), setting.random(size, size))
    )
    one = torch.ones((), device=setting.device)
    packed = setting.operators.pack(matrix)

    def dense() -> Tensor:
        return torch._scaled_mm(x, matrix.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def sparse() -> Tensor:
        return torch._cslt_sparse_mm(packed, x.t(), out_dtype=torch.bfloat16, transpose_result=True)

    times = setting.medians({"dense": dense, "sparse": sparse})
    return {"sparse": judge(sparse, dense()), "ms": times, "gain": times["dense"] / times["sparse"]}


def tilelang(setting: Setting) -> dict[str, object]:
    """V17: "TileLang/CUTLASS-62 vs cuSPARSELt at 8192^3"; no kernel of either is among ours yet."""
    installed = "installed" if find_spec("tilelang") else "not installed"
    raise NotAsked(f"TileLang is {installed}, and no kernel of this project uses it")
