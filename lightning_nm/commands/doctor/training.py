"""A few training steps: which products they make, and how long they take with dense ones."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.commands.doctor.report import Report, report, static_row, summarize
from lightning_nm.kernels import GemmKernel, GemmKey, KernelRegistry
from lightning_nm.kernels.api import Sparsity, bucketed
from lightning_nm.kernels.router import checks
from lightning_nm.kernels.router.cache import Decision
from lightning_nm.kernels.router.router import Product, Router, activate, routing
from lightning_nm.plugins.routing import KernelRouting
from lightning_nm.sparsifier import NMSparsifier

# Optimizer steps. A first step counts the products; those after it run dense.
_WARM_UP = 2
_TIMED = 5

_NOISY = 2.0
"""The longest of some equal steps over the shortest, from which on the machine is called busy."""


@dataclass(frozen=True)
class Observation:
    """The products of a training and the time of its steps, as :func:`watch` returns them.

    Example::

        >>> seen = Observation(counts={}, reuse=1, sparsifiers=(), router=None, step_ms=2.5)
        >>> seen.step_ms
        2.5
    """

    counts: dict[Product, float]  # calls in a step, for the real token counts
    reuse: int  # products that share one pack of a weight
    sparsifiers: tuple[NMSparsifier, ...]
    router: Router | None  # that of the Trainer's precision plugin
    step_ms: float | None  # of an optimizer step with dense products, without waiting for data


class _Counter(Router):
    """Runs every product dense and counts it with its real sizes, as another router would have to decide for it."""

    def __init__(self, deciding: Router) -> None:
        super().__init__("reference", [])
        self.deciding = deciding
        self.convolving = deciding.convolving
        self.counts: Counter[Product] = Counter()

    def takes(self, device: str) -> frozenset[Sparsity]:
        """Return the sparsities that the kernels of the other router take, so that layers offer the same products."""
        return self.deciding.takes(device)

    def active_or_none(self) -> Router:
        """Return this router: it counts although its mode is ``"reference"``."""
        return self

    def kernel(self, product: Product) -> GemmKernel:
        """Return the reference, and count the product."""
        self.counts[product] += 1
        return self.registry.reference


class _Enough(Exception):
    """Ends the training; an exception, so that the hooks for the end of an epoch or a fit do not run."""


class _StepClock(pl.Callback):
    """Measures some steps after the first ones if `timed`, then ends the training."""

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        self.batches = 0
        self.seconds: list[float] = []  # of each measured batch
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock, after the batch was loaded."""
        self._start = _now(pl_module.device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Read the clock after the update of masks, which is part of a step; end the training when it is time."""
        batches_in_step = trainer.accumulate_grad_batches
        unmeasured_steps = 1 + _WARM_UP
        if self.batches >= unmeasured_steps * batches_in_step:
            self.seconds.append(_now(pl_module.device) - self._start)
        self.batches += 1
        if self.batches == batches_in_step:
            self.first_step_ended()
        steps = unmeasured_steps + _TIMED if self.timed else 1
        if self.batches >= steps * batches_in_step:
            raise _Enough

    def first_step_ended(self) -> None:
        """Do nothing; subclasses may switch from counting to measuring."""

    def step_ms(self, batches_in_step: int) -> float | None:
        """Return the median milliseconds of the measured optimizer steps; ``None`` if there is none.

        On stderr it tells if they differ so much that other work on the machine must have disturbed them.
        """
        steps = []
        # A fit that ended early may leave a step without all of its batches: it is left out.
        last_start = len(self.seconds) - batches_in_step
        for start in range(0, last_start + 1, batches_in_step):
            seconds = sum(self.seconds[start : start + batches_in_step])
            steps.append(1e3 * seconds)
        if not steps:
            return None
        shortest, longest = min(steps), max(steps)
        if longest > _NOISY * shortest:
            print(
                f"lightning-nm doctor: equal steps took {shortest:.1f} to {longest:.1f} ms, so other work disturbs the "
                "measurement, and none of the times and gains can be relied on: run it again on an idle machine",
                file=sys.stderr,
            )
        return median(steps)


class _Watch(_StepClock):
    """A clock that also counts the products of the first step."""

    def __init__(self, deciding: Router, timed: bool) -> None:
        super().__init__(timed)
        self.counter = _Counter(deciding)
        self.plugin: KernelRouting | None = None
        self.router: Router | None = None
        self.sparsifiers: tuple[NMSparsifier, ...] = ()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the plugin's router, whose `reuse` is set by now."""
        sparsifiers = [callback.sparsifier for callback in _nm_callbacks(trainer)]
        self.sparsifiers = tuple(sparsifier for sparsifier in sparsifiers if sparsifier)
        plugin = trainer.precision_plugin
        if isinstance(plugin, KernelRouting):
            self.plugin = plugin
            self.router = plugin.router
            # It may have seen a validation, whose products are not those of a step.
            self.router.reset()
        self._route(self.counter)

    def _route(self, router: Router) -> None:
        # A plugin activates its own router around each step, and would replace one activated here.
        if self.plugin is None:
            activate(router.active_or_none())
        else:
            self.plugin.router = router

    def first_step_ended(self) -> None:
        """Run dense products, which are measured."""
        self._route(Router("reference"))

    def observation(self, batches_in_step: int) -> Observation:
        """Return what was counted and measured."""
        # A training shorter than a step was counted in part.
        scale = batches_in_step / min(self.batches, batches_in_step)
        counts = {product: scale * calls for product, calls in self.counter.counts.items()}
        # A weight is packed once for all batches of a step.
        reuse = batches_in_step if self.router is None else self.router.reuse
        return Observation(
            counts=counts,
            reuse=reuse,
            sparsifiers=self.sparsifiers,
            router=self.router,
            step_ms=self.step_ms(batches_in_step),
        )


def _now(device: torch.device) -> float:
    # CUDA runs kernels asynchronously: without waiting for them only their launch is measured.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _nm_callbacks(trainer: pl.Trainer) -> list[NMSparsityCallback]:
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    return [callback for callback in callbacks if isinstance(callback, NMSparsityCallback)]


def router_for(trainer: pl.Trainer, mode: str | None = None) -> Router:
    """Return the router of the Trainer's precision plugin, or a new one of this mode, by default ``"auto"``.

    Raises:
        ValueError: If the plugin has another mode.
    """
    plugin = trainer.precision_plugin
    if not isinstance(plugin, KernelRouting):
        return Router(mode or "auto")
    if mode is not None and mode != plugin.router.kernels:
        plugins = f"the kernels={plugin.router.kernels!r} of the config's plugin"
        raise ValueError(
            f"--kernels {mode} contradicts {plugins}: leave it out, or change the config"
        )
    return plugin.router


def watch(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
    *,
    router: Router | None = None,
    timed: bool = True,
) -> Observation:
    """Train a few steps with dense products: one to count them, two to warm up, five to measure.

    Without ``timed`` only the first. These steps train the model; they end the fit without the hooks of an epoch's end.
    ``router`` is the one that will decide, see :func:`router_for`.

    Raises:
        ValueError: If the Trainer has no NMSparsityCallback, no layer can be masked, or no batch was trained.
    """
    callbacks = _nm_callbacks(trainer)
    if not callbacks:
        advice = "add `class_path: lightning_nm.NMSparsityCallback` under trainer.callbacks"
        raise ValueError(f"there is no NMSparsityCallback among the Trainer's callbacks: {advice}")
    for callback in callbacks:
        callback.show_tables = False  # of a training that ends after a few steps
    watcher = _Watch(router or router_for(trainer), timed)
    try:
        _fit(trainer, model, datamodule, watcher)
    finally:
        # The plugin gets its own router back.
        if watcher.plugin is not None and watcher.router is not None:
            watcher.plugin.router = watcher.router
    return watcher.observation(trainer.accumulate_grad_batches)


def plain_step_ms(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None
) -> float | None:
    """Milliseconds of an optimizer step of a training without masks: as many steps as :func:`watch` makes.

    Raises:
        ValueError: If no batch was trained.
    """
    clock = _StepClock()
    _fit(trainer, model, datamodule, clock)
    return clock.step_ms(trainer.accumulate_grad_batches)


def _fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    clock: _StepClock,
) -> None:
    """Train until the clock ends the training."""
    trainer.callbacks.append(clock)  # type: ignore[attr-defined]  # set by the Trainer, missing in its annotations
    try:
        with routing(None):
            trainer.fit(model, datamodule=datamodule)
    except _Enough:
        pass
    finally:
        trainer.callbacks.remove(clock)  # type: ignore[attr-defined]
    if not clock.batches:
        raise ValueError(
            "the training ended before its first batch: see its max_steps, limit_train_batches and data"
        )


