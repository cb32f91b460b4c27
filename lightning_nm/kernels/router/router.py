"""The router: which kernel runs each product of a training, and the report of what ran."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_nm.kernels.api import (
    GemmKernel,
    GemmKey,
    Sparsity,
    bucketed,
    check_mode,
    multiply_adds,
    refuse_removed,
    uses_of_pack,
)
from lightning_nm.kernels.router.cache import (
    Decision,
    Decisions,
    decisions_file,
    environment_of,
    share,
)
from lightning_nm.kernels.router.handles import HasHandle
from lightning_nm.kernels.router.registry import KernelRegistry, describe_error
from lightning_nm.kernels.router.timing import DeviceTimer, Timer
from lightning_nm.kernels.router.tuner import Tuner

Result = TypeVar("Result")

_MOST_KNOWN = 1 << 14

LATER_SHARE = 0.05
"""Share of the time after :meth:`Router.tune` in which the products that it left out are measured."""

LATER_STEPS = 16
"""Optimizer steps between two such measurements where several processes wait for each."""


class Product(NamedTuple):
    """One GEMM of a layer."""

    layer: str
    key: GemmKey  # its pattern is the layer's if no operand is N:M along the contraction axis
    reason: str = ""  # why the product is always dense; empty if it is not


class Used(NamedTuple):
    """How often a product ran on a kernel, and the decision for it; None if there was nothing to decide."""

    product: Product
    kernel: str
    calls: int
    decision: Decision | None


@dataclass
class _Uses:
    """Calls of a product, its tokens bucketed, on a kernel, and the decision for it."""

    calls: int = 0
    decision: Decision | None = None


class _Settled(NamedTuple):
    """The kernel of a product of one exact size; it holds until a kernel fails or determinism is switched."""

    kernel: GemmKernel
    uses: _Uses
    validity: tuple[int, bool]


class Router(HasHandle):
    """Chooses a kernel for every product of masked layers while it is active, see :func:`routing`.

    In mode ``"auto"`` the products of the first batch are dense and recorded; :meth:`tune` then measures them. The
    plugins call it before the first backward pass; without :mod:`torch.distributed` that pass calls it itself. Products
    of new sizes are measured when they first run. While a CUDA graph is captured nothing is measured: products without
    a decision are dense in it.

    Args:
        kernels: The mode, as :class:`~lightning_nm.kernels.router.tuner.Tuner`'s.
        backends: The kernels besides the reference; ``None`` takes those of the package.
        file: Where ``"auto"`` keeps measured decisions; ``None`` keeps none, and so does a path in the home directory
            of a user who has none.
        reuse: Products that share one pack of a weight: the micro-batches of an optimizer step. From 2 on packs for
            2:4 hardware are kept until the weight or its masks change: 1.125 bytes for each weight, GEMM and 16-bit
            dtype. Call :meth:`release` if a weight is written through ``.data`` within a step: torch does not count
            such writes. CPU kernels read the values of a weight for every product, and need no call.
        budget_s: Seconds that :meth:`tune` may take. Products that it leaves out are dense, with a warning, until
            :meth:`measure_more` has measured them.
        timer: Measures for ``"auto"``; :class:`~lightning_nm.kernels.router.timing.DeviceTimer` by default.

    Raises:
        TypeError: If an argument is unknown, or was removed: the error names the replacement.
        ValueError: If the mode is unknown or two kernels have one name.

    Example::

        >>> from lightning_nm import NMSparsifier
        >>> from lightning_nm.kernels import SimulatedSparseKernel
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> sparsifier = NMSparsifier(model, skip_first_last=False).attach()
        >>> router = Router("sparse", backends=[SimulatedSparseKernel()])
        >>> with routing(router):
        ...     y = model(torch.randn(16, 32))
        >>> [(used.product.layer, used.product.key.gemm, used.kernel) for used in router.used()]
        [('0', 'forward', 'simulated'), ('2', 'forward', 'simulated')]
    """

    def __init__(
        self,
        kernels: str = "auto",
        backends: Sequence[GemmKernel] | None = None,
        file: str | os.PathLike[str] | None = None,
        reuse: int = 1,
        budget_s: float = 60.0,
        timer: Timer | None = None,
        **removed: Any,
    ) -> None:
        refuse_removed("Router", removed)
        check_mode(kernels)
        if not isinstance(budget_s, (int, float)) or budget_s < 0:
            raise ValueError(f"budget_s={budget_s!r} must be a number of seconds, at least 0")
        self.kernels = kernels
        self.registry = KernelRegistry(backends)
        self.file = decisions_file(file)
        self.reuse = reuse
        self.keeps_layouts = True
        """Whether layouts of masks are kept between products; they take memory for whole weights."""
        self.budget_s = budget_s
        self.timer = timer or DeviceTimer()
        self.reset()

    def reset(self, reuse: int | None = None) -> None:
        """Forget what ran and every pack, for a new training and perhaps `reuse`; decisions stay in their file."""
        self.reuse = reuse or self.reuse
        self.tuner: Tuner | None = None
        self.unavailable_reason = ""
        """Why no sparse kernel works on the device, once that is known."""
        self.all_dense = False
        """Whether :meth:`settle` ended routing, because no product is faster sparse."""
        self._none_sparse = False
        self._tuned_at = self._later_s = 0.0
        self._later_steps = 0
        # The same in all processes: they measure together or not at all.
        self._postponed_left = False
        # From the first process, before a tuner was made here.
        self._received: Decisions | None = None
        self.registry.failures.clear()
        self.tuned = self.kernels != "auto"
        self._tuned_keys: list[GemmKey] = []
        self._recorded: dict[Product, None] = {}
        self._known: dict[Product, _Settled] = {}
        self._fastest: dict[Hashable, int] = {}
        self._takes: dict[str, frozenset[Sparsity]] = {}
        self.convolving = frozenset(k.device_type for k in self.registry.backends if k.convolutions)
        """The types of devices on which a kernel may take convolutions; the empty one stands for every type."""
        self._uses: dict[tuple[Product, str], _Uses] = {}
        self._packs: WeakKeyDictionary[Any, dict[Hashable, tuple[Hashable, Any]]] = (
            WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: decisions and packs belong to this process and its device."""
        settings = ("kernels", "registry", "file", "reuse", "budget_s", "timer", "keeps_layouts")
        return {name: self.__dict__[name] for name in settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.reset()

    # ------------------------------------------------------------------------------------------------ choosing

    def initialize(self, device: torch.device) -> Tuner:
        """Load known decisions and probe the kernels on a device, once."""
        if self.tuner is None:
            environment = environment_of(device)
            file = self.file if self.kernels == "auto" else None
            known = Decisions.load(file, environment) if file else Decisions(environment)
            self._saved = {key for key, decision in known.items() if decision.source == "measured"}
            reuse = self.pack_reuse(str(device))
            self.tuner = Tuner(self.kernels, self.registry, known, self.timer, reuse=reuse)
            if self._received is not None:
                self.tuner.take_over(self._received)
            self.unavailable_reason = self.registry.unavailable_reason(str(device))
        return self.tuner

    def kernel(self, product: Product) -> GemmKernel:
        """Return the kernel for a product that is about to run, and count the call."""
        validity = len(self.registry.failures), torch.are_deterministic_algorithms_enabled()
        known = self._known.get(product)
        if known is None or known.validity != validity:
            known = self._settle(product, validity)
        known.uses.calls += 1
        return known.kernel

    def _settle(self, product: Product, validity: tuple[int, bool]) -> _Settled:
        decision = None
        # A capture must not measure: products without a decision are dense in it.
        keep = not _capturing() and (self.tuned or bool(product.reason))
        if keep and not product.reason:
            decision = self.initialize(torch.device(product.key.device)).decide(product.key)
        kernel = self.registry.kernels[decision.kernel] if decision else self.registry.reference
        if decision and decision.algorithm is not None:
            kernel = kernel.with_algorithm(decision.algorithm)
        bucket = product._replace(key=bucketed(product.key))
        uses = self._uses.setdefault((bucket, kernel.name), _Uses())
        uses.decision = decision
        settled = _Settled(kernel, uses, validity)
        if keep:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[product] = settled
        return settled

    def tune_if_single(self) -> None:
        """Call :meth:`tune`, unless other processes have to take part or a CUDA graph is captured."""
        if not self.tuned and not _capturing() and not _distributed():
            self.tune()

    def record(self, products: Sequence[Product]) -> None:
        """Record the products of a batch, for :meth:`tune`."""
        if not self.tuned:
            self._recorded.update(dict.fromkeys(products))

    def tune(self) -> None:
        """Measure the recorded products, once; the first process measures for all.

        With :mod:`torch.distributed` initialised, every process must call this at the same point.
        """
        if self.tuned:
            return
        self.tuned = True
        products = [product for product in self._recorded if not product.reason]
        self._recorded.clear()
        try:
            if products:
                device = torch.device(products[0].key.device)
                tuner = self.initialize(device)
                if _measures():
                    tuner.tune([product.key for product in products], self.budget_s)
                    if device.type == "cuda":
                        torch.cuda.empty_cache()  # the operands of the checks
                    self.save()
        finally:  # other processes wait for the decisions, and a process without products takes part
            self._share_decisions()
            if self.tuner is not None and products:
                self._tuned_at, self._later_s = time.monotonic(), 0.0
                self._tuned_keys = list(dict.fromkeys(product.key for product in products))
                self._look_at_decisions(self.tuner)
                self._warn_of_postponed(self.tuner)

    def _share_decisions(self) -> None:
        """Take over the decisions of the first process; those that it does not have stay."""
        own = (
            self.tuner.decisions
            if self.tuner is not None
            else Decisions(environment_of(torch.device("cpu")))
        )
        shared = share(own)
        self._postponed_left = bool(shared.postponed())
        if self.tuner is not None:
            self.tuner.take_over(shared)
        else:
            self._received = shared

    def _look_at_decisions(self, tuner: Tuner) -> None:
        """See whether all products of the first batch were measured, and none is faster sparse."""
        found = [tuner.decisions.get(key) for key in self._tuned_keys]
        reference = self.registry.reference.name
        self._none_sparse = all(
            decision is not None and decision.kernel == reference and decision.source != "postponed"
            for decision in found
        )

    def _warn_of_postponed(self, tuner: Tuner) -> None:
        """Say which part of the products is dense because it was not measured yet."""
        postponed = [key for key in self._tuned_keys if _is_postponed(tuner, key)]
        if not postponed:
            return
        share = sum(map(multiply_adds, postponed)) / sum(map(multiply_adds, self._tuned_keys))
        warnings.warn(
            f"{len(postponed)} of {len(self._tuned_keys)} products, {share:.0%} of their multiply-adds, were not "
            f"measured within budget_s={self.budget_s:g}: they run dense until they are measured between steps, in "
            f"{LATER_SHARE:.0%} of the time; a larger budget_s measures them at once",
            stacklevel=2,
        )

    def measure_more(self) -> None:
        """Measure one more of the products that :meth:`tune` left out, if it is time for that.

        The plugins call this after each optimizer step, when no forward pass waits for its backward pass. In all, 5 %
        of the time since :meth:`tune` is spent so. With :mod:`torch.distributed` every process must call it after the
        same steps; the first one measures for all, after every sixteenth step.
        """
        if not self._postponed_left or not self.tuned or _capturing():
            return
        self._later_steps += 1
        start = time.monotonic()
        if _distributed():
            if self._later_steps % LATER_STEPS:
                return
        elif self._later_s > LATER_SHARE * (start - self._tuned_at):
            return
        try:
            if self.tuner is not None and _measures():
                self.tuner.measure_next()
                self.save()
        finally:  # other processes wait for the decision
            self._share_decisions()
            self._known.clear()
            if self.tuner is not None:
                self._look_at_decisions(self.tuner)
            self._later_s += time.monotonic() - start

    def tune_again(self) -> None:
        """Record and measure the next batch's products: layers came in. Decisions so far stay."""
        if self.kernels == "auto":
            self.tuned = self.all_dense = self._none_sparse = False
            self._known.clear()

    def settle(self) -> None:
        """Go inactive until the next :meth:`reset` if :meth:`tune` found no product that is faster sparse.

        The plugins call it after an optimizer step, when no backward pass is pending: a checkpointed forward pass must
        be recomputed by the same kernels.
        """
        if not self._none_sparse or self.all_dense or self.tuner is None:
            return
        self.all_dense = True
        for (product, _), uses in list(
            self._uses.items()
        ):  # those that ran before they were measured
            if uses.decision is None and not product.reason:
                uses.decision = self.tuner.decisions.get(product.key)

    def save(self) -> None:
        """Add new measurements to the file, if there is one; a file that cannot be written gives a warning."""
        if self.kernels != "auto" or self.file is None or self.tuner is None:
            return
        decisions = self.tuner.decisions
        measured = {key for key, decision in decisions.items() if decision.source == "measured"}
        if measured <= self._saved:
            return
        try:
            decisions.save(self.file)
        except (OSError, ValueError) as error:  # no reason to end a training
            message = f"the choice of kernels is not kept and will be measured again next time: {describe_error(error)}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._saved |= measured

    def takes(self, device: str) -> frozenset[Sparsity]:
        """What may be sparse in products on a device for a kernel to take them.

        An N:M operand always: if no kernel takes it, the decision says why.
        """
        if device not in self._takes:
            found = frozenset() if self.kernels == "reference" else self.registry.takes(device)
            self._takes[device] = found | {"n:m"}
        return self._takes[device]

    def convolves(self, device_type: str) -> bool:
        """Whether a kernel may take convolutions on a type of device; compiled code asks, too."""
        return device_type in self.convolving or "" in self.convolving

    def active_or_none(self) -> Router | None:
        """Return this router, or ``None`` if every product is dense: layers then run, and compile, as without a router.

        That is so in mode ``"reference"``, if no sparse kernel works, and if none is faster, see :meth:`settle`.
        """
        return (
            None
            if self.kernels == "reference" or self.unavailable_reason or self.all_dense
            else self
        )

    # ----------------------------------------------------------------------------------------------- products

    def pack_reuse(self, device: str) -> int:
        """Count the products that share one pack of a weight on a device: 1 if its kernels keep no packs."""
        keeps = any(kernel.keeps_packs for kernel in self.registry.made_for(device))
        return self.reuse if keeps else 1

    def packed(self, owner: Any, name: Hashable, stamp: Hashable, make: Callable[[], Any]) -> Any:
        """Return a packed operand; it is kept for its owner, a layer, and reused while `stamp` stays the same."""
        return self._kept(owner, name, stamp, make) if self.reuse > 1 else make()

    def layout(self, owner: Any, name: Hashable, stamp: Hashable, make: Callable[[], Any]) -> Any:
        """Return what a packed operand has of a mask; it is kept while `stamp`, the state of the masks, is the same."""
        return self._kept(owner, name, stamp, make) if self.keeps_layouts else make()

    def _kept(self, owner: Any, name: Hashable, stamp: Hashable, make: Callable[[], Any]) -> Any:
        if _capturing():  # a replayed graph would use the pack of the capture
            return make()
        packs = self._packs.setdefault(owner, {})
        kept = packs.get(name)
        if kept is None or kept[0] != stamp:
            packs.pop(name, None)  # its memory is free for the next
            packs[name] = kept = (stamp, make())
        return kept[1]

    def pick_fastest(
        self, name: Hashable, ways: Sequence[Callable[[], Result]], device: torch.device
    ) -> Callable[[], Result]:
        """Return the fastest of several functions with the same result, or the first unless ``"auto"`` on a GPU."""
        if name not in self._fastest:
            if self.kernels != "auto" or device.type != "cuda" or _capturing():
                return ways[0]
            times = [self.timer.time(way, device) for way in ways]
            self._fastest[name] = times.index(min(times))
        return ways[self._fastest[name]]

    def release(self) -> None:
        """Free every pack, and save what was measured since :meth:`tune`, in the first process."""
        self._packs.clear()
        if _measures():
            self.save()

    # ------------------------------------------------------------------------------------------------- report

    def used(self) -> list[Used]:
        """Products that ran since the last :meth:`reset`, in the order of first use, their tokens bucketed."""
        ran = list(self._uses.items())  # a copy: another thread may run a product
        return [
            Used(product, kernel, uses.calls, uses.decision)
            for (product, kernel), uses in ran
            if uses.calls
        ]

    def sparse_share(self) -> tuple[float, str]:
        """Return the share of masked layers' GEMM time on sparse kernels, and its basis.

        Times are the measured ones; a product without one takes the mean rate of the others by its multiply-adds. If
        nothing was measured, the share is one of dense multiply-adds.
        """
        used = self.used()
        timed = [
            (u.decision.dense_ms, u.product.key) for u in used if u.decision and u.decision.dense_ms
        ]
        rate = (
            sum(ms for ms, _ in timed) / sum(multiply_adds(key) for _, key in timed)
            if timed
            else None
        )
        sparse = total = 0.0
        for product, kernel, calls, decision in used:
            time = multiply_adds(product.key) * (rate or 1.0)
            on_sparse = kernel != self.registry.reference.name
            if rate and decision and decision.dense_ms:
                time = decision.dense_ms
                if on_sparse and decision.sparse_ms is not None and decision.pack_ms is not None:
                    time = decision.sparse_ms + decision.pack_ms / uses_of_pack(
                        product.key.gemm, self.pack_reuse(product.key.device)
                    )
            total += calls * time
            sparse += calls * time * on_sparse
        return (sparse / total if total else 0.0), (
            "measured times" if rate else "dense multiply-adds"
        )


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _measures() -> bool:
    """Whether this process measures: the first of several."""
    return not _distributed() or dist.get_rank() == 0


def _is_postponed(tuner: Tuner, key: GemmKey) -> bool:
    decision = tuner.decisions.get(key)
    return decision is not None and decision.source == "postponed"


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_active: Router | None = None


def active() -> Router | None:
    """Return the router that masked layers use now."""
    return _active


def activate(router: Router | None) -> Router | None:
    """Make a router the one that masked layers use; return the previous one."""
    global _active  # not per thread: backward passes of other threads recompute checkpointed forward passes
    before, _active = _active, router
    return before


@contextmanager
def routing(router: Router | None) -> Generator[None, None, None]:
    """Run the products of masked layers by a router, or dense if it is ``None``.

    A backward pass uses the router of its forward pass, wherever it runs.
    """
    before = activate(router)
    try:
        yield
    finally:
        activate(before)
