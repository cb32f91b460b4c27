"""The router: which kernel runs each GEMM of a training, and the report of what ran.

Packs for 2:4 hardware are kept where micro-batches share a step. CPU kernels keep layouts, not values: torch does not
count writes through ``.data``, and gathering values costs no more than checking them. A layout takes 1 byte per kept
weight and direction (``cpu-permute``) or 12 (``cpu-csr``), while masks stand still. CUDA graphs of
``mode="reduce-overhead"`` leave the operators out, because these depend on the phase and on packs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_nm.kernels.api import (
    GemmKernel,
    GemmKey,
    HasHandle,
    bucketed,
    check_mode,
    is_capturing,
    multiply_adds,
    uses_of_pack,
)
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.tuner import (
    DENSE,
    Decision,
    Decisions,
    DeviceTimer,
    KernelRegistry,
    Tuner,
    decisions_file,
    environment_of,
    share,
)

_MOST_CHOSEN = 1 << 14
"""Exact sizes whose kernels are remembered: batches of ever new token counts must not fill the memory."""


class Product(NamedTuple):
    """One GEMM of a layer."""

    layer: str
    key: GemmKey  # its pattern is the layer's if no operand is N:M along the contraction axis
    reason: str = ""  # why the GEMM is always dense; empty if it is not


class Choice(NamedTuple):
    """The sparse kernel that a router chose for a GEMM."""

    kernel: GemmKernel
    key: GemmKey


@dataclass
class GemmUse:
    """Call count of a GEMM (tokens bucketed) on one kernel, and the decision; None if there was nothing to decide."""

    product: Product
    kernel: str
    calls: int = 0
    decision: Decision | None = None


class Router(HasHandle):
    """Chooses a kernel for every GEMM of masked layers while it is active, see :func:`routing`.

    In mode ``"auto"`` the GEMMs of the first batch are dense and recorded; :meth:`tune` then measures them. The
    plugins call it before the first backward pass; without :mod:`torch.distributed` that pass calls it itself. GEMMs
    of new sizes are measured when they first run. While a CUDA graph is captured nothing is measured: GEMMs without
    a decision are dense in it.

    Args:
        kernels: The mode, as :class:`~lightning_nm.kernels.tuner.Tuner`'s.
        backends: The kernels besides the reference; ``None`` takes those of the package.
        file: Where ``"auto"`` keeps measured decisions; ``None`` keeps none, and so does a path in the home directory
            of a user who has none.
        reuse: GEMMs that share one pack of a weight: the micro-batches of an optimizer step. From 2 on packs for
            2:4 hardware are kept until the weight or its masks change: 1.125 bytes for each weight, GEMM and 16-bit
            dtype. Call :meth:`release` if a weight is written through ``.data`` within a step: torch does not count
            such writes. CPU kernels read the values of a weight for every GEMM, and need no call.
        budget_s: Seconds that :meth:`tune` may take. GEMMs that it leaves out are dense, with a warning.
        timer: Measures for ``"auto"``, as the default does; tests pass recorded times.

    Raises:
        ValueError: If the mode is unknown or two kernels have one name.

    Example::

        >>> from lightning_nm import NMSparsifier
        >>> class Mine(GemmKernel):
        ...     name = "mine"
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> sparsifier = NMSparsifier(model, "2:4", "ste", skip_first_last=False).attach()
        >>> router = Router("sparse", backends=[Mine()])
        >>> with routing(router):
        ...     y = model(torch.randn(16, 32))
        >>> [(used.product.layer, used.product.key.gemm, used.kernel) for used in router.used()]
        [('0', 'forward', 'mine'), ('2', 'forward', 'mine')]
    """

    def __init__(
        self,
        kernels: str = "auto",
        backends: Sequence[GemmKernel] | None = None,
        file: str | os.PathLike[str] | None = None,
        reuse: int = 1,
        budget_s: float = 60.0,
        timer: DeviceTimer | None = None,
    ) -> None:
        check_mode(kernels)
        if not isinstance(budget_s, (int, float)) or budget_s < 0:
            raise ValueError(f"budget_s={budget_s!r} must be a number of seconds, at least 0")
        self.kernels = kernels
        self.registry = KernelRegistry(backends)
        self.file = decisions_file(file)
        self.reuse = reuse
        self.keeps_layouts = True
        """Whether layouts of masks are kept between GEMMs; they take memory for whole weights."""
        self.budget_s = budget_s
        self.timer = timer or DeviceTimer()
        self.reset()

    def reset(self, reuse: int | None = None) -> None:
        """Clear usage statistics and packs for a new training, perhaps with another `reuse`; saved decisions stay."""
        self.reuse = reuse or self.reuse
        # The tuner needs a device, which is known when the first GEMM runs, see `initialize`.
        self.tuner: Tuner | None = None
        self.unavailable_reason = ""
        """Why no sparse kernel works on the device, once that is known."""
        self.all_dense = False
        """Whether :meth:`deactivate_if_all_dense` ended routing, because no GEMM is faster sparse."""
        self.registry.failures.clear()
        # The other modes measure nothing: they decide in the first batch already.
        self.tuned = self.kernels != "auto"

        # What `tune` found.
        self._none_sparse = False
        self._tuned_keys: list[GemmKey] = []
        # From the first process, before a tuner was made here.
        self._received: Decisions | None = None

        # A dict instead of a set: it keeps the order of the GEMMs.
        self._recorded: dict[Product, None] = {}
        # For GEMMs of one exact size, with the terms of the choice; the use is shared by all sizes of a bucket.
        self._chosen: dict[tuple[Product, Hashable], tuple[Choice | None, GemmUse]] = {}
        # By the bucketed GEMM and the kernel's name.
        self._uses: dict[tuple[Product, str], GemmUse] = {}
        self.convolving = frozenset(
            kernel.device_type for kernel in self.registry.backends if kernel.convolutions
        )
        """The types of devices on which a kernel may take convolutions; the empty one stands for every type."""
        # For each layer, by name: a stamp, and choices or an operand. Weak, so that a pack ends with its layer.
        self._packs: WeakKeyDictionary[Any, dict[Hashable, tuple[Hashable, Any]]]
        self._packs = WeakKeyDictionary()

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
            known = Decisions.load(self.file if self.kernels == "auto" else None, environment)
            # The cost of packing is spread over `reuse` GEMMs only where packs are kept.
            reuse = self.pack_reuse(str(device))
            self.tuner = Tuner(self.kernels, self.registry, known, self.timer, reuse=reuse)
            # `tune` shared them before a GEMM ran here, so before the device was known.
            if self._received is not None:
                self.tuner.take_over(self._received)
            self.unavailable_reason = self.registry.unavailable_reason(str(device))
        return self.tuner

    def choose(
        self,
        owner: Any,
        name: Hashable,
        stamp: tuple[Hashable, ...],
        products: Callable[[], Sequence[Product]],
    ) -> list[Choice | None]:
        """Choose the kernels of GEMMs that are about to run, and count the calls; ``None`` is the dense GEMM.

        Args:
            owner: The layer.
            name: Of these GEMMs among those of the layer.
            stamp: All that the GEMMs depend on.
            products: Makes them. It is called again only if the stamp has changed since the last call.
        """
        # A choice also holds until a kernel fails or determinism is switched.
        deterministic = torch.are_deterministic_algorithms_enabled()
        terms = self.tuned, len(self.registry.failures), deterministic

        def choose() -> tuple[list[Choice | None], list[GemmUse]]:
            found = [self._choose(product, terms) for product in products()]
            return [choice for choice, _ in found], [use for _, use in found]

        # Most calls repeat the last one of the layer: then no key is made or hashed.
        choices, uses = self.kept(owner, name, (terms, stamp), choose)
        for use in uses:
            use.calls += 1
        return choices

    def _choose(self, product: Product, terms: Hashable) -> tuple[Choice | None, GemmUse]:
        """Choose the kernel of a GEMM, and remember it unless the choice is for the moment."""
        known = self._chosen.get((product, terms))
        if known is not None:
            return known
        decision = None
        kernel = self.registry.reference
        # A capture must not measure: GEMMs without a decision are dense in it. So are those before `tune`.
        lasting = not is_capturing() and (self.tuned or bool(product.reason))
        if lasting and not product.reason:
            decision = self.initialize(torch.device(product.key.device)).decide(product.key)
            kernel = self.registry.find(decision.kernel)
        # Counted by bucket, as decisions are: otherwise each token count would be a row of the report.
        bucket = product._replace(key=bucketed(product.key))
        use = self._uses.setdefault((bucket, kernel.name), GemmUse(bucket, kernel.name))
        # Set again: a GEMM that ran dense before `tune` has a decision since.
        use.decision = decision
        is_dense = kernel is self.registry.reference
        choice = None if is_dense else Choice(kernel, product.key)
        if lasting:
            if len(self._chosen) >= _MOST_CHOSEN:
                # Dropped as a whole: choosing again from known decisions measures nothing.
                self._chosen.clear()
            self._chosen[product, terms] = choice, use
        return choice, use

    def tune_if_single(self) -> None:
        """Call :meth:`tune`, unless other processes have to take part or a CUDA graph is captured."""
        if not self.tuned and not is_capturing() and not _distributed():
            self.tune()

    def record(self, products: Sequence[Product]) -> None:
        """Record the GEMMs of a batch, for :meth:`tune`."""
        if not self.tuned:
            self._recorded.update(dict.fromkeys(products))

    def tune(self) -> None:
        """Measure the recorded GEMMs, once; the first process measures for all.

        With :mod:`torch.distributed` initialised, every process must call this at the same point.
        """
        if self.tuned:
            return
        self.tuned = True
        # Once for each layer: a GEMM of many layers is worth more in the order of measurement.
        keys = [product.key for product in self._recorded if not product.reason]
        self._recorded.clear()
        try:
            if keys:
                device = torch.device(keys[0].device)
                tuner = self.initialize(device)
                if _measures():
                    tuner.tune(keys, self.budget_s)
                    if device.type == "cuda":
                        torch.cuda.empty_cache()  # the operands of the checks
                    # At once, so that a training that is killed leaves its measurements.
                    self.save()
        # Also after an error: other processes wait for the decisions. A process without GEMMs takes part.
        finally:
            self._share_decisions()
            if self.tuner is not None and keys:
                # Those of an earlier call may come again: a dense gradient in every second step has other GEMMs.
                self._tuned_keys = list(dict.fromkeys([*self._tuned_keys, *keys]))
                decisions = [self.tuner.decisions.get(key) for key in self._tuned_keys]
                # A postponed GEMM counts as dense: it stays so until a later `tune` measures it.
                self._none_sparse = all(found and found.kernel == DENSE for found in decisions)
                self._warn_of_postponed(self.tuner)

    def _share_decisions(self) -> None:
        """Take over the decisions of the first process; those that it does not have stay."""
        if self.tuner is not None:
            self.tuner.take_over(share(self.tuner.decisions))
        else:
            # The broadcast needs every process. The environment is a stand-in, because the device is not known yet.
            received = share(Decisions(environment_of(torch.device("cpu"))))
            # Without decisions it is the stand-in itself, under whose environment a GPU's would be saved.
            self._received = received or None

    def _warn_of_postponed(self, tuner: Tuner) -> None:
        """Say which part of the GEMMs is dense because it was not measured yet."""
        decided = {key: tuner.decisions.get(key) for key in self._tuned_keys}
        postponed = [key for key, found in decided.items() if found and found.source == "postponed"]
        if not postponed:
            return
        work = sum(map(multiply_adds, self._tuned_keys))
        part = sum(map(multiply_adds, postponed)) / work
        warnings.warn(
            f"{len(postponed)} of {len(self._tuned_keys)} GEMMs, {part:.0%} of their multiply-adds, were not "
            f"measured within budget_s={self.budget_s:g}: they run dense in this training; the next one measures more, "
            "and a larger budget_s all at once",
            stacklevel=2,
        )

    def tune_again(self) -> None:
        """Record and measure the next batch's GEMMs, since it may have new ones. Decisions so far stay."""
        if self.kernels == "auto":
            self.tuned = False
            self.all_dense = False
            self._none_sparse = False
            # The terms of old choices return when `tuned` is set again: a postponed GEMM would be found there as dense.
            self._chosen.clear()
            self._packs.clear()  # with the choices among them

    def deactivate_if_all_dense(self) -> None:
        """Go inactive until the next :meth:`reset` if :meth:`tune` found no GEMM that is faster sparse.

        Not where Triton masks weights: an active router's dense GEMMs have them masked in one pass, and an MLP of 7B
        sizes on an H200 took 24.2 ms without, 21.8 ms with it (``benchmarks/results/gpu``).
        The plugins call it after an optimizer step, when no backward pass is pending: a checkpointed forward pass must
        be recomputed by the same kernels.
        """
        if not self._none_sparse or self.all_dense or self.tuner is None:
            return
        if any(triton_use.runs_on(torch.device(key.device)) for key in self._tuned_keys):
            return
        self.all_dense = True
        # GEMMs that ran before they were measured, for the report. A copy: another thread may run a GEMM.
        for use in list(self._uses.values()):
            if use.decision is None and not use.product.reason:
                use.decision = self.tuner.decisions.get(use.product.key)

    def save(self) -> None:
        """Add new measurements to the file, if there is one; a file that cannot be written gives a warning."""
        if self.tuner is not None:
            self.tuner.decisions.keep(self.file)

    def convolves(self, device_type: str) -> bool:
        """Whether a kernel may take convolutions on a type of device; compiled code asks, too."""
        return device_type in self.convolving or "" in self.convolving

    def active_or_none(self) -> Router | None:
        """Return this router, or ``None`` if every GEMM is dense: layers then run, and compile, as without a router.

        That is so in mode ``"reference"``, if no sparse kernel works, and if none is faster, see
        :meth:`deactivate_if_all_dense`.
        """
        if self.kernels == "reference" or self.unavailable_reason or self.all_dense:
            return None
        return self

    # ----------------------------------------------------------------------------------------------- GEMMs

    def pack_reuse(self, device: str) -> int:
        """Count the GEMMs that share one pack of a weight on a device: 1 if its kernels keep no packs."""
        keeps = any(kernel.keeps_packs for kernel in self.registry.made_for(device))
        return self.reuse if keeps else 1

    def kept(self, owner: Any, name: Hashable, stamp: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the same owner, a layer, name and stamp before, or now.

        Only what was made last is kept under a name: a stamp that comes back finds nothing.
        """
        # A replayed graph would use the pack of the capture. Written out: this runs several times for every layer.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return make()
        packs = self._packs.setdefault(owner, {})
        known = packs.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        # A pack that is out of date is freed before another is made, and not left if that fails.
        packs.pop(name, None)
        made = make()
        packs[name] = (stamp, made)
        return made

    def release(self) -> None:
        """Free every pack, and save what was measured since :meth:`tune`, in the first process."""
        self._packs.clear()
        if _measures():
            self.save()

    # ------------------------------------------------------------------------------------------------- report

    def used(self) -> list[GemmUse]:
        """GEMMs that ran since the last :meth:`reset`, in the order of first use."""
        # A copy: another thread may run a GEMM.
        return [use for use in list(self._uses.values()) if use.calls]

    def sparse_share(self) -> tuple[float, str]:
        """Return the fraction of masked layers' GEMM time on sparse kernels, and its basis.

        Times are the measured ones; a GEMM without one takes the mean rate of the others by its multiply-adds. If
        nothing was measured, the fraction is one of dense multiply-adds.
        """
        used = self.used()
        measured = [
            (use.decision.dense_ms, multiply_adds(use.product.key))
            for use in used
            if use.decision is not None and use.decision.dense_ms
        ]
        # Milliseconds per multiply-add. Without any measurement the unit of time is one multiply-add.
        rate = 1.0
        basis = "dense multiply-adds"
        if measured:
            dense_times, dense_work = zip(*measured, strict=True)
            rate = sum(dense_times) / sum(dense_work)
            basis = "measured times"
        total = 0.0
        sparse = 0.0
        for use in used:
            key, decision = use.product.key, use.decision
            on_sparse = use.kernel != DENSE
            cost = multiply_adds(key) * rate
            if decision is not None and decision.dense_ms:
                cost = decision.dense_ms
                if on_sparse and decision.sparse_ms is not None and decision.pack_ms is not None:
                    uses = uses_of_pack(key, self.pack_reuse(key.device))
                    # These are the times of the best sparse kernel, which is the chosen one here.
                    cost = decision.sparse_ms + decision.pack_ms / uses
            total += use.calls * cost
            if on_sparse:
                sparse += use.calls * cost
        # Nothing ran, or nothing but empty GEMMs.
        if not total:
            return 0.0, basis
        return sparse / total, basis


def _distributed() -> bool:
    """Whether other processes train the same model."""
    return dist.is_available() and dist.is_initialized()


def _measures() -> bool:
    """Whether this process measures: the first of several."""
    return not _distributed() or dist.get_rank() == 0


_active: Router | None = None


def active() -> Router | None:
    """Return the router that masked layers use now."""
    return _active


def activate(router: Router | None) -> Router | None:
    """Make a router the one that masked layers use; return the previous one."""
    global _active  # not per thread: backward passes of other threads recompute checkpointed forward passes
    before = _active
    _active = router
    return before


@contextmanager
def routing(router: Router | None) -> Generator[None, None, None]:
    """Run the GEMMs of masked layers by a router, or dense if it is ``None``.

    A backward pass uses the router of its forward pass, wherever it runs.
    """
    before = activate(router)
    try:
        yield
    finally:
        activate(before)
