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
from lightning_nm.commands.doctor.target import TargetReport, examine_target, print_target
from lightning_nm.commands.doctor.training import (
    judge,
    judge_unmeasured,
    plain_step_ms,
    router_for,
    watch,
)
from lightning_nm.kernels.api import check_mode

SCHEMA = 3  # the version of the JSON document


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm doctor``.

    Returns:
        0, or 2 if a config or an option cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            _check(options)
            target = examine_target(options) if options.target else None
            machine = examine() if target is None else None
            reports = _reports(options) if options.config and target is None else []
    except (ImportError, ValueError) as error:
        print(f"lightning-nm doctor: {error}", file=sys.stderr)
        return 2
    if target is not None:
        _print_target(target, as_json=options.json)
        return 0
    assert machine is not None
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


def _print_target(report: TargetReport, *, as_json: bool) -> None:
    if as_json:
        content = {"schema": SCHEMA, "target": report.to_dict()}
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        print_target(report, Console())


def _reports(options: argparse.Namespace) -> list[Report]:
    """Train a few steps as the config says, and report what its products gain."""
    cli = build(options.config, options.model, options.data)
    device = cli.trainer.strategy.root_device
    router = router_for(cli.trainer, options.kernels)
    why_none_works = router.registry.unavailable_reason(str(device))
    # On a GPU dense products are timed even where no sparse kernel works.
    is_measured = device.type == "cuda" or not why_none_works
    if options.kernels is not None and not is_measured:
        raise ValueError(
            f"--kernels {options.kernels}: nothing is chosen, no sparse kernel works here: {why_none_works}"
        )
    plain_ms = _plain_step_ms(options) if is_measured else None
    seen = watch(cli.trainer, cli.model, cli.datamodule, router=router, timed=is_measured)
    if seen.router is None:  # else the plugin's router knows how many products share a pack
        router.reset(seen.reuse)
    if not is_measured:
        return judge_unmeasured(router, seen, options.tokens)
    reports = []
    for report in judge(router, seen, options.tokens):
        if report.step_ms is not None:
            report = replace(report, plain_step_ms=plain_ms)
        reports.append(report)
    if device.type == "cuda":
        return reports
    return _with_gpu_counts(
        reports, judge_unmeasured(router, seen, options.tokens, device_type="cuda")
    )


def _with_gpu_counts(reports: Sequence[Report], on_gpu: Sequence[Report]) -> list[Report]:
    """Note in reports of a CPU how many products could run sparse on a GPU."""
    counted = []
    for report, elsewhere in zip(reports, on_gpu, strict=True):
        count = sum(row.eligible for row in elsewhere.rows)
        counted.append(replace(report, on_gpu=count))
    return counted


def _plain_step_ms(options: argparse.Namespace) -> float | None:
    """The time of a step without masks; ``None``, and why on stderr, if the training does not run without them."""
    cli = build(options.config, options.model, options.data, masks=False)
    try:
        return plain_step_ms(cli.trainer, cli.model, cli.datamodule)
    except Exception as error:  # such as that of a user's callback that needs the masks
        print(
            f"lightning-nm doctor: plain dense training was not measured: {error}", file=sys.stderr
        )
        return None


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before any model is built.

    Raises:
        ValueError: With the option.
    """
    if options.kernels is not None:
        check_mode(options.kernels)
    # Without a config the machine alone is reported, and these would be ignored.
    for name in ("target", "tokens", "kernels", "model", "data"):
        if getattr(options, name) and not options.config:
            raise ValueError(f"--{name} is about a training: give its --config")
    if options.target and (options.tokens or options.kernels is not None):
        raise ValueError("--tokens and --kernels are about this machine, not about a --target")
    if options.tokens and min(options.tokens) < 1:
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
    tokens = (
        "decide for these numbers of tokens in a batch instead of the real one; one report for each"
    )
    parser.add_argument("--tokens", metavar="T", type=int, nargs="+", default=[], help=tokens)
    kernels = "how kernels are chosen if the config has no plugin for it: auto (the default), sparse, reference"
    parser.add_argument("--kernels", metavar="MODE", help=kernels)
    target = (
        "an NPU, such as ethos-u85-256: report which layers of the config's model would run sparse there; nothing is "
        "trained, and cycles are estimated where ExecuTorch and Vela are installed"
    )
    parser.add_argument("--target", metavar="NAME", help=target)
    return parser
