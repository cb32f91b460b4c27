"""What a backward mask keeps after `search="swap"` and after the best of 100 random permutations, in equal time.

    python -m benchmarks.permutation [--sizes 512 1024 2048] [--seeds 10] [--checkpoint PATH] [--json FILE]

Every case is a weight with a 2:4 forward mask of its magnitudes along `in`. "random mean" is the mean score of 1000
permutations, and a gain is the distance to that mean. Best-of-100 and swap run as a user would call them
(`candidates=100` for both), in turn and several times; "time" is the median of swap's time over best-of-100's, so that
below 1 swap had less than equal time. Scores are fractions of the forward mask's nonzeros (of their magnitude for
"l1"). The ceiling is what N per M rows would allow in every column if any rows could share a block; no search
reaches it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor

from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.permutation import (
    Criterion,
    _problem,
    _scores,
    permutation_score,
    search_permutation,
)
from lightning_nm.pattern import NMPattern

PATTERN = NMPattern(2, 4)
DRAWS = 1000
COLUMNS = {
    "case": "{}",
    "random mean": "{:.4f}",
    "best of 100": "{:.4f}",
    "swap": "{:.4f}",
    "swap, long": "{:.4f}",
    "ceiling": "{:.4f}",
    "gain ratio": "**{:.1f}**",
    "time": "{:.2f}",
    "best of 100, ms": "{:.1f}",
    "swap, ms": "{:.1f}",
    "long, ms": "{:.0f}",
}


def measure(
    weight: Tensor, criterion: Criterion, seed: int, repeats: int, long: int
) -> dict[str, float]:
    """One weight ``[out, K]``: scores as fractions, times in milliseconds."""
    mask = nm_mask(weight.abs(), PATTERN)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.where(mask, weight, 0).abs()
    kept = kept if criterion == "l1" else (kept != 0).float()
    whole = kept.sum(dtype=torch.float64).item()

    def score(permutation: Tensor) -> float:
        return permutation_score(weight, mask, PATTERN, permutation, criterion=criterion) / whole

    def best_of_100() -> Tensor:
        return search_permutation(
            weight, mask, PATTERN, search="random", criterion=criterion, generator=generator
        )

    def swap(candidates: int = 100) -> Tensor:
        return search_permutation(
            weight,
            mask,
            PATTERN,
            search="swap",
            candidates=candidates,
            criterion=criterion,
            generator=generator,
        )

    times: dict[str, list[float]] = {"random": [], "swap": []}
    found: dict[str, list[float]] = {"random": [], "swap": []}
    for _ in range(repeats):
        for name, search in (("random", best_of_100), ("swap", swap)):
            start = time.perf_counter()
            permutation = search()
            times[name].append(time.perf_counter() - start)
            found[name].append(score(permutation))
    start = time.perf_counter()
    converged = swap(long)
    long_time = time.perf_counter() - start

    draws = torch.stack([torch.randperm(len(weight), generator=generator) for _ in range(DRAWS)])
    drawn = _scores(
        _problem(weight, mask, PATTERN, criterion, groups=1), draws
    )  # packs the weight once, not 1000 times
    random_mean = drawn.double().mean().item() / whole
    best, swapped = mean(found["random"]), mean(found["swap"])
    limit = PATTERN.n * len(weight) // PATTERN.m
    return {
        "random mean": random_mean,
        "best of 100": best,
        "swap": swapped,
        "swap, long": score(converged),
        "ceiling": kept.sort(0, descending=True).values[:limit].sum(dtype=torch.float64).item()
        / whole,
        "gain ratio": (swapped - random_mean) / (best - random_mean),
        "time": median(
            mine / theirs for mine, theirs in zip(times["swap"], times["random"], strict=True)
        ),
        "best of 100, ms": 1e3 * median(times["random"]),
        "swap, ms": 1e3 * median(times["swap"]),
        "long, ms": 1e3 * long_time,
    }


def medians(case: str, runs: list[dict[str, float]]) -> dict[str, str | float]:
    return {"case": case, **{name: median(run[name] for run in runs) for name in runs[0]}}


def trained_weights(path: Path) -> Iterable[tuple[str, Tensor]]:
    """Every 2-D and 4-D weight that 2:4 divides both ways, ``[out, K]`` with blocks along `in` for a fixed tap."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, tensor in state.get("state_dict", state).items():
        if (
            not isinstance(tensor, Tensor)
            or not tensor.is_floating_point()
            or tensor.ndim not in (2, 4)
        ):
            continue
        out, columns = tensor.shape[:2]
        if out >= 32 and out % PATTERN.m == 0 and columns % PATTERN.m == 0:
            yield name, tensor.float().movedim(1, -1).flatten(1)


def table(rows: list[dict[str, str | float]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [
        f"| {' | '.join(form.format(row[name]) for name, form in COLUMNS.items())} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[512, 1024, 2048], help="rows and columns"
    )
    parser.add_argument(
        "--seeds", type=int, default=10, help="Gaussian weights per size; medians are printed"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed runs of either search per weight, interleaved"
    )
    parser.add_argument("--long", type=int, default=5000, help="candidates of the long run of swap")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both searches")
    parser.add_argument(
        "--checkpoint", type=Path, help="a state dict or Lightning checkpoint of a trained model"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    warm_up = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    measure(warm_up, "retained", 0, options.repeats, 100)

    print(
        f"Gaussian weights, retained, median of {options.seeds} seeds, torch {torch.__version__}, ",
        end="",
    )
    print(f"{options.threads} thread(s)\n")
    gaussian = []
    for size in options.sizes:
        runs = []
        for seed in range(options.seeds):
            weight = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
            runs.append(measure(weight, "retained", seed, options.repeats, options.long))
        gaussian.append(medians(f"{size} x {size}", runs))
    print(table(gaussian))

    trained = []
    if options.checkpoint is None:
        print("\nTrained weights: skipped, no --checkpoint PATH given.")
    else:
        for name, weight in trained_weights(options.checkpoint):
            case = f"{name} {weight.shape[0]} x {weight.shape[1]}"
            trained.append(medians(case, [measure(weight, "l1", 0, options.repeats, options.long)]))
        if trained:
            middle = {
                name: median(float(row[name]) for row in trained)
                for name in COLUMNS
                if name != "case"
            }
            print(f"\nTrained weights, l1 (retained magnitude), {options.checkpoint.name}\n")
            print(table([*trained, {"case": f"median of {len(trained)}", **middle}]))
        else:
            print(
                f"\nTrained weights: {options.checkpoint.name} holds none with at least 32 rows that 2:4 divides."
            )

    if options.json is not None:
        setup = {
            "torch": torch.__version__,
            "threads": options.threads,
            "machine": platform.machine(),
        }
        options.json.write_text(
            json.dumps({"setup": setup, "gaussian": gaussian, "trained": trained}, indent=1)
        )


if __name__ == "__main__":
    main()
