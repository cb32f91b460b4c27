"""The journal: who runs which trial, with scripted rows instead of trainings."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import pytest

from lightning_nm.commands.study.spec import Spec
from lightning_nm.commands.study.store import Store
from tests.support.processes import forkserver

SPEC = Spec(
    "s", {}, "m", {"a": {}, "b": {}}, grid={"pattern": ["2:4", "1:16"]}, seeds=tuple(range(5))
)
SEARCH = {
    "lr": {"low": 1e-3, "high": 1.0, "log": True},
    "n": {"low": 1, "high": 5, "log": False},
    "c": ["x", "y"],
}


def work(folder, spec=SPEC, limit=None, fail=()):
    """Claim and finish trials; what was claimed."""
    store, claimed = Store(spec, folder), []
    with store.working():
        while limit != len(claimed) and (job := store.claim()):
            claimed.append((job.cell.variant, *job.cell.values.values(), *job.seeds))
            error = "it failed" if claimed[-1] in fail else None
            rows = [] if error else [{"seed": seed, "m": float(seed)} for seed in job.seeds]
            store.finish(job, rows, error)
    return claimed


def hold(folder, spec, claimed):
    """Claim one trial, and be killed while it runs."""
    store = Store(spec, folder)
    with store.working():
        store.claim()
        claimed.set()
        signal.pause()


def everything(spec):
    return {
        (cell.variant, *cell.values.values(), seed) for cell in spec.cells() for seed in spec.seeds
    }


def states(folder, spec=SPEC):
    return [row["state"] for row in Store(spec, folder).rows()]


def test_every_trial_is_run_once_seed_by_seed(tmp_path):
    Store(SPEC, tmp_path).plan()
    Store(SPEC, tmp_path).plan()
    assert states(tmp_path) == ["waiting"] * 20
    claimed = work(tmp_path, limit=6)
    assert [key[-1] for key in claimed] == [0, 0, 0, 0, 1, 1]
    claimed += work(tmp_path)
    assert len(claimed) == 20
    assert set(claimed) == everything(SPEC)
    rows = Store(SPEC, tmp_path).rows()
    assert rows[6] == {"variant": "b", "pattern": "2:4", "seed": 1, "state": "complete", "m": 1.0}
    assert work(tmp_path) == []


def test_a_study_grows(tmp_path):
    Store(SPEC, tmp_path).plan()
    before = set(work(tmp_path))
    grown = replace(SPEC, variants={**SPEC.variants, "c": {}}, seeds=(*SPEC.seeds, 9))
    Store(grown, tmp_path).plan()
    assert set(work(tmp_path, grown)) == everything(grown) - before
    assert set(states(tmp_path, grown)) == {"complete"}


def test_a_process_leaves_variants_that_were_added_later_to_others(tmp_path):
    Store(SPEC, tmp_path).plan()
    grown = replace(SPEC, variants={**SPEC.variants, "c": {}})
    Store(grown, tmp_path).plan()
    (lost,) = work(tmp_path, limit=1, fail=everything(SPEC))
    Store(grown, tmp_path).plan(retry_failed=True)  # behind what was added
    assert [*work(tmp_path)].count(lost) == 1
    assert set(states(tmp_path)) == {"complete"}
    assert set(work(tmp_path, grown)) == everything(grown) - everything(SPEC)
    assert set(states(tmp_path, grown)) == {"complete"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"x": 1}}, r"config\.x: was None, is 1\nvariants, seeds"),
        ({"name": "t"}, "the study 's', not to 't'"),
    ],
)
def test_other_settings_are_refused(tmp_path, changes, message):
    Store(SPEC, tmp_path).plan()
    with pytest.raises(ValueError, match=message):
        Store(replace(SPEC, **changes), tmp_path).plan()


def test_failed_trials_are_kept_until_they_are_retried(tmp_path):
    fail = {("a", "2:4", 0), ("b", "1:16", 3)}
    Store(SPEC, tmp_path).plan()
    work(tmp_path, fail=fail)
    failed = [row for row in Store(SPEC, tmp_path).rows() if row["state"] == "failed"]
    assert [row["error"] for row in failed] == ["it failed"] * 2
    Store(SPEC, tmp_path).plan()
    assert work(tmp_path) == []
    Store(SPEC, tmp_path).plan(retry_failed=True)
    assert set(work(tmp_path)) == fail
    assert set(states(tmp_path)) == {"complete"}


def test_workers_share_the_trials(tmp_path):
    Store(SPEC, tmp_path).plan()
    with ThreadPoolExecutor(3) as pool:
        claimed = list(chain.from_iterable(pool.map(work, [tmp_path] * 3)))
    assert len(claimed) == 20
    assert set(claimed) == everything(SPEC)


@pytest.mark.slow
def test_processes_share_the_trials(tmp_path):
    Store(SPEC, tmp_path).plan()
    with forkserver().Pool(2) as pool:
        claimed = list(chain.from_iterable(pool.map(work, [tmp_path] * 2, chunksize=1)))
    assert len(claimed) == 20
    assert set(claimed) == everything(SPEC)


def one_of(sampler):
    return SPEC if sampler == "grid" else replace(SPEC, sampler=sampler, search=SEARCH, trials=1)


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_an_interrupted_trial_is_run_again(tmp_path, sampler):
    spec = one_of(sampler)
    Store(spec, tmp_path).plan()
    store = Store(spec, tmp_path)
    with store.working():
        store.claim()
        assert "running" in states(tmp_path, spec)
        others = work(tmp_path, spec)
        assert len(others) == (19 if sampler == "grid" else 3)
    assert "interrupted" in states(tmp_path, spec)
    (last,) = work(tmp_path, spec)
    assert last not in others
    assert set(states(tmp_path, spec)) == {"complete"}


class Killed(BaseException):
    """The process ends at this place."""


@pytest.mark.parametrize("place", range(1, 5))
def test_a_kill_between_any_two_writes_loses_no_trial(tmp_path, monkeypatch, place):
    """While a process takes over the trial of a dead one, and leaves a variant that it does not know to others."""
    Store(SPEC, tmp_path).plan()
    dead = Store(SPEC, tmp_path)
    with dead.working():
        dead.claim()
    heir = Store(replace(SPEC, variants={"b": {}}), tmp_path)
    study = heir._main_study()
    writes = []

    def dies(write):
        def wrapped(*args, **options):
            writes.append(write)
            if len(writes) > place:
                raise Killed
            return write(*args, **options)

        return wrapped

    for name in ("tell", "ask", "enqueue_trial"):
        monkeypatch.setattr(study, name, dies(getattr(study, name)))

    def claim_all():
        with heir.working():
            while heir.claim():
                pass

    with pytest.raises(Killed):
        claim_all()
    assert len(writes) == place + 1
    work(tmp_path)
    assert states(tmp_path) == ["complete"] * 20


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_the_trial_of_a_killed_process_is_run_again(tmp_path, sampler):
    spec = one_of(sampler)
    Store(spec, tmp_path).plan()
    context = forkserver()
    claimed = context.Event()
    process = context.Process(target=hold, args=(tmp_path, spec, claimed))
    process.start()
    assert claimed.wait(100)
    assert "running" in states(tmp_path, spec)
    others = work(tmp_path, spec)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert "interrupted" in states(tmp_path, spec)
    (last,) = work(tmp_path, spec)
    assert last not in others
    assert set(states(tmp_path, spec)) == {"complete"}
    assert list((tmp_path / "workers").iterdir()) == []


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_samples_for_every_cell(tmp_path, sampler):
    spec = replace(SPEC, sampler=sampler, search=SEARCH, trials=3, seeds=(0, 1))
    Store(spec, tmp_path).plan()
    claimed = work(tmp_path, spec)
    assert len(claimed) == 12
    assert claimed[0] == ("a", "2:4", 0, 1)
    rows = Store(spec, tmp_path).rows()
    assert len(rows) == 24
    for row in rows:
        assert 1e-3 <= row["lr"] <= 1
        assert row["n"] in range(1, 6)
        assert row["c"] in "xy"
    assert (
        len({row["lr"] for row in rows if row["pattern"] == "2:4" and row["variant"] == "a"}) == 3
    )
    more = replace(spec, trials=4)
    Store(more, tmp_path).plan()
    assert len(work(tmp_path, more)) == 4
