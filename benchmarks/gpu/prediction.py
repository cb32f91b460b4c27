"""Is what the doctor promises what a training gets? Predicted step time against measured, question V18.

    python -m benchmarks.gpu prediction

The doctor watches a few dense steps of a real training, measures its products and predicts the step on the kernels it
chose: ``dense step - sum(dense product - chosen product)``. Then the same model, with the same weights and batches, is
trained by a Trainer with those kernels. The decoder of :mod:`benchmarks.train`, eager, in bf16-mixed. Per variant:

`step ms`: medians of five steps of each training. `dense, watched` is what the doctor saw; `measured` and `dense,
trained`, the same with ``kernels="reference"``, are read by its clock, which waits for the device around each step;
`... , unwatched` without waiting, between events at the ends of steps, so that the host works ahead. `measured /
predicted`: the aim is 0.95 to 1.05. `saved ms`: of a step, predicted and measured; a small gain is easily within 5 % of
the step. `products ms`: sums of the doctor's times of products in a step, dense and as chosen. `products`: those of the
first block. `other kernels than predicted`: products for which the training took another kernel. `busy`: milliseconds
of one more step in which the device worked, by a profiler, and what took longest.

What a difference may come from: `dense, watched` against `dense, trained` is what the machine does meanwhile. Products
are measured alone, back to back and without the operands' masks and draws, which a sparse product makes in one pass and
a dense one in several: `busy` shows both, and so does it where products in a training run at another clock. A step much
longer than its `busy` waits for the host, which no sum of products knows.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import Setting
from benchmarks.train import clean, make_trainer, parse, quiet
from benchmarks.train_model import GPT, TINY, Batches, Size, help_topics
from lightning_nm import MVUE, NMMixedPrecision, NMSparsityCallback
from lightning_nm.commands.doctor import Report as Doctors
from lightning_nm.commands.doctor.training import judge, watch
from lightning_nm.kernels import GemmKernel, Router

SIZE = Size(dim=4096, depth=2, heads=32, context=1024, batch=16)
VARIANTS = ("transposable+mvue", "transposable")
LONGEST = 12
"""So many kernels of the device are listed."""

_WARM_UP, _TIMED = 3, 5  # as the doctor


class Clock(pl.Callback):
    """Times steps as the doctor does, then without waiting, profiles one more, and ends the training.

    Place it last: the masks' moves are part of a step.

    Args:
        device: Where the training is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batches = 0
        self.waited: list[float] = []
        self.ends: list[Any] = []
        on_gpu = device.type == "cuda"
        self.profiler = profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        )

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Read the clock, or start the profiler."""
        if self.batches < _WARM_UP + _TIMED:
            self.start = self._now()
        elif self.batches == _WARM_UP + 2 * _TIMED:
            self._now()
            self.profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Read the clock, or leave an event."""
        self.batches += 1
        if _WARM_UP < self.batches <= _WARM_UP + _TIMED:
            self.waited.append(1e3 * (self._now() - self.start))
        if _WARM_UP + _TIMED <= self.batches <= _WARM_UP + 2 * _TIMED:
            self.ends.append(self._event())
        if self.batches > _WARM_UP + 2 * _TIMED:
            self._now()
            self.profiler.stop()
            trainer.should_stop = True

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def unwatched(self) -> float:
        """Median milliseconds of a step that nobody waited for."""
        on_gpu = self.device.type == "cuda"
        return median(
            a.elapsed_time(b) if on_gpu else 1e3 * (b - a) for a, b in pairwise(self.ends)
        )

    def busy(self) -> dict[str, object]:
        """Milliseconds of the profiled step in which the device worked, and by which kernels."""
        on_gpu = self.device.type == "cuda"
        times: Counter[str] = Counter()
        for event in self.profiler.key_averages():
            # Spans that user code marks, as optimizers do, and what the host does hold others' time.
            if (event.device_type.name == "CUDA") == on_gpu and not event.is_user_annotation:
                times[event.key[:120]] += (
                    event.self_device_time_total if on_gpu else event.self_cpu_time_total
                ) / 1e3
        return {"ms": sum(times.values()), "longest": dict(times.most_common(LONGEST))}


