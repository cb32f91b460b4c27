"""What `kernels: auto` chooses, next to a dense layer: forward and backward of one linear layer, autograd included."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.cpu.peers import routed_layer, step_of
from benchmarks.timing import interleaved
from lightning_nm.functional import nm_prune
from lightning_nm.kernels import Router


def measure_auto(out: int, width: int, tokens: int, pattern: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds of a dense layer and of one with masks that stand still, and which kernels were chosen."""
    torch.manual_seed(0)
    weight = nm_prune(torch.randn(out, width), pattern)
    dense = nn.Linear(width, out)
    with torch.no_grad():
        dense.weight.copy_(weight)
    router = Router("auto", budget_s=120)
    routed = routed_layer(weight, pattern, router)
    x, grad = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, out)
    steps = [step_of(dense, x, grad), step_of(routed, x, grad)]
    for _ in range(2):  # the first records the GEMMs, the second follows the measurement of kernels
        steps[1]()
        router.tune()
    dense_ms, auto_ms = (1e3 * statistics.median(times) for times in interleaved(steps, repeats))
    chosen = {used.product.key.gemm: used.kernel or "dense" for used in router.used()}
    return {
        "shape": f"{width} -> {out}",
        "pattern": pattern,
        "dense_ms": dense_ms,
        "auto_ms": auto_ms,
        "gain": dense_ms / auto_ms,
        "kernels": chosen,
    }
