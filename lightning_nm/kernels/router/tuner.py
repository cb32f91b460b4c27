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
    Algorithm,
    GemmKernel,
    GemmKey,
    bucketed,
    check_mode,
    multiply_adds,
    uses_of_pack,
)
from lightning_nm.kernels.router.cache import Decision, Decisions, stored_key
from lightning_nm.kernels.router.checks import (
    check,
    check_bias,
    dense_ms,
    proposed_algorithms,
    sparse_ms,
    time_product,
)
from lightning_nm.kernels.router.registry import KernelRegistry, describe_error, reason_or_error
from lightning_nm.kernels.router.timing import Timer

HYSTERESIS = 0.03
"""The share by which a sparse product must be faster to be chosen."""


class _Candidate(NamedTuple):
    """A kernel that computes a product right, and its milliseconds."""

    kernel: GemmKernel
    algorithm: Algorithm | None
    product_ms: float
    pack_ms: float

    def __str__(self) -> str:
        return (
            self.kernel.name if self.algorithm is None else f"{self.kernel.name} ({self.algorithm})"
        )


class Tuner:
    """Chooses a kernel for each product, and remembers it.

    A sparse kernel may run if its probe passes on the device, it supports the product, and its product of random
    operands agrees with the dense one, see :func:`check`. A kernel that raises is passed over. A product without a
    kernel is dense, with the reason in its :class:`~lightning_nm.kernels.router.cache.Decision`.

    A decision holds for the bucket of a token count; a count in it that the kernel does not support is dense.

    Args:
        kernels: ``"auto"`` takes the fastest as measured, a sparse kernel only if ``dense / (sparse + pack / reuse)``
            is at least 1.03; the algorithms that a kernel proposes are tried, too. ``"sparse"`` takes the first kernel
            that is right, ``"reference"`` none.
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
        self._sizes: dict[
            GemmKey, GemmKey
        ] = {}  # at which the buckets of postponed products are measured
        self._decide = {"auto": self._measured, "sparse": self._forced, "reference": self._dense}[
            kernels
        ]

    def decide(self, key: GemmKey) -> Decision:
        """Decide for a product, or recall the decision.

        In ``"auto"`` an unknown product is measured: call :meth:`tune` before a CUDA graph is captured.
        """
        bucket = bucketed(key)
        if not self._known(bucket):
            self._settle(bucket, self._decide(key))
        decision = self.decisions[bucket]
        reason = self.registry.reason_against(decision.kernel, key)
        return _default([f"{decision.kernel}: {reason}"]) if reason else decision

    def tune(
        self, keys: Iterable[GemmKey], budget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Decide for many products within a budget of time, in ``"auto"`` in descending order of cost.

        The cost is the multiply-adds, times how often a product is among the keys. When the budget is used up, the rest
        is postponed: dense until :meth:`measure_next` or a later call measures it. The last measurement may exceed the
        budget. With several processes one tunes, and all :meth:`take_over` what
        :func:`~lightning_nm.kernels.router.cache.share` returns.
        """
        counts: Counter[GemmKey] = Counter()
        sizes: dict[GemmKey, GemmKey] = {}  # a bucket is measured at a size that occurs
        for key in keys:
            counts[bucketed(key)] += 1
            sizes.setdefault(bucketed(key), key)
        end = clock() + budget_s
        for bucket in sorted(
            counts, key=lambda bucket: counts[bucket] * multiply_adds(bucket), reverse=True
        ):
            key = sizes[bucket]
            if self.kernels == "auto" and not (
                self._known(bucket) and self.decisions[bucket].source == "measured"
            ):
                if clock() < end:
                    self._settle(bucket, self._measured(key))
                else:
                    self._settle(
                        bucket,
                        _postponed(f"not measured yet: the budget of {budget_s:g} s is used up"),
                    )
                    self._sizes[stored_key(bucket)] = key
            self.decide(key)

    def take_over(self, decisions: Decisions) -> None:
        """Continue with other decisions; those for products that they lack stay."""
        for key, decision in self.decisions.items():
            decisions.setdefault(key, decision)
        self.decisions = decisions

    def measure_next(self) -> bool:
        """Measure the first postponed product, the one of the highest cost; return whether there was one."""
        for bucket in self.decisions.postponed():
            self._settle(bucket, self._measured(self._sizes.pop(bucket, bucket)))
            return True
        return False

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a product right; each is checked when the iterator reaches it.

        Kernels for other types of devices are not noted, unless there are no others.
        """
        if not multiply_adds(key):
            notes.append("the product is empty")
            return
        for kernel in self.registry.made_for(key.device):
            reason = self.registry.reason(kernel, key) or self._reason(kernel, key)
            if reason:
                notes.append(f"{kernel.name}: {reason}")
            else:
                yield kernel

    def _reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Why a kernel does not compute a product right; empty if it does."""
        return reason_or_error(partial(check, kernel, key))

    def _terms(self, key: GemmKey) -> str:
        terms = f"kernels {self.registry}; reuse {uses_of_pack(key.gemm, self.reuse)}; hysteresis {self.hysteresis:g}"
        return f"{terms}; deterministic" if torch.are_deterministic_algorithms_enabled() else terms

    def _known(self, key: GemmKey) -> bool:
        decision = self.decisions.get(key)
        return decision is not None and decision.terms == self._terms(key)

    def _settle(self, key: GemmKey, decision: Decision) -> None:
        self.decisions[key] = replace(decision, terms=self._terms(key))

    def _measured(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        dense: list[float] = []
        found: list[_Candidate] = []
        for kernel in self.legal(key, notes):
            try:
                # Before and after each kernel: a GPU at its power limit slows down while it works.
                dense = dense or [self._dense_ms(key)]
                product_ms, pack_ms = self._sparse_ms(kernel, key)
                found.append(_Candidate(kernel, None, product_ms, pack_ms))
                for algorithm, other in _proposed(kernel, key, notes):
                    found.append(
                        _Candidate(other, algorithm, time_product(other, key, self.timer), pack_ms)
                    )
                dense.append(self._dense_ms(key))
            except Exception as error:
                notes.append(f"{kernel.name}: {describe_error(error)}")
        return self._fastest(key, fmean(dense), found, notes) if found else _default(notes)

    def _dense_ms(self, key: GemmKey) -> float:
        """Milliseconds of the dense product."""
        return dense_ms(key, self.timer)

    def _sparse_ms(self, kernel: GemmKernel, key: GemmKey) -> tuple[float, float]:
        """Milliseconds of a kernel's product, and of packing its operand."""
        return sparse_ms(kernel, key, self.timer)

    def _fastest(
        self, key: GemmKey, dense_ms: float, found: list[_Candidate], notes: list[str]
    ) -> Decision:
        uses, least = uses_of_pack(key.gemm, self.reuse), 1 + self.hysteresis
        gains = [
            speedup(dense_ms, candidate.product_ms, candidate.pack_ms, uses) for candidate in found
        ]
        gain, best = max(zip(gains, found, strict=True), key=lambda pair: pair[0])
        times = ", ".join(
            f"{candidate} {gain:.3f}x" for gain, candidate in zip(gains, found, strict=True)
        )
        reason = "; ".join([f"measured {times}; sparse from {least:g}x", *notes])
        name, algorithm = (
            (best.kernel.name, best.algorithm)
            if gain >= least
            else (self.registry.reference.name, None)
        )
        return Decision(
            name, dense_ms, best.product_ms, best.pack_ms, reason, "measured", algorithm=algorithm
        )

    def _forced(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        kernel = next(self.legal(key, notes), None)
        if kernel is None:
            return _default(notes)
        return Decision(
            kernel.name, None, None, None, "; ".join(["mode 'sparse'", *notes]), "forced"
        )

    def _dense(self, key: GemmKey) -> Decision:
        return Decision("reference", None, None, None, "mode 'reference'", "forced")


def _default(notes: Sequence[str]) -> Decision:
    return Decision(
        "reference", None, None, None, "; ".join(notes) or "there is no sparse kernel", "default"
    )


def _postponed(reason: str) -> Decision:
    return Decision("reference", None, None, None, reason, "postponed")


def speedup(dense_ms: float, sparse_ms: float, pack_ms: float, reuse: int) -> float:
    """Compute ``dense / (sparse + pack / reuse)`` for a pack that `reuse` products share."""
    return dense_ms / (sparse_ms + pack_ms / reuse)


def _proposed(
    kernel: GemmKernel, key: GemmKey, notes: list[str]
) -> Iterator[tuple[Algorithm, GemmKernel]]:
    """Yield the proposed algorithms that compute a product right; faults of the others are appended to `notes`."""
    try:
        algorithms = proposed_algorithms(kernel, key)
    except Exception as error:
        notes.append(f"{kernel.name}: the search for algorithms failed, {describe_error(error)}")
        return
    for algorithm in algorithms:
        other = kernel.with_algorithm(algorithm)
        reason = reason_or_error(partial(check, other, key))
        if (
            not reason and key.gemm == "forward"
        ):  # the device's probe checked a bias with the kernel's own algorithm
            reason = reason_or_error(partial(check_bias, other, key))
        if reason:
            notes.append(f"{kernel.name} ({algorithm}): {reason}")
        else:
            yield algorithm, other
