"""The trainings of a study, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch

from lightning_nm.study.config import as_list
from lightning_nm.study.spec import Spec
from lightning_nm.study.store import Job, Row, Store
from lightning_nm.study.trial import build, train


def check(spec: Spec) -> None:
    """Build the Trainer, the model and the data of every cell once, without training.

    Raises:
        ValueError: For the first config that cannot be built, with the variant, the grid values and the reason.
    """
    lowest = {key: as_list(bounds)[0] for key, bounds in spec.search.items()}
    searched = {key: bound["low"] if isinstance(bound, dict) else bound for key, bound in lowest.items()}
    for cell in spec.cells():
        try:
            build(spec.trial_config(cell, searched), spec.seeds[0])
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(f"variant {cell.label}: {error}") from error


def run(spec: Spec, folder: Path, workers: int, threads: int) -> bool:
    """Train what is left to train, and return whether every worker ended by itself.

    Args:
        spec: The study, already planned in the folder's journal.
        folder: The output folder.
        workers: Processes.
        threads: Threads of each.
    """
    if workers == 1:
        before = torch.get_num_threads()
        try:
            work(spec, folder, threads)
        finally:
            torch.set_num_threads(before)
        return True
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work_alone, args=(spec, folder, threads)) for _ in range(workers)]
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


def work(spec: Spec, folder: Path, threads: int) -> None:
    """Train until no trial is left to start; a failed trial does not stop the others.

    Raises:
        KeyboardInterrupt: On Ctrl-C. The running trial is run again by the next worker.
    """
    torch.set_num_threads(threads)
    store = Store(spec, folder)
    with store.working():
        while job := store.claim():
            rows: list[Row] = []
            error = _train_all(spec, job, rows)
            store.finish(job, rows, error)
            print(_line(spec, job, rows, error), flush=True)


def _train_all(spec: Spec, job: Job, rows: list[Row]) -> str | None:
    """Add a row for each seed; the error that ended it, if one did."""
    for seed in job.seeds:
        try:
            rows.append({"seed": seed, **train(spec.trial_config(job.cell, job.searched), seed, spec.metric)})
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
