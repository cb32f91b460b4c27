"""The trainings of a study, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_nm.commands.study.config import as_list
from lightning_nm.commands.study.pace import measure, set_steps, steps_within
from lightning_nm.commands.study.spec import Spec
from lightning_nm.commands.study.store import Job, Row, Store
from lightning_nm.commands.study.trial import UnknownMetric, build, train


def check(spec: Spec) -> None:
    """Build the Trainer, the model and the data of every cell once, without training.

    Raises:
        ValueError: For the first config that cannot be built, with the variant, the grid values and the reason.
    """
    lowest = {key: as_list(bounds)[0] for key, bounds in spec.search.items()}
    searched = {
        key: bound["low"] if isinstance(bound, dict) else bound for key, bound in lowest.items()
    }
    for cell in spec.cells():
        try:
            build(spec.trial_config(cell, searched), spec.seeds[0], spec.classes)
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(f"variant {cell.label}: {error}") from error


def pace(spec: Spec, folder: Path, threads: int) -> None:
    """Measure the steps of the cells that were not measured before, if the study trains for equal seconds.

    Nothing else should run on the machine.
    """
    store = Store(spec, folder)
    cells = [cell for cell in spec.cells() if cell.label not in store.paces()]
    if spec.seconds is None or not cells:
        return
    print(
        f"Measuring the steps of {len(cells)} settings, for {spec.seconds:g} s of training each",
        flush=True,
    )
    with _threads(threads):
        measured = measure(spec, cells)
    for cell, step_s in zip(cells, measured, strict=True):
        print(
            f"{cell.label}: {1e3 * step_s:.2f} ms, {steps_within(spec, step_s)} steps", flush=True
        )
    store.set_paces({cell.label: step_s for cell, step_s in zip(cells, measured, strict=True)})


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(spec: Spec, folder: Path, workers: int, threads: int) -> bool:
    """Train what is left to train, and return whether every worker ended by itself.

    Args:
        spec: The study, already planned in the folder's journal.
        folder: The output folder.
        workers: Processes.
        threads: Threads of each.
    """
    if workers == 1:
        with _threads(threads):
            work(spec, folder, threads)
        return True
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_work_alone, args=(spec, folder, threads)) for _ in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
        raise
    return all(process.exitcode == 0 for process in processes)


def _work_alone(spec: Spec, folder: Path, threads: int) -> None:
    """:func:`work` in a process of its own, which Ctrl-C ends without a traceback."""
    try:
        work(spec, folder, threads)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except UnknownMetric as error:
        raise SystemExit(f"lightning-nm study: {error}") from None


def work(spec: Spec, folder: Path, threads: int) -> None:
    """Train until no trial is left to start; a failed trial does not stop the others.

    Raises:
        KeyboardInterrupt: On Ctrl-C. The running trial is run again by the next worker.
        UnknownMetric: Likewise, after the first trial, if the test does not log the study's metric.
    """
    torch.set_num_threads(threads)
    store = Store(spec, folder)
    paces = store.paces()
    with store.working():
        while job := store.claim():
            rows: list[Row] = []
            error = _train_all(spec, job, rows, paces.get(job.cell.label), store.has_complete())
            store.finish(job, rows, error)
            print(_line(spec, job, rows, error), flush=True)


def _train_all(
    spec: Spec, job: Job, rows: list[Row], step_s: float | None, has_complete: bool
) -> str | None:
    """Add a row for each seed; the error that ended it, if one did.

    Raises:
        UnknownMetric: If the test logs other metrics, and no training is complete yet: all would fail by it.
    """
    paced = {} if step_s is None else {"step_ms": 1e3 * step_s}
    for seed in job.seeds:
        try:
            config = spec.trial_config(job.cell, job.searched)
            if step_s is not None:
                set_steps(config, steps_within(spec, step_s))
            rows.append({"seed": seed, **train(config, seed, spec.metric, spec.classes), **paced})
        except UnknownMetric as error:
            if not has_complete:
                raise
            return f"{type(error).__name__}: {error}"
        except SystemExit as error:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from error
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def _line(spec: Spec, job: Job, rows: list[Row], error: str | None) -> str:
    sampled = "".join(
        f", {key} {value:.4g}" if isinstance(value, float) else f", {key} {value}"
        for key, value in job.searched.items()
    )
    seeds = f"seed {job.seeds[0]}" if len(job.seeds) == 1 else f"{len(job.seeds)} seeds"
    if error is not None:
        found = f"failed: {error.splitlines()[0] if error else error}"
    else:
        mean = sum(row[spec.metric] for row in rows) / len(rows)
        found = f"{spec.metric} {mean:.5g}, {sum(row['fit_seconds'] for row in rows):.1f} s"
    return f"{job.cell.label}{sampled}, {seeds}: {found} (process {os.getpid()})"
