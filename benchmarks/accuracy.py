"""Accuracy of methods against each other: paired seeds, equal epochs, all test images.

Every run of a seed starts from the same weights and sees the same batches; only the method differs. Printed are the
accuracies in per cent, the mean difference to each baseline with its 95 % interval (Student's t over the paired
differences), and the training FLOPs of the whole run as they were counted, relative to dense training and to the first
baseline. On text (``--data help-topics``, a small transformer under AdamW) it is bits per byte instead, less is better.

A method is a short name, or one of the variants in ``VARIANTS``: ``fixed`` is BAME without any adaptation, ``mvue-1:2``
is dense weights with that gradient estimator, ``three-gemms`` is transposable masks with ``mvue-2:4``.

    python -m benchmarks.accuracy --seeds 5 --methods bi-mask sr-ste
    python -m benchmarks.accuracy --seeds 6 --batch-size 256 --methods top-n-2:4 mvue-2:4 three-gemms
    python -m benchmarks.accuracy --seeds 6 --pattern 1:16 --baselines sr-ste fixed --methods bame
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from scipy.stats import t as student_t

from lightning_nm import BAME, MVUE, ApproxMVUE, NMSparsityCallback, TopN, TransposableMask
from lightning_nm.demo import Digits, FashionMNIST, HelpTopics, ResidualCNN, TinyTransformer

# Method and gradient estimator.
VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bame": lambda: (BAME(every=25), None),
    "bame-every-100": lambda: (BAME(every=100), None),
    "bame-budget-0.05": lambda: (BAME(every=25, budget=0.05), None),
    "bame-loss": lambda: (BAME(every=25, rank_by="loss"), None),
    "bame-taylor": lambda: (BAME(every=25, score="taylor-abs"), None),
    "bame-quantile": lambda: (BAME(every=25, selection="quantile"), None),
    "bame-bi-mask": lambda: (BAME(every=25, dgrad="bi-mask"), None),
    "fixed": lambda: (BAME(start=1.0, stop=1.0), None),
    "top-n-2:4": lambda: ("dense", TopN("2:4")),
    "top-n-1:4": lambda: ("dense", TopN("1:4")),
    "top-n-1:16": lambda: ("dense", TopN("1:16")),
    "mvue-1:2": lambda: ("dense", MVUE("1:2")),
    "mvue-2:4": lambda: ("dense", MVUE("2:4")),
    "mvue-1:4": lambda: ("dense", MVUE("1:4")),
    "mvue-1:16": lambda: ("dense", MVUE("1:16")),
    "approx-mvue-2:4": lambda: ("dense", ApproxMVUE()),
    "transposable-every-10": lambda: (TransposableMask(update_every=10), None),
    "transposable-decay": lambda: (TransposableMask(decay=2e-4), None),
    "transposable-dense-end": lambda: (TransposableMask(dense_end=1 / 6), None),
    "three-gemms": lambda: ("transposable", MVUE("2:4")),
}


class Flops(pl.Callback):
    """Notes the FLOPs ratios of a run before the masks are taken off."""

    def __init__(self, masks: NMSparsityCallback) -> None:
        self.masks = masks
        self.ratios: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read them."""
        assert self.masks.sparsifier is not None
        self.ratios = self.masks.sparsifier.mean_flops_ratios()


