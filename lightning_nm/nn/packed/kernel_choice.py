"""The choice between a CPU kernel and the dense product, for the products of packed layers."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from lightning_nm.kernels.api import GemmKernel, GemmKey, bucketed
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.router.cache import Decision, Decisions, decisions_file, environment_of
from lightning_nm.kernels.router.checks import time_product
from lightning_nm.kernels.router.registry import KernelRegistry
from lightning_nm.kernels.router.timing import DeviceTimer
from lightning_nm.kernels.router.tuner import Tuner
from lightning_nm.nn.packed.memory import return_freed_memory

Kernels = Literal["auto", "sparse", "reference"]
"""``"auto"``: a kernel while it is measured to be no slower than the dense product, then the dense weight.
``"sparse"``: a kernel where one takes the product, ``"reference"``: none; both hold the weight packed."""

DECISIONS = "~/.cache/lightning_nm/packed.json"
"""Where measured choices are kept, by CPU, instruction set and number of threads; nowhere without a home directory."""

BUDGET_S = 1.0
"""Seconds that the products of one packed model are measured by default; the last measurement may exceed them."""

LARGEST_TOKENS = 4096
"""Products of more tokens are taken to be as fast, by the token, as products of this many."""

_MANY = 1 << 30  # products that use one pack: it is never made again


@functools.cache
def kernel_of(name: str) -> CpuPermuteKernel | CpuCsrKernel:
    """The kernel with a name."""
    return CpuPermuteKernel() if name == "cpu-permute" else CpuCsrKernel()


@functools.cache
def registry_of(name: str) -> KernelRegistry:
    """A registry of this kernel alone."""
    return KernelRegistry([kernel_of(name)])


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

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Measure whatever is asked for, within a ``with`` block; what is left stays as it was."""
        left_s = self.left_s
        self.left_s = math.inf
        try:
            yield
        finally:
            self.left_s = left_s


class Choice(NamedTuple):
    """Whether a kernel makes a product.

    Attributes:
        kernel: Whether the kernel makes it, and not the dense product.
        settled: Whether that stands; if not, it is asked again at the next product.
    """

    kernel: bool
    settled: bool


class _PackedTuner(Tuner):
    """Takes a kernel unless the dense product is faster in two measurements: a kernel's weight is smaller."""

    hysteresis = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known = list(self.decisions.items())
        """Every decision; threads may read the list while another thread appends to it, unlike the mapping."""

    def recall(self, key: GemmKey) -> Decision | None:
        """The decision for a product, if it was measured."""
        return self.decisions.get(key) if self._known(key) else None

    def nearest(self, key: GemmKey) -> Decision | None:
        """The measured decision for the most similar product: of the same matrix if there is one, else of another."""
        terms = self._terms(key)
        best: tuple[tuple[bool, float], Decision] | None = None
        for other, decision in self.known:
            comparable = (other.dtype, other.pattern, other.conv is None) == (key.dtype, key.pattern, key.conv is None)
            if decision.source != "measured" or decision.terms != terms or not comparable:
                continue
            distance = _distance(key, other)
            if best is None or distance < best[0]:
                best = distance, decision
        return None if best is None else best[1]

    def _sparse_ms(self, kernel: GemmKernel, key: GemmKey) -> tuple[float, float]:
        # The weight is packed already: to time that would take longer than to time the product, and more memory.
        return time_product(kernel, key, self.timer), 0.0

    def _measured(self, key: GemmKey) -> Decision:
        found = super()._measured(key)
        # Other work on the machine can slow one of the two down for a moment, and a layer does not go back from dense.
        again = found.source == "measured" and found.kernel == self.registry.reference.name
        return super()._measured(key) if again else found


def _distance(key: GemmKey, other: GemmKey) -> tuple[bool, float]:
    """How different two products are: whether their matrices or convolutions differ, then the ratios of their sizes."""
    sizes = ((key.rows, other.rows), (key.depth, other.depth), (key.columns, other.columns))
    ratios = sum(abs(math.log2(a / b)) for a, b in sizes)
    return (key.rows, key.depth, key.conv) != (other.rows, other.depth, other.conv), ratios


@functools.cache
def _tuner(name: str, threads: int) -> _PackedTuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    environment, file = environment_of(torch.device("cpu")), decisions_file(DECISIONS)
    decisions = Decisions(environment) if file is None else Decisions.load(file, environment)
    return _PackedTuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=_MANY)


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


def choose(name: str, key: GemmKey, budget: Budget) -> Choice:
    """Whether a kernel makes a product.

    :func:`coarse` products are measured once, while the budget lasts, and kept in :data:`DECISIONS`. After that, and
    while another thread measures, the nearest measured product decides; without one, the kernel makes the product.
    """
    key = coarse(key)
    tuner = _tuner(name, torch.get_num_threads())
    known = tuner.recall(key)
    if known is not None:
        return Choice(known.kernel == name, settled=True)
    if budget.left_s > 0 and _MEASURING.acquire(blocking=math.isinf(budget.left_s)):
        try:
            return Choice(_measure(tuner, key, budget).kernel == name, settled=True)
        finally:
            _MEASURING.release()
    nearest = tuner.nearest(key)
    return Choice(nearest is None or nearest.kernel == name, settled=budget.left_s <= 0)


def _measure(tuner: _PackedTuner, key: GemmKey, budget: Budget) -> Decision:
    """Measure a product, and keep the decision."""
    start = perf_counter()
    decision = tuner.decide(key)
    tuner.known.append((bucketed(key), decision))
    file = decisions_file(DECISIONS)
    if file is not None:
        with suppress(OSError, ValueError):  # a file that cannot be written: it is measured again next time
            tuner.decisions.save(file)
    return_freed_memory()
    budget.left_s -= perf_counter() - start
    return decision
