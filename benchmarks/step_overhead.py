"""What a method adds to a training step, and what an adaptation of BAME costs.

First table: a whole training step (forward, backward, optimizer, masks) of a two-layer MLP under every method, and with
gradient estimators, over the same step of the same model without masks; interleaved in one process, medians over the
rounds. Every GEMM is a dense one here, so this is overhead alone. BAME is timed between adaptations.

Second table: an adaptation of one layer, next to what the same two calls cost in a step without one.

    python -m benchmarks.step_overhead

With ``--convolutions`` another table alone: the first table's for a small residual CNN, narrow and wide, whose first
convolution and last linear layer stay dense.

    python -m benchmarks.step_overhead --convolutions

With ``--monitor`` another table alone: what MaskMonitor adds to the step of a Trainer with a TensorBoard log. Timed are
a step, the monitor's part of a step that does not log, of one that logs, and of one that draws, too (Lightning's
writing included); the fraction is that of the default intervals, 50 and 500 steps.

    python -m benchmarks.step_overhead --monitor
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    BAME,
    CAST,
    LBC,
    MVUE,
    STEP,
    ApproxMVUE,
    DecayingMask,
    MaskLogits,
    MaskMonitor,
    MaxQ,
    NMSparsifier,
    NMSparsityCallback,
    RigL,
    TopN,
)
from lightning_nm.callbacks.monitor import Watch
from lightning_nm.demo import ResidualCNN
from lightning_nm.kernels.cpu.library import cpu_name
from lightning_nm.nn.layer import NMLayer

NEVER = 1 << 40
Evidence = Literal["accumulated", "batch"]
# Method and gradient estimator. Moments are steps, so that each is timed in the state that most of its training has:
# `step` after its switch, `decaying` while entries fade, `lbc` before its stop, `maxq` after it.
METHODS: dict[str, tuple[Any, Any]] = {
    "dense": ("dense", None),
    "ste": ("ste", None),
    "sr-ste": ("sr-ste", None),
    "s-ste": ("s-ste", None),
    "step": (STEP(dense_start=1, latest=1), None),
    "decaying": (DecayingMask(stop=NEVER), None),
    "asp": ("asp", None),
    "transposable": ("transposable", None),
    "bi-mask": ("bi-mask", None),
    "slope": ("slope", None),
    "rigl": (RigL(stop=NEVER), None),
    "cast": (CAST(end=NEVER), None),
    "lbc": (LBC(stop=NEVER), None),
    "maxq": (MaxQ(start=0, stop=0), None),
    "mask-logits": (MaskLogits(stop=NEVER), None),
    "bame": (BAME(start=NEVER, stop=NEVER), None),
    "bame, adapting": (BAME(stop=NEVER), None),
    "bame-bi-mask": (BAME(start=NEVER, stop=NEVER, dgrad="bi-mask"), None),
    "dense, top-n 2:4": ("dense", TopN("2:4")),
    "dense, mvue 1:2": ("dense", MVUE("1:2")),
    "dense, mvue 2:4": ("dense", MVUE("2:4")),
    "dense, approx-mvue": ("dense", ApproxMVUE()),
    "transposable, mvue 2:4": ("transposable", MVUE("2:4")),
}


# Those of them, and combinations, that are timed for convolutions.
CONVOLUTION_METHODS: dict[str, tuple[Any, Any]] = {
    **{
        name: METHODS[name]
        for name in METHODS
        if not name.startswith(("dense,", "transposable,", "bame-", "bame,"))
    },
    "bi-mask, mvue 2:4": ("bi-mask", MVUE("2:4")),
}
CONVOLUTION_WIDTHS = (16, 64)


class Run(NamedTuple):
    """A model with its optimizer and, if any, its masks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sparsifier: NMSparsifier | None

    def step(self, x: torch.Tensor) -> float:
        """The seconds of one training step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        if self.sparsifier is not None:
            self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()
        if self.sparsifier is not None:
            self.sparsifier.step()
        return time.perf_counter() - start


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 1e-5)


def steps(options: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of every step, by method; ``plain`` is the model without masks."""
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    x = torch.randn(options.tokens, width)
    return interleaved(model, x, METHODS, options, skip_first_last=False)


