"""Train a small GPT on Python's help texts, N:M sparse and dense side by side on this CPU.

Each side is a Trainer in a process of its own. They make steps in turn, never at once, so that other work on the
machine slows both. They have the same initial weights, text and learning rate, which stays at its peak after a warm-up;
on the sparse side both are scaled to its density (docs/recipes.md). Losses are comparable at equal steps and at equal
seconds. The dense side is Lightning's Trainer alone, in float32 or
bf16-mixed, whichever is measured to be faster first; the sparse side takes the same precision, NMSparsityCallback and
the precision plugin, which measures for each GEMM whether a sparse kernel is faster. Ctrl-C ends it early, with
the results so far.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from lightning_nm.demo import HelpTopics
from lightning_nm.pattern import NMPattern
from studies.speed.curves import Curve
from studies.speed.race import SideError, Watch, pilot, race, sides
from studies.speed.report import draw, machine, print_table, write_json, write_tensorboard
from studies.speed.side import METHODS, PRECISIONS, SCALES, Precision, Setting

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_parser() -> argparse.ArgumentParser:
    """The arguments."""
    default = Setting()
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m studies.speed",
        description=summary,
        epilog=details,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    seconds = "of training, of each side; each makes 20 steps at least"
    parser.add_argument("--seconds", type=float, default=60, help=seconds)
    parser.add_argument("--width", type=int, default=default.width, help="features of a token")
    parser.add_argument("--layers", type=int, default=default.layers, help="decoder blocks")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="tokens of a step")
    parser.add_argument("--context", type=int, default=default.context, help="tokens of a window")
    parser.add_argument("--pattern", default=default.pattern, help="N:M of the sparse side")
    parser.add_argument(
        "--method", choices=METHODS, default=default.method, help="of the sparse side"
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default=default.scale,
        help="of the sparse side's initial weights and learning rates; none: as the dense side's",
    )
    parser.add_argument(
        "--precision",
        choices=["auto", *PRECISIONS],
        default="auto",
        help="of both sides; auto measures the dense side",
    )
    parser.add_argument("--lr", type=float, default=default.lr, help="peak learning rate")
    parser.add_argument(
        "--threads", type=int, default=CORES, help="of each side; one side runs at a time"
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/speed"), help="folder of picture, log and JSON file"
    )
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Setting]:
    """Parse and check the arguments; a wrong one ends the program with a message."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("seconds", "width", "layers", "tokens", "context", "lr", "threads"):
        if not 0 < getattr(options, name) < float("inf"):
            parser.error(f"--{name} must be positive")
    try:
        pattern = NMPattern.parse(options.pattern)
    except ValueError as error:
        parser.error(f"--pattern: {error}")
    if options.width % 16 or (options.width > 64 and options.width % 64):
        parser.error(f"--width must be 16, 32, 48 or a multiple of 64, got {options.width}")
    if options.width % pattern.m:
        parser.error(
            f"--width {options.width} is not a multiple of the {pattern.m} of --pattern {pattern}"
        )
    if options.tokens % options.context:
        parser.error(f"--tokens {options.tokens} is not a multiple of --context {options.context}")
    data = HelpTopics(options.context)
    try:
        data.setup("fit")
    except (ValueError, ImportError) as error:
        parser.error(f"no text: {error}")
    windows = len(data.train_set)
    if options.tokens > windows * options.context:
        parser.error(
            f"--tokens {options.tokens} is more than the text's {windows * options.context}"
        )
    for module, why in (("matplotlib", "the picture"), ("tensorboard", "the log")):
        if find_spec(module) is None:
            parser.error(
                f"{module} is missing, for {why}: pip install -e '.[cli,tensorboard]' in a checkout of lightning_nm"
            )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    names = set(Setting._fields) & set(vars(options))
    setting = Setting(**{name: getattr(options, name) for name in names})
    return options, setting._replace(pattern=str(pattern))


def compare(
    setting: Setting, asked: str, seconds: float, watch: Watch, console: Console
) -> tuple[Curve, Curve, dict[str, Any], bool]:
    """Choose the precision and train both sides; what there is if Ctrl-C interrupts it, and whether it did."""
    sparse, dense = (
        Curve("sparse", "32-true", setting.tokens),
        Curve("dense", "32-true", setting.tokens),
    )
    facts: dict[str, Any] = {}
    try:
        precision: Precision = "bf16-mixed" if asked == "bf16-mixed" else "32-true"
        if asked == "auto":
            measured = pilot(setting, watch)
            precision = next(iter(measured))
            facts["dense step seconds by precision"] = measured
            told = ", ".join(
                f"{1e3 * seconds:.0f} ms in {name}" for name, seconds in measured.items()
            )
            console.print(
                f"A dense step takes {told}: both sides train in {precision}.",
                highlight=False,
                soft_wrap=True,
            )
        sparse.precision = dense.precision = precision
        with sides(setting, ("sparse", precision), ("dense", precision)) as pair:
            sparse, dense = (side.curve for side in pair)
            race(pair, seconds, watch)
    except KeyboardInterrupt:
        return sparse, dense, facts, True
    return sparse, dense, facts, False


def main(argv: Sequence[str] | None = None, begin: float | None = None) -> int:
    """Run the comparison; 0 unless a side failed (1) or Ctrl-C ended it (130). The time shown counts from `begin`."""
    begin = perf_counter() if begin is None else begin
    options, setting = parse(argv)
    console = Console()
    where = machine(setting.threads)
    label = f"{setting.pattern} {setting.method}"
    line = (
        f"{where['cpu']}, {where['instructions']}, {where['threads']} threads, torch {where['torch']}; "
        f"GPT of width {setting.width}, {setting.layers} layers, {setting.tokens} tokens a step"
    )
    console.print(line, highlight=False, soft_wrap=True)
    try:
        with console.status("starting") as status:

            def watch(what: str) -> None:
                status.update(
                    f"{perf_counter() - begin:.0f} s, {options.seconds:.0f} s of training a side: {what}"
                )

            sparse, dense, facts, interrupted = compare(
                setting, options.precision, options.seconds, watch, console
            )
    except SideError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    if interrupted and not (sparse.seconds or dense.seconds):
        console.print("Interrupted before a step that counts: nothing was written.", style="yellow")
        return 130
    if interrupted:
        console.print("Interrupted: these are the results so far.", style="yellow")
    print_table(sparse, dense, label, console)
    command = shlex.join(
        ["python", "-m", "studies.speed", *(sys.argv[1:] if argv is None else argv)]
    )
    facts |= {
        "command": command,
        "machine": where,
        "setting": setting._asdict(),
        "interrupted": interrupted,
    }
    write_json(options.out / "speed.json", sparse, dense, facts)
    write_tensorboard(options.out, sparse, dense)
    draw(options.out / "curves.png", sparse, dense, f"{label} against dense. {line}")
    console.print(
        f"written: {options.out}/curves.png, {options.out}/speed.json",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"curves over seconds in TensorBoard: tensorboard --logdir {options.out}",
        highlight=False,
        soft_wrap=True,
    )
    return 130 if interrupted else 0
