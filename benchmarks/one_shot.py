"""The error of one-shot pruning: magnitude, Wanda and SparseGPT, and NVIDIA's Model Optimizer if it is installed.

``python -m benchmarks.one_shot`` trains small MLPs on handwritten digits, prunes their hidden layers and prints the
error of the logits on other digits, ``|f(x) - f_pruned(x)| / |f(x)|``, and the accuracy: medians over seeds. The demo
extra is needed; ``nvidia-modelopt`` (with ``requests``) is optional, and is compared at 2:4, its pattern.

``python -m benchmarks.one_shot --budgets 0.5 0.25`` prunes all layers of the same MLPs to these densities instead: with
one N:16 for all layers, and with one for each layer, chosen without and with data.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm import prune
from lightning_nm.demo import Digits

Pruner = Callable[[nn.Module, list[Tensor]], object]


def by_score(pattern: str, score: Any, model: nn.Module, data: list[Tensor]) -> None:
    """Prune by :func:`lightning_nm.prune`."""
    prune(model, pattern, score, data)


def uniform(budget: float, score: Any, model: nn.Module, data: list[Tensor]) -> None:
    """Prune all layers, the last one too, to the same N:16."""
    prune(model, f"{round(16 * budget)}:16", score, data, skip_first_last=False)


def chosen(budget: float, score: Any, model: nn.Module, data: list[Tensor]) -> None:
    """Prune all layers within a budget, by their output errors."""
    prune(model, score=score, data=data, budget=budget, skip_first_last=False)


def chosen_without_data(budget: float, model: nn.Module, data: list[Tensor]) -> None:
    """Prune all layers within a budget, by their magnitudes."""
    prune(model, budget=budget, skip_first_last=False)


def pruners_at(budget: float) -> dict[str, Pruner]:
    """The ways to prune to a density."""
    pruners: dict[str, Pruner] = {}
    pruners["magnitude, one N"] = partial(uniform, budget, "magnitude")
    pruners["magnitude, N by magnitudes"] = partial(chosen_without_data, budget)
    for score in ("magnitude", "wanda", "sparsegpt"):
        pruners[f"{score}, one N"] = partial(uniform, budget, score)
        pruners[f"{score}, N by output errors"] = partial(chosen, budget, score)
    return pruners


def modelopt(mode: str, model: nn.Module, data: list[Tensor]) -> None:
    """Prune by Model Optimizer, which leaves out the head: its ten outputs are no multiple of its tiles."""
    import modelopt.torch.sparsity as mts

    mts.sparsify(model, mode, config={"data_loader": data, "collect_func": lambda batch: batch})


@torch.enable_grad()
def trained(seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """An MLP, the images that it was trained on, and others with their classes."""
    torch.manual_seed(seed)
    digits = Digits()
    digits.setup("fit")
    (x, y), (others, classes) = map(_whole, (digits.train_set, digits.val_set))
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        batch = torch.randint(len(x), (128,))
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model, x, others, classes


def _whole(images: Any) -> tuple[Tensor, Tensor]:
    x, y = images.__getitems__(list(range(len(images))))
    return x.flatten(1), y


@torch.no_grad()
def measure(seed: int, pruners: dict[str, Pruner]) -> dict[str, tuple[float, float]]:
    """The error of the logits and the accuracy after each pruning of the same model."""
    model, x, others, classes = trained(seed)
    before = model(others)
    found = {"dense": (0.0, (before.argmax(1) == classes).float().mean().item())}
    for name, pruner in pruners.items():
        pruned = copy.deepcopy(model)
        pruner(pruned, list(x.split(128)))
        logits = pruned(others)
        error = ((logits - before).norm() / before.norm()).item()
        found[name] = error, (logits.argmax(1) == classes).float().mean().item()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:4", "1:8"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[])
    args = parser.parse_args(argv)
    if args.budgets:
        print("| density | pruning | error of the logits | accuracy |\n|---|---|---|---|")
        for budget in args.budgets:
            print_medians(f"{budget:g}", pruners_at(budget), args.seeds)
        return
    print("| pattern | pruning | error of the logits | accuracy |\n|---|---|---|---|")
    for pattern in args.patterns:
        pruners: dict[str, Pruner] = {
            score: partial(by_score, pattern, score)
            for score in ("magnitude", "wanda", "sparsegpt")
        }
        if pattern == "2:4" and importlib.util.find_spec("modelopt"):
            pruners["modelopt sparse_magnitude"] = partial(modelopt, "sparse_magnitude")
            pruners["modelopt sparsegpt"] = partial(modelopt, "sparsegpt")
        print_medians(pattern, pruners, args.seeds)


def print_medians(label: str, pruners: dict[str, Pruner], seeds: int) -> None:
    """Print a line for each pruner, with the medians over seeds."""
    results = [measure(seed, pruners) for seed in range(seeds)]
    for name in results[0]:
        error, accuracy = (
            statistics.median(result[name][k] for result in results) for k in range(2)
        )
        print(f"| {label} | {name} | {error:.3f} | {accuracy:.1%} |")


if __name__ == "__main__":
    main()