def train(method: str, seed: int, options: argparse.Namespace) -> tuple[float, dict[str, float], float]:
    """Train once; the figure of the test, the FLOPs ratios to dense training and the seconds that it took."""
    pl.seed_everything(seed, verbose=False)
    data: Any
    batches = {} if options.batch_size is None else {"batch_size": options.batch_size}
    if options.data == "fashion-mnist":
        data = FashionMNIST(options.data_dir, train_size=options.train_size, seed=seed, **batches)
    else:
        data = {"digits": Digits, "help-topics": HelpTopics}[options.data](seed=seed, **batches)
    text = options.data == "help-topics"
    model = TinyTransformer() if text else ResidualCNN(width=options.width)
    made = VARIANTS.get(method, lambda: (method, None))()
    masks = NMSparsityCallback(options.pattern, *made, show_tables=False, grad_snr_every=0)
    flops = Flops(masks)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        max_steps=options.steps,
        accelerator="cpu",
        callbacks=[masks, flops],
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
    tested = trainer.test(model, data, verbose=False)[0]
    figure = tested["test_bits_per_byte"] if text else 100 * tested["test_acc"]
    return float(figure), flops.ratios, seconds


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval."""
    half = student_t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), float(half)


def report(
    found: dict[str, list[float]], flops: dict[str, dict[str, float]], baselines: list[str], digits: str
) -> None:
    """Print means, paired differences to the baselines, and FLOPs."""
    methods = list(found)
    print("| mean | " + " | ".join(f"{statistics.mean(found[method]):{digits}}" for method in methods) + " | |\n")
    for baseline in baselines:
        for method in methods:
            if method != baseline:
                mean, half = interval([a - b for a, b in zip(found[method], found[baseline], strict=True)])
                bounds = f"[{mean - half:+{digits}}, {mean + half:+{digits}}]"
                print(f"{method} - {baseline}: {mean:+{digits}}, 95 % interval {bounds}")
    first = baselines[0]
    kinds = list(flops[first])
    print("\n| training FLOPs | " + " | ".join(f"{kind}, to dense | to {first}" for kind in kinds) + " |")
    print("|" + "---|" * (2 * len(kinds) + 1))
    for method in methods:
        cells = (f"{flops[method][kind]:.3f} | {flops[method][kind] / flops[first][kind]:.3f}" for kind in kinds)
        print(f"| {method} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["fashion-mnist", "digits", "help-topics"], default="fashion-mnist")
    parser.add_argument("--data-dir", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--methods", nargs="+", default=["bi-mask"])
    parser.add_argument("--baselines", nargs="+", default=["dense"])
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps, if that is earlier")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--train-size", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the runs there")
    parser.add_argument("--read", type=Path, help="print the tables of runs that were written, without training")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", message="BAME never adapts")  # that is what `fixed` is for
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    if options.read:
        runs = json.loads(options.read.read_text())
        found = runs["figures"]
        digits = ".3f" if runs["settings"]["data"] == "help-topics" else ".2f"
        print("| seed | " + " | ".join(found) + " | |\n|" + "---|" * (len(found) + 2))
        for seed, row in enumerate(zip(*found.values(), strict=True)):
            print(f"| {seed} | " + " | ".join(f"{value:{digits}}" for value in row) + " | |")
        report(found, runs["flops"], options.baselines, digits)
        return
    methods = list(dict.fromkeys([*options.baselines, *options.methods]))
    found = {method: [] for method in methods}
    flops: dict[str, dict[str, float]] = {}
    size = {
        "fashion-mnist": f"{options.train_size} training images, width {options.width}",
        "digits": f"width {options.width}",
        "help-topics": "bits per byte",
    }[options.data]
    length = f"{options.epochs} epochs" if options.steps < 0 else f"{options.steps} steps"
    batch = "" if options.batch_size is None else f"batches of {options.batch_size}, "
    print(f"{options.data}, {size}, {length}, {batch}{options.pattern}, ", end="")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    digits = ".3f" if options.data == "help-topics" else ".2f"
    print("| seed | " + " | ".join(methods) + " | seconds |\n|" + "---|" * (len(methods) + 2))
    for seed in range(options.seeds):
        results = [train(method, seed, options) for method in methods]
        for method, (value, ratios, _) in zip(methods, results, strict=True):
            found[method].append(value)
            flops[method] = ratios
        times = " ".join(f"{seconds:.0f}" for *_, seconds in results)
        print(f"| {seed} | " + " | ".join(f"{result[0]:{digits}}" for result in results) + f" | {times} |", flush=True)
    report(found, flops, options.baselines, digits)
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "figures": found, "flops": flops}, indent=1))


if __name__ == "__main__":
    main()
