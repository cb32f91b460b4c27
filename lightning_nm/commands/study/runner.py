"""The trainings of a study, in one process or several, and the storage of what they found.

Optuna samples the settings of a search, and its SQLite storage keeps each finished training as a trial, in one
transaction: a kill or a full disk loses the running trainings alone. A process that trains holds the operating system's
lock of a file, which ends with the process however it ends. Optuna's heartbeats would notice a dead process after
minutes, and never one that dies before its first; and two processes can take the same waiting trial out of SQLite.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from filelock import FileLock, Timeout
from jsonargparse import ArgumentError
from lightning.pytorch.callbacks import LambdaCallback
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.commands.from_config import import_classes
from lightning_nm.commands.lightning_cli import NMLightningCLI
from lightning_nm.commands.study.spec import Cell, Classes, Job, Spec
from lightning_nm.spelling import did_you_mean

# Optuna reports every study that it creates, and sample() creates one for each job.
optuna.logging.set_verbosity(optuna.logging.ERROR)
Row = dict[str, Any]

# For equal seconds, each setting is timed in trainings of SHORT and of LONG steps, several times.
SHORT, LONG, ROUNDS = 6, 26, 5


class UnknownMetric(ValueError):
    """The test does not log the study's metric."""


class Store:
    """The finished trainings of a study.

    Args:
        spec: The study.
        folder: The output folder, which is made.

    Raises:
        OSError: If the storage cannot be read or written; also from the methods. The message names the file.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec = spec
        self.jobs = list(spec.jobs())
        self.path = folder / "study.db"
        self._locks = folder / "locks"
        self._locks.mkdir(parents=True, exist_ok=True)
        with self.storage():
            self.study = optuna.create_study(
                storage=optuna.storages.RDBStorage(f"sqlite:///{self.path}"),
                # Optuna refuses other choices of a setting in the same study.
                study_name=f"{spec.name} {spec.search or ''}",
                direction=spec.direction,
                load_if_exists=True,
            )

    def lock(self, name: str) -> FileLock:
        """A lock that processes with the same output folder share."""
        return FileLock(self._locks / f"{name}.lock")

    @contextmanager
    def storage(self) -> Iterator[None]:
        """Open the storage under a lock; errors name the file."""
        try:
            with self.lock("storage"):
                yield
        except Exception as error:
            # SQLAlchemy's errors are many lines, and have that of SQLite, which says what is wrong.
            cause = error.__cause__ or error
            reason = str(getattr(cause, "orig", cause)).partition("\n")[0]
            raise OSError(f"'{self.path}' cannot be read or written: {reason}") from error

    def trials(self) -> dict[str, FrozenTrial]:
        """The finished trials by their job's key, without the failed ones that are to be trained again."""
        with self.storage():
            # How many trials there were when retry_failed() was last called. Trials are numbered from 0 on, so those
            # from before that call have smaller numbers. A failed trial has no values.
            retried = self.study.user_attrs.get("retried", 0)
            trials = self.study.get_trials(deepcopy=False)  # they are only read
        kept = [trial for trial in trials if trial.values or trial.number >= retried]
        return {trial.user_attrs["key"]: trial for trial in kept}

    def retry_failed(self) -> None:
        """Let failed trials be trained again."""
        with self.storage():
            self.study.set_user_attr("retried", len(self.study.trials))

    def claim(self) -> Iterator[Job]:
        """Yield each job that is left, while this process holds its lock, which ends with the process."""
        found = True
        while found:  # again: a process that held a lock may have been killed
            found = False
            for job in self.jobs:
                # Without waiting: a job whose lock is taken is being trained by another process.
                with suppress(Timeout), self.lock(job.key).acquire(timeout=0):
                    # Read under the lock: another process may have finished the job since. Jobs of several grid points
                    # may have one key, as dense training has for all patterns: then the first one counts for all.
                    if job.key not in self.trials():
                        found = True
                        yield job

    def add(self, job: Job, searched: Row, rows: list[Row]) -> None:
        """Write what a job found: a row for each seed, with its ``state``."""
        values = [row[self.spec.metric] for row in rows if row["state"] == "complete"]
        # With a failed seed there is no value: a mean over fewer seeds cannot be compared.
        is_complete = len(values) == len(rows)
        trial = create_trial(
            state=TrialState.COMPLETE if is_complete else TrialState.FAIL,
            value=fmean(values) if is_complete else None,
            params=searched,
            distributions=self.spec.search,
            user_attrs={"key": job.key, "rows": rows},
        )
        with self.storage():
            # Optuna 4.3 would never read what others added since this process last looked.
            self.study.get_trials(deepcopy=False)
            self.study.add_trial(trial)

    def rows(self) -> list[Row]:
        """One row for each training of the study file, in the order in which they are trained.

        ``state`` is ``complete``, ``failed`` (with ``error``) or ``missing``.
        """
        trials = self.trials()
        rows = []
        for job in self.jobs:
            what: Row = {"variant": job.cell.variant, **job.cell.values}
            found = [{"seed": seed, "state": "missing"} for seed in job.seeds]
            if self.spec.search:
                what["trial"] = job.number
            if trial := trials.get(job.key):
                what |= trial.params
                found = trial.user_attrs["rows"]
            rows += [what | row for row in found]
        return rows


