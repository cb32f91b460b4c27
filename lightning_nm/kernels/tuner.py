"""The choice of a kernel for each product: check it against the dense product, time it, decide."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.functional import nm_prune
from lightning_nm.kernels.api import Algorithm, GemmKernel, GemmKey, bucketed, check_mode, multiply_adds, uses_of_pack
from lightning_nm.kernels.cache import Decision, Decisions
from lightning_nm.kernels.operands import TOKENS, permuted_columns
from lightning_nm.kernels.registry import KernelRegistry, describe_error, reason_or_error
from lightning_nm.kernels.timing import Timer, copies_past_cache, rotated

TOLERANCE = 1e-2
"""Largest relative Frobenius difference of two 16-bit products. Rounding both results to bfloat16 makes 2.3e-3, and the
dense one may round partial sums, too. A kernel that loses one value in 5000 exceeds it."""

REPEATS = 3
"""How often a product must have the same bits if deterministic algorithms are requested."""

HYSTERESIS = 0.03
"""The share by which a sparse product must be faster to be chosen."""


class _Candidate(NamedTuple):
    """A kernel that computes a product right, and its milliseconds."""

    kernel: GemmKernel
    algorithm: Algorithm | None
    product_ms: float
    pack_ms: float

    def __str__(self) -> str:
        return self.kernel.name if self.algorithm is None else f"{self.kernel.name} ({self.algorithm})"


class Tuner:
    """Chooses a kernel for each product, and remembers it.

    A sparse kernel may run if its probe passes on the device, it supports the product, and its product of random
    operands agrees with the dense one, see :func:`check`. A kernel that raises is passed over. A product without a
    kernel is dense, with the reason in its :class:`~lightning_nm.kernels.cache.Decision`.

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

    def __init__(
        self, kernels: str, registry: KernelRegistry, decisions: Decisions, timer: Timer, reuse: int = 1
    ) -> None:
        check_mode(kernels)
        if reuse < 1:
            raise ValueError(f"reuse={reuse!r} must be at least 1")
        self.kernels = kernels
        self.registry = registry
        self.decisions = decisions if kernels == "auto" else Decisions(decisions.environment)
        self.timer = timer
        self.reuse = reuse
        self._decide = {"auto": self._measured, "sparse": self._forced, "reference": self._dense}[kernels]

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

    def tune(self, keys: Iterable[GemmKey], budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Decide for many products within a budget of time, in ``"auto"`` in descending order of cost.

        The cost is the multiply-adds, times how often a product is among the keys. When the budget is used up, the rest
        is dense; a later call measures it. The last measurement may exceed the budget. With several processes one
        tunes, and all continue with ``tuner.decisions = share(tuner.decisions)``.
        """
        counts: Counter[GemmKey] = Counter()
        sizes: dict[GemmKey, GemmKey] = {}  # a bucket is measured at a size that occurs
        for key in keys:
            counts[bucketed(key)] += 1
            sizes.setdefault(bucketed(key), key)
        end = clock() + budget_s
        for bucket in sorted(counts, key=lambda bucket: counts[bucket] * multiply_adds(bucket), reverse=True):
            key = sizes[bucket]
            if self.kernels == "auto" and not (self._known(bucket) and self.decisions[bucket].source == "measured"):
                late = [f"the budget of {budget_s:g} s is used up"]
                self._settle(bucket, self._measured(key) if clock() < end else _default(late))
            self.decide(key)

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a product right; each is checked when the iterator reaches it."""
        if not multiply_adds(key):
            notes.append("the product is empty")
            return
        for kernel in self.registry.backends:
            reason = self.registry.reason(kernel, key) or reason_or_error(partial(check, kernel, key))
            if reason:
                notes.append(f"{kernel.name}: {reason}")
            else:
                yield kernel

    def _terms(self, key: GemmKey) -> str:
        terms = f"kernels {self.registry}; reuse {uses_of_pack(key.gemm, self.reuse)}; hysteresis {HYSTERESIS:g}"
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
                dense = dense or [dense_ms(key, self.timer)]
                product_ms, pack_ms = sparse_ms(kernel, key, self.timer)
                found.append(_Candidate(kernel, None, product_ms, pack_ms))
                for algorithm, other in _proposed(kernel, key, notes):
                    found.append(_Candidate(other, algorithm, _product_ms(other, key, self.timer), pack_ms))
                dense.append(dense_ms(key, self.timer))
            except Exception as error:
                notes.append(f"{kernel.name}: {describe_error(error)}")
        return self._fastest(key, fmean(dense), found, notes) if found else _default(notes)

    def _fastest(self, key: GemmKey, dense_ms: float, found: list[_Candidate], notes: list[str]) -> Decision:
        uses, least = uses_of_pack(key.gemm, self.reuse), 1 + HYSTERESIS
        gains = [speedup(dense_ms, candidate.product_ms, candidate.pack_ms, uses) for candidate in found]
        gain, best = max(zip(gains, found, strict=True), key=lambda pair: pair[0])
        times = ", ".join(f"{candidate} {gain:.3f}x" for gain, candidate in zip(gains, found, strict=True))
        reason = "; ".join([f"measured {times}; sparse from {least:g}x", *notes])
        name, algorithm = (best.kernel.name, best.algorithm) if gain >= least else (self.registry.reference.name, None)
        return Decision(name, dense_ms, best.product_ms, best.pack_ms, reason, "measured", algorithm=algorithm)

    def _forced(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        kernel = next(self.legal(key, notes), None)
        if kernel is None:
            return _default(notes)
        return Decision(kernel.name, None, None, None, "; ".join(["mode 'sparse'", *notes]), "forced")

    def _dense(self, key: GemmKey) -> Decision:
        return Decision("reference", None, None, None, "mode 'reference'", "forced")


def _default(notes: Sequence[str]) -> Decision:
    return Decision("reference", None, None, None, "; ".join(notes) or "there is no sparse kernel", "default")


def speedup(dense_ms: float, sparse_ms: float, pack_ms: float, reuse: int) -> float:
    """Compute ``dense / (sparse + pack / reuse)`` for a pack that `reuse` products share."""
    return dense_ms / (sparse_ms + pack_ms / reuse)


def check(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product of random operands with the dense one, ``|P - D|_F / |D|_F < 1e-2``.

    Under ``torch.use_deterministic_algorithms(True)`` it is repeated, always to the same bits.

    Returns:
        What is wrong; empty if nothing is. Exceptions of the kernel pass through.
    """
    with _no_autocast():
        matrix, dense = _operands(key, _generator(key))
        expected = _product(GemmKernel(), key, matrix, dense)
        packable, kept = matrix.contiguous(), dense.clone()
        packed = kernel.pack(packable)
        result = _product(kernel, key, packed, dense)
        if not torch.equal(dense, kept) or not torch.equal(packable, matrix):
            return "changes its operands"
        second = _product(kernel, key, packed, dense)
        if result.data_ptr() == second.data_ptr():
            return "returns the same memory for two products"
        if (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return f"returns {tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        if reason := _difference(result, expected):
            return reason
        if torch.are_deterministic_algorithms_enabled():
            repeats = [_product(kernel, key, _packed(kernel, matrix), dense) for _ in range(REPEATS - 1)]
            bits = [product.contiguous().view(torch.uint8) for product in (result, second, *repeats)]
            if not all(torch.equal(each, bits[0]) for each in bits):
                return "gives other bits when it is repeated, and deterministic algorithms are asked for"
    return ""


def _check_bias(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product with a bias with the dense one; return what is wrong."""
    with _no_autocast():
        generator = _generator(key)
        matrix, dense = _operands(key, generator)
        bias = 10 * torch.randn(key.rows, dtype=key.dtype, device=key.device, generator=generator)
        result = kernel.linear(_packed(kernel, matrix), dense, bias)
        return _difference(result, GemmKernel().linear(matrix, dense, bias))


def _difference(result: Tensor, expected: Tensor) -> str:
    dtype = torch.promote_types(expected.dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in (result - expected, expected)])
    difference, norm = norms.tolist()
    error = difference / norm
    if not error < TOLERANCE:  # true of NaN
        return f"wrong by {error:.2g} of the dense product, not less than {TOLERANCE:g}"
    return ""


def dense_ms(key: GemmKey, timer: Timer) -> float:
    """Milliseconds of the dense product of the N:M operand as the layer has it."""
    with _no_autocast():
        matrices, others = _copies(key)
        return _milliseconds(timer, key, lambda a, b: _product(GemmKernel(), key, a, b), matrices, others)


def sparse_ms(kernel: GemmKernel, key: GemmKey, timer: Timer) -> tuple[float, float]:
    """Milliseconds of a kernel's product, permuting the dense matrix included, and of packing the N:M operand once.

    The operand to pack is contiguous, so transposed where the layer packs a transposed one. Like the dense product's,
    the times include neither masking nor drawing.
    """
    with _no_autocast():
        product = _product_ms(kernel, key, timer)
        matrices = [matrix.contiguous() for matrix in _copies(key)[0]]
        return product, _milliseconds(timer, key, kernel.pack, matrices)


def _product_ms(kernel: GemmKernel, key: GemmKey, timer: Timer) -> float:
    """Milliseconds of a kernel's product alone: the first time of :func:`sparse_ms`."""
    with _no_autocast():
        matrices, others = _copies(key)
        packs = [_packed(kernel, matrix) for matrix in matrices]
        order = None
        if key.permuted:
            order = torch.randperm(key.depth, generator=torch.Generator().manual_seed(0)).to(key.device)

        def product_of(packed: Tensor, dense: Tensor) -> Tensor:
            return _product(kernel, key, packed, dense if order is None else permuted_columns(dense, order))

        return _milliseconds(timer, key, product_of, packs, others)


def _proposed(kernel: GemmKernel, key: GemmKey, notes: list[str]) -> Iterator[tuple[Algorithm, GemmKernel]]:
    """Yield the proposed algorithms that compute a product right; faults of the others are appended to `notes`."""
    try:
        with _no_autocast():
            matrix, dense = _operands(key, _generator(key))
            algorithms = kernel.algorithms(key.gemm, _packed(kernel, matrix), dense)
    except Exception as error:
        notes.append(f"{kernel.name}: the search for algorithms failed, {describe_error(error)}")
        return
    for algorithm in algorithms:
        other = kernel.with_algorithm(algorithm)
        reason = reason_or_error(partial(check, other, key))
        if not reason and key.gemm == "forward":  # the device's probe checked a bias with the kernel's own algorithm
            reason = reason_or_error(partial(_check_bias, other, key))
        if reason:
            notes.append(f"{kernel.name} ({algorithm}): {reason}")
        else:
            yield algorithm, other


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Neither autograd nor autocast."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _generator(key: GemmKey) -> torch.Generator:
    return torch.Generator(key.device).manual_seed(0)


def _matrix(key: GemmKey, generator: torch.Generator) -> Tensor:
    """A random N:M ``A [rows, depth]`` with the strides of the layer's W or dY: transposed except in the forward."""
    padded = key.depth + -key.depth % key.pattern.m
    matrix = torch.randn(key.rows, padded, dtype=key.dtype, device=key.device, generator=generator)
    matrix = nm_prune(matrix, key.pattern)[:, : key.depth]
    if key.gemm == "wgrad":  # estimates have padded tokens
        matrix = pad(matrix, (0, -key.depth % TOKENS))
    return matrix.contiguous() if key.gemm == "forward" else matrix.t().contiguous().t()


def _dense(key: GemmKey, generator: torch.Generator) -> Tensor:
    shape = (key.depth, key.columns) if key.gemm == "wgrad" else (key.columns, key.depth)
    return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)


def _operands(key: GemmKey, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _matrix(key, generator), _dense(key, generator)


def _copies(key: GemmKey) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of both operands that do not stay in the cache."""
    generator, device = _generator(key), torch.device(key.device)
    matrices, others = (
        [make(key, generator) for _ in range(copies_past_cache(rows * key.depth * key.dtype.itemsize, device))]
        for make, rows in ((_matrix, key.rows), (_dense, key.columns))
    )
    return matrices, others


def _packed(kernel: GemmKernel, matrix: Tensor) -> Tensor:
    return kernel.pack(matrix.contiguous())


def _product(kernel: GemmKernel, key: GemmKey, packed: Tensor, dense: Tensor) -> Tensor:
    return kernel.matmul(packed, dense) if key.gemm == "wgrad" else kernel.linear(packed, dense)


def _milliseconds(timer: Timer, key: GemmKey, function: Callable[..., Tensor], *operands: Sequence[Tensor]) -> float:
    return 1e3 * timer.time(rotated(function, *operands), torch.device(key.device))
