"""Whole layers, forward and backward, dense against ours through the public API: question V15, with the layers of it.

    python -m benchmarks.gpu layers

The dense MLP has ordinary linear layers. Ours is the same MLP under an ``NMSparsifier``, by its method, with or without
2:4 estimates of output gradients, called within ``routing(...)`` of a router in each mode. A step is a forward and a
backward pass that also makes the input's gradient, as inside a model, and casts, masking, drawing and packing count;
an optimizer step and the moves of masks do not. All variants take turns, on random data. Per variant:

`ms`: median between CUDA events around two steps, from an idle device: the longer of device and host. `x`: the dense
`ms` over it. `host ms`: what the host needs to issue a step. `step MB`: the most memory that a step takes beyond
parameters, masks and input, kept packs included. `kept MB`: parameters and masks. `sparse share`: of the GEMM time on
sparse kernels, see ``Router.sparse_share``; the first forward pass in "auto" is dense, and counts. `products`: the
kernel of each, and why. `error`: the largest relative error of Y, dX and all dW against mode "reference" of the same
masks and the same random numbers; after estimates it may be some per cent, where a last digit of dY moves an entry
across its draw. `masks ms`: what the sparsifier adds around an optimizer's step, not part of `ms` and by mode
"reference" alone; where masks rest for many steps, a step in which they move takes longer. `first s`: the first step,
with what it compiles and measures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.correctness import relative
from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import Setting
from lightning_nm import MVUE, NMSparsifier
from lightning_nm.kernels import GemmKernel
from lightning_nm.kernels.router import Router, routing

BF16 = torch.bfloat16


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the MLP of a 7B model."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """``fc2(gelu(fc1(x)))`` with biases, the MLP of a ViT."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return self.fc2(F.gelu(self.fc1(x)))


class Shape(NamedTuple):
    """An MLP and its batch."""

    kind: Callable[[int, int], nn.Module]
    width: int
    hidden: int
    tokens: int


class Variant(NamedTuple):
    """How the MLP is trained; without a method, dense.

    Args:
        method: A method's short name; ``transposable`` has one mask for both GEMMs, ``bi-mask`` a permuted dgrad.
        mvue: Whether output gradients are drawn 2:4 along tokens.
        mode: The router's.
        reuse: As ``Router``'s; from 2 on packs are kept, and no step moves a weight here: the limit of many
            micro-batches.
    """

    method: str = ""
    mvue: bool = False
    mode: str = ""
    reuse: int = 1

    @property
    def name(self) -> str:
        """As it is recorded."""
        words = [
            self.method + "+mvue" * self.mvue,
            self.mode,
            "packs kept" if self.reuse > 1 else "",
        ]
        return ", ".join(filter(None, words)) or "dense"


B7 = (SwiGLU, 4096, 11008)
SHAPES = {
    "7b swiglu, 16k": Shape(*B7, 16384),
    "vit-l, 50k": Shape(MLP, 1024, 4096, 50432),
    "7b swiglu, 8k": Shape(*B7, 8192),
    "7b swiglu, 32k": Shape(*B7, 32768),
}
TINY = {"tiny swiglu": Shape(SwiGLU, 32, 48, 32), "tiny mlp": Shape(MLP, 16, 32, 40)}

DENSE = Variant()
MODES = ("reference", "sparse", "auto")
VARIANTS = (
    DENSE,
    *(
        Variant(method, mvue, mode)
        for mvue in (False, True)
        for method in ("transposable", "bi-mask")
        for mode in MODES
    ),
    Variant("transposable", False, "sparse", reuse=8),
)
COMPILED = (
    DENSE,
    Variant("transposable", False, "auto"),
    Variant("transposable", True, "sparse"),
    Variant("bi-mask", False, "sparse"),
)
GRAPHED = (DENSE, Variant("transposable", False, "sparse"))


