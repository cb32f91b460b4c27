"""Decisions in a file: whose they are, what is read again, and what is left alone."""

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import collect_env

from lightning_nm import NMMixedPrecision
from lightning_nm.kernels import Router
from lightning_nm.kernels import tuner as cache
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu.library import cpu_name
from lightning_nm.kernels.tuner import Decision, Decisions, Environment, environment_of, share
from tests.support.fake_kernels import gemm_key, without_home
from tests.support.processes import in_processes

HERE = Environment("H200", "580.65", "2.13.0", "13.0", "801")
FAST = Decision("cusparselt", 1.5, 1.0, 0.1, "measured", "measured", "reuse 1")
DENSE = Decision("reference", 1.0, 1.5, 0.1, "measured", "measured", "reuse 1")
KEY = gemm_key()
TIMES = st.none() | st.floats(min_value=0, allow_infinity=False)
SIZES = [st.integers(1, 1 << 20)] * 3
SOURCES = st.sampled_from(["measured", "forced"])
CONV = Convolution(16, 32, (8, 9), (3, 1), (1, 2), groups=2)
KEYS = st.builds(
    lambda key, **options: replace(key, **options),
    st.builds(gemm_key, st.sampled_from(["forward", "wgrad"]), *SIZES),
    conv=st.sampled_from([None, CONV]),
    drawn=st.booleans(),
    permuted=st.booleans(),
    sparsity=st.sampled_from(["n:m", "masked", "outputs"]),
)


def decisions(entries, environment=HERE):
    result = Decisions(environment)
    result.update(entries)
    return result


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kernels.json"


@settings(max_examples=30)
@given(
    st.dictionaries(
        KEYS, st.builds(Decision, st.text(), *[TIMES] * 3, st.text(), SOURCES, st.text())
    )
)
def test_round_trip(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("decisions") / "new" / "kernels.json"
    assert not Decisions.load(path, HERE)
    saved = decisions(entries)
    saved.save(path)
    loaded = Decisions.load(path, HERE)
    assert dict(loaded) == dict(saved)
    assert loaded.environment == HERE


def test_the_file_can_be_read_by_people(path):
    decisions({gemm_key("forward", 11008, 4096, 16384, device="cuda:3"): FAST}).save(path)
    content = json.loads(path.read_text())
    assert content["schema"] == 2
    ((environment, entries),) = content["environments"].items()
    assert environment == "device H200, driver 580.65, torch 2.13.0, cuda 13.0, cusparselt 801"
    ((key, entry),) = entries.items()
    expected = {"gemm": "forward", "rows": 11008, "columns": 16384, "dtype": "bfloat16"}
    assert json.loads(key).items() >= {**expected, "pattern": "2:4", "device": "cuda"}.items()
    assert entry["kernel"] == "cusparselt"


def test_a_bucket_and_all_devices_of_a_type_share_a_decision():
    known = decisions({gemm_key(columns=1000, device="cuda:0"): FAST})
    assert known[gemm_key(columns=1024, device="cuda:1")] == FAST
    known[gemm_key(columns=900, device="cuda")] = DENSE
    assert list(known.values()) == [DENSE]
    masked, outputs = (
        replace(gemm_key(columns=1024, device="cuda"), sparsity=sparsity)
        for sparsity in ("masked", "outputs")
    )
    for other in (
        gemm_key(columns=1025, device="cuda"),
        gemm_key(columns=1024, device="cpu"),
        gemm_key("wgrad", columns=1024, device="cuda"),
        masked,
        outputs,
    ):
        assert other not in known
    del known[gemm_key(columns=1024, device="cuda:7")]
    assert not known


def test_saving_adds_to_what_another_process_saved(path):
    first, second = gemm_key("forward"), gemm_key("dgrad")
    decisions({first: FAST, second: FAST}).save(path)
    decisions({second: DENSE}).save(path)
    assert dict(Decisions.load(path, HERE)) == {first: FAST, second: DENSE}


@pytest.mark.parametrize("schema", [1, 99])
def test_another_schema_is_ignored_and_replaced(path, schema):
    # As of 0.3, or of a later release.
    path.write_text(f'{{"schema": {schema}, "environments": {{}}}}')
    assert not Decisions.load(path, HERE)
    decisions({KEY: FAST}).save(path)
    assert len(Decisions.load(path, HERE)) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 1}', '{"model": {"layers": 3}}'])
def test_a_file_of_something_else_is_ignored_and_never_replaced(path, text):
    path.write_text(text)
    assert not Decisions.load(path, HERE)
    with pytest.raises(ValueError, match=r"kernels\.json does not hold decisions"):
        decisions({KEY: FAST}).save(path)
    assert path.read_text() == text


WRITTEN = cache._written_key(KEY)
WRONG = {**asdict(FAST), "dense_ms": "fast"}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"forward": {}},
        {WRITTEN: {}},
        {WRITTEN: 3},
        {WRITTEN: WRONG},
        {WRITTEN: {**WRONG, "dense_ms": 1.0, "kernel": None}},
        {"[]": asdict(FAST)},
        {"{}": asdict(FAST)},
        {WRITTEN.replace('"bfloat16"', '"load"'): asdict(FAST)},
        {WRITTEN.replace('"2:4"', '"4:2"'): asdict(FAST)},
        {WRITTEN.replace('"device"', '"place"'): asdict(FAST)},
    ],
)
def test_damaged_entries_are_ignored(path, entries):
    path.write_text(json.dumps({"schema": cache.SCHEMA, "environments": {str(HERE): entries}}))
    assert not Decisions.load(path, HERE)


def test_without_a_home_directory_nothing_is_kept(path, monkeypatch):
    without_home(monkeypatch)
    assert Router(file="~/kernels.json").file is None
    assert NMMixedPrecision().router.file is None
    assert Router(file=path).file == path
    assert Router().file is None


