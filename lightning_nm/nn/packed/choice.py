"""The choice between a CPU kernel and the dense product, for the products of packed layers."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Literal

import torch

from lightning_nm.kernels.api import GemmKey, bucketed
from lightning_nm.kernels.cache import Decision, Decisions, decisions_file, environment_of
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.registry import KernelRegistry
from lightning_nm.kernels.timing import DeviceTimer
from lightning_nm.kernels.tuner import Tuner

Kernels = Literal["auto", "sparse", "reference"]
"""``"auto"``: a kernel while it is measured to be no slower than the dense product, then the dense weight.
``"sparse"``: a kernel where one takes the product, ``"reference"``: none; both hold the weight packed."""

DECISIONS = "~/.cache/lightning_nm/packed.json"
"""Where measured choices are kept, by CPU, instruction set and number of threads; nowhere without a home directory."""

_MANY = 1 << 30  # products that use one pack: it is never made again


@functools.cache
def kernel_of(name: str) -> CpuPermuteKernel | CpuCsrKernel:
    """The kernel with a name."""
    return CpuPermuteKernel() if name == "cpu-permute" else CpuCsrKernel()


@functools.cache
def registry_of(name: str) -> KernelRegistry:
    """A registry of this kernel alone."""
    return KernelRegistry([kernel_of(name)])


class _PackedTuner(Tuner):
    """Takes a kernel unless the dense product is faster in two measurements: a kernel's weight is smaller."""

    hysteresis = 0.0

    def _measured(self, key: GemmKey) -> Decision:
        found = super()._measured(key)
        # Other work on the machine can slow one of the two down for a moment, and a layer does not go back from dense.
        again = found.source == "measured" and found.kernel == self.registry.reference.name
        return super()._measured(key) if again else found


@functools.cache
def _tuner(name: str, threads: int) -> _PackedTuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    environment, file = environment_of(torch.device("cpu")), decisions_file(DECISIONS)
    decisions = Decisions(environment) if file is None else Decisions.load(file, environment)
    return _PackedTuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=_MANY)


def decide(name: str, key: GemmKey) -> Decision:
    """The measured choice for a product; it is measured once, and kept in :data:`DECISIONS`."""
    tuner = _tuner(name, torch.get_num_threads())
    known = tuner.decisions.get(bucketed(key))
    decision = tuner.decide(key)
    file = decisions_file(DECISIONS)
    if decision is not known and file is not None:
        with suppress(OSError, ValueError):  # a file that cannot be written: it is measured again next time
            tuner.decisions.save(file)
    return decision
