"""The coordinate check of SuPar: do the sizes of activations depend on the density of the weights?

``PYTHONPATH=. python -m benchmarks.coordinate_check`` trains an MLP of three masked layers by AdamW for ten steps at
each density and width, with and without ``scale="supar"``, and prints the root mean square of the last masked layer's
output after 0 to 10 steps, averaged over seeds. Nothing is timed. ``--json FILE`` keeps the numbers for the picture.

In a good parametrization (Yang et al., arXiv 2203.03466; for sparse weights Dey et al., arXiv 2405.15743) the curves
of all densities lie on each other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tables.markdown import table
from lightning_nm import NMSparsifier
from lightning_nm.training.scale import Scale

PATTERNS = (None, "1:2", "1:4", "1:8", "1:16", "1:32")
WIDTHS = (128, 256, 512)
STEPS = 10
SEEDS = 5
MASKED = ["2", "4", "6"]


def activations(pattern: str | None, scale: Scale | None, width: int, seed: int) -> list[float]:
    """The root mean square of the last masked layer's output before the first step and after each of ten."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(64, width)]
    for _ in MASKED:
        layers += [nn.ReLU(), nn.Linear(width, width)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))
    x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))
    sizes: list[float] = []

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        sizes.append(float(output.detach().square().mean().sqrt()))

    model.get_submodule(MASKED[-1]).register_forward_hook(note)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sparsifier = None
    if pattern is not None:
        sparsifier = NMSparsifier(
            model, pattern, "asp", include=MASKED, skip_first_last=False, scale=scale
        ).attach()
        sparsifier.register(optimizer)
    for step in range(STEPS + 1):
        loss = F.cross_entropy(model(x), y)
        if step == STEPS:
            break
        optimizer.zero_grad()
        loss.backward()
        if sparsifier is not None:
            sparsifier.before_step(optimizer)
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()
    return sizes


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the numbers if asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.coordinate_check")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(argv)
    found = []
    rows = []
    scales: tuple[Scale | None, ...] = (None, "supar")
    for width in WIDTHS:
        for scale in scales:
            for pattern in PATTERNS:
                runs = [activations(pattern, scale, width, seed) for seed in range(SEEDS)]
                sizes = [mean(column) for column in zip(*runs, strict=True)]
                found.append(
                    {"width": width, "scale": scale, "pattern": pattern or "dense", "sizes": sizes}
                )
                shown = [f"{sizes[step]:.3f}" for step in (0, 1, 3, STEPS)]
                rows.append([str(width), str(scale), pattern or "dense", *shown])
    print(table(["width", "scale", "N:M", "step 0", "1", "3", "10"], rows))
    if options.json:
        settings = {"steps": STEPS, "seeds": SEEDS, "optimizer": "AdamW, lr 1e-3"}
        options.json.write_text(json.dumps({"settings": settings, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
