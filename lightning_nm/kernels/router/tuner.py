"""The choice of a kernel for each product: check it against the dense product, time it, decide."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import ClassVar, NamedTuple

import torch

from lightning_nm.kernels.api import (
    GemmKernel,
    GemmKey,
    bucketed,
    check_mode,
    multiply_adds,
    uses_of_pack,
)
from lightning_nm.kernels.router.cache import Decision, Decisions, Source
from lightning_nm.kernels.router.checks import (
    check,
    dense_ms,
    sparse_ms,
)
from lightning_nm.kernels.router.registry import KernelRegistry, describe_error, reason_or_error
from lightning_nm.kernels.router.timing import Timer

HYSTERESIS = 0.03
"""The share by which a sparse product must be faster to be chosen."""


class _Candidate(NamedTuple):
    """A kernel that computes a product right, and its milliseconds."""

    kernel: GemmKernel
    product_ms: float
    pack_ms: float  # of packing the operand once


class Tuner:
    """Chooses a kernel for each product, and remembers it.

    A sparse kernel may run if its probe passes on the device, it supports the product, and its product of random
    operands agrees with the dense one, see :func:`check`. A kernel that raises is passed over. A product without a
    kernel is dense, with the reason in its :class:`~lightning_nm.kernels.router.cache.Decision`.

    A decision holds for the bucket of a token count; a count in it that the kernel does not support is dense.

    Args:
        kernels: ``"auto"`` takes the fastest as measured, a sparse kernel only if ``dense / (sparse + pack / reuse)``
            is at least 1.03. ``"sparse"`` takes the first kernel that is right, ``"reference"`` none.
        registry: The kernels, the sparse ones in order of preference.
        decisions: Known decisions, to which ``"auto"`` adds; other modes take only the environment from them.
        timer: Measures times for ``"auto"``.
        reuse: Products that use one pack of a weight; output gradients are packed for each product.

    Raises:
        ValueError: If the mode is unknown or `reuse` is less than 1.
    """

    hysteresis: ClassVar[float] = HYSTERESIS

    def __init__(
        self,
        kernels: str,
        registry: KernelRegistry,
        decisions: Decisions,
        timer: Timer,
        reuse: int = 1,
    ) -> None:
        check_mode(kernels)
        if reuse < 1:
            raise ValueError(f"reuse={reuse!r} must be at least 1")
        self.kernels = kernels
        self.registry = registry
        self.decisions = decisions if kernels == "auto" else Decisions(decisions.environment)
        self.timer = timer
        self.reuse = reuse
        deciders = {"auto": self._measured, "sparse": self._forced, "reference": self._dense}
        self._decide = deciders[kernels]

    def decide(self, key: GemmKey) -> Decision:
        """Decide for a product, or recall the decision.

        In ``"auto"`` an unknown product is measured: call :meth:`tune` before a CUDA graph is captured.
        """
        bucket = bucketed(key)
        if not self._known(bucket):
            self._remember(bucket, self._decide(key))
        decision = self.decisions[bucket]
        # The decision holds for the whole bucket; the kernel may still refuse this very size, or have failed at it.
        reason = self.registry.reason_against(decision.kernel, key)
        if reason:
            return _default([f"{decision.kernel}: {reason}"])
        return decision

    def tune(
        self, keys: Iterable[GemmKey], budget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Decide for many products within a budget of time, in ``"auto"`` in descending order of cost.

        The cost is the multiply-adds, times how often a product is among the keys. When the budget is used up, the rest
        is postponed: dense until a later call measures it. The last measurement may exceed the budget. With several
        processes one tunes, and all :meth:`take_over` what :func:`~lightning_nm.kernels.router.cache.share` returns.
        """
        counts: Counter[GemmKey] = Counter()
        sizes: dict[GemmKey, GemmKey] = {}  # a bucket is measured at a size that occurs
        for key in keys:
            bucket = bucketed(key)
            counts[bucket] += 1
            sizes.setdefault(bucket, key)

        def cost(bucket: GemmKey) -> int:
            return counts[bucket] * multiply_adds(bucket)

        end = clock() + budget_s
        for bucket in sorted(counts, key=cost, reverse=True):
            key = sizes[bucket]
            # A decision that an earlier call postponed is known, but is still to be measured.
            measured = self._known(bucket) and self.decisions[bucket].source == "measured"
            if self.kernels == "auto" and not measured:
                if clock() < end:
                    self._remember(bucket, self._measured(key))
                else:
                    reason = f"not measured yet: the budget of {budget_s:g} s is used up"
                    self._remember(bucket, _unmeasured("reference", reason, "postponed"))
            # Other modes decide here; in "auto" this asks whether the kernel supports the size.
            self.decide(key)

    def take_over(self, decisions: Decisions) -> None:
        """Continue with other decisions; those for products that they lack stay."""
        for key, decision in self.decisions.items():
            decisions.setdefault(key, decision)
        self.decisions = decisions

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a product right; each is checked when the iterator reaches it.

        Kernels for other types of devices are not noted, unless there are no others.
        """
        if not multiply_adds(key):
            notes.append("the product is empty")
            return
        for kernel in self.registry.made_for(key.device):
            # The registry is asked first: the trial runs the kernel, which may not exist for this device.
            reason = self.registry.reason(kernel, key) or self._reason(kernel, key)
            if reason:
                notes.append(f"{kernel.name}: {reason}")
            else:
                yield kernel

    def _reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Return why a kernel does not compute a product right; empty if it does."""
        return reason_or_error(partial(check, kernel, key))

    def _terms(self, key: GemmKey) -> str:
        """The conditions under which a decision holds, as text; a stored one with other terms is made anew."""
        uses = uses_of_pack(key, self.reuse)
        terms = f"kernels {self.registry}; reuse {uses}; hysteresis {self.hysteresis:g}"
        if torch.are_deterministic_algorithms_enabled():
            terms += "; deterministic"
        return terms

    def _known(self, key: GemmKey) -> bool:
        """Whether there is a decision for a product that holds under the present terms."""
        decision = self.decisions.get(key)
        return decision is not None and decision.terms == self._terms(key)

    def _remember(self, key: GemmKey, decision: Decision) -> None:
        """Store a decision with the terms under which it was made."""
        self.decisions[key] = replace(decision, terms=self._terms(key))

    def _measured(self, key: GemmKey) -> Decision:
        """Decide by measurement: the mode ``"auto"``."""
        notes: list[str] = []
        dense_times: list[float] = []
        candidates: list[_Candidate] = []
        for kernel in self.legal(key, notes):
            try:
                # Before and after each kernel: a GPU at its power limit slows down while it works.
                if not dense_times:
                    dense_times.append(self._dense_ms(key))
                candidates.append(_Candidate(kernel, *self._sparse_ms(kernel, key)))
                dense_times.append(self._dense_ms(key))
            except Exception as error:
                notes.append(f"{kernel.name}: {describe_error(error)}")
        if not candidates:
            return _default(notes)
        return self._fastest(key, fmean(dense_times), candidates, notes)

    def _dense_ms(self, key: GemmKey) -> float:
        """Milliseconds of the dense product."""
        return dense_ms(key, self.timer)

    def _sparse_ms(self, kernel: GemmKernel, key: GemmKey) -> tuple[float, float]:
        """Milliseconds of a kernel's product, and of packing its operand."""
        return sparse_ms(kernel, key, self.timer)

    def _fastest(
        self, key: GemmKey, dense_ms: float, candidates: list[_Candidate], notes: list[str]
    ) -> Decision:
        """Decide from times: the fastest candidate if its speedup reaches the margin, else the reference."""
        uses = uses_of_pack(key, self.reuse)
        least_gain = 1 + self.hysteresis
        gains = []
        measured = []
        for candidate in candidates:
            gain = speedup(dense_ms, candidate.product_ms, candidate.pack_ms, uses)
            gains.append(gain)
            measured.append(f"{candidate.kernel.name} {gain:.3f}x")
        best_gain = max(gains)
        # Of equally fast ones the first: the kernels are in order of preference.
        best = candidates[gains.index(best_gain)]
        name = self.registry.reference.name
        if best_gain >= least_gain:
            name = best.kernel.name
        reason = f"measured {', '.join(measured)}; sparse from {least_gain:g}x"
        return Decision(
            kernel=name,
            dense_ms=dense_ms,
            sparse_ms=best.product_ms,
            pack_ms=best.pack_ms,
            reason="; ".join([reason, *notes]),
            source="measured",
        )

    def _forced(self, key: GemmKey) -> Decision:
        """Decide for the first kernel that computes the product right: the mode ``"sparse"``."""
        notes: list[str] = []
        # No kernel after the first right one is tried.
        kernel = next(self.legal(key, notes), None)
        if kernel is None:
            return _default(notes)
        reason = "; ".join(["mode 'sparse'", *notes])
        return _unmeasured(kernel.name, reason, "forced")

    def _dense(self, key: GemmKey) -> Decision:
        """Decide for the dense product: the mode ``"reference"``."""
        return _unmeasured("reference", "mode 'reference'", "forced")


def _default(notes: Sequence[str]) -> Decision:
    reason = "; ".join(notes) or "there is no sparse kernel"
    return _unmeasured("reference", reason, "default")


def _unmeasured(kernel: str, reason: str, source: Source) -> Decision:
    return Decision(kernel, None, None, None, reason, source)


def speedup(dense_ms: float, sparse_ms: float, pack_ms: float, reuse: int) -> float:
    """Compute ``dense / (sparse + pack / reuse)`` for a pack that `reuse` products share."""
    return dense_ms / (sparse_ms + pack_ms / reuse)
