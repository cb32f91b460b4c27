"""The trials of a study in Optuna's journal: who runs which, and what they found.

Optuna gives the journal, which any number of processes and machines can append to, the queue of waiting trials and the
samplers. Two things it has for databases alone, or not at all, and they are here:

- Its ``GridSampler`` may run one point twice under several workers and cannot grow, so a grid is a queue of trials,
  taken one by one under Optuna's own lock.
- A trial whose process died stays ``RUNNING`` in a journal (heartbeats exist for databases only). Each worker holds an
  operating system's lock on a file of its own, which ends with the process however it ends; a running trial whose
  worker's file can be locked is interrupted, and queued again.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_nm.commands.study.settings import ADVICE, forbidden_changes, to_settings
from lightning_nm.commands.study.spec import Cell, Spec

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

Row = dict[str, Any]


class Job(NamedTuple):
    """A trial that this process runs: the same settings with one seed, or in a search with every seed.

    Attributes:
        study: The Optuna study of the trial.
        trial: The trial, which is running.
        cell: Variant and grid values.
        searched: Sampled settings.
        seeds: Seeds to train.
    """

    study: Study
    trial: Trial
    cell: Cell
    searched: dict[str, Any]
    seeds: tuple[int, ...]


class Store:
    """The journal of a study's output folder.

    Args:
        spec: The study.
        folder: Where ``journal.log`` is.

    Raises:
        ImportError: If Optuna is missing.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.spec = spec
        self.workers = folder / "workers"
        self.workers.mkdir(parents=True, exist_ok=True)
        path = str(folder / "journal.log")
        backend = JournalFileBackend(path, lock_obj=JournalFileOpenLock(path))
        self._storage = optuna.storages.JournalStorage(backend)
        self._plan_lock = JournalFileOpenLock(str(folder / "plan"))
        self._studies: dict[str, Study] = {}
        self._worker = ""

    def plan(self, retry_failed: bool = False) -> None:
        """Write the study's settings, and queue the trials of the grid that are not there yet.

        Raises:
            ValueError: If the journal belongs to a study with other settings.
        """
        with self._alone():
            self._check_name()
            study = self._main_study()
            settings = to_settings(self.spec)
            before = study.user_attrs.get("settings", settings)
            # The metric may have been one that no test logs.
            if not self.has_complete():
                before = {**before, "metric": settings["metric"]}
            faults = forbidden_changes(before, settings)
            if faults:
                lines = "\n  ".join(["the output folder belongs to other settings:", *faults])
                raise ValueError(f"{lines}\n{ADVICE}")
            study.set_user_attr("settings", settings)
            if self.spec.sampler == "grid":
                self._queue_grid(study)
            if retry_failed:
                self._retry_failed()

    def _queue_grid(self, study: Study) -> None:
        """Queue the trials of the grid that are not there yet."""
        there = set(self._latest())
        # Seed by seed, so that an unfinished study has whole pairs.
        for seed in self.spec.seeds:
            for cell in self.spec.cells():
                keys = [_text(each, seed) for each in self.spec.same_trainings(cell)]
                if there.isdisjoint(keys):
                    _enqueue(study, keys[0])
                    there.add(keys[0])

    def paces(self) -> dict[str, float]:
        """Seconds of an optimizer step by cell label, as far as they were measured."""
        return dict(self._main_study().user_attrs.get("paces", {}))

    def set_paces(self, measured: Mapping[str, float]) -> None:
        """Keep measured seconds of steps; those of another process that was faster are kept."""
        with self._alone():
            self._main_study().set_user_attr("paces", {**measured, **self.paces()})

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the lock that tells other processes that this worker's trials are running."""
        self._worker = f"{uuid.uuid4()}.lock"
        path = self.workers / self._worker
        with path.open("w") as file:
            _lock(file)
            yield
        path.unlink()

    def claim(self) -> Job | None:
        """Start the next trial; ``None`` if none is left to start."""
        with self._alone():
            return self._claim_queued() if self.spec.sampler == "grid" else self._claim_sampled()

    def _claim_queued(self) -> Job | None:
        from optuna.trial import TrialState

        study = self._main_study()
        self._fail_interrupted(study)
        self._queue_lost(study)
        waiting = [
            _key(trial) for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        ]
        # Another process may have added variants since this one read its file: they are left to it, at the queue's end.
        known = [json.loads(key)[0] in self.spec.variants for key in waiting]
        if not any(known):
            return None
        for key in waiting[: known.index(True)]:
            study.tell(study.ask(), state=TrialState.FAIL)
            _enqueue(study, key)
        # Optuna gives the first that waits.
        trial = study.ask()
        trial.set_user_attr("worker", self._worker)
        variant, values, seed = json.loads(trial.user_attrs["key"])
        return Job(study, trial, Cell(variant, values), {}, (seed,))

    def _claim_sampled(self) -> Job | None:
        for cell in self.spec.cells():
            study = self._cell_study(cell)
            self._fail_interrupted(study)
            trials = study.get_trials(deepcopy=False)
            done = [trial for trial in trials if not _is_interrupted(trial)]
            if len(done) < (self.spec.trials or 0):
                # Not one seed for all processes: they would draw the same settings.
                study.sampler = self._sampler(len(trials))
                trial = study.ask()
                trial.set_user_attr("worker", self._worker)
                searched = {
                    key: _suggest(trial, key, bounds) for key, bounds in self.spec.search.items()
                }
                return Job(study, trial, cell, searched, self.spec.seeds)
        return None

    def finish(self, job: Job, rows: list[Row], error: str | None) -> None:
        """Write the rows of a trial, and its error if it failed."""
        from optuna.trial import TrialState

        job.trial.set_user_attr("rows", rows)
        if error is None:
            values = [row[self.spec.metric] for row in rows]
            job.study.tell(job.trial, sum(values) / len(values))
        else:
            job.trial.set_user_attr("error", error)
            job.study.tell(job.trial, state=TrialState.FAIL)

    def has_complete(self) -> bool:
        """Whether any training is complete."""
        return any(row["state"] == "complete" for row in self.rows())

    def rows(self) -> list[Row]:
        """One row for each training of the study file's cells and seeds, in their order.

        ``state`` is ``complete``, ``failed`` (with ``error``), ``running``, ``waiting`` or ``interrupted``.
        """
        rows = []
        for cell in self.spec.cells():
            for searched, seed, trial in self._trainings(cell):
                row: Row = {"variant": cell.variant, **cell.values}
                if self.spec.search:
                    row |= {"trial": trial.number, **searched}
                row["seed"] = seed
                # A trial of a search may have failed after some of its seeds.
                found = next(
                    (each for each in trial.user_attrs.get("rows", []) if each["seed"] == seed),
                    None,
                )
                if found is not None:
                    row |= {"state": "complete", **found}
                else:
                    row["state"] = self._state(trial)
                if row["state"] == "failed":
                    row["error"] = trial.user_attrs.get("error", "")
                rows.append(row)
        return rows

    def _trainings(self, cell: Cell) -> Iterator[tuple[dict[str, Any], int, FrozenTrial]]:
        if self.spec.sampler == "grid":
            latest = self._latest()
            for seed in self.spec.seeds:
                keys = [_text(each, seed) for each in (cell, *self.spec.same_trainings(cell))]
                there = [key for key in keys if key in latest]
                if there:
                    yield {}, seed, latest[there[0]]
            return
        for trial in self._cell_study(cell).get_trials(deepcopy=False):
            if not _is_interrupted(trial):
                for seed in self.spec.seeds:
                    yield dict(trial.params), seed, trial

    def _state(self, trial: FrozenTrial) -> str:
        from optuna.trial import TrialState

        if trial.state is TrialState.RUNNING:
            return "running" if self._is_alive(trial) else "interrupted"
        if _is_interrupted(trial):
            return "interrupted"
        return "waiting" if trial.state is TrialState.WAITING else "failed"

    def _retry_failed(self) -> None:
        for key, trial in self._latest().items():
            if "error" in trial.user_attrs:
                _enqueue(self._main_study(), key)

    def _latest(self) -> dict[str, FrozenTrial]:
        """The last trial of each key of the grid."""
        trials = self._main_study().get_trials(deepcopy=False)
        return {_key(trial): trial for trial in trials}

    def _queue_lost(self, study: Study) -> None:
        """Queue what was interrupted and does not wait yet: a process may be killed between the one and the other."""
        for key, trial in self._latest().items():
            if _is_interrupted(trial):
                _enqueue(study, key)

    def _fail_interrupted(self, study: Study) -> None:
        """End the running trials whose worker is gone; they have no ``error``."""
        from optuna.trial import TrialState

        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in running:
            if not self._is_alive(trial):
                study.tell(trial.number, state=TrialState.FAIL)
                self._lock_file(trial).unlink(missing_ok=True)

    def _is_alive(self, trial: FrozenTrial) -> bool:
        try:
            with self._lock_file(trial).open() as file:
                return not _lock(file)
        except FileNotFoundError:
            return False

    def _lock_file(self, trial: FrozenTrial) -> Path:
        """The file that the worker of a trial locks; a worker may end before it is noted."""
        return self.workers / trial.user_attrs.get("worker", "none")

    def _main_study(self) -> Study:
        return self._study(self.spec.name)

    def _cell_study(self, cell: Cell) -> Study:
        return self._study(f"{self.spec.name}: {cell.label}")

    def _study(self, name: str) -> Study:
        import optuna

        if name not in self._studies:
            self._studies[name] = optuna.create_study(
                storage=self._storage,
                study_name=name,
                direction=self.spec.direction,
                load_if_exists=True,
            )
        return self._studies[name]

    def _sampler(self, seed: int) -> Any:
        import warnings

        import optuna

        if self.spec.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        # constant_liar, which is for several workers, is called experimental.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _check_name(self) -> None:
        import optuna

        names = optuna.get_all_study_names(self._storage)
        if names and self.spec.name not in names:
            fault = (
                f"the output folder belongs to the study {names[0]!r}, not to {self.spec.name!r}"
            )
            raise ValueError(f"{fault}: take another --output")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._plan_lock.acquire()
        try:
            yield
        finally:
            self._plan_lock.release()


def _text(cell: Cell, seed: int) -> str:
    return json.dumps([cell.variant, cell.values, seed], sort_keys=True)


def _enqueue(study: Study, key: str) -> None:
    study.enqueue_trial({}, user_attrs={"key": key})


def _key(trial: FrozenTrial) -> str:
    return str(trial.user_attrs["key"])


def _is_interrupted(trial: FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return trial.state is TrialState.FAIL and "error" not in trial.user_attrs


def _suggest(trial: Trial, key: str, bounds: Any) -> Any:
    if isinstance(bounds, list):
        return trial.suggest_categorical(key, bounds)
    if isinstance(bounds["low"], int) and isinstance(bounds["high"], int):
        return trial.suggest_int(key, **bounds)
    return trial.suggest_float(key, **bounds)


def _lock(file: Any) -> bool:
    """Take the operating system's lock of an open file; ``False`` if a process holds it."""
    if os.name == "nt":
        raise OSError("lightning-nm study needs the file locks of Linux or macOS")
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
