"""``lightning-nm doctor``: which kernels work on this machine, and how fast a training is on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from lightning_nm.callbacks.report.kernel_table import kernel_rows, print_kernels
from lightning_nm.commands.build import (
    Enough,
    add_classes,
    build,
    fit_until_enough,
    masking_callbacks,
)
from lightning_nm.commands.machine import examine, print_machine
from lightning_nm.commands.output import add_json, columns_table, print_json, print_line
from lightning_nm.kernels import KernelRegistry, Router
from lightning_nm.kernels.router.registry import reason_or_error
from lightning_nm.kernels.router.router import activate, routing
from lightning_nm.plugins.routing import KernelRouting

# Optimizer steps. Kernels are chosen in the first; the others before the timed ones run them, unmeasured.
_WARM_UP = 3
_TIMED = 5

_NOISY = 2.0
"""The longest of some equal steps over the shortest, from which on the machine is called busy."""


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm doctor``.

    Returns:
        0, or 2 if a config or an option cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    console = Console(file=sys.stdout, quiet=options.json)
    training = None
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            machine = examine()
            if options.config:
                training = _Training(options)
            elif options.model or options.data:
                raise ValueError("--model and --data are about a training: give its --config")
    except (ImportError, ValueError) as error:
        print(f"lightning-nm doctor: {error}", file=sys.stderr)
        return 2
    if options.json:
        content = None if training is None else training.to_dict()
        print_json("doctor", machine=machine, training=content)
    print_machine(machine, console)
    if training is not None:
        training.show(console)
    return 0


class _Training:
    """The kernels and the step times of a few training steps of a config, with masks and without.

    Raises:
        ValueError: If the config has no NMSparsityCallback, or trains no batch.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        cli = build(options.config, options.model, options.data)
        callbacks = masking_callbacks(cli)
        if not callbacks:
            raise ValueError(
                "there is no NMSparsityCallback among the Trainer's callbacks: add "
                "`class_path: lightning_nm.NMSparsityCallback` under trainer.callbacks"
            )
        for callback in callbacks:
            callback.show_tables = False  # of a training that ends after a few steps
        plugin = cli.trainer.precision_plugin
        clock = _StepClock(cli.trainer.accumulate_grad_batches)
        if isinstance(plugin, KernelRouting):
            self.router = plugin.router
        else:
            self.router = clock.router = Router(reuse=clock.batches_in_step)
        self.device = cli.trainer.strategy.root_device
        self.plain_ms = self._plain_ms(options)
        with routing(None):
            fit_until_enough(cli, clock)
        self.step_ms = clock.step_ms()

    def _plain_ms(self, options: argparse.Namespace) -> float | None:
        """Milliseconds of a step without masks; ``None``, and why on stderr, if the training needs them."""
        cli = build(options.config, options.model, options.data, masks=False)
        clock = _StepClock(cli.trainer.accumulate_grad_batches)
        try:
            fit_until_enough(cli, clock)
        except Exception as error:  # such as that of a user's callback that needs the masks
            why = f"plain dense training was not measured: {error}"
            print(f"lightning-nm doctor: {why}", file=sys.stderr)
        return clock.step_ms()

    @property
    def speedup(self) -> float | None:
        """How many times as fast as plain dense training a step is; ``None`` if a time is unknown."""
        if self.plain_ms is None or self.step_ms is None:
            return None
        return self.plain_ms / self.step_ms

    def could_run_on_gpu(self) -> dict[str, int] | None:
        """How many products could run on a kernel for GPUs in a 16-bit dtype, of how many; ``None`` on a GPU."""
        if self.device.type == "cuda":
            return None
        registry = KernelRegistry(
            [each for each in KernelRegistry().backends if each.device_type == "cuda"]
        )
        count = 0
        products = {used.product for used in self.router.used()}
        for product in products:
            key = replace(product.key, dtype=torch.bfloat16)
            reasons = [
                registry.sparsity_reason(kernel, key)
                or reason_or_error(partial(kernel.static_reason, key))
                for kernel in registry.backends
            ]
            count += not product.reason and not all(reasons)
        return {"products": count, "of": len(products)}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as primitives, for JSON."""
        rows = kernel_rows(self.router)
        share, basis = self.router.sparse_share()
        return {
            "kernels": self.router.kernels,
            "unavailable": self.router.unavailable_reason,
            "products": [{**asdict(row), "gain": row.gain} for row in rows],
            "sparse_share": share,
            "sparse_share_by": basis,
            "could_run_on_gpu": self.could_run_on_gpu(),
            "plain_step_ms": self.plain_ms,
            "step_ms": self.step_ms,
            "speedup": self.speedup,
        }

    def show(self, console: Console) -> None:
        """Print the kernel of each product, and the step times."""
        print_kernels(self.router, console)
        gpu = self.could_run_on_gpu()
        if gpu is not None:
            could = f"{gpu['products']} of {gpu['of']} products could run sparse in a 16-bit dtype"
            print_line(console, f"on a GPU with sparse tensor cores, not measured here: {could}")
        heads = ("training step, measured", "time", "speed")
        table = columns_table("", heads, {}, right=heads[1:])
        plain_speed = None if self.plain_ms is None else 1.0
        for name, milliseconds, speed in (
            ("plain dense training", self.plain_ms, plain_speed),
            ("under masks, by the kernels above", self.step_ms, self.speedup),
        ):
            time = "unknown" if milliseconds is None else f"{milliseconds:.4g} ms"
            table.add_row(name, time, "-" if speed is None else f"{speed:.3f}x")
        console.print(table)


class _StepClock(pl.Callback):
    """Measures some steps after the first ones, and ends the training; makes a router the one that layers use.

    A precision plugin that chooses kernels activates its own router.
    """

    def __init__(self, batches_in_step: int) -> None:
        self.batches_in_step = batches_in_step
        self.router: Router | None = None
        self.seconds: list[float] = []  # of each batch
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock, after the batch was loaded."""
        if self.router is not None:
            activate(self.router.active_or_none())
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
        self.seconds.append(_now(pl_module.device) - self._start)
        is_step = len(self.seconds) % self.batches_in_step == 0
        if self.router is not None and is_step:
            self.router.measure_more()
            self.router.deactivate_if_all_dense()
        if len(self.seconds) >= (_WARM_UP + _TIMED) * self.batches_in_step:
            raise Enough

    def step_ms(self) -> float | None:
        """Return the median milliseconds of the measured optimizer steps; ``None`` if there is none.

        On stderr it tells if they differ so much that other work on the machine must have disturbed them.
        """
        size = self.batches_in_step
        # A fit that ended early may leave a step without all of its batches: it is left out.
        starts = range(_WARM_UP * size, len(self.seconds) - size + 1, size)
        steps = [1e3 * sum(self.seconds[start : start + size]) for start in starts]
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


def _now(device: torch.device) -> float:
    # CUDA runs kernels asynchronously: without waiting for them only their launch is measured.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm doctor",
        description="Report which kernels work on this machine. With --config, train a few steps with masks and "
        "without, and report the kernel of each product of the masked layers, as measured on this machine's GPU, or on "
        "its CPU if it has no GPU, and the times of the steps. Exits with 0, or with 2 if a config or an option cannot "
        "be used.",
    )
    config = "a YAML file as `lightning-nm fit -c` takes it; may be given several times, later ones override"
    parser.add_argument("-c", "--config", metavar="FILE", action="append", default=[], help=config)
    add_classes(parser)
    add_json(parser)
    return parser