def judge(router: Router, seen: Observation, tokens: Sequence[int] = ()) -> list[Report]:
    """Let a router decide for the products of a training, and report: once, or for each of other token counts.

    Decisions without times, as in mode ``"sparse"``, are measured for the report.
    """
    cases = _cases(seen, tokens)
    # Each product once, in order: token counts may share some.
    products = list(dict.fromkeys(chain.from_iterable(case.counts for case in cases)))
    router.record(products)
    router.tune()
    for product in products:
        if product.reason:
            continue
        key = product.key
        deciding = router.initialize(torch.device(key.device))
        deciding.decide(key)
        bucket = bucketed(key)
        deciding.decisions[bucket] = _timed(router, bucket, deciding.decisions[bucket])
    reports = []
    for case in cases:
        # The measured step had the real tokens, and says nothing of a step with others.
        step_ms = seen.step_ms if case.tokens is None else None
        made = report(
            router, *seen.sparsifiers, counts=case.counts, tokens=case.tokens, step_ms=step_ms
        )
        reports.append(made)
    return reports


def judge_unmeasured(
    router: Router, seen: Observation, tokens: Sequence[int] = (), *, device_type: str | None = None
) -> list[Report]:
    """Report which kernels could run the products of a training on a machine with a GPU; nothing is measured.

    Products of other dtypes count as bfloat16, because GPUs have no 2:4 kernels for them. Kernels that are made for
    CPUs are left out, and with ``device_type`` all that are not made for it.
    """
    if device_type is None:
        kernels = [kernel for kernel in router.registry.backends if kernel.device_type != "cpu"]
    else:
        kernels = [
            kernel for kernel in router.registry.backends if kernel.device_type == device_type
        ]
    make_row = partial(static_row, KernelRegistry(kernels), router.reuse)
    reports = []
    for case in _cases(seen, tokens):
        counts = {_as_16_bit(product): calls for product, calls in case.counts.items()}
        reports.append(summarize(make_row, None, seen.sparsifiers, counts, case.tokens))
    return reports


