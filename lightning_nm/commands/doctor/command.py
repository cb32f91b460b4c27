"""``lightning-nm doctor``: which kernels work on this machine, and what a training gains from them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace

from rich.console import Console

from lightning_nm.commands.build import add_classes, build
from lightning_nm.commands.doctor.machine import examine
from lightning_nm.commands.doctor.report import Report
from lightning_nm.commands.doctor.tables import print_machine, print_report
from lightning_nm.commands.doctor.training import (
    judge,
    judge_unmeasured,
    plain_step_ms,
    router_for,
    watch,
)
from lightning_nm.kernels.api import check_mode

SCHEMA = 3


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm doctor``.

    Returns:
        0, or 2 if a config or an option cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        with redirect_stdout(sys.stderr):  # what Lightning and the model print
            _check(options)
            machine = examine()
            reports = _reports(options) if options.config else []
    except (ImportError, ValueError) as error:
        print(f"lightning-nm doctor: {error}", file=sys.stderr)
        return 2
    if options.json:
        content = {
            "schema": SCHEMA,
            "machine": machine.to_dict(),
            "reports": [report.to_dict() for report in reports],
        }
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        console = Console()
        print_machine(machine, console)
        for report in reports:
            print_report(report, console)
    return 0


def _reports(options: argparse.Namespace) -> list[Report]:
    cli = build(options.config, options.model, options.data)
    device = cli.trainer.strategy.root_device
    router = router_for(cli.trainer, options.kernels)
    missing = router.registry.unavailable_reason(str(device))
    measures = device.type == "cuda" or not missing
    if options.kernels is not None and not measures:
        raise ValueError(
            f"--kernels {options.kernels}: nothing is chosen, no sparse kernel works here: {missing}"
        )
    plain = _plain_step_ms(options) if measures else None
    seen = watch(cli.trainer, cli.model, cli.datamodule, router=router, timed=measures)
    if seen.router is None:
        router.reset(seen.reuse)
    if not measures:
        return judge_unmeasured(router, seen, options.tokens)
    reports = [
        report if report.step_ms is None else replace(report, plain_step_ms=plain)
        for report in judge(router, seen, options.tokens)
    ]
    if device.type == "cuda":
        return reports
    elsewhere = judge_unmeasured(router, seen, options.tokens, device_type="cuda")
    counts = [sum(row.eligible for row in report.rows) for report in elsewhere]
    return [replace(report, on_gpu=count) for report, count in zip(reports, counts, strict=True)]


def _plain_step_ms(options: argparse.Namespace) -> float | None:
    """The time of a step without masks; ``None``, and why on stderr, if the training does not run without them."""
    cli = build(options.config, options.model, options.data, masks=False)
    try:
        return plain_step_ms(cli.trainer, cli.model, cli.datamodule)
    except Exception as error:  # of a callback of the user's that needs the masks, say
        print(
            f"lightning-nm doctor: plain dense training was not measured: {error}", file=sys.stderr
        )
        return None


def _check(options: argparse.Namespace) -> None:
    if options.gpu is not None:
        raise ValueError(
            "--gpu was removed, because its times were predicted: run this command on the GPU to measure"
        )
    if options.kernels is not None:
        check_mode(options.kernels)
    given = {name: getattr(options, name) for name in ("tokens", "kernels", "model", "data")}
    for name, value in given.items():
        if value and not options.config:
            raise ValueError(f"--{name} is about a training: give its --config")
    if min(options.tokens, default=1) < 1:
        raise ValueError(f"--tokens {min(options.tokens)} must be at least 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm doctor",
        description="Report which kernels work on this machine. With --config, train a few steps and report for each "
        "product of each masked layer whether a sparse kernel makes it faster, as measured on this machine's GPU, or "
        "on its CPU if it has no GPU; where no sparse kernel works, which kernels could run it elsewhere. Exits with "
        "0, or with 2 if a config or an option cannot be used.",
    )
    config = "a YAML file as `lightning-nm fit -c` takes it; may be given several times, later ones override"
    parser.add_argument("-c", "--config", metavar="FILE", action="append", default=[], help=config)
    add_classes(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else to stdout"
    )
    parser.add_argument("--gpu", help=argparse.SUPPRESS)  # removed: _check names the replacement
    tokens = (
        "decide for these numbers of tokens in a batch instead of the real one; one report for each"
    )
    parser.add_argument("--tokens", metavar="T", type=int, nargs="+", default=[], help=tokens)
    kernels = "how kernels are chosen if the config has no plugin for it: auto (the default), sparse, reference"
    parser.add_argument("--kernels", metavar="MODE", help=kernels)
    return parser
