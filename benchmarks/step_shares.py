"""Where the time of a training step goes, dense and N:M, by torch's profiler: ``python -m benchmarks.step_shares``.

The GPT and the Trainer of ``python -m benchmarks.cpu steps``, on one thread, so that operators add up to the time
of a step. Each training runs in a process of its own. Reported are milliseconds of a step in each group of operators.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_nm.kernels.cpu import library, mask_passes
from lightning_nm.kernels.cpu.kernels import CsrLayout, PermuteLayout
from studies.speed.side import Grant, Precision, Setting, run

METHODS = ["dense", "asp", "bame", "sr-ste", "bi-mask"]
LAYERS = {768: 2, 1024: 2, 2048: 1}

ATTENTION = "attention"
DENSE = "dense products"
SPARSE = "sparse products"
LAYOUTS = "layouts of masks"
MASKS = "masks and evidence"
OPTIMIZER = "optimizer"
REST = "norms, activations and the rest"
GROUPS = [ATTENTION, DENSE, SPARSE, LAYOUTS, MASKS, OPTIMIZER, REST]

_LAYOUT_RANGE = "benchmark::layout"
_MASK_RANGE = "benchmark::masks"
_DENSE_OPERATORS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear"}


def group_of(operator: str) -> str:
    """The group of an operator, by its name in the profile."""
    if "scaled_dot_product" in operator:
        return ATTENTION
    if operator in _DENSE_OPERATORS:
        return DENSE
    if operator.startswith("lightning_nm::"):
        return SPARSE
    if operator == _LAYOUT_RANGE:
        return LAYOUTS
    if operator == _MASK_RANGE:
        return MASKS
    if "adamw" in operator:
        return OPTIMIZER
    return REST


class Profiled:
    """The other end of a side's connection: some steps to warm up, then some under the profiler.

    Args:
        warm_up: Steps before the profile; kernels are measured in the first of them.
        steps: Steps of the profile.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up = warm_up
        self.steps = steps
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.seconds = 0.0
        self.messages: list[Any] = []
        self._asked = 0
        self._begin = 0.0

    def send(self, message: Any) -> None:
        """Keep what the side says."""
        self.messages.append(message)

    def recv(self) -> Grant | None:
        """The next grant; ``None`` at the end."""
        self._asked += 1
        if self._asked == 1:
            return Grant(steps=self.warm_up)
        if self._asked == 2:
            self.profile.start()
            self._begin = perf_counter()
            return Grant(steps=self.steps)
        self.seconds = perf_counter() - self._begin
        self.profile.stop()
        return None


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose time the profiler sees under this name: calls of the library are no operators of torch."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return wrapped


def _mark_calls() -> None:
    """Let the profiler see the passes over weights and the layouts of this process."""
    mask_passes._run = _in_range(_MASK_RANGE, mask_passes._run)
    for layout in (PermuteLayout, CsrLayout):
        layout.values = _in_range(_LAYOUT_RANGE, layout.values)  # type: ignore[method-assign]
        # The function of a class method, which gets the class as its first argument.
        make: Any = vars(layout)["of"].__func__
        setattr(layout, "of", classmethod(_in_range(_LAYOUT_RANGE, make)))  # noqa: B010


def measure(width: int, method: str, pattern: str, precision: Precision, steps: int) -> Any:
    """Milliseconds of a step in each group, and of the whole step, in this process."""
    _mark_calls()
    is_sparse = method != "dense"
    setting = Setting(
        width,
        layers=LAYERS.get(width, 2),
        pattern=pattern,
        method=method if is_sparse else "asp",
        threads=1,
        val_batches=0,
        budget_s=120,
    )
    connection = Profiled(warm_up=4, steps=steps)
    run(setting, is_sparse, precision, connection)  # type: ignore[arg-type]
    for message in connection.messages:
        if message[0] == "error" and not connection.seconds:
            raise RuntimeError(message[1])
    groups = dict.fromkeys(GROUPS, 0.0)
    for event in connection.profile.key_averages():
        groups[group_of(event.key)] += event.self_cpu_time_total / 1e3 / steps
    whole = connection.seconds * 1e3 / steps
    # What no operator accounts for is Python's time.
    groups[REST] += max(0.0, whole - sum(groups.values()))
    return {
        "width": width,
        "layers": setting.layers,
        "method": method,
        "ms": whole,
        "groups": groups,
    }


def _send(results: Any, *arguments: Any) -> None:
    results.put(measure(*arguments))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.step_shares", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--widths", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--pattern", default="1:16")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    machine = {
        "cpu": library.cpu_name(),
        "instructions": library.unavailable() or library.LEVELS[library.level()],
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), "\n")
    print(f"| width | method | step, ms | {' | '.join(GROUPS)} |")
    print("|---" * (3 + len(GROUPS)) + "|")
    context = multiprocessing.get_context("spawn")
    found = []
    for width in options.widths:
        for method in options.methods:
            results = context.Queue()
            arguments = (results, width, method, options.pattern, options.precision, options.steps)
            process = context.Process(target=_send, args=arguments)
            process.start()
            row = results.get()
            process.join()
            found.append(row)
            shares = " | ".join(f"{row['groups'][group]:.0f}" for group in GROUPS)
            print(f"| {width} | {method} | {row['ms']:.0f} | {shares} |", flush=True)
    if options.json is not None:
        setting = {"pattern": options.pattern, "precision": options.precision}
        data = {"machine": machine, "setting": setting, "steps": found}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