class _Case(NamedTuple):
    """What one report is about."""

    tokens: int | None  # the assumed token count; None for the real ones
    counts: dict[Product, float]  # calls in a step


def _cases(seen: Observation, tokens: Sequence[int]) -> list[_Case]:
    if not tokens:
        return [_Case(None, seen.counts)]
    return [_Case(count, _with_tokens(seen.counts, count)) for count in tokens]


def _as_16_bit(product: Product) -> Product:
    if product.key.dtype.itemsize == 2:
        return product
    return product._replace(key=replace(product.key, dtype=torch.bfloat16))


def _with_tokens(counts: dict[Product, float], tokens: int) -> dict[Product, float]:
    """The same products for another token count; those that differed in it alone become one."""
    changed: Counter[Product] = Counter()
    for product, calls in counts.items():
        if product.key.gemm == "wgrad":  # contracts over the tokens
            key = replace(product.key, depth=tokens)
        else:
            key = replace(product.key, columns=tokens)
        changed[product._replace(key=key)] += calls  # type: ignore[assignment]  # calls are floats
    return dict(changed)


def _timed(router: Router, key: GemmKey, decision: Decision) -> Decision:
    """A forced decision with the measured times of its kernel, or for a dense one of the first that could run."""
    if decision.source != "forced" or decision.dense_ms is not None:
        return decision
    kernel: GemmKernel | None = router.registry.kernels[decision.kernel]
    if kernel is router.registry.reference:
        deciding = router.initialize(torch.device(key.device))
        kernel = next(deciding.legal(key, []), None)
    if kernel is None:
        return decision
    try:
        sparse_ms, pack_ms = checks.sparse_ms(kernel, key, router.timer)
        dense_ms = checks.dense_ms(key, router.timer)
    except Exception as error:  # of any kernel, such as one out of memory: the report goes on
        return replace(decision, reason=f"{decision.reason}; not measured: {error}")
    return replace(decision, dense_ms=dense_ms, sparse_ms=sparse_ms, pack_ms=pack_ms)
