"""Kernels and a timer whose times are written down."""

import pwd

import torch

from lightning_nm import NMPattern
from lightning_nm.kernels.api import GemmKernel, GemmKey

DENSE = "dense"


def gemm_key(
    gemm="forward",
    rows=32,
    depth=64,
    columns=128,
    dtype=torch.bfloat16,
    pattern="2:4",
    device="cpu",
):
    return GemmKey(gemm, rows, depth, columns, dtype, NMPattern.parse(pattern), device)


class FakeKernel(GemmKernel):
    """The dense GEMM, spoiled by a function; its pack is a copy, and its calls are written down."""

    def __init__(
        self, name="fast", spoil=lambda product: product, probe="", supports=lambda key: ""
    ):
        self.name = name
        self.calls = []
        self.spoil = spoil
        self.probe = lambda device: probe
        self.supports = supports

    def pack(self, matrix):
        assert matrix.is_contiguous()
        self.calls.append("pack")
        return matrix.clone()

    def linear(self, packed, x, bias=None):
        self.calls.append("linear")
        return self.spoil(super().linear(packed, x, bias))

    def matmul(self, packed, matrix):
        self.calls.append("matmul")
        return self.spoil(super().matmul(packed, matrix))


class Flickering:
    """Spoils a product's last digit, in the result of some calls alone: in each call that `calls` holds, from 0."""

    def __init__(self, *calls):
        self.calls = calls
        self.made = 0

    def __call__(self, product):
        self.made += 1
        if self.made - 1 in self.calls:
            product.view(torch.int16)[0, 0] ^= 1
        return product


class FakeTimer:
    """Milliseconds of the dense GEMM, and of GEMM and pack of each kernel, found by what a function calls."""

    def __init__(self, kernels, dense, **times):
        self.kernels = kernels
        self.dense = dense
        self.times = times
        self.timed = []

    def time(self, function, device):
        for kernel in self.kernels:
            kernel.calls.clear()
        function()
        called = [(kernel.name, kernel.calls) for kernel in self.kernels if kernel.calls]
        if not called:
            self.timed.append(DENSE)
            return self.dense / 1e3
        ((name, (call,)),) = called
        self.timed.append((name, call))
        product, pack = self.times[name]
        return (pack if call == "pack" else product) / 1e3


def without_home(monkeypatch):
    """A user who has no home directory, as those of some containers."""

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