class Training:
    """The decoder under a Trainer, always with the same weights and batches.

    Args:
        setting: Where.
        variant: ``METHOD`` or ``METHOD+mvue``.
        mode: How kernels are chosen.
        kernels: The sparse ones.
        decisions: The file that trainings share what they measured by: the doctor's decisions hold in the next one.
        text: uint8 ``[length]``.
    """

    def __init__(
        self,
        setting: Setting,
        variant: str,
        mode: str,
        kernels: list[GemmKernel],
        decisions: Path,
        text: Tensor,
    ) -> None:
        self.device, self.size = setting.device, setting.pick(SIZE, TINY)
        method, mvue, mode = parse(f"{variant}:{mode}")
        clean(self.device)
        torch.manual_seed(0)
        with self.device:
            size = self.size
            self.model = GPT(
                context=size.context, dim=size.dim, depth=size.depth, heads=size.heads, lr=3e-4
            )
        self.masks = NMSparsityCallback(
            "2:4",
            method,  # type: ignore[arg-type]
            MVUE("2:4") if mvue else None,
            show_tables=False,
        )
        self.plugin = NMMixedPrecision(
            kernels=mode,
            backends=kernels,
            decisions=str(decisions),
            budget_s=10,
            device=self.device.type,
        )
        self.plugin.router.timer = setting.timer
        data = DataLoader(Batches(text, self.size, self.device), batch_size=None)
        self.model.train_dataloader = lambda: data  # type: ignore[method-assign]

    def judged(self) -> Doctors:
        """What the doctor says of it."""
        with quiet():
            seen = watch(make_trainer(self.device, [self.masks], plugins=[self.plugin]), self.model)
        assert seen.router is not None
        (found,) = judge(seen.router, seen)
        return found

    def clocked(self) -> tuple[Clock, Router]:
        """Train it by the clock."""
        clock = Clock(self.device)
        with quiet():
            make_trainer(self.device, [self.masks, clock], plugins=[self.plugin]).fit(self.model)
        return clock, self.plugin.router


def compare(
    setting: Setting, variant: str, text: Tensor, kernels: list[GemmKernel]
) -> dict[str, object]:
    """Predict a step, and measure it."""
    mode = setting.pick("auto", "sparse")
    with TemporaryDirectory() as folder:
        begin = partial(
            Training,
            setting,
            variant,
            kernels=kernels,
            decisions=Path(folder) / "kernels.json",
            text=text,
        )
        found = begin(mode=mode).judged()
        chosen, router = begin(mode=mode).clocked()
        dense, _ = begin(mode="reference").clocked()
    assert found.step_ms is not None
    predicted, measured, before = (
        found.predicted_step_ms,
        median(chosen.waited),
        median(dense.waited),
    )
    ratio = measured / predicted if predicted else None
    first = [row for row in found.rows if row.product.layer.startswith("blocks.0.")]
    return {
        "step ms": {
            "dense, watched": found.step_ms,
            "dense, trained": before,
            "predicted": predicted,
            "measured": measured,
            "dense, unwatched": dense.unwatched(),
            "measured, unwatched": chosen.unwatched(),
        },
        "measured / predicted": ratio,
        "within 5 %": ratio is not None and 0.95 <= ratio <= 1.05,
        "saved ms": {"predicted": found.dense_ms - found.chosen_ms, "measured": before - measured},
        "products ms": {"dense": found.dense_ms, "as chosen": found.chosen_ms},
        "other kernels than predicted": others(found, router),
        "products": {
            f"{row.product.layer} {row.product.key.gemm}": {
                key: row.to_dict()[key]
                for key in ("gemm", "kernel", "why", "dense_ms", "sparse_ms", "pack_ms")
            }
            for row in first
        },
        "busy": {"dense": dense.busy(), "measured": chosen.busy()},
        "verdict": found.verdict,
    }


def others(found: Doctors, router: Router) -> list[str]:
    """The products for which the training took another kernel than the doctor, after its first batch."""
    promised = {(row.product.layer, row.product.key.gemm): row.kernel for row in found.rows}
    taken = {(product.layer, product.key.gemm): kernel for product, kernel, _, _ in router.used()}
    return [
        f"{layer} {gemm}: {kernel}, not {promised.get((layer, gemm))}"
        for (layer, gemm), kernel in taken.items()
        if promised.get((layer, gemm)) != kernel
    ]


def run(report: Report) -> None:
    """One question for each variant."""
    text, _ = help_topics()
    kernels = report.setting.kernels  # probed once
    for variant in VARIANTS:
        report.ask(f"V18 {variant}", partial(compare, variant=variant, text=text, kernels=kernels))
