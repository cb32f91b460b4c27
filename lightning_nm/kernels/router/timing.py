"""Timers: seconds of one call on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch


class Timer(Protocol):
    """Measures a function; tests pass recorded times instead."""

    def time(self, function: Callable[[], object], device: torch.device) -> float:
        """Return the seconds of one call on the device, with the time on the host."""


_ENOUGH = 0.01
"""Seconds of a sample on the host, at which a tick of the clock and the loop no longer count."""

_LONG = 0.05
"""Seconds of a call on the host of which few are enough."""


class DeviceTimer:
    """Median over samples of back-to-back calls, after a warm-up.

    On CUDA a sample is the time between two events on the current stream, so the slower of device and host decides.
    Elsewhere :func:`time.perf_counter` is read, around fewer calls if they are long.

    Args:
        warmup: Calls that are not measured.
        samples: Samples of which the median is taken.
        calls: Calls in a sample.

    Example::

        >>> x = torch.randn(64, 64)
        >>> DeviceTimer().time(lambda: x @ x, torch.device("cpu")) > 0
        True
    """

    def __init__(self, warmup: int = 3, samples: int = 7, calls: int = 10) -> None:
        self.warmup = warmup
        self.samples = samples
        self.calls = calls

    def time(self, function: Callable[[], object], device: torch.device) -> float:
        """Return the seconds of one call."""
        if device.type != "cuda":
            return self._host_time(function)
        for _ in range(self.warmup):
            function()
        samples = [self._cuda_sample(function, device) for _ in range(self.samples)]
        return median(samples) / self.calls

    def _host_time(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call on the host, measured by fewer calls if they are long."""
        # The first call is part of the warm-up, and says how many calls a sample needs. A coarse clock may give 0.
        first = max(self._host_sample(function, 1), 1e-9)
        calls = min(max(round(_ENOUGH / first), 1), self.calls)
        if first < _LONG:
            further_warmup = self.warmup - 1
            sample_count = self.samples
        else:
            further_warmup = 0
            sample_count = min(self.samples, 3)
        for _ in range(further_warmup):
            function()
        samples = [self._host_sample(function, calls) for _ in range(sample_count)]
        return median(samples) / calls

    def _host_sample(self, function: Callable[[], object], calls: int) -> float:
        """Seconds of some calls together, by the clock of the host."""
        start = perf_counter()
        for _ in range(calls):
            function()
        return perf_counter() - start

    def _cuda_sample(self, function: Callable[[], object], device: torch.device) -> float:
        """Seconds of the calls of a sample together, between two events."""
        # Events are recorded on the current stream of the current device, which need not be this one.
        with torch.cuda.device(device):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(self.calls):
                function()
            end.record()
            # The host runs ahead: without this the end is not reached yet.
            end.synchronize()
            return start.elapsed_time(end) / 1e3  # from milliseconds


def copies_past_cache(size: int, device: torch.device) -> int:
    """Count the copies of `size` bytes that together exceed twice the L2 cache, at most 32; one without CUDA."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    enough = 1 + 2 * cache_bytes // size
    # Small operands would need thousands of copies.
    return min(enough, 32)


def rotated(function: Callable[..., object], *operands: Sequence[Any]) -> Callable[[], object]:
    """Return a function that calls another one with the next copy of each operand in turn.

    Example::

        >>> call = rotated(lambda a, b: a + b, "abc", "xy")
        >>> [call() for _ in range(4)]
        ['ax', 'by', 'cx', 'ay']
    """
    rings = [cycle(copies) for copies in operands]

    def call() -> object:
        arguments = [next(ring) for ring in rings]
        return function(*arguments)

    return call
