"""All that this project wants to know of a GPU, in one run and one JSON; see benchmarks/gpu/README.md.

    python -m benchmarks.gpu [PART ...] [--only QUESTION ...] [--out FOLDER] [--seconds 470] [--dry-run]

Each part runs in a process of its own and within a time of its own, and is killed a little after that: a part that
fails is recorded with its error, and the next one runs. A dry run makes every part on the CPU, in this process, with
tiny sizes and the simulated kernel, and its figures mean nothing.

A part is a module with ``run(report)``, which calls ``report.ask(name, question)`` for each thing it wants to know; a
question is a function of a :class:`~benchmarks.gpu.setting.Setting`. To add a part, add a line to ``PARTS``.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.apart import messages
from benchmarks.gpu.report import Answer, run_part
from benchmarks.gpu.setting import Setting
from lightning_nm.kernels.tuner import environment_of

SCHEMA = 1

GRACE = 20.0
"""Seconds after which a part is killed that has gone beyond its time: to start, and to end the question it is at."""


class Part(NamedTuple):
    """A module with ``run(report)``, and the seconds that it may take."""

    module: str
    seconds: float


PARTS = {
    "checks": Part("benchmarks.gpu.checks", 140),
    "gemms": Part("benchmarks.gpu.gemms", 80),
    "layers": Part("benchmarks.gpu.layers", 70),
    "train": Part("benchmarks.train", 110),
    "preprocess": Part("benchmarks.gpu.preprocess", 30),
}

DRY = "A dry run: CPU, tiny sizes, a simulated kernel. It shows that the scripts work, and no figure has a meaning."


def describe(setting: Setting) -> dict[str, object]:
    """What the figures depend on besides the code."""
    environment: dict[str, object] = asdict(environment_of(setting.device))
    try:
        environment["triton"] = version("triton")
    except PackageNotFoundError:
        environment["triton"] = None
    environment["python"] = platform.python_version()
    if not setting.dry_run:
        device = torch.cuda.get_device_properties(setting.device)
        environment["capability"] = f"{device.major}.{device.minor}"
        environment["multiprocessors"] = device.multi_processor_count
        environment["memory bytes"] = device.total_memory
        environment["L2 bytes"] = device.L2_cache_size
    return environment


def answers(
    name: str,
    setting: Setting,
    seconds: float,
    only: Sequence[str],
    keep: Callable[[str, Answer], None],
) -> None:
    """Run one part, and keep its answers; what it raises passes through."""
    module = PARTS[name].module
    if setting.dry_run:
        run_part(lambda pair: keep(*pair), module, setting, seconds, only)
        return
    for question, answer in messages(
        run_part, module, setting, seconds, only, seconds=seconds + GRACE
    ):
        keep(question, answer)


def file_name(environment: dict[str, object], setting: Setting, parts: Sequence[str]) -> str:
    """Name the file after what was measured: ``nvidia-h200-torch-2.11.0-cu130.json``, and its parts if not all."""
    words = (
        ["dry-run"]
        if setting.dry_run
        else [str(environment["device"]), "torch", str(environment["torch"])]
    )
    words += [] if list(parts) == list(PARTS) else parts
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()) + ".json"


def main(argv: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them by default"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="QUESTION", help="for example V5")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder of the JSON"
    )
    parser.add_argument("--seconds", type=float, default=470, help="of the whole run")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU; no figure has a meaning"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(
            f"{', '.join(sorted(unknown))}: no such part; the parts are {', '.join(PARTS)}"
        )
    setting = Setting(options.dry_run)
    if not (setting.dry_run or torch.cuda.is_available()):
        parser.exit(
            1, "torch finds no CUDA device; --dry-run shows on a CPU that the scripts work.\n"
        )

    parts = options.parts or list(PARTS)
    start, environment = time.monotonic(), describe(setting)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "dry run": setting.dry_run,
        "environment": environment,
        "parts": {},
    }
    if setting.dry_run:
        result["meaning"] = DRY
    path: Path = options.out / file_name(environment, setting, parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)

    def save() -> None:
        result["seconds"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(result, indent=1) + "\n")

    for name in parts:
        begin = time.monotonic()
        part: dict[str, Any] = {"answers": {}}
        result["parts"][name] = part

        def keep(
            question: str, answer: Answer, name: str = name, part: dict[str, Any] = part
        ) -> None:
            part["answers"][question] = answer
            print(f"{name}: {question}: {json.dumps(answer)[:400]}", flush=True)
            save()

        seconds = min(PARTS[name].seconds, options.seconds - (begin - start) - GRACE)
        try:
            if seconds <= 0:
                raise TimeoutError(f"the {options.seconds:g} s of the whole run are used up")
            answers(name, setting, seconds, options.only, keep)
        except Exception as error:
            part["error"] = f"{type(error).__name__}: {error}"[:1000]
            print(f"{name}: {part['error']}", flush=True)
        part["seconds"] = round(time.monotonic() - begin, 1)
        save()
    print(f"{result['seconds']} s, {path}")
    return path


if __name__ == "__main__":
    main()