def test_what_was_measured_is_kept_once_and_a_failure_told_once(path):
    known = decisions({KEY: replace(FAST, source="default")})
    known.keep(path)
    known[gemm_key("dgrad")] = FAST
    known.keep(None)
    assert not path.exists(), "nothing was measured, or there is no file"
    known.keep(path)
    assert len(Decisions.load(path, HERE)) == 2
    path.write_text("my notes")
    known.keep(path)
    known[gemm_key("wgrad")] = FAST
    with pytest.warns(RuntimeWarning, match=r"not kept and will be measured again.*ValueError"):
        known.keep(path)
    known[gemm_key("wgrad")] = DENSE
    known.keep(path)  # a warning would be an error
    assert path.read_text() == "my notes"
    Decisions.load(path, HERE).keep(path)


def test_a_save_that_fails_leaves_the_old_file(path, monkeypatch):
    decisions({KEY: FAST}).save(path)
    before = path.read_text()
    with pytest.raises(OSError, match=r"kernels\.json"):
        decisions({KEY: FAST}).save(path / "kernels.json")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        decisions({gemm_key("dgrad"): FAST}).save(path)
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["kernels.json"]


def test_a_thread_adds_decisions_while_another_saves_them(path, monkeypatch):
    made = decisions({gemm_key(depth=1 + depth): FAST for depth in range(4)})

    def adding(decision):
        made[gemm_key(rows=7, depth=1 + len(made))] = FAST
        return asdict(decision)

    monkeypatch.setattr(cache, "asdict", adding)
    made.save(path)
    assert len(Decisions.load(path, HERE)) >= 4
    assert len(list(made.items())) == 8


def save_often(path, row, times=8):
    for depth in range(1, 1 + times):
        decisions({gemm_key(rows=1 + row, depth=depth): FAST}).save(path)
        assert Decisions.load(path, HERE)


def test_threads_that_save_at_the_same_time_lose_nothing(path):
    threads = [threading.Thread(target=save_often, args=(path, thread)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Decisions.load(path, HERE)) == 64
    assert os.listdir(path.parent) == ["kernels.json"]


def save_and_share(path):
    rank = dist.get_rank()
    save_often(path, rank, times=40)
    shared = share(decisions({KEY: replace(FAST, kernel=f"kernel of {rank}")}))
    return shared[KEY].kernel


@pytest.mark.slow
def test_processes_save_at_the_same_time_and_take_the_decisions_of_the_first(path, tmp_path):
    found = in_processes(3, tmp_path / "run", save_and_share, path)
    assert found == ["kernel of 0"] * 3
    assert len(Decisions.load(path, HERE)) == 120
    alone = decisions({KEY: FAST})
    assert share(alone) is alone


# ----------------------------------------------------------------------------------------------------- environments


def assert_kept_apart(path, here, other):
    decisions({KEY: FAST}, here).save(path)
    assert not Decisions.load(path, other)
    decisions({KEY: DENSE}, other).save(path)
    assert Decisions.load(path, here)[KEY] == FAST
    assert Decisions.load(path, other)[KEY] == DENSE


@pytest.mark.parametrize(
    "change",
    [
        {"device": "H100"},
        {"driver": None},
        {"torch": "2.12.0"},
        {"cuda": "12.9"},
        {"cusparselt": "800"},
    ],
)
def test_other_environments_are_left_alone(path, change):
    assert_kept_apart(path, HERE, replace(HERE, **change))


@pytest.fixture
def cpu(monkeypatch):
    """A CPU whose name, instruction set and threads can be set."""

    def become(
        name="Xeon", level="avx512", threads=8, unavailable="", sources="1f", amx=False, limit=""
    ):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        monkeypatch.setattr(cache, "cpu_name", lambda: name)
        monkeypatch.setattr(cache, "has_amx", lambda: amx)
        monkeypatch.setattr(cache, "level", lambda: cache.LEVELS.index(level))
        monkeypatch.setattr(cache, "unavailable", lambda: unavailable)
        monkeypatch.setattr(cache, "compiled_from", lambda: sources)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return environment_of(torch.device("cpu"))

    return become


@pytest.mark.parametrize(
    ("other", "device"),
    [
        ({"name": "EPYC"}, "EPYC; avx512; library 1f; threads: 8"),
        ({"amx": True}, "Xeon; AMX; avx512; library 1f; threads: 8"),
        ({"limit": "AVX2"}, "Xeon; avx512; library 1f; oneDNN up to AVX2; threads: 8"),
        ({"level": "avx2"}, "Xeon; avx2; library 1f; threads: 8"),
        ({"threads": 1}, "Xeon; avx512; library 1f; threads: 1"),
        ({"unavailable": "removed"}, "Xeon; no kernels; threads: 8"),
        ({"sources": "2"}, "Xeon; avx512; library 2; threads: 8"),
    ],
)
def test_the_environment_of_a_cpu(cpu, path, other, device):
    assert cpu(**other) == Environment(device, None, torch.__version__, None, None)
    assert_kept_apart(path, cpu(), cpu(**other))


def test_the_environments_of_this_machine():
    found = environment_of(torch.device("cpu"))
    assert found.device.startswith(cpu_name())
    assert found.device.endswith(f"threads: {torch.get_num_threads()}")
    unknown = Environment("meta", None, torch.__version__, torch.version.cuda, None)
    assert environment_of(torch.device("meta")) == unknown


def test_the_environment_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(cache, "library_version", lambda: 801)
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "580.65")
    here = environment_of(torch.device("cuda:1"))
    assert (here.device, here.driver, here.cusparselt) == ("GPU 1", "580.65", "801")
    assert "cuda none" in str(replace(here, cuda=None))
