"""Memory that a training holds between two steps, by method: ``python -m benchmarks.state_memory``.

Each method trains a linear layer of 512 x 2048 weights for some steps of AdamW in float32. Counted are the bytes of all
tensors that live after a step, each memory once, before the gradients are let go: the weight, its gradient, the
optimizer's state, masks, and what the method keeps for itself. What a step needs for a moment is not counted. The dense
training holds 16 bytes for a weight. Nothing is timed, so that the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.step_overhead import METHODS
from lightning_nm import NMSparsifier

PATTERNS = ("2:4", "1:4", "1:16")
ROWS, DEPTH = 512, 2048
STEPS = 3


def live_bytes() -> int:
    """The bytes of all living tensors, each memory once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        # Not `isinstance`, which asks some objects of torch for a class that they import first.
        if issubclass(type(found), torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held(method: Any, estimator: Any, pattern: str) -> float:
    """The bytes for a weight that a training holds after a step.

    Args:
        method: A name or a method.
        estimator: Of the output gradient, or ``None``.
        pattern: N:M.
    """
    before = live_bytes()
    torch.manual_seed(0)
    model = nn.Linear(DEPTH, ROWS, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    sparsifier = NMSparsifier(
        model, pattern, method, estimator, skip_first_last=False, grad_snr_every=0
    ).attach()
    sparsifier.register(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, DEPTH)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    return (live_bytes() - before) / (ROWS * DEPTH)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found: dict[str, dict[str, float]] = {}
    print(f"| method | {' | '.join(PATTERNS)} |\n|---|{'---|' * len(PATTERNS)}")
    for name, (method, estimator) in METHODS.items():
        if "," in name and not name.startswith("bame"):
            continue  # an estimator keeps nothing between two steps
        found[name] = {}
        for pattern in PATTERNS:
            found[name][pattern] = held(method, estimator, pattern)
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in found[name].values())} |")
    if args.json:
        args.json.write_text(json.dumps({"bytes per weight": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
