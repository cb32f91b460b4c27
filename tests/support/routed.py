"""Masked layers with and without a router: what tests of routing share."""

import torch

from lightning_nm import NMSparsifier, TransposableMask
from lightning_nm.kernels import Router, routing
from tests.support import contract
from tests.support.fake_kernels import FakeTimer
from tests.support.kinds import make
from tests.support.outside import ScaledMask, SoftThreshold

METHODS = {
    "dense": lambda: "dense",
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "bi-mask": lambda: "bi-mask",
    "transposable": lambda: TransposableMask(),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
}


def simulated(**options):
    return Router("sparse", [contract.KERNEL()], **options)


def ran(router):
    return {(used.product.key.gemm, used.kernel) for used in router.used()}


def attach(module, pattern="2:4", method="bi-mask", estimator=None):
    return NMSparsifier(module, pattern, method, estimator, skip_first_last=False).attach()


def gradients(module, x, router):
    """The output, dX and all gradients of a batch, whose noise is always the same."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    for part in module.modules():
        for layer in getattr(part, "nm_layers", {}).values():
            layer.draw_noise(7)
    with routing(router):
        y = module(x)
    (y.square() * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).sum().backward()
    return y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())


def assert_equal(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def masked(kind="linear", dtype=torch.float64, **options):
    """A masked module of a kind, and an input; the options are those of :func:`attach`."""
    module, x = make(kind, dtype)
    attach(module, **options)
    return module, x


def compare(module, x, router, **tolerance):
    """A batch on the kernels of a router equals that of the dense GEMMs."""
    assert_equal(gradients(module, x, router), gradients(module, x, None), **tolerance)


def timed(kernel, dense=9.0, fast=1.0, **options):
    """A router that measures: milliseconds of the dense GEMM and of this kernel are given."""
    return Router(
        "auto", [kernel], timer=FakeTimer([kernel], dense=dense, fast=(fast, 0.0)), **options
    )
