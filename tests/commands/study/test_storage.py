"""The storage of a study: who trains what, and what survives, with scripted rows instead of trainings."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import pytest
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lightning_nm.commands.study.runner import Store, sample
from lightning_nm.commands.study.spec import Spec
from tests.support.full_disk import full_disk
from tests.support.processes import forkserver

SPEC = Spec(
    "s", {}, "m", {"a": {}, "b": {"x": 1}}, grid={"pattern": ["2:4", "1:16"]}, seeds=[0, 1, 2, 3]
)
SEARCH = replace(
    SPEC,
    sampler="random",
    trials=3,
    seeds=[0, 1],
    search={
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "n": IntDistribution(1, 5),
        "c": CategoricalDistribution(["x", "y"]),
    },
)


def what(job):
    return (job.cell.variant, *job.cell.values.values(), job.number)


def work(folder, spec=SPEC, limit=None, fail=()):
    """Claim and finish jobs; what was claimed."""
    store, claimed = Store(spec, folder), []
    for job in store.claim():
        claimed.append(what(job))
        rows = [{"seed": seed, "state": "complete", "m": float(seed)} for seed in job.seeds]
        if claimed[-1] in fail:
            rows[-1] = {"seed": job.seeds[-1], "state": "failed", "error": "it failed"}
        store.add(job, sample(spec, job.number), rows)
        if len(claimed) == limit:
            break
    return claimed


def hold(folder, spec, claimed):
    """Finish one training, and be killed in the next."""
    work(folder, spec, limit=1)
    for _ in Store(spec, folder).claim():
        claimed.set()
        signal.pause()


def everything(spec):
    return {what(job) for job in spec.jobs()}


def states(folder, spec=SPEC):
    return [row["state"] for row in Store(spec, folder).rows()]


def test_everything_is_trained_once_seed_by_seed(tmp_path):
    assert states(tmp_path) == ["missing"] * 16
    claimed = work(tmp_path, limit=6)
    assert [key[-1] for key in claimed] == [0, 0, 0, 0, 1, 1]
    claimed += work(tmp_path)
    assert len(claimed) == 16
    assert set(claimed) == everything(SPEC)
    rows = Store(SPEC, tmp_path).rows()
    assert rows[5] == {"variant": "b", "pattern": "2:4", "seed": 1, "state": "complete", "m": 1.0}
    assert work(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({"variants": {**SPEC.variants, "c": {"x": 2}}, "seeds": [0, 1, 2, 3, 9]}, 6 + 8),
        ({"grid": {"pattern": ["1:4", "2:4", "1:16"]}}, 8),
        ({"variants": {"renamed": {}}, "baselines": ["renamed"], "seeds": [3]}, 0),
        ({"variants": {"a": {}, "b": {"x": 2}}}, 8),
        ({"config": {"x": 3}}, 8),
        ({"metric": "other"}, 16),
        ({"seconds": 3.0}, 16),
        ({"model": "a.B"}, 16),
    ],
)
def test_what_was_added_or_changed_is_trained_and_nothing_else(tmp_path, changes, trained):
    work(tmp_path)
    changed = replace(SPEC, **changes)
    store = Store(changed, tmp_path)
    assert sum(job.key not in store.trials() for job in store.jobs) == trained
    assert work(tmp_path) == [], "what was there is still there"


def test_failed_trainings_are_kept_until_they_are_retried(tmp_path):
    fail = {("a", "2:4", 0), ("b", "1:16", 3)}
    work(tmp_path, fail=fail)
    failed = [row for row in Store(SPEC, tmp_path).rows() if row["state"] == "failed"]
    assert [row["error"] for row in failed] == ["it failed"] * 2
    assert work(tmp_path) == []
    Store(SPEC, tmp_path).retry_failed()
    assert states(tmp_path).count("missing") == 2
    assert set(work(tmp_path, fail={("b", "1:16", 3)})) == fail
    assert work(tmp_path) == []
    assert states(tmp_path).count("failed") == 1


@pytest.mark.parametrize("spec", [SPEC, SEARCH], ids=["grid", "search"])
def test_workers_share_the_trainings(tmp_path, spec):
    with ThreadPoolExecutor(3) as pool:
        claimed = list(chain.from_iterable(pool.map(work, [tmp_path] * 3, [spec] * 3)))
    assert sorted(claimed) == sorted(everything(spec))
    assert set(states(tmp_path, spec)) == {"complete"}


def test_a_killed_process_loses_its_running_training_alone(tmp_path):
    context = forkserver()
    claimed = context.Event()
    process = context.Process(target=hold, args=(tmp_path, SEARCH, claimed))
    process.start()
    assert claimed.wait(100)
    others = work(tmp_path, SEARCH)
    assert len(others) == len(everything(SEARCH)) - 2, "one is complete and one runs"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (last,) = work(tmp_path, SEARCH)
    assert last not in others
    assert set(states(tmp_path, SEARCH)) == {"complete"}


def test_a_full_disk_loses_no_finished_training(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # Optuna tries five times
    work(tmp_path, limit=3)
    store = Store(SPEC, tmp_path)
    before, job = store.rows(), next(store.claim())
    row = {"seed": 1, "state": "complete", "m": 1.0, "text": "x" * 100_000}
    message = r"study\.db' cannot be read or written: .*disk"
    with full_disk(os.path.getsize(store.path)), pytest.raises(OSError, match=message):
        store.add(job, {}, [row])
    assert Store(SPEC, tmp_path).rows() == before
    assert len(work(tmp_path)) == 13


@pytest.mark.parametrize("damage", ["text", "half"])
def test_a_damaged_storage_is_named_in_one_sentence(tmp_path, damage):
    work(tmp_path)
    path = tmp_path / "study.db"
    content = path.read_bytes()
    path.write_bytes(b"no database" if damage == "text" else content[: len(content) // 2])
    with pytest.raises(OSError, match=r"study\.db' cannot be read or written: ") as error:
        Store(SPEC, tmp_path).rows()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_samples_for_every_cell(tmp_path, sampler):
    spec = replace(SEARCH, sampler=sampler)
    claimed = work(tmp_path, spec)
    assert len(claimed) == 12
    rows = Store(spec, tmp_path).rows()
    assert len(rows) == 24
    assert all(1e-3 <= row["lr"] <= 1 and 1 <= row["n"] <= 5 and row["c"] in "xy" for row in rows)
    cell = [row for row in rows if row["pattern"] == "2:4" and row["variant"] == "a"]
    assert len({row["lr"] for row in cell}) == 3
    more = replace(spec, trials=4)
    assert len(work(tmp_path, more)) == 4
    other = replace(spec, search={"c": CategoricalDistribution(["x", "z"])})
    assert len(work(tmp_path, other)) == 12


def test_tpe_learns_from_the_trials_of_its_cell(tmp_path):
    spec = replace(
        SEARCH, sampler="tpe", trials=40, variants={"a": {}}, grid={}, seeds=[0],
        search={"lr": FloatDistribution(0.0, 1.0)},
    )  # fmt: skip
    store = Store(spec, tmp_path)
    for job in store.claim():
        trials = store.trials()
        searched = sample(spec, job.number, list(trials.values()))
        row = {"seed": 0, "state": "complete", "m": (searched["lr"] - 0.7) ** 2}
        store.add(job, searched, [row])
    found = [row["lr"] for row in store.rows()]
    assert all(abs(lr - 0.7) < 0.25 for lr in found[-10:])
    assert not all(abs(lr - 0.7) < 0.25 for lr in found[:10])