class Layer:
    """One variant of an MLP.

    Args:
        setting: Where.
        variant: How it is trained.
        model: The MLP; a dense one is masked if the variant is.
        sparsifier: Of a model that is masked already.
        kernels: The sparse ones, which routers share.
        decisions: File by which they share what they measured.
        batch: Input and output gradient, ``[tokens, width]`` in bfloat16.
        call: What is called for the model, for example the compiled one.
    """

    def __init__(
        self,
        setting: Setting,
        variant: Variant,
        model: nn.Module,
        sparsifier: NMSparsifier | None,
        kernels: list[GemmKernel],
        decisions: Path,
        batch: tuple[Tensor, Tensor],
        call: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.setting, self.variant, self.model, self.sparsifier = (
            setting,
            variant,
            model,
            sparsifier,
        )
        self.call = model if call is None else call
        self.x, self.grad = batch[0].detach().requires_grad_(), batch[1]
        self.mixed = next(model.parameters()).dtype == torch.float32
        self.router = None
        if sparsifier is not None:
            self.router = Router(
                variant.mode, kernels, decisions, variant.reuse, budget_s=10, timer=setting.timer
            )

    def step(self) -> Tensor:
        """Forward and backward; gradients of the step before go first."""
        for tensor in (self.x, *self.model.parameters()):
            tensor.grad = None
        with routing(self.router and self.router.active_or_none()):
            with torch.autocast(self.setting.device.type, BF16, enabled=self.mixed):
                y = self.call(self.x)
            if self.router is not None:
                self.router.tune()
            y.backward(self.grad)
        return y

    def results(self, router: Router | None) -> list[Tensor]:
        """Y, dX and the weights' gradients of one step by a router, with the first draw of its random numbers."""
        assert self.sparsifier is not None
        for layer in self.sparsifier.layers.values():
            layer.draw_noise(1)
        own, self.router = self.router, router
        try:
            y = self.step().detach()
        finally:
            self.router = own
        return [
            y,
            *(
                tensor.grad
                for tensor in (self.x, *self.model.parameters())
                if tensor.grad is not None
            ),
        ]

    def error(self) -> float | None:
        """The largest relative error against the reference; None where there is none."""
        if self.router is None or self.router.active_or_none() is None:
            return None
        expected = self.results(None)
        return max(map(relative, self.results(self.router), expected))

    def masks_ms(self) -> float:
        """Median milliseconds of what the sparsifier does around an optimizer's step."""
        assert self.sparsifier is not None
        optimizer, times = torch.optim.SGD(self.model.parameters(), lr=0.0), []
        self.sparsifier.register(optimizer)
        for _ in range(self.setting.pick(5, 1)):
            self.step()
            start = self._now()
            self.sparsifier.before_step(optimizer)
            before = self._now() - start
            optimizer.step()
            start = self._now()
            self.sparsifier.step()
            times.append(1e3 * (before + self._now() - start))
        return median(times)

    def _now(self) -> float:
        self.setting.synchronize()
        return perf_counter()

    def kept_bytes(self) -> int:
        """Bytes of the parameters and the masks."""
        tensors: list[Tensor] = list(self.model.parameters())
        if self.sparsifier is not None:
            for layer in self.sparsifier.layers.values():
                tensors += [*layer.read_tensors(), *layer.buffers.values()]
        return sum(
            tensor.numel() * tensor.element_size()
            for tensor in {id(t): t for t in tensors}.values()
        )

    def step_bytes(self) -> int:
        """Bytes that a step takes at its most beyond what was there before."""
        if self.setting.dry_run:
            return 0
        for tensor in (self.x, *self.model.parameters()):
            tensor.grad = None
        if self.router is not None:
            self.router.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - before


def masked(model: nn.Module, variant: Variant, x: Tensor) -> NMSparsifier:
    """Mask a model, and take a step that changes no weight: the hooks that count multiply-adds end with the first."""
    sparsifier = NMSparsifier(
        model,
        "2:4",
        variant.method,  # type: ignore[arg-type]
        MVUE("2:4") if variant.mvue else None,
        skip_first_last=False,
        grad_snr_every=0,
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier.register(optimizer)
    with torch.no_grad():
        model(x.to(next(model.parameters()).dtype))
    optimizer.step()
    sparsifier.step()
    return sparsifier


def compare(
    setting: Setting,
    shape: Shape,
    variants: Sequence[Variant],
    dtype: torch.dtype = torch.float32,
    compiled: str = "",
) -> dict[str, object]:
    """Measure the variants of an MLP in turn.

    Args:
        setting: Where.
        shape: The MLP and its batch.
        variants: The first is what the others are compared with.
        dtype: Of the parameters; float32 ones are cast by autocast.
        compiled: ``torch.compile``'s mode; empty for eager code.
    """
    torch.manual_seed(0)
    if compiled:
        torch._dynamo.reset()
    with setting.device:
        origin = shape.kind(shape.width, shape.hidden).to(dtype)
    batch = setting.random(shape.tokens, shape.width), setting.random(shape.tokens, shape.width)
    models: dict[Variant, tuple[nn.Module, NMSparsifier | None]] = {}
    layers: dict[str, Layer] = {}
    first: dict[str, float] = {}
    failed: dict[str, object] = {}
    kernels = setting.kernels
    with TemporaryDirectory() as folder:
        for variant in variants:
            try:
                # Routers share a masked model; graphs are made for one router.
                of = variant if compiled else variant._replace(mode="", reuse=1)
                if of not in models:
                    model = copy.deepcopy(origin)
                    models[of] = (
                        model,
                        masked(model, variant, batch[0][:64]) if variant.method else None,
                    )
                model, sparsifier = models[of]
                call = None
                if compiled:
                    backend = setting.pick(
                        {"backend": "inductor", "mode": compiled}, {"backend": "aot_eager"}
                    )
                    call = torch.compile(model, dynamic=False, **backend)  # type: ignore[call-overload]
                layer = Layer(
                    setting,
                    variant,
                    model,
                    sparsifier,
                    kernels,
                    Path(folder) / "decisions.json",
                    batch,
                    call,
                )
                start = perf_counter()
                layer.step()
                setting.synchronize()
                first[variant.name] = perf_counter() - start
                for _ in range(
                    setting.pick(2, 1)
                ):  # CUDA graphs are captured in the second, and replayed in the third
                    layer.step()
                layers[variant.name] = layer
            except Exception as error:
                failed[variant.name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        times = turns(setting, layers)
        rows: dict[str, object] = {}
        dense = times[variants[0].name][0] if variants[0].name in times else None
        for name, layer in layers.items():
            ms, host = times[name]
            row: dict[str, object] = {
                "ms": ms,
                "x": dense and dense / ms,
                "host ms": host,
                "first s": first[name],
            }
            row |= {"step MB": layer.step_bytes() / 1e6, "kept MB": layer.kept_bytes() / 1e6}
            if layer.router is not None:
                row["sparse share"], row["share of"] = layer.router.sparse_share()
                row["products"] = products(layer.router)
                row["error"] = None if compiled else layer.error()
                if layer.variant.mode == "reference":  # whatever the mode
                    row["masks ms"] = layer.masks_ms()
            rows[name] = row
    return rows | failed


def products(router: Router) -> dict[str, str]:
    """The kernel of each GEMM that ran, as it was in the end, and why."""
    if router.unavailable_reason:
        return {"all": f"{router.registry.reference.name}: {router.unavailable_reason}"}
    return {
        f"{use.product.layer} {use.product.key.gemm}": ": ".join(
            filter(
                None,
                (use.kernel, use.product.reason or (use.decision.reason if use.decision else "")),
            )
        )
        for use in router.used()
    }


def turns(setting: Setting, layers: dict[str, Layer]) -> dict[str, tuple[float, float]]:
    """Median milliseconds of a step, and of issuing one, with the layers in turn."""
    rounds, steps = setting.pick((5, 2), (1, 1))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            setting.synchronize()
            events = (
                [] if setting.dry_run else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            )
            start = perf_counter()
            for event in events[:1]:
                event.record()
            for _ in range(steps):
                layer.step()
            for event in events[1:]:
                event.record()
            host = 1e3 * (perf_counter() - start)
            setting.synchronize()
            total = events[0].elapsed_time(events[1]) if events else host
            found[name].append((total / steps, host / steps))
    return {
        name: (median(ms for ms, _ in row), median(host for _, host in row))
        for name, row in found.items()
    }


def run(report: Report) -> None:
    """Compare all shapes, the most telling first."""
    setting = report.setting
    shapes = setting.pick(SHAPES, TINY)
    first, second, *others = shapes.items()
    eager = partial(compare, variants=VARIANTS)
    for name, shape in (first, second):
        report.ask(f"V15 {name}", partial(eager, shape=shape))
    report.ask(
        f"V15 {first[0]}, compiled",
        partial(compare, shape=first[1], variants=COMPILED, compiled="default"),
    )
    for name, shape in others:
        report.ask(f"V15 {name}", partial(eager, shape=shape))
    report.ask(f"V15 {first[0]}, bfloat16 parameters", partial(eager, shape=first[1], dtype=BF16))
    graphed = partial(compare, shape=second[1], variants=GRAPHED, compiled="reduce-overhead")
    report.ask(f"V15 {second[0]}, CUDA graphs", graphed, apart=True)
