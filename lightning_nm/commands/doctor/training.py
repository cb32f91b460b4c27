"""A few training steps: which products they make, and how long they take with dense ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

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

_WARM_UP, _TIMED = 2, 5


@dataclass(frozen=True)
class Observation:
    """The products of a training and the time of its steps."""

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
        """What the kernels of the other router take."""
        return self.deciding.takes(device)

    def active_or_none(self) -> Router:
        """This router: it counts although its mode is ``"reference"``."""
        return self

    def kernel(self, product: Product) -> GemmKernel:
        """The reference."""
        self.counts[product] += 1
        return self.registry.reference


class _Enough(Exception):
    """Ends the training; an exception, so that the hooks for the end of an epoch or a fit do not run."""


class _StepClock(pl.Callback):
    """Measures some steps after the first ones if `timed`, then ends the training."""

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        self.batches = 0
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock."""
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
        step = trainer.accumulate_grad_batches
        if self.batches >= (1 + _WARM_UP) * step:
            self.seconds.append(_now(pl_module.device) - self._start)
        self.batches += 1
        if self.batches == step:
            self.first_step_ended()
        if self.batches >= ((1 + _WARM_UP + _TIMED) if self.timed else 1) * step:
            raise _Enough

    def first_step_ended(self) -> None:
        """Does nothing here."""

    def step_ms(self, step: int) -> float | None:
        """Median milliseconds of the measured steps, with so many batches in a step; ``None`` if there is none."""
        starts = range(0, len(self.seconds) - step + 1, step)
        steps = [1e3 * sum(self.seconds[start : start + step]) for start in starts]
        return median(steps) if steps else None


class _Watch(_StepClock):
    """Counts the products of the first step, too."""

    def __init__(self, deciding: Router, timed: bool) -> None:
        super().__init__(timed)
        self.counter = _Counter(deciding)
        self.plugin: KernelRouting | None = None
        self.router: Router | None = None
        self.sparsifiers: tuple[NMSparsifier, ...] = ()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the plugin's router, whose `reuse` is set by now."""
        self.sparsifiers = tuple(
            callback.sparsifier for callback in _nm_callbacks(trainer) if callback.sparsifier
        )
        plugin = trainer.precision_plugin
        if isinstance(plugin, KernelRouting):
            self.plugin, self.router = plugin, plugin.router
            self.router.reset()  # it may have seen a validation, whose products are not those of a step
        self._route(self.counter)

    def _route(self, router: Router) -> None:
        if self.plugin is None:
            activate(router.active_or_none())
        else:
            self.plugin.router = router

    def first_step_ended(self) -> None:
        """Run dense products, which are measured."""
        self._route(Router("reference"))

    def observation(self, step: int) -> Observation:
        """The result, with so many batches in a step."""
        scale = step / min(self.batches, step)
        return Observation(
            {product: scale * calls for product, calls in self.counter.counts.items()},
            step if self.router is None else self.router.reuse,
            self.sparsifiers,
            self.router,
            self.step_ms(step),
        )


def _now(device: torch.device) -> float:
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
    if mode not in (None, plugin.router.kernels):
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
        callback.show_tables = False
    watcher = _Watch(router or router_for(trainer), timed)
    try:
        _fit(trainer, model, datamodule, watcher)
    finally:
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
    products = list(dict.fromkeys(product for _, case in cases for product in case))
    router.record(products)
    router.tune()
    for key in (product.key for product in products if not product.reason):
        deciding = router.initialize(torch.device(key.device))
        deciding.decide(key)
        bucket = bucketed(key)
        deciding.decisions[bucket] = _timed(router, bucket, deciding.decisions[bucket])
    return [
        report(
            router,
            *seen.sparsifiers,
            counts=case,
            tokens=count,
            step_ms=seen.step_ms if count is None else None,
        )
        for count, case in cases
    ]


def judge_unmeasured(
    router: Router, seen: Observation, tokens: Sequence[int] = (), *, device_type: str | None = None
) -> list[Report]:
    """Report which kernels could run the products of a training on a machine with a GPU; nothing is measured.

    Products of other dtypes count as bfloat16, because GPUs have no 2:4 kernels for them. Kernels that are made for
    CPUs are left out, and with ``device_type`` all that are not made for it.
    """
    kernels = [
        kernel
        for kernel in router.registry.backends
        if (
            kernel.device_type != "cpu"
            if device_type is None
            else kernel.device_type == device_type
        )
    ]
    make_row = partial(static_row, KernelRegistry(kernels), router.reuse)
    cases = [
        (n, {_as_16_bit(product): calls for product, calls in case.items()})
        for n, case in _cases(seen, tokens)
    ]
    return [summarize(make_row, None, seen.sparsifiers, case, n) for n, case in cases]


def _cases(
    seen: Observation, tokens: Sequence[int]
) -> list[tuple[int | None, dict[Product, float]]]:
    return [(count, _with_tokens(seen.counts, count)) for count in tokens] or [(None, seen.counts)]


def _as_16_bit(product: Product) -> Product:
    if product.key.dtype.itemsize == 2:
        return product
    return product._replace(key=replace(product.key, dtype=torch.bfloat16))


def _with_tokens(counts: dict[Product, float], tokens: int) -> dict[Product, float]:
    changed: Counter[Product] = Counter()
    for product, calls in counts.items():
        size = {"depth" if product.key.gemm == "wgrad" else "columns": tokens}
        changed[product._replace(key=replace(product.key, **size))] += calls  # type: ignore[arg-type, assignment]
    return dict(changed)


def _timed(router: Router, key: GemmKey, decision: Decision) -> Decision:
    """A forced decision with the measured times of its kernel, or for a dense one of the first that could run."""
    if decision.source != "forced" or decision.dense_ms is not None:
        return decision
    kernel: GemmKernel | None = router.registry.kernels[decision.kernel]
    if kernel is router.registry.reference:
        kernel = next(router.initialize(torch.device(key.device)).legal(key, []), None)
    if kernel is None:
        return decision
    try:
        sparse_ms, pack_ms = checks.sparse_ms(kernel, key, router.timer)
        return replace(
            decision,
            dense_ms=checks.dense_ms(key, router.timer),
            sparse_ms=sparse_ms,
            pack_ms=pack_ms,
        )
    except Exception as error:
        return replace(decision, reason=f"{decision.reason}; not measured: {error}")
