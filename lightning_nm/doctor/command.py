"""``lightning-nm doctor``: which kernels work here, and what does a training gain from them?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lightning_nm.doctor.build import build
from lightning_nm.doctor.estimate import EstimateRouter
from lightning_nm.doctor.machine import Machine, examine
from lightning_nm.doctor.report import Report
from lightning_nm.doctor.tables import print_gpu, print_machine, print_report
from lightning_nm.doctor.training import Observation, judge, watch
from lightning_nm.kernels import Router, cost
from lightning_nm.kernels.cost import DeviceModel, device_model
from lightning_nm.kernels.tuner import check_mode
from lightning_nm.lightning_cli import EXTRA

SCHEMA = 1
DEFAULT_GPU = "H200"


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm doctor``.

    Returns:
        0, or 2 if a config or an option cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        with redirect_stdout(sys.stderr):  # what Lightning and the model say
            gpu = device_model(options.gpu) if options.gpu else None
            if options.kernels is not None:
                check_mode(options.kernels)
            _check(options)
            machine = examine()
            reports, gpu = _reports(options, gpu) if options.config else ([], gpu)
    except ImportError as error:
        print(f"lightning-nm doctor: {error}\n{EXTRA}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"lightning-nm doctor: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(document(machine, gpu, reports), indent=1, allow_nan=False))
    else:
        console = Console()
        print_machine(machine, console)
        if machine.capability is None and not reports:
            names = ", ".join(cost.DEVICE_MODELS)
            console.print(
                f"An estimate is possible: lightning-nm doctor --config FILE --gpu NAME (known: {names}).",
                soft_wrap=True,
            )
        if gpu is not None:
            print_gpu(gpu, console)
        for report in reports:
            print_report(report, console)
    return 0


def document(machine: Machine, gpu: DeviceModel | None, reports: Sequence[Report]) -> dict[str, Any]:
    """Everything as primitives, in one mapping with ``schema: 1``."""
    figures = None
    if gpu is not None:
        uses = cost.break_even(gpu)
        figures = {**asdict(gpu), "break_even": None if uses == float("inf") else uses}
    return {
        "schema": SCHEMA,
        "machine": machine.to_dict(),
        "gpu": figures,
        "reports": [report.to_dict() for report in reports],
    }


def _reports(options: argparse.Namespace, gpu: DeviceModel | None) -> tuple[list[Report], DeviceModel | None]:
    """The reports, and the GPU that they are estimates for."""
    cli = build(options.config)
    if gpu is None and cli.trainer.strategy.root_device.type != "cuda":
        gpu = device_model(DEFAULT_GPU)
    if gpu is not None and options.kernels is not None:
        raise ValueError(
            f"--kernels {options.kernels} needs a training on a CUDA device without --gpu: an estimate has no modes"
        )
    seen = watch(cli.trainer, cli.model, cli.datamodule, timed=gpu is None)
    router = EstimateRouter(gpu, seen.reuse) if gpu else measuring_router(seen, options.kernels)
    return judge(router, seen, options.tokens), gpu


def measuring_router(seen: Observation, mode: str | None) -> Router:
    """The router of the training's plugin, or a new one where it has none.

    Args:
        seen: The training.
        mode: As :class:`~lightning_nm.kernels.Router`'s; ``None`` takes the plugin's, or ``"auto"``.

    Raises:
        ValueError: If the plugin says otherwise.
    """
    if seen.router is None:
        return Router(mode or "auto", reuse=seen.reuse)
    if mode not in (None, seen.router.mode):
        raise ValueError(
            f"--kernels {mode} contradicts the precision plugin of the config, which has kernels={seen.router.mode!r}: "
            "leave --kernels out, or change the config"
        )
    return seen.router


def _check(options: argparse.Namespace) -> None:
    for name, value in (("--tokens", options.tokens), ("--kernels", options.kernels)):
        if value and not options.config:
            raise ValueError(f"{name} is about a training: give its --config")
    for tokens in options.tokens:
        if tokens < 1:
            raise ValueError(f"--tokens {tokens} must be at least 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm doctor",
        description="Say which kernels work on this machine. With --config, train a few steps and say for each product "
        "of each masked layer whether a sparse kernel makes it faster, measured on a CUDA device and estimated without "
        "one. Exits with 0, or with 2 if a config or an option cannot be used.",
    )
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="a YAML file as `lightning-nm fit -c` takes it; may be given several times, later ones override",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else to stdout")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"estimate for this GPU instead of measuring: {', '.join(cost.DEVICE_MODELS)}; "
        f"without a CUDA device {DEFAULT_GPU} is taken",
    )
    parser.add_argument(
        "--tokens",
        metavar="T",
        type=int,
        nargs="+",
        default=[],
        help="decide for so many tokens in a batch instead of the real number; one report for each",
    )
    parser.add_argument(
        "--kernels",
        metavar="MODE",
        help="how kernels are chosen where the config has no plugin that says it: "
        "auto (the default), sparse, reference, heuristic, replay:FILE",
    )
    return parser
