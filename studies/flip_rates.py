"""How often masks change under candidate decays, relative to dense training: a cheap way to choose a decay.

``python -m studies.flip_rates CONFIG --decays 1e-3 1e-2 --steps 200`` trains a config of `lightning-nm fit` for a few
steps, once dense and once with each decay of its method, and prints the mean flip rate of each: the fraction of a
mask's entries that differ from those of the mask some steps before. The masks are those that the weights would have,
also in the dense training. Hu et al. (ICML 2024, arXiv 2404.01847) keep a decay whose flip rate is 0.60 to 0.95 of the
dense training's.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_nm import functional as nmf
from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.commands.from_config import read_yaml
from lightning_nm.commands.study.runner import fit
from lightning_nm.commands.study.spec import last_part, override, quiet
from lightning_nm.nn.layer import NMLayer


class Flips(pl.Callback):
    """Compares the masks that the weights would have every few steps.

    Args:
        every: Optimizer steps between two masks.
        transposable: Whether the masks are transposable where they can be, else N:M along ``in``.

    Attributes:
        rates: Fractions of changed entries, one for each comparison, over all layers.
    """

    def __init__(self, every: int, transposable: bool) -> None:
        self.every = every
        self.transposable = transposable
        self.rates: list[float] = []
        self._before: dict[str, torch.Tensor] = {}
        self._step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Select the masks and compare them with the former ones."""
        if trainer.global_step == self._step or trainer.global_step % self.every:
            return
        self._step = trainer.global_step
        masks = {layer.name: self._mask(layer) for layer in _layers(trainer)}
        if self._before:
            changed = sum(int((mask != self._before[name]).sum()) for name, mask in masks.items())
            self.rates.append(changed / sum(mask.numel() for mask in masks.values()))
        self._before = masks

    @torch.no_grad()
    def _mask(self, layer: NMLayer) -> torch.Tensor:
        rows = layer.view.rows(layer.weight.detach())
        if self.transposable and not layer.spec.dgrad_reason:
            return nmf.transposable_mask(rows, layer.pattern, layer.spec.groups)
        return nmf.magnitude_mask(rows, layer.pattern, dim=1)


def _layers(trainer: pl.Trainer) -> list[NMLayer]:
    (callback,) = [one for one in trainer.callbacks if isinstance(one, NMSparsityCallback)]  # type: ignore[attr-defined]
    assert callback.sparsifier is not None
    return [layer for layer in callback.sparsifier.layers.values() if not layer.spec.forward_reason]


def method_of(config: dict[str, Any]) -> dict[str, Any]:
    """The method of a config's NMSparsityCallback, which must be an object with a decay.

    Raises:
        ValueError: If there is none.
    """
    callbacks = config.get("trainer", {}).get("callbacks") or []
    masks = [one for one in callbacks if last_part(one) == "NMSparsityCallback"]
    method = masks[0].get("init_args", {}).get("method") if masks else None
    if last_part(method or "") not in ("SRSTE", "BiMask", "TransposableMask"):
        raise ValueError(
            f"method: {method!r} has no decay: write one as class_path, lightning_nm.SRSTE, lightning_nm.BiMask or "
            "lightning_nm.TransposableMask"
        )
    return dict(method)  # type: ignore[arg-type]


def flip_rate(
    config: dict[str, Any], decay: float | None, steps: int, every: int, seed: int
) -> float:
    """The mean flip rate of a training of some steps; dense for a decay of ``None``."""
    method = method_of(config)
    config = quiet(copy.deepcopy(config))
    override(config, {"trainer.limit_val_batches": 0, "trainer.accelerator": "cpu"})
    override(config, {"method": "dense"} if decay is None else {"method.init_args.decay": decay})
    flips = Flips(every, last_part(method) == "TransposableMask")
    fit(config, seed, (None, None), flips, _Stop(steps))
    return sum(flips.rates) / len(flips.rates)


class _Stop(pl.Callback):
    """Ends a training early, whose schedules are those of the whole one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def main(arguments: Sequence[str]) -> int:
    """Print a table; return 2 for a config or an option that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m studies.flip_rates", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--decays", type=float, nargs="+", required=True)
    parser.add_argument(
        "--steps", type=int, default=200, help="optimizer steps of each training; 200 by default"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="steps between two masks; 10 by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(list(arguments))
    try:
        if not 1 <= options.every <= options.steps // 2:
            raise ValueError(
                f"--every {options.every} --steps {options.steps}: two masks must be compared at least"
            )
        config = read_yaml(options.config)
        method_of(config)
        dense = flip_rate(config, None, options.steps, options.every, options.seed)
        print("| decay | flip rate | relative to dense |\n|---|---|---|")
        print(f"| dense | {dense:.4f} | 1 |", flush=True)
        for decay in options.decays:
            rate = flip_rate(config, decay, options.steps, options.every, options.seed)
            print(f"| {decay:g} | {rate:.4f} | {rate / dense:.2f} |", flush=True)
    except (OSError, ValueError) as error:
        print(f"studies.flip_rates: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
