"""The directed permutation search against the paper's best of 100 random permutations, at equal wall time.

``python -m benchmarks.permutation`` prints, for 2:4 on square Gaussian weights, how many times the gain of best-of-100
over a random permutation the directed search gains in the time that best-of-100 takes. Both run in turn in one process,
for each of the seeds; the effort of the directed search is chosen once per size so that it takes less time. With
``--checkpoint`` the same in retained magnitude on the weights of a trained model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import nm_mask, permutation_score, search_permutation
from lightning_nm.functional.permutation import Criterion

PATTERN = "2:4"
CONVERGED = 20_000


def timed(function: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def search(
    weight: Tensor, mask: Tensor, kind: str, candidates: int, criterion: Criterion, seed: int
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        return search_permutation(
            weight,
            mask,
            PATTERN,
            search=kind,  # type: ignore[arg-type]
            candidates=candidates,
            criterion=criterion,
            generator=torch.Generator().manual_seed(seed),
        )

    return run


def affordable(weight: Tensor, mask: Tensor, criterion: Criterion) -> int:
    """The largest effort at which the directed search takes no longer than best-of-100, in the median of five pairs."""
    for candidates in (400, 300, 240, 200, 170, 140, 120, 100, 80, 66, 50, 33):
        ratios = []
        for seed in range(6):
            _, random = timed(search(weight, mask, "random", 100, criterion, seed))
            _, directed = timed(search(weight, mask, "swap", candidates, criterion, seed))
            ratios.append(directed / random)
        if statistics.median(ratios[1:]) < 0.85:  # a margin, so that noise does not put it above
            break
    return candidates


def compare(weight: Tensor, criterion: Criterion, candidates: int | None, draws: int, seed: int) -> dict[str, float]:
    mask = nm_mask(weight.abs(), PATTERN, dim=1)
    candidates = candidates or affordable(weight, mask, criterion)

    def score(permutation: Tensor | None) -> float:
        return permutation_score(weight, mask, PATTERN, permutation, criterion=criterion)

    generator = torch.Generator().manual_seed(10_000 + seed)
    mean = statistics.fmean(score(torch.randperm(len(weight), generator=generator)) for _ in range(draws))
    random, random_time = timed(search(weight, mask, "random", 100, criterion, seed))
    directed, directed_time = timed(search(weight, mask, "swap", candidates, criterion, seed))
    total = float(mask.sum()) if criterion == "retained" else float(weight.abs()[mask].sum())
    return {
        "mean": mean / total,
        "random": score(random) / total,
        "swap": score(directed) / total,
        "ratio": (score(directed) - mean) / (score(random) - mean),
        "random_ms": 1e3 * random_time,
        "swap_ms": 1e3 * directed_time,
        "time_ratio": directed_time / random_time,
        "candidates": candidates,
    }


def trained_weights(path: Path) -> dict[str, Tensor]:
    """Every matrix, and every kernel as [out, taps * in], that has rows enough to permute."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    found = {}
    for key, weight in content.get("state_dict", content).items():
        if not isinstance(weight, Tensor) or weight.dim() not in (2, 4) or weight.shape[1] % 4 or len(weight) % 4:
            continue
        if len(weight) >= 32:
            found[key] = (weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight).contiguous().float()
    return found


def report(name: str, rows: list[dict[str, float]], converged: tuple[float, float] | None) -> dict[str, Any]:
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    end = f"{converged[0]:.4f} in {converged[1]:.1f} s" if converged else "-"
    print(
        f"| {name} | {middle['mean']:.4f} | {middle['random']:.4f} | {middle['swap']:.4f} | {middle['ratio']:.1f} "
        f"| {middle['random_ms']:.0f} | {middle['swap_ms']:.0f} | {middle['time_ratio']:.2f} | {end} |",
        flush=True,
    )
    return {"name": name, "runs": rows, "converged": converged}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--draws", type=int, default=1000, help="random permutations that the mean is taken over")
    parser.add_argument("--checkpoint", type=Path, help="dense weights to run on, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, {PATTERN}\n")
    print("Medians over seeds. mean, best, swap and converged: share of the forward-masked weight that is kept.\n")
    head = "weight | random mean | best of 100 | swap | gain ratio | best-of-100 ms | swap ms | time ratio | converged"
    print(f"| {head} |\n|" + "---|" * (head.count("|") + 1))

    results = []
    for size in args.sizes:
        rows: list[dict[str, float]] = []
        converged = None
        for seed in range(args.seeds):
            weight = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
            rows.append(compare(weight, "retained", int(rows[0]["candidates"]) if rows else None, args.draws, seed))
            if seed == 0:
                converged = convergence(weight, "retained")
        results.append(report(f"Gaussian {size} x {size}, retained nonzeros", rows, converged))
    if args.checkpoint is None:
        print("\nno --checkpoint: not run on trained weights")
    else:
        for key, weight in trained_weights(args.checkpoint).items():
            rows = []
            for seed in range(args.seeds):
                rows.append(compare(weight, "l1", int(rows[0]["candidates"]) if rows else None, args.draws, seed))
            shape = f"{len(weight)} x {weight.shape[1]}"
            results.append(report(f"{key} {shape}, retained magnitude", rows, convergence(weight, "l1")))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def convergence(weight: Tensor, criterion: Criterion) -> tuple[float, float]:
    """Share kept by a search that ends by itself, and its seconds."""
    mask = nm_mask(weight.abs(), PATTERN, dim=1)
    total = float(mask.sum()) if criterion == "retained" else float(weight.abs()[mask].sum())
    found, seconds = timed(search(weight, mask, "swap", CONVERGED, criterion, 0))
    return permutation_score(weight, mask, PATTERN, found, criterion=criterion) / total, seconds


if __name__ == "__main__":
    main()