def sample(spec: Spec, number: int, before: Sequence[FrozenTrial] = ()) -> Row:
    """The settings of a search's trial, by what trials of the same cell found before; nothing for a grid."""
    if not spec.search:
        return {}
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    # A seed of its own: processes that sample at the same time would draw the same settings.
    study = optuna.create_study(
        direction=spec.direction, sampler=samplers[spec.sampler](seed=number)
    )
    # TPE draws at random until there are ten complete trials, Optuna's default.
    study.add_trials(before)
    return study.ask(spec.search).params


def check(spec: Spec) -> None:
    """Build the Trainer, the model and the data of every cell once, without training.

    Raises:
        ValueError: For the first config that cannot be built, with the variant, the grid values and the reason.
    """
    for cell in spec.cells():
        try:
            # Any sampled settings will do: they have the same keys.
            build(spec.trial_config(cell, sample(spec, 0)), spec.seeds[0], spec.classes)
        except Exception as error:  # of any class: models and data are the user's
            raise ValueError(f"variant {cell.label}: {error}") from error


def run(spec: Spec, folder: Path, workers: int, threads: int) -> None:
    """:func:`work` in one process or several."""
    if workers == 1:
        work(spec, folder, threads)
        return
    # Not fork: this process has used torch, and a forked one can use neither CUDA nor the threads that torch has.
    context = multiprocessing.get_context("spawn")
    # One may be killed, as where memory is short: what is missing is reported.
    with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, context) as pool:
        # result() raises what ended a worker, such as an unknown metric.
        for done in [pool.submit(work, spec, folder, threads) for _ in range(workers)]:
            done.result()


def work(spec: Spec, folder: Path, threads: int) -> None:
    """Train until no training is left to start; one that fails does not stop the others.

    Raises:
        KeyboardInterrupt: On Ctrl-C. The running training starts again in the next process.
        OSError: If the storage cannot be read or written.
        UnknownMetric: If the test does not log the study's metric: the others would fail by it, too.
    """
    # First, so that steps are timed in as many threads as trainings have.
    torch.set_num_threads(threads)
    store = Store(spec, folder)
    paces = step_seconds(store)
    for job in store.claim():
        # Again for each job: what other processes found meanwhile tells a search more.
        trials = store.trials()
        of_cell = [other.key for other in store.jobs if other.cell == job.cell]
        searched = sample(spec, job.number, [trials[key] for key in of_cell if key in trials])
        steps = None
        if spec.seconds is not None:
            # Rounded down, so that the training keeps within its seconds.
            steps = max(1, int(spec.seconds / paces[spec.fingerprint(job.cell)]))
        config = spec.trial_config(job.cell, searched, steps)
        rows = []
        for seed in job.seeds:
            row: Row = {"seed": seed, "state": "complete"}
            try:
                row |= train(config, seed, spec.metric, spec.classes)
            except SystemExit as stop:  # what Lightning makes of Ctrl-C
                raise KeyboardInterrupt from stop
            # Before the clause for other errors, which would store it as a failed training.
            except UnknownMetric:
                raise
            except Exception as fault:
                row |= {"state": "failed", "error": f"{type(fault).__name__}: {fault}"}
            rows.append(row)
            found = row.get("error", f"{spec.metric} {row.get(spec.metric)}")
            what = Cell(job.cell.label, {**searched, "seed": seed}).label  # for its label alone
            print(f"{what}: {found} (process {os.getpid()})", flush=True)
        # After all seeds: of a job that is interrupted nothing is stored, and it is trained again as a whole.
        store.add(job, searched, rows)


