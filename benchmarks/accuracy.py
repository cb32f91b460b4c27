"""Accuracy of methods against dense training: paired seeds, equal epochs, all test images.

Every run of a seed starts from the same weights and sees the same batches; only the method differs. Printed are the
accuracies, the mean difference to dense and its 95 % interval (Student's t over the paired differences).

    python -m benchmarks.accuracy --seeds 5 --methods bi-mask sr-ste
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from scipy.stats import t as student_t

from lightning_nm import NMSparsityCallback
from lightning_nm.demo import Digits, FashionMNIST, ResidualCNN


def accuracy(method: str, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Train once; the test accuracy and the seconds that it took."""
    pl.seed_everything(seed, verbose=False)
    if options.data == "fashion-mnist":
        data: Any = FashionMNIST(options.data_dir, train_size=options.train_size, seed=seed)
    else:
        data = Digits(seed=seed)
    model = ResidualCNN(width=options.width)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[NMSparsityCallback(options.pattern, method, show_tables=False)],  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    return float(trainer.test(model, data, verbose=False)[0]["test_acc"]), seconds


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval."""
    half = student_t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), float(half)


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--data-dir", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--methods", nargs="+", default=["bi-mask"])
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--train-size", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    methods = ["dense", *options.methods]
    found: dict[str, list[float]] = {method: [] for method in methods}
    print(
        f"{options.data}, {options.train_size} training images, {options.epochs} epochs, width {options.width}, ",
        end="",
    )
    print(f"{options.pattern}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| seed | " + " | ".join(methods) + " | seconds |\n|" + "---|" * (len(methods) + 2))
    for seed in range(options.seeds):
        results = [accuracy(method, seed, options) for method in methods]
        for method, (value, _) in zip(methods, results, strict=True):
            found[method].append(value)
        seconds = " ".join(f"{s:.0f}" for _, s in results)
        print(f"| {seed} | " + " | ".join(f"{100 * value:.2f}" for value, _ in results) + f" | {seconds} |", flush=True)
    print("| mean | " + " | ".join(f"{100 * statistics.mean(found[method]):.2f}" for method in methods) + " | |\n")
    for method in options.methods:
        mean, half = interval([100 * (a - b) for a, b in zip(found[method], found["dense"], strict=True)])
        print(f"{method} - dense: {mean:+.2f} points, 95 % interval [{mean - half:+.2f}, {mean + half:+.2f}]")
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "accuracy": found}, indent=1))


if __name__ == "__main__":
    main()
