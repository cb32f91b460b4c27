"""What a comparison leaves behind: a table, a picture, TensorBoard runs, and a JSON file."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lightning_nm
from lightning_nm.kernels.cpu import library
from studies.speed.curves import WINDOW, Comparison, Curve, findings, means


def machine(threads: int) -> dict[str, Any]:
    """Name of the CPU, threads and versions."""
    return {
        "cpu": library.cpu_name(),
        "instructions": "no kernels" if library.unavailable() else library.LEVELS[library.level()],
        "threads": threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lightning_nm": lightning_nm.__version__,
    }


def print_table(sparse: Curve, dense: Curve, label: str, console: Console) -> None:
    """Print both sides and the findings."""
    both = bool(sparse.seconds and dense.seconds)
    found = Comparison.of(sparse, dense) if both else None
    table = Table(title=f"sparse ({label}) and dense, side by side", title_justify="left", box=None)
    table.add_column("")
    for side in (sparse, dense):
        table.add_column(side.name, justify="right")

    def add(label: str, cell: Callable[[Curve], str]) -> None:
        table.add_row(label, *(cell(curve) if curve.seconds else "-" for curve in (sparse, dense)))

    add("precision", lambda c: c.precision)
    add("first step, s (not counted below)", lambda c: f"{c.start_s:.1f}")
    add("steps", lambda c: str(len(c.seconds)))
    add("training, s", lambda c: f"{c.total_s:.1f}")
    add("step, ms: median", lambda c: f"{c.step_ms:.0f}")
    add("step, ms: middle half", lambda c: "{:.0f} to {:.0f}".format(*c.middle_half_ms))
    add("tokens per second", lambda c: f"{c.tokens_per_s:,.0f}")
    if found:
        table.add_row(
            f"loss after {found.seconds:.0f} s", *(f"{loss:.3f}" for loss in found.at_seconds)
        )
        table.add_row(
            f"loss after {found.steps} steps", *(f"{loss:.3f}" for loss in found.at_steps)
        )
    add("validation loss at the end", lambda c: "-" if c.val_loss is None else f"{c.val_loss:.3f}")
    console.print(table)
    means = f"training losses are means over the last {WINDOW:.0%} before"
    console.print(f"Losses: nats per byte; {means}.", style="dim", soft_wrap=True)
    for line in findings(sparse, dense):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def write_json(path: Path, sparse: Curve, dense: Curve, facts: dict[str, Any]) -> None:
    """Write every step, the comparison and the facts."""
    both = bool(sparse.seconds and dense.seconds)
    content = facts | {
        "comparison": asdict(Comparison.of(sparse, dense)) if both else None,
        "findings": findings(sparse, dense),
        "sides": {
            curve.name: asdict(curve)
            | (
                {"step_ms": curve.step_ms, "tokens_per_s": curve.tokens_per_s}
                if curve.seconds
                else {}
            )
            for curve in (sparse, dense)
        },
    }
    path.write_text(json.dumps(_without_nan(content), indent=1) + "\n")


def _without_nan(value: Any) -> Any:
    """The same content with ``None`` for numbers that JSON does not have, such as the loss of a diverged training."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, (list, tuple)) else value


def draw(path: Path, sparse: Curve, dense: Curve, title: str) -> None:
    """Draw loss over seconds and over steps: every step pale, means as compared strong."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    both = (sparse, dense)
    for curve, colour, timed, counted in zip(
        both, ("tab:green", "tab:blue"), *means(both), strict=True
    ):
        if not curve.seconds:
            continue
        steps = list(range(1, len(curve.losses) + 1))
        label = f"{curve.name}, {curve.precision}, {curve.tokens_per_s:,.0f} tokens/s"
        for axes, x, smooth in ((left, curve.ends, timed), (right, steps, counted)):
            axes.plot(x, curve.losses, color=colour, alpha=0.3, linewidth=1)
            axes.plot(x, smooth, color=colour, linewidth=2, label=label)
    left.set(xlabel="seconds of training", ylabel="training loss, nats per byte")
    right.set(xlabel="steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if left.get_legend_handles_labels()[0]:
        left.legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def write_tensorboard(folder: Path, sparse: Curve, dense: Curve) -> None:
    """Write one run for each side, in the folders ``sparse`` and ``dense``; their older event files are removed.

    The time of an event is the training second it belongs to, from a start that both runs share, so the axis
    "Relative" compares them. The steps of ``loss/over_ms`` are milliseconds of training, those of ``loss/over_steps``
    steps.
    """
    from torch.utils.tensorboard import SummaryWriter

    start = time.time()
    for curve in (sparse, dense):
        for old in (folder / curve.name).glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(folder / curve.name)) as writer:
            for step, (end, seconds, loss) in enumerate(
                zip(curve.ends, curve.seconds, curve.losses, strict=True), 1
            ):
                ms, when = round(1e3 * end), start + end
                writer.add_scalar("loss/over_steps", loss, step, when)
                writer.add_scalar("loss/over_ms", loss, ms, when)
                writer.add_scalar("tokens_per_second", curve.tokens / seconds, ms, when)
            if curve.val_loss is not None:
                writer.add_scalar(
                    "val_loss", curve.val_loss, round(1e3 * curve.total_s), start + curve.total_s
                )
