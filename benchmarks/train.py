"""A small GPT trained by a real Trainer: tokens per second, memory and loss, dense against ours.

    python -m benchmarks.train [--variants dense transposable:auto ...] [--seconds 60] [--json benchmarks/results/...]

A variant is ``dense``, Lightning's Trainer with bf16-mixed, or ``METHOD[+mvue]:KERNELS``: the same with
``NMSparsityCallback(method=METHOD)``, with 2:4 estimates of output gradients after ``+mvue``, and
``NMMixedPrecision(kernels=KERNELS)``, for example ``transposable+mvue:auto``. The decoder blocks are compiled in all of
them. The model is bytes in, bytes out; the text is Python's help topics or, where Python came without them, a random
text with a structure. The head and the embeddings stay dense, as they are by default.

What is compared fairly, and how. A Trainer owns its loop, so variants run one after another, in one process and for
equal seconds; each begins with the same weights and sees the same batches. What the machine does meanwhile is shown
by ``dense``, which by default runs first and last: its two speeds should agree. Steps count after a warm-up in which
graphs are compiled and kernels measured, whose seconds are told apart. A step's time is between two events on the
device at the ends of batches, moves of masks and the optimizer included, and the host is never more than a step
ahead. Losses are means of ten training steps: at the earliest end of all variants' seconds after the warm-up (equal
time), and at the fewest steps (equal steps).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.gpu.layers import products
from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import NotAsked, Setting
from benchmarks.train_model import TINY, Batches, ScratchGPT, Size, help_topics
from lightning_nm import MVUE, NMMixedPrecision, NMSparsityCallback
from lightning_nm.kernels import GemmKernel

VARIANTS = (
    "dense",
    "transposable:reference",
    "transposable:auto",
    "bi-mask:auto",
    "transposable+mvue:auto",
    "dense",
)
AVERAGED = 10
"""Steps whose losses are averaged."""


class Watch(pl.Callback):
    """Notes when each step ended and its loss, and ends the run; placed last, so that it sees the moves of masks.

    Args:
        device: Where the run is.
        seconds: From the end of the warm-up until the run ends, by the clock of the host.
        warmup: Steps that do not count; at least two that do are made.
        limit: Seconds of the whole run, the warm-up included.
    """

    def __init__(
        self, device: torch.device, seconds: float, warmup: int, limit: float = math.inf
    ) -> None:
        self.device, self.seconds, self.warmup, self.limit = device, seconds, warmup, limit
        self.ends: list[Any] = []
        self.losses: list[Tensor] = []
        self.start = perf_counter()
        self.warm = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Note the step, and wait for the one before it."""
        self.losses.append(outputs["loss"].detach())
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
            if len(self.ends) > 1:
                self.ends[-2].synchronize()
        else:
            self.ends.append(perf_counter())
        if len(self.ends) == self.warmup:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.warm = perf_counter() - self.start
        passed = perf_counter() - self.start
        if len(self.ends) >= self.warmup + 2 and passed > min(self.warm + self.seconds, self.limit):
            trainer.should_stop = True

    def steps(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        ends = self.ends[self.warmup - 1 :]
        return [
            a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a
            for a, b in pairwise(ends)
        ]


class Run(NamedTuple):
    """One variant's training: seconds and losses of the steps after the warm-up, and the figures of the whole."""

    seconds: list[float]
    losses: list[float]
    figures: dict[str, object]

    def loss_after(self, seconds: float) -> float:
        """Mean loss of the last ten steps that ended within so many seconds; of the first one if none did."""
        passed, count = 0.0, 0
        for step in self.seconds:
            passed += step
            if passed > seconds * (1 + 1e-9):
                break
            count += 1
        return self.loss_at(max(count, 1))

    def loss_at(self, steps: int) -> float:
        """Mean loss of the last ten of so many steps."""
        return mean(self.losses[max(steps - AVERAGED, 0) : steps])


def parse(variant: str) -> tuple[str, bool, str]:
    """Split a variant's name into method, whether output gradients are drawn, and kernels.

    Raises:
        ValueError: If it is no such name.

    Example::

        >>> parse("transposable+mvue:auto"), parse("dense")
        (('transposable', True, 'auto'), ('', False, ''))
    """
    if variant == "dense":
        return "", False, ""
    method, _, kernels = variant.partition(":")
    method, plus, estimator = method.partition("+")
    if not (method and kernels) or (plus and estimator != "mvue"):
        raise ValueError(
            f"{variant!r} is no variant: write 'dense' or METHOD:KERNELS or METHOD+mvue:KERNELS"
        )
    return method, bool(plus), kernels


def make_trainer(device: torch.device, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """A Trainer that does nothing but the training, and leaves its end to the callbacks."""
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        max_steps=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(
    variant: str,
    size: Size,
    seconds: float,
    text: Tensor,
    device: torch.device,
    backends: list[GemmKernel] | None = None,
    limit: float = math.inf,
) -> Run:
    """Train one variant for so many seconds after its warm-up.

    Args:
        variant: See :func:`parse`.
        size: What is trained.
        seconds: How long; the warm-up and two steps are made in any case.
        text: uint8 ``[length]``.
        device: Where.
        backends: The sparse kernels; None for those of the package.
        limit: Seconds of the whole run, what it compiles included.
    """
    method, mvue, kernels = parse(variant)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with device:
        model = ScratchGPT(
            context=size.context, dim=size.dim, depth=size.depth, heads=size.heads, lr=3e-4
        )
    for block in model.blocks:
        block.compile(backend=size.backend)
    watch = Watch(device, seconds, size.warmup, limit)
    callbacks: list[pl.Callback] = [watch]
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    router = None
    if method:
        masks = NMSparsityCallback("2:4", method, MVUE("2:4") if mvue else None, show_tables=False)  # type: ignore[arg-type]
        plugin = NMMixedPrecision(
            kernels=kernels, backends=backends, decisions=None, budget_s=10, device=device.type
        )
        callbacks, precision, router = [masks, watch], {"plugins": [plugin]}, plugin.router
    with quiet():
        trainer = make_trainer(device, callbacks, **precision)
        watch.start = perf_counter()
        trainer.fit(model, DataLoader(Batches(text, size, device), batch_size=None))
    steps = watch.steps()
    losses = torch.stack(watch.losses[size.warmup :]).float().tolist()
    tokens = size.batch * size.context
    figures: dict[str, object] = {
        "steps": len(steps),
        "step ms": 1e3 * median(steps),
        "tokens per second": tokens / median(steps),
        "warm-up s": watch.warm,
        "peak MB": torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else None,
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "last loss": losses[-1],
    }
    if router is not None:
        figures["sparse share"], figures["share of"] = router.sparse_share()
        figures["products of a block"] = {
            name: why for name, why in products(router).items() if name.startswith("blocks.0.")
        }
    return Run(steps, losses, figures)


def clean(device: torch.device) -> None:
    """Give back the memory of the run before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """Speed relative to the first run, and losses at equal time and at equal steps, of runs with at least one step."""
    time = min(sum(run.seconds) for run in runs.values())
    steps = min(len(run.seconds) for run in runs.values())
    first = next(iter(runs.values()))
    return {
        name: {
            "x": median(first.seconds) / median(run.seconds),
            "loss at equal time": run.loss_after(time),
            "loss at equal steps": run.loss_at(steps),
        }
        for name, run in runs.items()
    } | {"at": {"seconds": time, "steps": steps}}


def names(variants: Sequence[str]) -> list[tuple[str, str]]:
    """Give repeated variants names of their own.

    Example::

        >>> names(["dense", "bi-mask:auto", "dense"])
        [('dense', 'dense'), ('bi-mask:auto', 'bi-mask:auto'), ('dense again', 'dense')]
    """
    found: dict[str, str] = {}
    for variant in variants:
        name = variant
        while name in found:
            name += " again"
        found[name] = variant
    return list(found.items())


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Silence what Lightning says of a run without loggers and validation; what we say is heard."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(before)


# For the runner of benchmarks/gpu, whose time is short: the most telling first, in equal fractions of what is left.
PART = ("dense", "transposable+mvue:auto", "transposable:auto", "transposable:reference", "dense")
DRY_PART = ("dense", "bi-mask+mvue:sparse")


def run(report: Report) -> None:
    """One question for each variant, and one for the comparison."""
    setting = report.setting
    size = setting.pick(Size(), TINY)
    text, source = help_topics()
    runs: dict[str, Run] = {}
    kernels = setting.kernels  # probed once

    def one(setting: Setting, name: str, variant: str, limit: float) -> dict[str, object]:
        clean(setting.device)
        seconds = setting.pick(8.0, 0.0)
        runs[name] = train(variant, size, seconds, text, setting.device, kernels, limit)
        return runs[name].figures | {"text": source}

    variants = names(setting.pick(PART, DRY_PART))
    for k, (name, variant) in enumerate(variants):
        limit = report.left / (len(variants) - k) - 2  # a model is made in less than two
        report.ask(name, partial(one, name=name, variant=variant, limit=limit))

    def comparison(setting: Setting) -> dict[str, Any]:
        if not runs:
            raise NotAsked("nothing was trained")
        return compare(runs)

    report.ask("comparison", comparison)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the variants and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of each variant, after its warm-up"
    )
    for name, default in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    size = Size(*(getattr(options, name) for name in Size._fields))
    for variant in options.variants:
        try:
            parse(variant)
        except ValueError as error:
            parser.error(str(error))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    text, source = help_topics()
    print(f"{where}, torch {torch.__version__}, {source}, {size}\n")
    runs: dict[str, Run] = {}
    for name, variant in names(options.variants):
        clean(device)
        runs[name] = train(variant, size, options.seconds, text, device)
        print(f"{name}: {json.dumps(runs[name].figures)}", flush=True)
    compared = compare(runs)
    at = compared["at"]
    print(
        f"\n| variant | tokens/s | x | peak MB | loss after {at['seconds']:.0f} s | loss after {at['steps']} steps |"
    )
    print("|---|---|---|---|---|---|")
    for name, run in runs.items():
        row, figures = compared[name], run.figures
        peak = "" if figures["peak MB"] is None else f"{figures['peak MB']:.0f}"
        print(
            f"| {name} | {figures['tokens per second']:.0f} | {row['x']:.3f} | {peak} "
            f"| {row['loss at equal time']:.4f} | {row['loss at equal steps']:.4f} |"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {key: str(value) for key, value in vars(options).items()}
        settings |= {"device": where, "torch": torch.__version__, "text": source}
        result = {
            "settings": settings,
            "comparison": compared,
            "runs": {
                name: {"figures": run.figures, "seconds": run.seconds, "losses": run.losses}
                for name, run in runs.items()
            },
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
