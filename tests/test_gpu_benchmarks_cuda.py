"""What benchmarks/gpu does on CUDA devices alone, against stand-ins: that it runs, and tells right from wrong."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import correctness, costs, layers
from benchmarks.gpu.setting import Setting, SoftwareOperators
from benchmarks.gpu.simulated import compress, expand
from benchmarks.train import Watch
from lightning_nm.functional import transposable_mask
from lightning_nm.kernels.cpu import kernels

BF16 = torch.bfloat16


class OnCpu(Setting):
    """Not a dry run, but on the CPU, with the sizes and operators of one."""

    device = torch.device("cpu")
    operators = SoftwareOperators()

    def pick(self, real, tiny):
        return tiny


class Event:
    def __init__(self, enable_timing=False):
        self.recorded = False

    def record(self):
        self.recorded = True

    def query(self):
        return False


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


@pytest.fixture
def cuda(monkeypatch):
    """A device that does nothing: what is captured is run once, and a replay changes nothing."""
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
    for name, stand_in in {
        "Event": Event,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": lambda graph: nullcontext(),
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device: (5, 10),
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return OnCpu()


def test_times_in_graphs(cuda):
    row = costs.gains(cuda, BF16)["tiny"]
    assert (
        set(row["graph ms"]) == set(row["ms"]) == {"dense", "unpruned", "algorithm 0", "searched"}
    )
    assert row["gain by graph ms"] > 0
    assert row["searched"]["verdict"] == "right"


def test_a_call_that_waits_is_told_from_one_that_does_not(cuda, monkeypatch):
    assert {row["synchronises"] for row in costs.host(cuda).values()} == {False}
    monkeypatch.setattr(Event, "query", lambda self: self.recorded)
    assert {row["synchronises"] for row in costs.host(cuda).values()} == {True}


@pytest.mark.parametrize("question", [costs.captured_product, costs.captured_packing])
def test_a_graph_whose_replay_does_not_read_its_input_again_is_wrong(cuda, question):
    assert question(cuda)["verdict"] == "wrong"


def test_growth_of_memory(cuda):
    assert costs.growth(cuda)["device bytes"] == 0


def test_power(cuda, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile true; do echo 690.5, 700.00, 1400; sleep 0.02; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(costs, "WATCHED_S", 1.0)
    for row in costs.power(cuda).values():
        assert (row["watts"], row["limit watts"], row["SM MHz"]) == (690.5, 700, 1400)
        assert row["ms"] > 0


def test_fp8(cuda, monkeypatch):
    class Fp8(SoftwareOperators):
        def pack(self, matrix):
            return compress(matrix.float())

    def dense(x, other, scale_a, scale_b, out_dtype):
        return (x.float() @ other.float()).to(out_dtype)

    def sparse(packed, other, out_dtype, transpose_result):
        return (expand(packed, len(other)) @ other.float()).t().contiguous().to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", dense)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", sparse)
    monkeypatch.setattr(OnCpu, "operators", Fp8())
    assert costs.fp8(cuda)["sparse"]["verdict"] == "right"


@pytest.mark.parametrize("layout", ["ours", "another"])
def test_tiles_of_another_packed_form_are_found_wrong(cuda, monkeypatch, layout):
    def tile(weight, algorithm, use_cutlass):
        mask = transposable_mask(weight, "2:4")
        packed = compress(torch.where(mask, weight, 0))
        return (packed if layout == "ours" else packed.roll(1, 0)), None, None, None, mask

    monkeypatch.setattr(torch, "_sparse_semi_structured_tile", tile)
    monkeypatch.setattr(
        torch,
        "_sparse_semi_structured_apply_dense",
        lambda weight, mask: torch.where(mask, weight, 0),
    )
    answer = correctness.tile(cuda)
    assert answer["packed by tile"]["verdict"] == ("right" if layout == "ours" else "wrong")
    assert answer["masked by tile, packed by compress"]["verdict"] == "right"
    assert answer["the mask is 2:4 along rows"]
    assert answer["along columns"]
    assert 0.5 < answer["magnitude kept"] < 1


def test_compiled(cuda, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    answer = costs.compiled(cuda)
    assert answer["verdict"] == "right"
    assert set(answer["ms"]) == {"eager", "compiled"}


class Clock(Event):
    """Each record comes three milliseconds after the one before."""

    now = 0.0
    waited = 0

    def record(self):
        Clock.now += 3.0
        self.at = Clock.now

    def elapsed_time(self, end):
        return end.at - self.at

    def synchronize(self):
        Clock.waited += 1


def test_a_layer_is_timed_by_events_and_its_memory_measured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    # The kernels of this CPU would run.
    monkeypatch.setattr(kernels, "unavailable", lambda: "no library here")
    allocated = iter(range(0, 10**6, 1000))
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    variants = [layers.DENSE, layers.Variant("bi-mask", True, "auto")]
    rows = layers.compare(cuda, layers.TINY["tiny mlp"], variants)
    assert list(rows) == [variant.name for variant in variants]
    for row in rows.values():
        assert row["ms"] == 3.0
        assert row["step MB"] == 1e-3
        assert row["host ms"] > 0
    assert "no library here" in rows["bi-mask+mvue, auto"]["products"]["all"]


def test_a_training_is_watched_by_events(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for seconds, limit in ((0.0, float("inf")), (1e6, 0.0)):
        before = Clock.waited
        watch = Watch(torch.device("cuda"), seconds, warmup=3, limit=limit)
        trainer = SimpleNamespace(should_stop=False)
        batches = 0
        while not trainer.should_stop:
            watch.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)}, None, batches)
            batches += 1
        assert batches == len(watch.losses) == 5
        assert watch.steps() == pytest.approx([3e-3, 3e-3])
        assert Clock.waited - before == 4  # for every step but the last