def convolution_steps(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """The same for a residual CNN of each width."""
    found = {}
    for width in CONVOLUTION_WIDTHS:
        torch.manual_seed(0)
        model, x = ResidualCNN(in_channels=3, width=width), torch.randn(options.images, 3, 32, 32)
        found[str(width)] = interleaved(
            model, x, CONVOLUTION_METHODS, options, skip_first_last=True
        )
    return found


def interleaved(
    model: nn.Module,
    x: torch.Tensor,
    methods: dict[str, tuple[Any, Any]],
    options: argparse.Namespace,
    *,
    skip_first_last: bool,
) -> dict[str, list[float]]:
    """The seconds of every step of copies of a model, in turn."""
    runs = {}
    for name in ("plain", *methods):
        copied = copy.deepcopy(model)
        optimizer, sparsifier = optimizer_of(options.optimizer, copied), None
        if name != "plain":
            method, estimator = methods[name]
            sparsifier = NMSparsifier(
                copied,
                options.pattern,
                method,
                estimator,
                skip_first_last=skip_first_last,
                grad_snr_every=0,
            ).attach()
            sparsifier.register(optimizer)
        runs[name] = Run(copied, optimizer, sparsifier)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(options.rounds + 2):
        for name, run in runs.items():
            taken = run.step(x)
            if k >= 2:  # the first steps allocate
                seconds[name].append(taken)
    return seconds


def over_plain(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The fraction that each adds to the plain step, as a median."""
    # Ratios within a round: what else the machine does in it slows both.
    return {
        name: statistics.median(a / b for a, b in zip(values, seconds["plain"], strict=True)) - 1
        for name, values in seconds.items()
    }


class Timed(BAME):
    """Notes the seconds that it spends around the optimizer's step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = 0.0

    def before_step(self, layer: NMLayer, optimizer: torch.optim.Optimizer) -> None:
        """As BAME."""
        self._seconds = -time.perf_counter()
        super().before_step(layer, optimizer)
        self._seconds += time.perf_counter()

    def after_step(self, layer: NMLayer, optimizer: torch.optim.Optimizer) -> None:
        """As BAME."""
        self._seconds -= time.perf_counter()
        super().after_step(layer, optimizer)
        self._seconds += time.perf_counter()


def adaptations(
    size: int, pattern: str, optimizer_name: str, evidence: Evidence, rounds: int
) -> tuple[float, float]:
    """Median seconds that BAME takes around the optimizer's step, in a window that adapts and in one that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    for parameter in model.parameters():
        parameter.data.mul_(1e-4)  # so that exchanges are worth it and the whole budget is used
    optimizer = optimizer_of(optimizer_name, model)
    gathers = 1 if evidence == "batch" else 2
    method = Timed(
        start=2, stop=NEVER, every=2, evidence=evidence, gradient_every=gathers, evidence_rate=1.0
    )
    sparsifier = NMSparsifier(model, pattern, method, skip_first_last=False).attach()
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2 * rounds + 2):
        adapts = layer.progress.dense_gradient
        layer.weight.grad = torch.randn(size, size)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        taken[adapts].append(method._seconds)
    assert sparsifier.stats()["adapted_blocks"] > 0.25
    return statistics.median(taken[True]), statistics.median(taken[False][2:])


class Watching(MaskMonitor):
    """Notes the seconds that it takes in each batch: without a log, with one, with pictures."""

    def __init__(self, every: int) -> None:
        super().__init__(histograms_every=2 * every, images_every=2 * every)
        self.every = every
        self.seconds: dict[str, list[float]] = {"quiet": [], "log": [], "draw": []}

    def watch(self, trainer: pl.Trainer, *args: Any) -> Watch:
        """As MaskMonitor."""
        watch = super().watch(trainer, *args)
        after_batch = watch.after_batch

        def timed(stepped: bool, also: Mapping[str, float]) -> None:
            start, step = time.perf_counter(), trainer.global_step
            after_batch(stepped, also)
            kind = "quiet" if step % self.every else "draw" if step // self.every % 2 else "log"
            self.seconds[kind].append(time.perf_counter() - start)

        watch.after_batch = timed  # type: ignore[method-assign]
        return watch


class TimedLogger(TensorBoardLogger):
    """Notes the seconds of each log; nothing but the monitor logs here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds: list[float] = []

    def log_metrics(self, *args: Any, **options: Any) -> None:
        """As TensorBoardLogger."""
        start = time.perf_counter()
        super().log_metrics(*args, **options)
        self.experiment.flush()
        self.seconds.append(time.perf_counter() - start)


class Module(pl.LightningModule):
    """A model that trains on its outputs' squares."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.model, self.optimizer, self.starts = model, optimizer, [0.0]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        self.starts.append(time.perf_counter())
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return optimizer_of(self.optimizer, self.model)


def monitored(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of a step, of the monitor's parts, and its fraction of the step at the default intervals."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found, every, width = {}, 4, options.width
    for method in ("sr-ste", "transposable", "bi-mask", "bame"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        module, monitor = Module(model, options.optimizer), Watching(every)
        made: Any = METHODS[method][0]
        masks = NMSparsityCallback(
            options.pattern, made, skip_first_last=False, show_tables=False, monitor=monitor
        )
        with tempfile.TemporaryDirectory() as folder:
            logger = TimedLogger(folder)
            trainer = pl.Trainer(
                accelerator="cpu",
                logger=logger,
                callbacks=[masks],
                max_steps=2 * every * options.rounds,
                log_every_n_steps=every,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            many = torch.randn(options.tokens, width).expand(trainer.max_steps, -1, -1)
            trainer.fit(module, DataLoader(TensorDataset(many), batch_size=None, collate_fn=None))
        quiet, log, draw = (statistics.median(values[1:]) for values in monitor.seconds.values())
        write = statistics.median(logger.seconds[1:])
        gaps = [b - a for a, b in zip(module.starts[1:], module.starts[2:], strict=False)]
        steps = [gap for k, gap in enumerate(gaps, 1) if k % every]
        step = statistics.median(steps) - quiet
        share = (quiet + (log + write) / 50 + (draw - log) / 500) / step
        found[method] = {
            "step": step,
            "quiet": quiet,
            "log": log + write,
            "draw": draw - log,
            "share": share,
        }
    return found


def convolutions(options: argparse.Namespace) -> None:
    """Print the table of convolutions."""
    found = convolution_steps(options)
    print(
        f"{options.images} images of 3 x 32 x 32, ResidualCNN, {options.pattern}, {options.optimizer}, ",
        end="",
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| width | method | step, ms | over the plain step |\n|---|---|---|---|")
    over = {width: over_plain(seconds) for width, seconds in found.items()}
    for width, seconds in found.items():
        for name, values in seconds.items():
            ms = 1e3 * statistics.median(values)
            print(f"| {width} | {name} | {ms:.1f} | {100 * over[width][name]:+.1f} % |")
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
        machine = {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        content = {
            "settings": settings,
            "machine": machine,
            "step seconds": found,
            "over the plain step": over,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pattern", help="by default 1:16, and 2:4 for convolutions")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--monitor", action="store_true")
    parser.add_argument("--convolutions", action="store_true")
    parser.add_argument("--images", type=int, default=32, help="a batch of the residual CNN")
    parser.add_argument("--threads", type=int, help="instead of torch's default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pattern is None:
        options.pattern = "2:4" if options.convolutions else "1:16"
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    if options.monitor:
        parts = monitored(options)
        print(
            "| method | step, ms | batch without a log, ms | log, ms | histogram and pictures, ms | share |"
        )
        print("|---|---|---|---|---|---|")
        for name, part in parts.items():
            times = [1e3 * part[kind] for kind in ("step", "quiet", "log", "draw")]
            print(
                "| {} | {:.1f} | {:.3f} | {:.1f} | {:.1f} | {:.2f} % |".format(
                    name, *times, 100 * part["share"]
                )
            )
        if options.json:
            options.json.write_text(
                json.dumps({"width": options.width, "tokens": options.tokens, "seconds": parts})
            )
        return
    if options.convolutions:
        convolutions(options)
        return
    seconds = steps(options)
    print(
        f"{options.tokens} tokens, MLP {options.width} -> {4 * options.width} -> {options.width}, {options.pattern}, ",
        end="",
    )
    print(f"{options.optimizer}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| method | step, ms | over the plain step |\n|---|---|---|")
    over = over_plain(seconds)
    for name, values in seconds.items():
        print(f"| {name} | {1e3 * statistics.median(values):.0f} | {100 * over[name]:+.1f} % |")
    size = f"{options.size} x {options.size}"
    print(
        f"\n| an adaptation, {size} | optimizer | evidence | seconds | without |\n|---|---|---|---|---|"
    )
    costs = {}
    for pattern in ("1:16", "2:4"):
        for optimizer in ("sgd", "adamw"):
            for evidence in get_args(Evidence):
                cost = adaptations(options.size, pattern, optimizer, evidence, 5)
                costs[f"{pattern} {optimizer} {evidence}"] = cost
                print(
                    "| {} | {} | {} | {:.2f} | {:.2f} |".format(pattern, optimizer, evidence, *cost)
                )
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        found = {"step seconds": seconds, "over the plain step": over, "adaptation seconds": costs}
        options.json.write_text(json.dumps({"settings": settings, **found}, indent=1))


if __name__ == "__main__":
    main()
