import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import collect_env

from lightning_nm import NMMixedPrecision
from lightning_nm.kernels import Router
from lightning_nm.kernels import tuner as cache
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu.library import cpu_name
from lightning_nm.kernels.tuner import Decision, Decisions, Environment, environment_of
from tests.support.fake_kernels import gemm_key, without_home
from tests.support.processes import in_processes

HERE = Environment("H200", "580.65", "2.13.0", "13.0", "801")
FAST = Decision("cusparselt", 1.5, 1.0, 0.1, "measured", "measured", "reuse 1")
DENSE = Decision("reference", 1.0, 1.5, 0.1, "measured", "measured", "reuse 1")
TIMES = st.none() | st.floats(min_value=0, allow_infinity=False)
DECISIONS = st.builds(
    Decision,
    st.text(),
    *[TIMES] * 3,
    st.text(),
    st.sampled_from(["measured", "forced"]),
    st.text(),
)


def decisions(entries, environment=HERE):
    result = Decisions(environment)
    result.update(entries)
    return result


@given(
    st.dictionaries(
        st.builds(gemm_key, st.sampled_from(["forward", "wgrad"]), *[st.integers(1, 1 << 20)] * 3),
        DECISIONS,
    )
)
def test_round_trip(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("decisions") / "new" / "kernels.json"
    saved = decisions(entries)
    saved.save(path)
    loaded = Decisions.load(path, HERE)
    assert dict(loaded) == dict(saved)
    assert loaded.environment == HERE


def test_the_file_can_be_read_by_people(tmp_path):
    decisions({gemm_key("forward", 11008, 4096, 16384, device="cuda:3"): FAST}).save(
        tmp_path / "kernels.json"
    )
    content = json.loads((tmp_path / "kernels.json").read_text())
    assert content["schema"] == 2
    ((environment, entries),) = content["environments"].items()
    assert environment == "device H200, driver 580.65, torch 2.13.0, cuda 13.0, cusparselt 801"
    ((key, entry),) = entries.items()
    assert (
        json.loads(key).items()
        >= {
            "gemm": "forward",
            "rows": 11008,
            "columns": 16384,
            "dtype": "bfloat16",
            "pattern": "2:4",
            "device": "cuda",
        }.items()
    )
    assert entry["kernel"] == "cusparselt"


def test_a_bucket_and_all_devices_of_a_type_share_a_decision():
    known = decisions({gemm_key(columns=1000, device="cuda:0"): FAST})
    assert known[gemm_key(columns=1024, device="cuda:1")] == FAST
    known[gemm_key(columns=900, device="cuda")] = replace(FAST, kernel="reference")
    assert [decision.kernel for decision in known.values()] == ["reference"]
    for other in (
        gemm_key(columns=1025, device="cuda"),
        gemm_key(columns=1024, device="cpu"),
        gemm_key("wgrad", columns=1024, device="cuda"),
    ):
        assert other not in known
    del known[gemm_key(columns=1024, device="cuda:7")]
    assert not known


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
def test_other_environments_are_left_alone(tmp_path, change):
    path, key = tmp_path / "kernels.json", gemm_key()
    other = replace(HERE, **change)
    decisions({key: FAST}).save(path)
    loaded = Decisions.load(path, other)
    assert not loaded
    slow = replace(FAST, kernel="reference")
    decisions({key: slow}, other).save(path)
    assert Decisions.load(path, HERE)[key] == FAST
    assert Decisions.load(path, other)[key] == slow


def test_saving_adds_to_what_another_process_saved(tmp_path):
    path = tmp_path / "kernels.json"
    first, second = gemm_key("forward"), gemm_key("dgrad")
    decisions({first: FAST, second: FAST}).save(path)
    decisions({second: replace(FAST, kernel="reference")}).save(path)
    assert [Decisions.load(path, HERE)[key].kernel for key in (first, second)] == [
        "cusparselt",
        "reference",
    ]


@pytest.mark.parametrize("schema", [1, 99])
def test_another_schema_is_ignored_and_replaced(tmp_path, schema):
    path = tmp_path / "kernels.json"
    # As of 0.3, or of a later release.
    path.write_text(f'{{"schema": {schema}, "environments": {{}}}}')
    assert not Decisions.load(path, HERE)
    decisions({gemm_key(): FAST}).save(path)
    assert len(Decisions.load(path, HERE)) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 1}', '{"model": {"layers": 3}}'])
def test_a_file_of_something_else_is_ignored_and_never_replaced(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert not Decisions.load(path, HERE)
    with pytest.raises(ValueError, match=r"config\.json does not hold decisions"):
        decisions({gemm_key(): FAST}).save(path)
    assert path.read_text() == text


KEY = cache._written_key(gemm_key())
WRONG = {**asdict(FAST), "dense_ms": "fast"}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"forward": {}},
        {KEY: {}},
        {KEY: 3},
        {KEY: WRONG},
        {KEY: {**WRONG, "dense_ms": 1.0, "kernel": None}},
        {"[]": asdict(FAST)},
        {"{}": asdict(FAST)},
        {KEY.replace('"bfloat16"', '"load"'): asdict(FAST)},
        {KEY.replace('"2:4"', '"4:2"'): asdict(FAST)},
        {KEY.replace('"device"', '"place"'): asdict(FAST)},
    ],
)
def test_damaged_entries_are_ignored(tmp_path, entries):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"schema": cache.SCHEMA, "environments": {str(HERE): entries}}))
    assert not Decisions.load(path, HERE)


