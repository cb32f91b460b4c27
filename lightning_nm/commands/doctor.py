"""``lightning-nm doctor``: which kernels work on this machine, and how fast a training is on them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from lightning_nm.callbacks.tables import columns_table, kernel_rows, print_kernels
from lightning_nm.commands.from_config import (
    Enough,
    add_training,
    build,
    fit_until_enough,
    masking_callbacks,
)
from lightning_nm.commands.output import add_json, print_json, print_line
from lightning_nm.kernels import KernelRegistry, Router
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.router import activate, routing
from lightning_nm.kernels.tuner import environment_of, reason_or_error
from lightning_nm.plugins.precision import KernelRouting


def _examine() -> dict[str, Any]:
    """Return what is known of CUDA's current device, else of the CPU, as primitives.

    Example:
        >>> machine = _examine()
        >>> machine["kernels"][0]["name"], machine["kernels"][0]["works"]
        ('reference', True)
    """
    device = torch.device("cpu")
    capability = triton = cpu = None
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
        triton = triton_use.unavailable()  # empty if Triton kernels run
    else:
        # The library is compiled at installation; without a compiler there is none.
        usable = not library.unavailable()
        # On Linux a container or `taskset` may allow fewer cores than the machine has.
        can_tell = hasattr(os, "sched_getaffinity")
        cpu = {
            "model": library.cpu_name(),
            "instructions": library.LEVELS[library.level()] if usable else None,
            "asked": os.environ.get("LIGHTNING_NM_ISA") or None,
            "cores": len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
            # The kernels, on torch's threads.
            "parallel": usable and library.parallel() is not None,
            "amx": library.has_amx(),
        }
    kernels = []
    for kernel in KernelRegistry().kernels.values():
        # A kernel that raises does not work, and its error is the reason.
        reason = reason_or_error(partial(kernel.probe, device))
        remark = reason_or_error(partial(kernel.remark, device))
        state = {"name": kernel.name, "works": not reason, "reason": reason, "remark": remark}
        kernels.append(state)
    return {
        **asdict(environment_of(device)),
        "capability": capability,
        "cpu": cpu,
        "triton": triton,
        "kernels": kernels,
    }


def print_machine(machine: dict[str, Any], console: Console) -> None:
    """Print the device, the libraries and each kernel."""
    table = columns_table("machine", ("part", "value"), {"value": 0}, show_header=False)
    if cpu := machine["cpu"]:
        instructions = cpu["instructions"] or "none, the kernels do not work"
        if cpu["asked"]:
            instructions += f" (LIGHTNING_NM_ISA={cpu['asked']})"
        threads = f"{cpu['threads']}"
        if cpu["parallel"]:
            threads += ", for dense GEMMs and kernels"
        elif cpu["instructions"]:
            threads += " for dense GEMMs; the kernels use one: more need torch 2.10 or later"
        table.add_row("device", f"CPU, {cpu['model']}")
        table.add_row("instructions", instructions)
        table.add_row("cores", f"{cpu['cores']} that this process may use")
        table.add_row("threads", threads)
        if cpu["amx"]:
            amx = "for dense GEMMs of many tokens in bfloat16: N:M ones cannot use it"
            table.add_row("AMX", amx)
        table.add_row("torch", machine["torch"])
    else:
        capability = machine["capability"]
        table.add_row("device", f"{machine['device']}, compute capability {capability}")
        for name in ("driver", "torch", "cuda", "cusparselt"):
            table.add_row(name, machine[name] or "none")
        triton = "its kernels prepare operands, and make BAME's passes"
        if machine["triton"]:
            triton = f"{machine['triton']}: torch prepares operands, and makes BAME's passes"
        table.add_row("triton", triton)
    console.print(table)

    table = columns_table("kernels", ("kernel", "works", "why"), {"why": 20})
    for kernel in machine["kernels"]:
        why = "; ".join(filter(None, (kernel["reason"], kernel["remark"])))
        if kernel["name"] == "reference":
            why = "the dense GEMM on masked operands, always available"
        works, style = ("yes", None) if kernel["works"] else ("no", "dim")
        why = why or "passed its numeric check on this device"
        table.add_row(kernel["name"], works, why, style=style)
    console.print(table)
    # The first one is the dense GEMM.
    if not any(kernel["works"] for kernel in machine["kernels"][1:]):
        print_line(console, "No sparse kernel works here: a training runs every GEMM dense.")


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
    # The file is bound now: within the redirection below, sys.stdout is stderr.
    console = Console(file=sys.stdout, quiet=options.json)
    training = None
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            machine = _examine()
            if options.config:
                router, training = _train(options)
            elif options.model or options.data:
                raise ValueError("--model and --data are about a training: give its --config")
    except (ImportError, ValueError) as error:
        # Errors of other classes are those of the user's training: they keep their traceback.
        print(f"lightning-nm doctor: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json("doctor", machine=machine, training=training)
    # With --json the console is quiet, and what follows prints nothing.
    print_machine(machine, console)
    if training is not None:
        print_kernels(router, console)
        if training["speedup"] is None:
            least = _WARM_UP + 1
            speed = f"not measured with and without masks: the training has less than {least} steps, or needs its masks"
        else:
            speed = (
                f"{training['step_ms']:.4g} ms under masks by the kernels above, {training['plain_step_ms']:.4g} ms in "
                f"plain dense training: {training['speedup']:.3f}x as fast"
            )
        print_line(console, f"a step: {speed}", style="bold")
    return 0


def _train(options: argparse.Namespace) -> tuple[Router, dict[str, Any]]:
    """Train a few steps with masks and without; return the router of those with masks, and a report as primitives.

    Raises:
        ValueError: If the config has no NMSparsityCallback, or trains no batch.
    """
    # First, so that a config without masks is refused before anything is trained.
    cli = build(options)
    callbacks = masking_callbacks(cli)
    if not callbacks:
        raise ValueError(
            "there is no NMSparsityCallback among the Trainer's callbacks: add "
            "`class_path: lightning_nm.NMSparsityCallback` under trainer.callbacks"
        )
    for callback in callbacks:
        callback.show_tables = False  # of a training that ends after a few steps
    # A step is timed as the sum of its micro-batches.
    batches_in_step = cli.trainer.accumulate_grad_batches
    plain_clock = _StepClock(batches_in_step)
    try:
        # A model of its own, so that both trainings start untrained.
        plain = build(options, masks=False)
        fit_until_enough(plain, plain_clock)
    except Exception as error:  # such as that of a user's callback that needs the masks
        why = f"plain dense training was not measured: {error}"
        print(f"lightning-nm doctor: {why}", file=sys.stderr)

    plugin = cli.trainer.precision_plugin
    clock = _StepClock(batches_in_step)
    if isinstance(plugin, KernelRouting):
        router = plugin.router  # which the plugin activates
    else:
        # GEMMs under masks are dense without a plugin, and what kernels would gain is the question. No file is given,
        # so that decisions are measured in this call.
        router = clock.router = Router(reuse=batches_in_step)
    # The clock activates its router in each batch, and Enough or an error ends the fit in between: this restores what
    # was active before.
    with routing(None):
        fit_until_enough(cli, clock)
    plain_ms, step_ms = plain_clock.step_ms(), clock.step_ms()
    share, basis = router.sparse_share()
    return router, {
        "kernels": router.kernels,
        "unavailable": router.unavailable_reason,
        "products": [{**asdict(row), "gain": row.gain} for row in kernel_rows(router)],
        "sparse_share": share,
        "sparse_share_by": basis,
        "plain_step_ms": plain_ms,
        "step_ms": step_ms,
        "speedup": plain_ms / step_ms if plain_ms and step_ms else None,
    }


class _StepClock(pl.Callback):
    """Measures some steps after the first ones, and ends the training; makes a router the one that layers use.

    A precision plugin that chooses kernels activates its own router.
    """

    def __init__(self, batches_in_step: int) -> None:
        self.batches_in_step = batches_in_step
        self.router: Router | None = None
        self.seconds: list[float] = []  # of each batch
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        """Read the clock, after the batch was loaded."""
        if self.router is not None:
            # In each batch: active_or_none() is None once no GEMM was found to be faster sparse.
            activate(self.router.active_or_none())
        self._start = _now(pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        """Read the clock after the update of masks, which is part of a step; end the training when it is time."""
        self.seconds.append(_now(pl_module.device) - self._start)
        if self.router is not None:
            # As a plugin does after a step. No backward pass is pending, so kernels may change.
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
        # One disturbed step does not move it.
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
        "without, and report the kernel of each GEMM of the masked layers, as measured on this machine's GPU, or on "
        "its CPU if it has no GPU, and the times of the steps. Exits with 0, or with 2 if a config or an option cannot "
        "be used.",
    )
    add_training(parser, required=False)
    add_json(parser)
    return parser
