"""The three GEMMs of linear layers, dense against each sparse kernel, in bfloat16; one question a layer.

    python -m benchmarks.gpu gemms

Dense is the GEMM of the masked operand as the layer has it. What a kernel must do first is apart and included: pack
W_F; transpose and pack W_B and E(dY). Masking and drawing E(dY) are the preprocessing's, and counted by neither. Dense
and sparse take turns; times are medians, of random operands that rotate past the L2 cache.

`auto` is what ``Tuner("auto")`` takes, from timings of its own; `auto x` is its gain by the timings of the table, and
should be 0.98 or more.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import NotAsked, Setting
from lightning_nm.kernels import GemmKernel, GemmKey
from lightning_nm.kernels.api import multiply_adds
from lightning_nm.kernels.tuner import (
    Decisions,
    DeviceTimer,
    Tuner,
    dense_ms,
    environment_of,
    sparse_ms,
)
from lightning_nm.pattern import NMPattern

PATTERN = NMPattern(2, 4)
DTYPE = torch.bfloat16

# out, in, tokens; the first gives the ceilings of the device.
LAYERS = {
    "square": (8192, 8192, 8192),
    "7b up, 8k": (11008, 4096, 8192),
    "7b down, 8k": (4096, 11008, 8192),
    "7b up, 16k": (11008, 4096, 16384),
    "7b down, 16k": (4096, 11008, 16384),
    "7b up, 32k": (11008, 4096, 32768),
    "7b down, 32k": (4096, 11008, 32768),
    "vit-l fc1, 50k": (4096, 1024, 50432),
    "vit-l fc2, 50k": (1024, 4096, 50432),
    "small": (1024, 1024, 2048),
}
TINY = {"tiny": (64, 32, 48), "tiny, ragged": (48, 16, 40)}


def keys(layer: tuple[int, int, int], device: torch.device) -> list[GemmKey]:
    """The three GEMMs of a layer ``[out, in]`` with so many tokens."""
    out, columns, tokens = layer
    place = (DTYPE, PATTERN, str(device))
    return [
        GemmKey("forward", out, columns, tokens, *place),
        GemmKey("dgrad", columns, out, tokens, *place),
        GemmKey("wgrad", out, tokens, columns, *place),
    ]


class Table:
    """Measures layers, and remembers what was decided."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.registry = setting.registry()
        self.tuner = Tuner(
            "auto", self.registry, Decisions(environment_of(setting.device)), setting.timer
        )

    def times(self, key: GemmKey, notes: list[str]) -> tuple[float, dict[str, tuple[float, float]]]:
        """Milliseconds of the dense GEMM, and of each kernel's bare GEMM and packing, measured in turn."""
        setting = self.setting
        timer = DeviceTimer(warmup=1, samples=1, calls=setting.pick(10, 1))
        kernels: list[GemmKernel] = list(self.tuner.legal(key, notes))
        dense: list[float] = []
        sparse: dict[str, list[tuple[float, float]]] = {kernel.name: [] for kernel in kernels}
        for _ in range(setting.pick(5, 1)):
            dense.append(dense_ms(key, timer))
            for kernel in kernels:
                sparse[kernel.name].append(sparse_ms(kernel, key, timer))
        medians = {
            name: (median(product for product, _ in row), median(pack for _, pack in row))
            for name, row in sparse.items()
        }
        return median(dense), medians

    def ceilings(self, layer: tuple[int, int, int], setting: Setting) -> dict[str, object]:
        """The device: dense TFLOP/s, GB/s of a copy, and the gain s of each kernel without packing, forward."""
        key, notes = keys(layer, setting.device)[0], list[str]()
        dense, sparse = self.times(key, notes)
        source = setting.random(setting.pick(2**29, 2**10))
        target = torch.empty_like(source)
        copy = setting.medians({"copy": lambda: target.copy_(source)})["copy"]
        return {
            "key": str(key),
            "dense TFLOP/s": 2e-9 * multiply_adds(key) / dense,
            "copy GB/s": 4e-6 * source.numel() / copy,
            "s": {name: dense / product for name, (product, _) in sparse.items()},
            "notes": notes,
        }

    def layer(self, layer: tuple[int, int, int], setting: Setting) -> dict[str, object]:
        """A row for each GEMM, one for the two of a dense gradient, and one for all three."""
        rows = {key.gemm: self.row(key) for key in keys(layer, setting.device)}
        forward, dgrad, wgrad = rows.values()
        return rows | {
            "forward and dgrad": _sum([forward, dgrad]),
            "all three": _sum([forward, dgrad, wgrad]),
        }

    def row(self, key: GemmKey) -> dict[str, object]:
        """One GEMM: times, gains, and what auto takes."""
        notes: list[str] = []
        dense, sparse = self.times(key, notes)
        decision = self.tuner.decide(key)
        begin = perf_counter()
        self.tuner.decide(key)
        recall = perf_counter() - begin
        gains = {name: dense / sum(times) for name, times in sparse.items()} | {"reference": 1.0}
        row: dict[str, object] = {
            "key": str(key),
            "dense ms": dense,
            "kernels": {
                name: {
                    "product ms": product,
                    "pack ms": pack,
                    "bare x": dense / product,
                    "packed x": gains[name],
                }
                for name, (product, pack) in sparse.items()
            },
            "notes": notes,
            "auto": decision.kernel,
            "auto because": decision.reason,
            "auto ms": dense / gains[decision.kernel],
            "auto x": gains[decision.kernel],
            "auto at least 0.98": gains[decision.kernel] >= 0.98,
            "recalling a decision us": 1e6 * recall,
        }
        if sparse:
            best = max(sparse, key=lambda name: gains[name])
            row |= {"best": best, "best ms": sum(sparse[best])}
        return row


def _sum(rows: list[dict[str, object]]) -> dict[str, object]:
    """Several GEMMs of a layer as one; sparse only if all of them can be."""

    def total(name: str) -> float:
        return sum(float(str(row[name])) for row in rows)

    dense, auto = total("dense ms"), total("auto ms")
    answer: dict[str, object] = {"dense ms": dense, "auto ms": auto, "auto x": dense / auto}
    if all("best ms" in row for row in rows):
        answer |= {"best ms": total("best ms"), "packed x": dense / total("best ms")}
    return answer


def run(report: Report) -> None:
    """Measure the ceilings of the device, then the layers."""
    setting = report.setting
    table, layers = Table(setting), setting.pick(LAYERS, TINY)
    report.ask("ceilings", partial(table.ceilings, next(iter(layers.values()))))
    rows = {name: report.ask(name, partial(table.layer, layer)) for name, layer in layers.items()}

    def verdict(setting: Setting) -> dict[str, object]:
        """What the table says as a whole."""
        products = [
            (f"{name}: {gemm}", row)
            for name, answer in rows.items()
            if isinstance(answer, dict)
            for gemm, row in answer.items()
            if "key" in row
        ]
        if not products:
            raise NotAsked("nothing was measured")
        return {
            "products": len(products),
            "auto at least 0.98x dense": all(row["auto at least 0.98"] for _, row in products),
            "auto below": [name for name, row in products if not row["auto at least 0.98"]],
            "auto is sparse": [name for name, row in products if row["auto"] != "reference"],
            "without a sparse kernel": [name for name, row in products if not row["kernels"]],
        }

    report.ask("verdict", verdict)