def test_a_convolution_is_read_back(tmp_path):
    conv = Convolution(16, 32, (8, 9), (3, 1), (1, 2), groups=2)
    key = replace(gemm_key(), conv=conv, drawn=True, permuted=True, sparsity="masked")
    decisions({key: FAST}).save(tmp_path / "kernels.json")
    assert dict(Decisions.load(tmp_path / "kernels.json", HERE)) == {cache.stored_key(key): FAST}


def test_a_missing_file_is_no_error(tmp_path):
    assert not Decisions.load(tmp_path / "kernels.json", HERE)


def test_without_a_home_directory_nothing_is_kept(tmp_path, monkeypatch):
    without_home(monkeypatch)
    assert Router(file="~/kernels.json").file is None
    assert NMMixedPrecision().router.file is None
    assert Router(file=tmp_path / "kernels.json").file == tmp_path / "kernels.json"
    assert Router().file is None


def test_what_was_measured_is_kept_once_and_a_failure_told_once(tmp_path):
    path = tmp_path / "kernels.json"
    known = decisions({gemm_key(): replace(FAST, source="default")})
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


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    decisions({gemm_key(): FAST}).save(path)
    before = path.read_text()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        decisions({gemm_key("dgrad"): FAST}).save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["kernels.json"]


def test_a_thread_adds_decisions_while_another_saves_them(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    made = decisions({gemm_key(depth=1 + depth): FAST for depth in range(4)})

    def adding(decision):
        made[gemm_key(rows=7, depth=1 + len(made))] = FAST
        return asdict(decision)

    monkeypatch.setattr(cache, "asdict", adding)
    made.save(path)
    assert len(Decisions.load(path, HERE)) >= 4
    assert len(list(made.items())) == 8


def test_threads_that_save_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "kernels.json"

    def save(thread):
        for depth in range(1, 9):
            decisions({gemm_key(rows=1 + thread, depth=depth): FAST}).save(path)

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Decisions.load(path, HERE)) == 64
    assert os.listdir(tmp_path) == ["kernels.json"]


def test_a_folder_that_cannot_be_written_leaves_the_training_alone(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        decisions({gemm_key(): FAST}).save(tmp_path / "file" / "kernels.json")


def save_often(path):
    rank = dist.get_rank()
    for repeat in range(40):
        decisions(
            {gemm_key(rows=1 + rank, depth=1 + depth): FAST for depth in range(50 + repeat)}
        ).save(path)
        assert Decisions.load(path, HERE)


@pytest.mark.slow
def test_processes_save_at_the_same_time(tmp_path):
    path = tmp_path / "decisions" / "kernels.json"
    path.parent.mkdir()
    in_processes(2, tmp_path / "run", save_often, path)
    loaded = Decisions.load(path, HERE)
    every = {gemm_key(rows=1 + rank, depth=1 + depth) for rank in range(2) for depth in range(89)}
    assert set(loaded) == set(decisions(dict.fromkeys(every, FAST)))
    assert os.listdir(path.parent) == ["kernels.json"]


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


def test_the_environment_of_a_cpu(cpu):
    assert cpu() == Environment(
        "Xeon; avx512; library 1f; threads: 8", None, torch.__version__, None, None
    )
    assert cpu(unavailable="no compiler").device == "Xeon; no kernels; threads: 8"
    assert cpu(amx=True).device == "Xeon; AMX; avx512; library 1f; threads: 8"


def test_the_environment_of_this_cpu():
    found = environment_of(torch.device("cpu"))
    assert found.device.startswith(cpu_name())
    assert found.device.endswith(f"threads: {torch.get_num_threads()}")
    assert found.torch == torch.__version__


def test_an_unknown_device_is_its_own_environment():
    assert environment_of(torch.device("meta")) == Environment(
        "meta", None, torch.__version__, torch.version.cuda, None
    )


@pytest.mark.parametrize(
    "other",
    [
        {"name": "EPYC"},
        {"amx": True},
        {"limit": "AVX2"},
        {"level": "avx2"},
        {"threads": 1},
        {"unavailable": "removed"},
        {"sources": "2"},
    ],
)
def test_decisions_of_another_cpu_are_not_used(cpu, tmp_path, other):
    path = tmp_path / "kernels.json"
    key = gemm_key(dtype=torch.float32, pattern="1:16")
    decisions({key: FAST}, cpu()).save(path)
    assert not Decisions.load(path, cpu(**other))
    decisions({key: DENSE}, cpu(**other)).save(path)
    assert Decisions.load(path, cpu())[key] == FAST
    assert Decisions.load(path, cpu(**other))[key] == DENSE


@pytest.mark.parametrize("known", ["masked", "outputs", "n:m"])
def test_what_is_sparse_is_part_of_a_decision(tmp_path, known):
    path = tmp_path / "kernels.json"
    keys = {
        kind: replace(gemm_key("dgrad"), sparsity=kind) for kind in ("n:m", "masked", "outputs")
    }
    decisions({keys[known]: FAST}).save(path)
    loaded = Decisions.load(path, HERE)
    assert {kind for kind, key in keys.items() if key in loaded} == {known}


def test_the_environment_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(cache, "library_version", lambda: 801)
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "580.65")
    here = environment_of(torch.device("cuda:1"))
    assert (here.device, here.driver, here.cusparselt) == ("GPU 1", "580.65", "801")
    assert str(replace(here, cuda=None)) == (
        f"device GPU 1, driver 580.65, torch {torch.__version__}, cuda none, cusparselt 801"
    )
