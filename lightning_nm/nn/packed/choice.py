"""The choice between a CPU kernel and unpacking, for the products of packed layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_nm.kernels.api import GemmKey, bucketed
from lightning_nm.kernels.cache import Decision, Decisions, environment_of
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.registry import KernelRegistry
from lightning_nm.kernels.timing import DeviceTimer
from lightning_nm.kernels.tuner import Tuner

Kernels = Literal["auto", "sparse", "reference"]
"""``"auto"``: a kernel where it is measured faster than unpacking the weight. ``"sparse"``: always, where one takes the
product. ``"reference"``: never."""

DECISIONS = "~/.cache/lightning_nm/packed.json"
"""Where measured choices are kept, by CPU, instruction set and number of threads."""

_MANY = 1 << 30  # products that use one pack: it is never made again


@functools.cache
def kernel_of(name: str) -> CpuPermuteKernel | CpuCsrKernel:
    """The kernel with a name."""
    return CpuPermuteKernel() if name == "cpu-permute" else CpuCsrKernel()


@functools.cache
def registry_of(name: str) -> KernelRegistry:
    """A registry of this kernel alone."""
    return KernelRegistry([kernel_of(name)])


class _UnpackingTuner(Tuner):
    """Compares a kernel with what a packed layer does otherwise: it unpacks the weight for each product."""

    unpack: Callable[[], Tensor]

    def _fastest(self, key: GemmKey, dense_ms: float, found: Any, notes: list[str]) -> Decision:
        unpack_ms = 1e3 * self.timer.time(self.unpack, torch.device("cpu"))
        return super()._fastest(key, dense_ms + unpack_ms, found, notes)

    def _terms(self, key: GemmKey) -> str:
        return f"{super()._terms(key)}; unpacked for each product"


@functools.cache
def _tuner(name: str, threads: int) -> _UnpackingTuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    decisions = Decisions.load(Path(DECISIONS).expanduser(), environment_of(torch.device("cpu")))
    return _UnpackingTuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=_MANY)


def decide(name: str, key: GemmKey, unpack: Callable[[], Tensor]) -> Decision:
    """The measured choice for a product; it is measured once, and kept in :data:`DECISIONS`."""
    tuner = _tuner(name, torch.get_num_threads())
    tuner.unpack = unpack
    known = tuner.decisions.get(bucketed(key))
    decision = tuner.decide(key)
    if decision is not known:
        with suppress(OSError, ValueError):  # a file that cannot be written: it is measured again next time
            tuner.decisions.save(Path(DECISIONS).expanduser())
    return decision
