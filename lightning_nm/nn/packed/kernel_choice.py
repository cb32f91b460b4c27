"""The choice between a CPU kernel and the dense product, for the products of packed layers."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias, get_args

import torch

from lightning_nm.kernels.api import GemmKernel, GemmKey, bucketed
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuInt8Kernel, CpuPermuteKernel
from lightning_nm.kernels.tuner import (
    Decision,
    Decisions,
    DeviceTimer,
    KernelRegistry,
    Tuner,
    decisions_file,
    dense_ms,
    environment_of,
    time_packed,
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

PANEL_BYTES = 4 << 20
"""A dense product is timed with so much of the weight: more than a core's own cache, less than a weight of interest."""

_MANY = 1 << 30  # products that use one pack: it is never made again


PackedKernel: TypeAlias = CpuPermuteKernel | CpuCsrKernel | CpuInt8Kernel


@functools.cache
def kernel_of(name: str) -> PackedKernel:
    """The kernel with a name."""
    return next(kind for kind in get_args(PackedKernel) if kind.name == name)()


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


class _PackedTuner(Tuner):
    """Takes a kernel unless the dense product is faster in two measurements: a kernel's weight is smaller."""

    hysteresis = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known = list(self.decisions.items())
        """Every decision; threads may read the list while another thread appends to it, unlike the mapping."""
        self._packed: Any = None

    def recall(self, key: GemmKey) -> Decision | None:
        """The decision for a product, if it was measured."""
        return self.decisions.get(key) if self._known(key) else None

    def nearest(self, key: GemmKey) -> Decision | None:
        """The measured decision for the most similar product: of the same matrix if there is one, else of another."""
        terms = self._terms(key)

        def kind(key: GemmKey) -> tuple[Any, ...]:
            return key.dtype, key.pattern, key.conv is None

        def distance(measured: tuple[GemmKey, Decision]) -> tuple[bool, float]:
            # Whether their matrices or convolutions differ, then the ratios of their sizes.
            other, _ = measured
            sizes = ((key.rows, other.rows), (key.depth, other.depth), (key.columns, other.columns))
            ratios = sum(abs(math.log2(a / b)) for a, b in sizes)
            return (key.rows, key.depth, key.conv) != (other.rows, other.depth, other.conv), ratios

        comparable = [
            (other, decision)
            for other, decision in self.known
            if decision.source == "measured"
            and decision.terms == terms
            and kind(other) == kind(key)
        ]
        return min(comparable, key=distance)[1] if comparable else None

    def measure(self, key: GemmKey, packed: Any) -> Decision:
        """Decide for a product with this operand, which a kernel can take."""
        self._packed = packed
        try:
            return self.decide(key)
        finally:
            self._packed = None

    def _reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        return super()._reason(kernel, few_rows(key))

    def _dense_ms(self, key: GemmKey) -> float:
        """The time of a few rows for all: a dense copy of the weight next to the packed one would take its memory."""
        few = few_rows(key)
        return dense_ms(few, self.timer) * key.rows / few.rows

    def _sparse_ms(self, kernel: GemmKernel, key: GemmKey) -> tuple[float, float]:
        # The weight is packed already: to time that would take longer than to time the product, and more memory.
        return time_packed(kernel, key, self._packed, self.timer), 0.0

    def _measured(self, key: GemmKey) -> Decision:
        found = super()._measured(key)
        # Other work on the machine can slow one of the two down for a moment, and a layer does not go back from dense.
        again = found.source == "measured" and found.kernel == self.registry.reference.name
        return super()._measured(key) if again else found


def few_rows(key: GemmKey) -> GemmKey:
    """A product with the first rows of the weight, of at most :data:`PANEL_BYTES`; the same for a smaller weight.

    Example::

        >>> from lightning_nm import NMPattern
        >>> few_rows(GemmKey("forward", 4096, 4096, 16, torch.float32, NMPattern(2, 4), "cpu")).rows
        256
    """
    rows = max(PANEL_BYTES // (key.depth * key.dtype.itemsize) // 64 * 64, 64)
    if key.rows <= rows or (key.conv is not None and key.conv.groups > 1):
        return key
    conv = None if key.conv is None else key.conv._replace(outputs=rows)
    return replace(key, rows=rows, conv=conv)


def _tuner(name: str, threads: int) -> _PackedTuner:
    """One for each kernel and number of threads, on which the environment of decisions depends."""
    with _MAKING:
        return _tuner_of(name, threads)


@functools.cache
def _tuner_of(name: str, threads: int) -> _PackedTuner:
    environment, file = environment_of(torch.device("cpu")), _file_of(name)
    decisions = Decisions(environment) if file is None else Decisions.load(file, environment)
    return _PackedTuner("auto", registry_of(name), decisions, DeviceTimer(), reuse=_MANY)


def _file_of(name: str) -> Path | None:
    """Where the choices for a kernel are kept."""
    file = decisions_file(DECISIONS)
    if file is None or name != CpuInt8Kernel.name:
        return file
    # Products in int8 have the keys of those in the dtype of their inputs: in one file they would replace each other.
    return file.with_name(f"{file.stem}-int8{file.suffix}")


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
    decision, settled = tuner.recall(key), True
    if decision is None:
        if budget.left_s > 0 and _MEASURING.acquire(blocking=math.isinf(budget.left_s)):
            try:
                decision = _measure(tuner, key, budget, packed)
            finally:
                _MEASURING.release()
        else:
            decision, settled = tuner.nearest(key), budget.left_s <= 0
    return decision is None or decision.kernel == name, settled


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _measure(tuner: _PackedTuner, key: GemmKey, budget: Budget, packed: Any) -> Decision:
    """Measure a product, and keep the decision."""
    start = perf_counter()
    decision = tuner.measure(key, packed)
    tuner.known.append((bucketed(key), decision))
    file = _file_of(tuner.registry.backends[0].name)
    try:
        if file is not None:
            tuner.decisions.save(file)
    except (OSError, ValueError) as error:  # no reason to answer nothing
        _warn_once(
            f"the choice of kernels is not kept and will be measured again next time: {error}"
        )
    return_freed_memory()
    budget.left_s -= perf_counter() - start
    return decision


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system: it keeps most of the dense weights and layouts that were made.

    Of a model of 190 MB, packed 2:4 to 145 MB, a process held 236 MB before it and 150 MB after it.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