def step_seconds(store: Store) -> dict[str, float]:
    """Seconds of an optimizer step by a cell's fingerprint, which the first process measures for a study of `seconds`.

    Nothing else should run on the machine then. A short training has the same phases in the same proportions as a long
    one, if a method's moments are fractions of the planned steps. What takes the same time in two trainings of
    different length does not count. The cells take turns, so that a change of the machine's speed meets all of them.
    """
    spec = store.spec
    # Other processes wait here until the first one has measured, and then read what it found.
    with store.lock("pace"):
        with store.storage():
            paces: dict[str, float] = store.study.user_attrs.get("paces", {})
        # Cells with one fingerprint, as dense training at several patterns has, are timed once.
        cells = {spec.fingerprint(cell): cell for cell in spec.cells()}
        times: dict[str, list[float]] = {key: [] for key in cells if key not in paces}
        if spec.seconds is None or not times:
            return paces
        print(f"Measuring the steps of {len(times)} settings", flush=True)
        for _ in range(ROUNDS):
            for key, found in times.items():
                # Nothing is sampled: `seconds` goes with a grid alone.
                configs = [spec.trial_config(cells[key], {}, steps) for steps in (SHORT, LONG)]
                short, long = (fit(each, spec.seeds[0], spec.classes)[1] for each in configs)
                found.append((long - short) / (LONG - SHORT))
        # The median leaves out the first round, in which precision plugins measure kernels.
        paces |= {key: median(found) for key, found in times.items()}
        with store.storage():
            store.study.set_user_attr("paces", paces)
    return paces


def build(config: Mapping[str, Any], seed: int, classes: Classes) -> NMLightningCLI:
    """Create the Trainer, the model and the data of a trial.

    ``seed`` is that of ``seed_everything`` and, if the data module takes one, of the data, so all variants of a seed
    start from the same weights and see the same batches. ``classes`` are those of a config that does not name them.

    Raises:
        ValueError: If the config has an unknown key or a bad value, in jsonargparse's words, or a class cannot be
            imported.
    """

    class CLI(NMLightningCLI):
        def before_instantiate_classes(self) -> None:
            data = self.config.get("data")
            # Without `class_path`, of a class that `--data` names, the arguments lie in `data` itself.
            arguments = data.get("init_args", data) if data else None
            # The parser has filled in the defaults, so the key is there if the class takes a seed.
            if arguments is not None and "seed" in arguments:
                arguments["seed"] = seed

    class_arguments = import_classes(*classes, [config])
    try:
        with silence():
            return CLI(
                **class_arguments,
                run=False,
                save_config_callback=None,
                parser_kwargs={"exit_on_error": False},  # raises, instead of ending the process
                args={**config, "seed_everything": seed},
            )
    except ArgumentError as error:
        raise ValueError(str(error)) from error


def fit(
    config: Mapping[str, Any], seed: int, classes: Classes, *callbacks: pl.Callback
) -> tuple[NMLightningCLI, float]:
    """Build and fit once; return the Trainer's CLI, and the seconds of the fit."""
    with silence():
        cli = build(config, seed, classes)
        cli.trainer.callbacks += callbacks  # type: ignore[attr-defined]
        # The fit alone is timed, not what was built and imported for it.
        start = time.perf_counter()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli, time.perf_counter() - start


def train(config: Mapping[str, Any], seed: int, metric: str, classes: Classes) -> Row:
    """Fit and test once; return everything that is known of it, as a row for a table.

    Raises:
        UnknownMetric: If the test does not log `metric`.
        ValueError: If `metric` is no finite number.
    """
    flops: dict[str, float] = {}

    def read_flops(trainer: pl.Trainer, _: Any) -> None:  # before the masks are taken off
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NMSparsityCallback) and callback.sparsifier is not None:
                # Over the whole training, its dense phases included.
                ratios = callback.sparsifier.flops_ratios(mean=True)
                flops.update({f"flops_{kind}": ratio for kind, ratio in ratios.items()})

    cli, seconds = fit(config, seed, classes, LambdaCallback(on_train_end=read_flops))
    steps = cli.trainer.global_step
    with silence():
        found = cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    # Lightning returns one dictionary for each test loader.
    tested = {name: float(value) for each in found for name, value in each.items()}
    if metric not in tested:
        names = ", ".join(tested) or "nothing"
        hint = did_you_mean(metric, tested)
        raise UnknownMetric(f"metric: the test logs no {metric!r} but {names}{hint}")
    if not math.isfinite(tested[metric]):
        raise ValueError(f"the training diverged: {metric} is {tested[metric]}")
    return {
        **tested,
        **flops,
        "steps": steps,
        "fit_seconds": round(seconds, 3),
        "torch": torch.__version__,
        "lightning_nm": version("lightning-nm"),
        "threads": torch.get_num_threads(),
        "device": str(cli.trainer.strategy.root_device),
    }


@contextmanager
def silence() -> Iterator[None]:
    """Without log messages and warnings, which a small or short training gives rise to."""
    # Calls are nested: the inner one must not end the outer one's silence.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
