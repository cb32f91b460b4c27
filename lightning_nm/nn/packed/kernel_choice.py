"""The choice between a CPU kernel and the dense product, for the products of packed layers."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from lightning_nm.kernels.api import GemmKey
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuInt8Kernel, CpuPermuteKernel
from lightning_nm.kernels.tuner import (
    Decisions,
    DeviceTimer,
    KernelRegistry,
    Tuner,
    decisions_file,
    environment_of,
)

Kernels = Literal["auto", "sparse", "reference"]
"""``"auto"``: a kernel while it is measured to be no slower than the dense product, then the dense weight.
``"sparse"``: a kernel where one takes the product, ``"reference"``: none; both hold the weight packed."""

DECISIONS = "~/.cache/lightning_nm/packed.json"
"""Where measured choices are kept, by CPU, instruction set and number of threads; nowhere without a home directory.

Those for int8 weights are in a file next to it, see :func:`_file_of`."""

BUDGET_S = 1.0
"""Seconds that the products of one packed model are measured by default; the last measurement may exceed them."""

LARGEST_TOKENS = 4096
"""Products of more tokens are taken to be as fast, by the token, as products of this many."""


@functools.cache
def registry_of(name: str) -> KernelRegistry:
    """The kernel with this name alone, as all packed layers use it."""
    kinds = CpuPermuteKernel, CpuCsrKernel, CpuInt8Kernel
    return KernelRegistry([kind() for kind in kinds if kind.name == name])


class Budget:
    """How long the products of one model may still be measured.

    Args:
        seconds: The time in all.

    Raises:
        ValueError: If it is negative or NaN.
    """

    def __init__(self, seconds: float = BUDGET_S) -> None:
        if not seconds >= 0:
            raise ValueError(f"budget_s={seconds!r} must be 0 or more seconds")
        self.left_s = seconds


def _tuner(name: str, threads: int) -> Tuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    with _MAKING:
        return _tuner_of(name, threads)


@functools.cache
def _tuner_of(name: str, threads: int) -> Tuner:
    decisions = Decisions.load(_file_of(name), environment_of(torch.device("cpu")))
    # A pack is never made again, and a kernel is taken if it is as fast: its weight is smaller.
    return Tuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=1 << 30, hysteresis=0.0)


def _file_of(name: str) -> Path | None:
    """Where the choices for a kernel are kept."""
    if name != CpuInt8Kernel.name:
        return decisions_file(DECISIONS)
    # Products in int8 have the keys of those in the dtype of their inputs: in one file they would replace each other.
    return decisions_file(DECISIONS.replace(".json", "-int8.json"))


_MAKING = threading.Lock()  # two threads must not have two tuners, each with decisions of its own
_MEASURING = threading.Lock()  # two measurements at a time would slow each other down


def coarse(key: GemmKey) -> GemmKey:
    """The product that is measured for a product: its tokens rounded up to a power of two, at most 4096.

    Of convolutions the images are rounded up, and limited to those of 4096 positions, but for one image.

    Example::

        >>> from lightning_nm import NMPattern
        >>> key = GemmKey("forward", 64, 64, 1000, torch.float32, NMPattern(2, 4), "cpu")
        >>> coarse(key).columns, coarse(replace(key, columns=9000)).columns
        (1024, 4096)
    """
    unit = 1 if key.conv is None else math.prod(key.conv.positions)
    count = max(key.columns // unit, 1)
    power = 1 << (count - 1).bit_length()
    most = max(LARGEST_TOKENS // unit, 1)
    return replace(key, columns=unit * min(power, most))


def choose(name: str, key: GemmKey, budget: Budget, packed: Any) -> tuple[bool, bool]:
    """Whether a kernel makes a product with a packed operand, and whether that stands; if not, ask again.

    :func:`coarse` products are measured once, while the budget lasts, and kept in :data:`DECISIONS`. After that, and
    while another thread measures, the nearest measured product decides; without one, the kernel makes the product.
    """
    key = coarse(key)
    tuner = _tuner(name, torch.get_num_threads())
    decision = tuner.recall(key)
    to_measure = decision is None and budget.left_s > 0
    if to_measure and _MEASURING.acquire(blocking=math.isinf(budget.left_s)):
        try:
            start = perf_counter()
            decision = tuner.decide(key, packed)
            tuner.decisions.keep(_file_of(name))
            return_freed_memory()
            budget.left_s -= perf_counter() - start
        finally:
            _MEASURING.release()
        return decision.kernel == name, True
    decision = decision or tuner.nearest(key)
    return decision is None or decision.kernel == name, not to_measure


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system: it keeps most of the dense weights and layouts that were made.

    Of a model of 190 MB, packed 2:4 to 145 MB, a process held 236 MB before it and 150 MB after it.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
