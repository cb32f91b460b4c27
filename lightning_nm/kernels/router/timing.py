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
        return median(self._cuda_sample(function, device) for _ in range(self.samples)) / self.calls

    def _host_time(self, function: Callable[[], object]) -> float:
        """The same on the host, with fewer calls if they are long."""
        first = max(self._host_sample(function, 1), 1e-9)
        for _ in range(self.warmup - 1 if first < _LONG else 0):
            function()
        calls = min(max(round(_ENOUGH / first), 1), self.calls)
        samples = self.samples if first < _LONG else min(self.samples, 3)
        return median(self._host_sample(function, calls) for _ in range(samples)) / calls

    def _host_sample(self, function: Callable[[], object], calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            function()
        return perf_counter() - start

    def _cuda_sample(self, function: Callable[[], object], device: torch.device) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self.calls):
                function()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3


def copies_past_cache(size: int, device: torch.device) -> int:
    """Count the copies of `size` bytes that together exceed twice the L2 cache, at most 32; one without CUDA."""
    if device.type != "cuda":
        return 1
    return min(1 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // size, 32)


def rotated(function: Callable[..., object], *operands: Sequence[Any]) -> Callable[[], object]:
    """Return a function that calls another one with the next copy of each operand in turn.

    Example::

        >>> call = rotated(lambda a, b: a + b, "abc", "xy")
        >>> [call() for _ in range(4)]
        ['ax', 'by', 'cx', 'ay']
    """
    rings = [cycle(copies) for copies in operands]
    return lambda: function(*(next(ring) for ring in rings))
