"""What a method adds to a training step, and what an adaptation of BAME costs.

First table: a whole training step (forward, backward, optimizer, masks) of a two-layer MLP under every method, and with
gradient estimators, over the same step of the same model without masks; interleaved in one process, medians over the
rounds. Every GEMM is a dense one here, so this is overhead alone. BAME is timed between adaptations.

Second table: an adaptation of one layer, beside what the same two calls cost in a step without one.

    python -m benchmarks.step_overhead
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_nm import BAME, MVUE, ApproxMVUE, NMSparsifier, TopN
from lightning_nm.nn.layer import NMLayer

NEVER = 1 << 40
# Method and gradient estimator.
METHODS: dict[str, tuple[Any, Any]] = {
    "dense": ("dense", None),
    "ste": ("ste", None),
    "sr-ste": ("sr-ste", None),
    "asp": ("asp", None),
    "transposable": ("transposable", None),
    "bi-mask": ("bi-mask", None),
    "bame": (BAME(start=NEVER, stop=NEVER), None),
    "bame-bi-mask": (BAME(start=NEVER, stop=NEVER, dgrad="bi-mask"), None),
    "dense, top-n 2:4": ("dense", TopN("2:4")),
    "dense, mvue 1:2": ("dense", MVUE("1:2")),
    "dense, mvue 2:4": ("dense", MVUE("2:4")),
    "dense, approx-mvue": ("dense", ApproxMVUE()),
    "transposable, mvue 2:4": ("transposable", MVUE("2:4")),
}


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
    runs = {}
    for name in ("plain", *METHODS):
        copied = copy.deepcopy(model)
        optimizer, sparsifier = optimizer_of(options.optimizer, copied), None
        if name != "plain":
            method, estimator = METHODS[name]
            sparsifier = NMSparsifier(
                copied, options.pattern, method, estimator, skip_first_last=False, grad_snr_every=0
            ).attach()
            sparsifier.register(optimizer)
        runs[name] = Run(copied, optimizer, sparsifier)
    x = torch.randn(options.tokens, width)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(options.rounds + 2):
        for name, run in runs.items():
            taken = run.step(x)
            if k >= 2:  # the first steps allocate
                seconds[name].append(taken)
    return seconds


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


def adaptations(size: int, pattern: str, optimizer_name: str, rounds: int) -> tuple[float, float]:
    """Median seconds that BAME takes around the optimizer's step, in a window that adapts and in one that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    for parameter in model.parameters():
        parameter.data.mul_(1e-4)  # so that exchanges are worth it and the whole budget is used
    optimizer = optimizer_of(optimizer_name, model)
    method = Timed(start=2, stop=NEVER, every=2)
    sparsifier = NMSparsifier(model, pattern, method, skip_first_last=False).attach()
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2 * rounds + 2):
        adapts = layer.dense_gradient
        layer.weight.grad = torch.randn(size, size)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        taken[adapts].append(method._seconds)
    assert sparsifier.stats()["adapted_blocks"] > 0.25
    return statistics.median(taken[True]), statistics.median(taken[False][2:])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pattern", default="1:16")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    seconds = steps(options)
    plain = seconds["plain"]
    print(
        f"{options.tokens} tokens, MLP {options.width} -> {4 * options.width} -> {options.width}, {options.pattern}, ",
        end="",
    )
    print(f"{options.optimizer}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| method | step, ms | over the plain step |\n|---|---|---|")
    for name, values in seconds.items():
        # Ratios within a round: what else the machine does in it slows both.
        ratio = statistics.median(a / b for a, b in zip(values, plain, strict=True))
        print(f"| {name} | {1e3 * statistics.median(values):.0f} | {100 * (ratio - 1):+.1f} % |")
    print(f"\n| an adaptation, {options.size} x {options.size} | optimizer | seconds | without |\n|---|---|---|---|")
    costs = {}
    for pattern in ("1:16", "2:4"):
        for optimizer in ("sgd", "adamw"):
            costs[f"{pattern} {optimizer}"] = adaptations(options.size, pattern, optimizer, 5)
            print("| {} | {} | {:.2f} | {:.2f} |".format(pattern, optimizer, *costs[f"{pattern} {optimizer}"]))
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(
            json.dumps({"settings": settings, "step seconds": seconds, "adaptation seconds": costs}, indent=1)
        )


if __name__ == "__main__":
    main()
