"""Forward and backward of one linear layer, autograd included, next to other sparse libraries that are installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import interleaved
from lightning_nm import NMSparsifier
from lightning_nm.functional import nm_prune
from lightning_nm.kernels import Router, routing
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel


def step_of(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer, autograd included."""

    def run() -> None:
        layer(x).backward(grad)

    return run


def routed_layer(weight: Tensor, pattern: str, router: Router) -> Callable[[Tensor], Tensor]:
    """A linear layer with this N:M weight, whose masks stand still and whose GEMMs the router makes."""
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
    model = nn.Sequential(linear)
    model.sparsifier = NMSparsifier(model, pattern, "asp", skip_first_last=False).attach()  # type: ignore[assignment]

    def call(x: Tensor) -> Tensor:
        linear.weight.grad = None
        with routing(router):
            found: Tensor = model(x)
        return found

    return call


def measure_peers(
    out: int, width: int, tokens: int, pattern: str, repeats: int
) -> dict[str, float]:
    """Median milliseconds of forward and backward: float32, the same N:M weight; a library that fails is left out."""
    torch.manual_seed(0)
    weight = nm_prune(torch.randn(out, width), pattern)
    dense = nn.Linear(width, out)
    with torch.no_grad():
        dense.weight.copy_(weight)
    router = Router("sparse", [CpuPermuteKernel(), CpuCsrKernel()])
    layers: dict[str, Any] = {
        "dense torch": dense,
        "lightning_nm": routed_layer(weight, pattern, router),
    }
    try:
        layers["sparseprop"] = import_module("sparseprop.modules.linear").SparseLinear.from_dense(
            dense
        )
    except ImportError:
        print("sparseprop is not installed")
    try:
        sparselab = import_module("sparselab")
        other = sparselab.SparseLinear(
            width, out, sparsity=1 - torch.count_nonzero(weight).item() / weight.numel()
        )
        layers["sparselab"] = other
    except ImportError:
        print("sparselab is not installed")
    x = torch.randn(tokens, width, requires_grad=True)
    grad = torch.randn(tokens, out)
    steps = {name: step_of(layer, x, grad) for name, layer in layers.items()}
    for name, step in list(steps.items()):
        try:
            step()
        except Exception as error:
            print(f"{name} fails: {error}")
            del steps[name]
    seconds = interleaved(list(steps.values()), repeats)
    return {
        name: 1e3 * statistics.median(times) for name, times in zip(steps, seconds, strict=True)
    }
