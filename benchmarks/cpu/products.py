"""GEMMs of a masked linear layer on this CPU: sparse kernels next to every dense GEMM and CSR that torch has."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import interleaved
from lightning_nm.functional import nm_mask
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.pattern import NMPattern

Call = Callable[[], Any]


class Row(NamedTuple):
    """Median milliseconds of one GEMM, by the way it is made."""

    product: str
    shape: str
    tokens: int
    dtype: str
    pattern: str
    ms: dict[str, float]

    @property
    def dense(self) -> tuple[str, float]:
        """The fastest dense GEMM of this precision."""
        found = {name: ms for name, ms in self.ms.items() if name.startswith("dense")}
        return min(found.items(), key=lambda item: item[1])

    @property
    def sparse(self) -> tuple[str, float]:
        """The fastest of our kernels."""
        found = {name: ms for name, ms in self.ms.items() if name.startswith("cpu-")}
        return min(found.items(), key=lambda item: item[1])

    @property
    def gain(self) -> float:
        """Dense over sparse time, both the fastest."""
        return self.dense[1] / self.sparse[1]


def _one_dnn(x: Tensor, weight: Tensor) -> Call | None:
    """The float32 GEMM by oneDNN, its operands already in oneDNN's form; ``None`` where torch lacks it."""
    try:
        a, b = x.to_mkldnn(), weight.contiguous().to_mkldnn()
        torch._C._nn.mkldnn_linear(a, b, None)
    except (RuntimeError, AttributeError):
        return None
    return lambda: torch._C._nn.mkldnn_linear(a, b, None)


def _sparse_csr(x: Tensor, weight: Tensor) -> Call:
    matrix, columns = weight.to_sparse_csr(), x.t().contiguous()
    return lambda: matrix @ columns


def ways(
    product: str,
    out: int,
    width: int,
    tokens: int,
    dtype: torch.dtype,
    pattern: NMPattern,
    csr: bool = True,
) -> dict[str, Call]:
    """The ways to make a GEMM: ``forward``, ``dgrad`` of a row mask, ``wgrad`` at kept entries, or ``pack``.

    Dense ones begin with ``dense``, ours with ``cpu-``.
    """
    torch.manual_seed(0)
    latent = torch.randn(out, width)
    mask = nm_mask(latent.abs(), pattern)
    weight = torch.where(mask, latent, 0).to(dtype)
    x, grad = torch.randn(tokens, width).to(dtype), torch.randn(tokens, out).to(dtype)
    bits = mask.view(torch.uint8)
    rows = MaskedMatrix(latent, bits, FORWARD_BIT, pattern, dtype, None, lambda: weight)
    columns = rows._replace(values=latent.t(), bits=bits.t(), dense=lambda: weight.t().contiguous())
    permute, any_mask = CpuPermuteKernel(), CpuCsrKernel()
    kernels: list[Any] = [permute, any_mask]
    found: dict[str, Call | None] = {}
    if product == "forward":
        packs = [(each, each.pack_masked(rows, each.layout(rows))) for each in kernels]
        found["dense torch"] = lambda: F.linear(x, weight)
        found |= {each.name: partial(each.linear, pack, x) for each, pack in packs}
        if dtype == torch.float32:
            found["dense oneDNN"] = _one_dnn(x, weight)
            found["torch CSR"] = _sparse_csr(x, weight) if csr else None
    elif product == "dgrad":
        pack = any_mask.pack_masked(columns, any_mask.layout(columns))
        found["dense torch"] = lambda: grad @ weight
        found[any_mask.name] = lambda: any_mask.linear(pack, grad)
        if dtype == torch.float32:
            found["dense oneDNN"] = _one_dnn(grad, weight.t())
            found["torch CSR"] = _sparse_csr(grad, weight.t().contiguous()) if csr else None
    elif product == "wgrad":
        layouts = [(each, each.layout(rows)) for each in kernels]
        found["dense torch"] = lambda: grad.t() @ x
        if dtype == torch.float32:
            found["dense oneDNN"] = _one_dnn(grad.t().contiguous(), x.t())
        found |= {each.name: partial(each.sampled, layout, grad, x) for each, layout in layouts}
    else:
        permute_layout, csr_layout = permute.layout(rows), any_mask.layout(columns)
        found["dense torch"] = lambda: F.linear(x, weight)
        found["cpu-permute layout"] = lambda: permute.layout(rows)
        found["cpu-permute values"] = lambda: permute.pack_masked(rows, permute_layout)
        found["cpu-csr layout"] = lambda: any_mask.layout(columns)
        found["cpu-csr values"] = lambda: any_mask.pack_masked(columns, csr_layout)
    return {name: call for name, call in found.items() if call is not None}


def measure(
    products: list[str],
    shapes: list[tuple[int, int]],
    tokens: int,
    dtypes: list[torch.dtype],
    patterns: list[str],
    repeats: int,
) -> Iterator[Row]:
    """Time every GEMM of every size; the ways of one GEMM are interleaved."""
    for dtype in dtypes:
        for out, width in shapes:
            for product in products:
                for text in patterns:
                    calls = ways(
                        product, out, width, tokens, dtype, NMPattern.parse(text), csr=tokens > 1
                    )
                    seconds = interleaved(list(calls.values()), repeats)
                    ms = {
                        name: 1e3 * statistics.median(times)
                        for name, times in zip(calls, seconds, strict=True)
                    }
                    yield Row(
                        product,
                        f"{width} -> {out}",
                        tokens,
                        str(dtype).removeprefix("torch."),
                        text,
                        ms,
                    )
