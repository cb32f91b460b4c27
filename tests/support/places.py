"""Where routed layers run: on a GPU with a real sparse kernel, and on the CPU with cuSPARSELt's operators in software.

The same tests run in both places, so that what asks a GPU is itself tried without one. A GPU's place is skipped, with
the reason, where the kernel does not pass its probe.
"""

import copy
import functools
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from lightning_nm.kernels import (
    CuSparseLtKernel,
    GemmKernel,
    Router,
    routing,
)
from lightning_nm.nn.products import estimated
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps

GPU_KERNELS = {kernel.name: kernel for kernel in (CuSparseLtKernel,)}


class Place(NamedTuple):
    """A device and its sparse kernel."""

    device: torch.device
    kernel: GemmKernel

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    @property
    def accelerator(self):
        return "gpu" if self.on_gpu else "cpu"

    def router(self, mode="sparse", **options):
        """A router with the kernel, which another one may have probed."""
        return Router(mode, [self.kernel], **options)

    def runs(self, used):
        """Whether a GEMM ran on the kernel, by whatever algorithm a search found."""
        return used.kernel.partition(":")[0] == self.kernel.name

    def random(self, *shape, dtype=torch.bfloat16, seed=0):
        """Normal numbers, the same in all places."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
            self.device, dtype
        )

    @contextmanager
    def side_stream(self):
        """Another stream that is behind with its work; the current one waits for it in the end."""
        if not self.on_gpu:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def captured(self, function):
        """A function that does the same again: on a GPU by a CUDA graph, captured after three calls."""
        with self.side_stream():
            for _ in range(3):
                function()
        if not self.on_gpu:
            return function
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = function()

        def replay():
            graph.replay()
            return results

        return replay

    def compiled(self, module, mode):
        """The module compiled as its GPU does; on the CPU without the C++ compiler that Inductor wants."""
        torch.compiler.reset()
        return torch.compile(
            module, **({"mode": mode} if self.on_gpu else {"backend": "aot_eager"})
        )


@functools.cache  # probed once
def _cpu_kernel():
    ops = TrappingOps(found=3)
    ops.calls = deque(maxlen=0)  # what is kept of them would keep packs
    return KernelOnCpu(ops)


@functools.cache
def _gpu_kernel(name):
    if not torch.cuda.is_available():
        return None, "torch finds no CUDA device"
    kernel = GPU_KERNELS[name]()
    return kernel, kernel.probe(torch.device("cuda", 0))


def make_place(name):
    """The CPU, or the GPU with a kernel; skips where that does not work."""
    if name == "cpu":
        return Place(torch.device("cpu"), _cpu_kernel())
    kernel, reason = _gpu_kernel(name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    return Place(torch.device("cuda", 0), kernel)


PLACES = ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_KERNELS)]


class Results(NamedTuple):
    """What one forward and one backward pass give."""

    y: torch.Tensor
    dx: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def items(self):
        return [("y", self.y), ("dx", self.dx), *self.gradients.items()]


def layers_of(model):
    return [
        layer for module in model.modules() for layer in getattr(module, "nm_layers", {}).values()
    ]


def results(model, x, grad, router, call=None):
    """One batch with a given output gradient; the estimators' noise is always the same."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    for layer in layers_of(model):
        layer.draw_noise(7)
    with routing(router):
        y = (model if call is None else call)(x)
        y.backward(grad)
    return Results(
        y.detach().clone(),
        x.grad.clone(),
        {name: p.grad.clone() for name, p in model.named_parameters()},
    )


def exact(module, x, grad):
    """The same for one layer in float64 on the CPU: of the same weight and masks, and of the same sample of dY."""
    (layer,) = layers_of(module)
    layer.draw_noise(7)
    sample = (
        None
        if layer.spec.estimator is None
        else estimated(layer, grad, layer.noise.for_call(layer.noise.words, 0))
    )
    module = copy.deepcopy(module).cpu().double()
    (layer,) = layers_of(module)
    if sample is not None:
        layer.estimate = lambda grad, seed: sample.cpu().double()
    return results(module, x.cpu().double(), grad.cpu().double(), None)


def assert_right(found, expected, dtype):
    """Every entry is right but for the rounding of a 16-bit GEMM, of its own size or of the matrix's."""
    for (name, a), (_, b) in zip(found.items(), expected.items(), strict=True):
        assert a.shape == b.shape, name
        a, b = a.cpu().double(), b.cpu().double()
        allowed = 4 * torch.finfo(dtype).eps * (b.abs() + b.square().mean().sqrt())
        error = (a - b).abs()
        assert bool((error <= allowed).all()), (
            f"{name} is wrong by up to {float((error / allowed).max()):.3g} x allowed"
        )


def assert_on_kernel(place, router, gemms):
    """These GEMMs ran on the sparse kernel wherever it takes their sizes, and all others dense."""
    for used in router.used():
        key = used.product.key
        sparse = key.gemm in gemms and not place.kernel.supports(key)
        assert place.runs(used) == sparse, used.decision and used.decision.reason
        assert sparse or used.kernel == "reference"
    return {used.product.key.gemm for used in router.used() if place.runs(used)}
