"""Resident memory of a training of a GPT: dense, N:M, and N:M with packed storage, each in a process of its own.

``python -m benchmarks.memory`` trains a few steps of each by a Trainer, on made-up tokens, with AdamW. Reported are the
bytes of weights, gradients and optimizer state (each memory once) with what masks take, and the resident memory of the
process at the end of the last batch and the largest within a batch after the first, both less that before the model was
made; all over those of the dense training in float32. ``--only asp-packed --width 4096 --layers 9 --pattern 1:16
--steps 20`` trains what dense does not fit into 24 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_nm import ASP, BAME, NMMixedPrecision, NMPrecision, NMSparsityCallback
from lightning_nm.demo import GPT
from lightning_nm.nn.packed.memory import return_freed_memory

MODES = ("dense", "asp", "asp-packed", "bame", "bame-packed")
"""Methods, and whether their weights are packed. Masks of ``bame`` move in all steps."""


class RepeatedTokens(Dataset[tuple[Tensor, Tensor]]):
    """Windows that repeat 16 tokens of the first 32, so that the loss falls within a few steps."""

    def __init__(self, context: int) -> None:
        self.context = context

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index % 64)
        pattern = torch.randint(0, 32, (16,), generator=generator)
        tokens = pattern.repeat(self.context // 16 + 2)[: self.context + 1]
        return tokens[:-1], tokens[1:]


class Memory(pl.Callback):
    """Reads the memory at the end of each batch."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.counted = 0
        self.resident = 0
        self.peak = 0
        self._begin = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin a step."""
        reset_peak()
        self._begin = perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count and read."""
        self.seconds.append(perf_counter() - self._begin)
        self.losses.append(float(outputs["loss"]))
        if len(self.losses) > 1:  # kernels are measured in the first step
            self.peak = max(self.peak, peak_bytes() - self.before)
        return_freed_memory()
        self.resident = resident_bytes() - self.before
        self.counted = _bytes(_tensors(trainer, pl_module))
        print(
            f"step {len(self.losses)}: loss {self.losses[-1]:.3f}, {self.seconds[-1]:.2f} s, "
            f"{self.resident / 2**20:.0f} MiB resident",
            flush=True,
        )


def resident_bytes() -> int:
    """The resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Let :func:`peak_bytes` count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell the largest resident memory of a process")


def _tensors(trainer: pl.Trainer, model: pl.LightningModule) -> Iterable[Tensor]:
    """What a training holds from step to step."""
    for parameter in model.parameters():
        yield parameter.detach()
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, NMSparsityCallback) and callback.sparsifier is not None:
            for layer in callback.sparsifier.layers.values():
                yield from layer.tensors()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory of tensors, each memory once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def train(options: argparse.Namespace, mode: str, results: Any) -> None:
    """Train in this process, and put the figures into a queue."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    callbacks: list[pl.Callback] = []
    plugins: list[Any] = []
    precision: Any = options.precision
    if mode != "dense":
        name, _, packed = mode.partition("-")
        method = BAME(stop=1.0, every=2, gradient_every=2) if name == "bame" else ASP()
        callbacks = [
            NMSparsityCallback(
                options.pattern,
                method,
                include="blocks.*",
                skip_first_last=False,
                scale="supar",
                storage=packed or "dense",
                show_tables=False,
                monitor=False,
            )
        ]
        plugin = NMPrecision() if precision == "32-true" else NMMixedPrecision(precision, "cpu")
        plugins, precision = [plugin], None
    before = resident_bytes()
    memory = Memory(before)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        precision=precision,
        plugins=plugins,
        callbacks=[*callbacks, memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    heads = max(1, options.width // 64)
    model = GPT(
        dim=options.width,
        depth=options.layers,
        heads=heads,
        context=options.context,
        lr=options.lr,
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    trainer.fit(model, DataLoader(RepeatedTokens(options.context), batch_size=options.batch_size))
    results.put(
        {
            "mode": mode,
            "weights": weights,
            "counted": memory.counted,
            "resident": memory.resident,
            "peak": memory.peak,
            "losses": memory.losses,
            "seconds": memory.seconds,
        }
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--pattern", default="1:16")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=MODES, nargs="+", default=MODES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    found = []
    for mode in options.only:
        results = context.Queue()
        process = context.Process(target=train, args=(options, mode, results))
        process.start()
        found.append(results.get())
        process.join()
    dense = next((figures for figures in found if figures["mode"] == "dense"), None)
    names = ("held", "resident", "peak")
    header = [f"{name}, MiB" for name in names] + [f"{name} / dense" for name in names]
    print(f"\n| {options.pattern} | weights | {' | '.join(header)} |")
    print("|---" * (2 + len(header)) + "|")
    keys = ("counted", "resident", "peak")
    for figures in found:
        against = ["-"] * len(keys)
        if dense is not None:
            against = [f"{figures[key] / dense[key]:.3f}" for key in keys]
        sizes = [f"{figures[key] / 2**20:.0f}" for key in keys]
        weights = f"{figures['weights'] / 1e6:.1f} M"
        print(f"| {figures['mode']} | {weights} | {' | '.join(sizes)} | {' | '.join(against)} |")
    if options.json is not None:
        settings = {k: v for k, v in vars(options).items() if k not in ("json", "only")}
        options.json.write_text(json.dumps({"setting": settings, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
