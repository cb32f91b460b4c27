from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.kernels.choose import Chooser
from lightning_nm.kernels.cost import DeviceModel, device_model
from lightning_nm.kernels.decisions import Decision, Decisions
from lightning_nm.kernels.environment import Environment
from lightning_nm.kernels.registry import KernelRegistry
from tests.fake_kernels import DENSE, FakeKernel, FakeTimer, Flickering, gemm_key

HERE = Environment("H200", None, "2.13.0", None, None)
KEY = gemm_key()
FAST_GPU = DeviceModel("fast", dense_tflops=1e-3, bandwidth=1e3, gain=1.5)
SLOW_GPU = DeviceModel("slow", dense_tflops=1e3, bandwidth=1e-3, gain=1.5)


def chooser(mode="auto", kernels=None, dense=10.0, decisions=None, times=None, **options):
    kernels = [FakeKernel()] if kernels is None else kernels
    timer = FakeTimer(kernels, dense, **(times or {kernel.name: (5.0, 1.0) for kernel in kernels}))
    decisions = Decisions(HERE) if decisions is None else decisions
    return Chooser(mode, KernelRegistry(kernels), decisions, timer, **options)


MILLISECONDS = st.floats(0.01, 100)


@given(
    dense=MILLISECONDS,
    times=st.lists(st.tuples(MILLISECONDS, MILLISECONDS), min_size=1, max_size=3),
    reuse=st.integers(1, 8),
    gemm=st.sampled_from(["forward", "dgrad", "wgrad"]),
)
def test_auto_takes_the_fastest_and_sparse_only_with_a_margin(dense, times, reuse, gemm):
    kernels = [FakeKernel(f"kernel{index}") for index in range(len(times))]
    named = {kernel.name: pair for kernel, pair in zip(kernels, times, strict=True)}
    choice = chooser("auto", kernels, dense, times=named, reuse=reuse)
    decision = choice.decide(gemm_key(gemm, 8, 8, 8))
    totals = [product + pack / (1 if gemm == "wgrad" else reuse) for product, pack in times]
    best = min(range(len(times)), key=lambda index: totals[index])
    assert (decision.dense_ms, decision.sparse_ms, decision.pack_ms) == pytest.approx((dense, *times[best]))
    if abs(dense / totals[best] - 1.03) > 1e-6:
        assert decision.kernel == (f"kernel{best}" if dense / totals[best] > 1.03 else "reference")
    assert decision.source == "measured"
    assert all(kernel.name in decision.reason for kernel in kernels)


@pytest.mark.parametrize(("dense", "kernel"), [(6.15, "reference"), (6.25, "fast")])
def test_a_margin_of_three_percent_and_packing_count(dense, kernel):
    choice = chooser(dense=dense, times={"fast": (5.0, 1.0)})
    assert choice.decide(KEY).kernel == kernel
    assert f"measured fast {dense / 6:.3f}x; sparse from 1.03x" == choice.decide(KEY).reason


def test_a_pack_is_shared_by_micro_batches_but_not_in_wgrad():
    choice = chooser(dense=6.0, times={"fast": (5.0, 1.0)}, reuse=4)
    assert [choice.decide(gemm_key(gemm)).kernel for gemm in ("forward", "dgrad", "wgrad")] == [
        "fast",
        "fast",
        "reference",
    ]


def test_the_choice_runs():
    choice = chooser()
    matrix, x = torch.randn(32, 64), torch.randn(128, 64)
    kernel = choice.registry.kernels[choice.decide(KEY).kernel]
    assert torch.equal(kernel.linear(kernel.pack(matrix), x), torch.nn.functional.linear(x, matrix))


def broken(product):
    raise RuntimeError("no such algorithm")


@pytest.mark.parametrize("mode", ["auto", "sparse", "heuristic"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"probe": "this device has no sparse tensor cores"}, "bad: this device has no sparse tensor cores"),
        ({"supports": lambda key: f"{key.rows} rows"}, "bad: 32 rows"),
        ({"supports": lambda key: 1 // 0}, "bad: ZeroDivisionError"),
        ({"spoil": broken}, "bad: RuntimeError: no such algorithm"),
        ({"spoil": lambda product: product * 1.1}, "bad: wrong by 0.1"),
        ({"spoil": lambda product: product * float("nan")}, "bad: wrong by nan"),
    ],
)
def test_a_kernel_that_fails_is_passed_over(mode, options, words):
    bad, good = FakeKernel("bad", **options), FakeKernel("good")
    times = {"bad": (0.1, 0.1), "good": (5.0, 1.0)}
    decision = chooser(mode, [bad, good], times=times, device_model=FAST_GPU).decide(KEY)
    assert decision.kernel == "good"
    assert words in decision.reason
    decision = chooser(mode, [bad], times=times, device_model=FAST_GPU).decide(KEY)
    assert (decision.kernel, decision.source, decision.dense_ms) == ("reference", "default", None)
    assert decision.reason.startswith(words)


def test_a_kernel_that_fails_while_it_is_timed_is_passed_over():
    calls = []

    def spoil(product):
        calls.append(product)
        if len(calls) > 1:
            raise RuntimeError("out of workspace")
        return product

    choice = chooser(kernels=[FakeKernel("bad", spoil=spoil), FakeKernel("good")])
    decision = choice.decide(KEY)
    assert decision.kernel == "good"
    assert choice.timer.timed == [DENSE, ("good", "linear"), ("good", "pack"), DENSE]
    assert "bad: RuntimeError: out of workspace" in decision.reason


def test_a_probe_is_asked_once():
    kernel, probes = FakeKernel(), []
    kernel.probe = lambda device: probes.append(device) or ""
    choice = chooser(kernels=[kernel])
    for columns in (8, 64, 8):
        choice.decide(gemm_key(columns=columns))
    assert probes == [torch.device("cpu")]


@pytest.mark.parametrize("mode", ["auto", "sparse", "reference"])
def test_without_sparse_kernels_all_is_dense(mode):
    decision = chooser(mode, []).decide(KEY)
    assert decision.kernel == "reference"
    assert decision.reason == ("mode 'reference'" if mode == "reference" else "there is no sparse kernel")


def test_an_empty_product_is_dense():
    assert chooser("sparse").decide(gemm_key(columns=0)).reason == "the product is empty"


def test_sparse_takes_the_first_legal_kernel_untimed():
    choice = chooser("sparse", [FakeKernel("first"), FakeKernel("second")])
    assert choice.decide(KEY) == Decision(
        "first",
        None,
        None,
        None,
        "mode 'sparse'",
        "forced",
        "kernels reference, first, second; reuse 1; hysteresis 0.03",
    )
    assert choice.timer.timed == []


def test_reference_never_tries_a_kernel():
    kernel = FakeKernel()
    choice = chooser("reference", [kernel])
    assert choice.decide(KEY).source == "forced"
    assert kernel.calls == choice.timer.timed == []


def test_heuristic_predicts_untimed():
    fast, slow = (chooser("heuristic", device_model=model) for model in (FAST_GPU, SLOW_GPU))
    assert fast.decide(KEY).kernel == "fast"
    assert fast.decide(KEY).dense_ms == pytest.approx(2 * 32 * 64 * 128 / 1e9 * 1e3)
    assert slow.decide(KEY).kernel == "reference"
    assert {fast.decide(KEY).source, slow.decide(KEY).source} == {"predicted"}
    assert fast.timer.timed == slow.timer.timed == []


def test_heuristic_without_figures_for_a_dtype_is_dense():
    decision = chooser("heuristic", device_model=FAST_GPU).decide(gemm_key(dtype=torch.float32))
    assert decision.kernel == "reference"
    assert "not for torch.float32" in decision.reason


def test_the_default_policy_of_an_h200(monkeypatch):
    """Weights pay, unfused gradients do not: at a gain of 1.2 they need 4000 inputs."""
    monkeypatch.setattr("lightning_nm.kernels.registry.check", lambda kernel, key: "")
    choice = chooser("heuristic", device_model=device_model("H200"))
    shapes = {"forward": (4096, 1024, 50432), "dgrad": (1024, 4096, 50432), "wgrad": (4096, 50432, 1024)}
    names = [choice.decide(gemm_key(gemm, *shape)).kernel for gemm, shape in shapes.items()]
    assert names == ["fast", "fast", "reference"]
    assert choice.decide(gemm_key("wgrad", 4096, 16384, 11008)).kernel == "fast"


def test_lengths_of_a_bucket_are_measured_once_at_the_first_of_them():
    sizes = []
    choice = chooser(kernels=[FakeKernel(supports=lambda key: sizes.append(key.columns) or "")])
    for columns in (1000, 1024, 897, 960):
        assert choice.decide(gemm_key(columns=columns)).kernel == "fast"
    assert choice.timer.timed == [DENSE, ("fast", "linear"), ("fast", "pack"), DENSE]
    assert sizes == [1000, 1000, 1024, 897, 960]
    assert len(choice.decisions) == 1


def test_a_length_that_a_kernel_does_not_support_is_dense():
    choice = chooser(kernels=[FakeKernel(supports=lambda key: "odd" if key.columns % 2 else "")])
    assert [choice.decide(gemm_key(columns=columns)).kernel for columns in (128, 127, 126)] == [
        "fast",
        "reference",
        "fast",
    ]
    assert choice.decide(gemm_key(columns=127)).reason == "fast: odd"


def test_what_was_measured_is_not_measured_again(tmp_path):
    path = tmp_path / "kernels.json"
    first = chooser()
    first.tune([KEY, gemm_key("wgrad")], budget_s=1, clock=lambda: 0)
    first.decisions.save(path)
    second = chooser(decisions=Decisions.load(path, HERE))
    second.tune([KEY, gemm_key("wgrad")], budget_s=1, clock=lambda: 0)
    assert dict(second.decisions) == dict(first.decisions)
    assert second.timer.timed == []


@pytest.mark.parametrize(
    "options", [{"reuse": 2}, {"hysteresis": 0.1}, {"kernels": [FakeKernel("newer"), FakeKernel("fast")]}]
)
def test_a_decision_on_other_terms_is_made_anew(options):
    known = chooser()
    known.decide(KEY)
    choice = chooser(decisions=known.decisions, **options)
    choice.decide(KEY)
    assert DENSE in choice.timer.timed
    assert choice.decisions is known.decisions
    times = len(choice.timer.timed)
    choice.decide(KEY)
    assert len(choice.timer.timed) == times


def test_a_decision_without_the_check_of_repeated_products_does_not_hold_in_deterministic_mode(deterministic):
    flickering = [FakeKernel(spoil=Flickering(*range(1, 1000, 2)))]
    torch.use_deterministic_algorithms(False)
    known = chooser(kernels=flickering)
    assert known.decide(KEY).kernel == "fast"
    torch.use_deterministic_algorithms(True)
    decision = known.decide(KEY)
    assert decision.kernel == "reference"
    assert "fast: gives other bits when it is repeated" in decision.reason
    assert decision.terms.endswith("; deterministic")
    torch.use_deterministic_algorithms(False)
    assert known.decide(KEY).kernel == "fast"


@pytest.mark.parametrize("mode", ["sparse", "heuristic"])
def test_modes_without_timing_check_repeated_products_as_well(mode, deterministic):
    choice = chooser(mode, [FakeKernel(spoil=Flickering(*range(1, 1000, 2)))], device_model=FAST_GPU)
    torch.use_deterministic_algorithms(False)
    assert choice.decide(KEY).kernel == "fast"
    torch.use_deterministic_algorithms(True)
    assert choice.decide(KEY).kernel == "reference"


def test_replay_of_a_decision_without_that_check_is_dense_in_deterministic_mode(tmp_path, deterministic):
    mode = recorded(tmp_path, forward="fast", dgrad="reference")
    choice = chooser(mode)
    assert choice.decide(gemm_key("dgrad")).reason == "as measured then"
    decision = choice.decide(gemm_key("forward"))
    assert (decision.kernel, decision.reason) == ("reference", f"not recorded as deterministic in {mode[7:]}")
    record = chooser()
    record.decide(KEY)
    record.decisions.save(tmp_path / "checked.json")
    assert chooser(f"replay:{tmp_path / 'checked.json'}").decide(KEY).kernel == "fast"


def test_more_micro_batches_do_not_matter_to_gradients():
    known = chooser()
    known.decide(gemm_key("wgrad"))
    choice = chooser(decisions=known.decisions, reuse=2)
    choice.decide(gemm_key("wgrad"))
    assert choice.timer.timed == []


@pytest.mark.parametrize("mode", ["sparse", "reference", "heuristic"])
def test_only_auto_reads_and_adds_decisions(mode):
    known = chooser(dense=1.0)
    known.decide(KEY)
    assert known.decisions[KEY].kernel == "reference"
    before = dict(known.decisions)
    choice = chooser(mode, decisions=known.decisions, device_model=FAST_GPU)
    choice.decide(gemm_key("dgrad"))
    assert choice.decide(KEY).kernel == ("reference" if mode == "reference" else "fast")
    assert dict(known.decisions) == before


class Clock:
    """Seconds that pass at each look."""

    def __init__(self):
        self.now = -1

    def __call__(self):
        self.now += 1
        return self.now


SMALL, MIDDLE, LARGE = (gemm_key("forward", 32, 32, size) for size in (32, 64, 128))


def sources(choice):
    return [choice.decisions[key].source if key in choice.decisions else None for key in (SMALL, MIDDLE, LARGE)]


def test_the_most_expensive_is_tuned_first():
    choice = chooser()
    choice.tune([SMALL, MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["default", "default", "measured"]
    assert "the budget of 2 s is used up" in choice.decisions[MIDDLE].reason
    assert [key.columns for key in choice.decisions] == [128, 64, 32]


def test_what_is_used_often_is_more_expensive():
    choice = chooser()
    choice.tune([SMALL] * 5 + [MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["measured", "default", "default"]


def test_the_rest_is_predicted_and_measured_another_time():
    choice = chooser(device_model=FAST_GPU)
    choice.tune([SMALL, MIDDLE, LARGE], budget_s=0, clock=Clock())
    assert sources(choice) == ["predicted"] * 3
    assert "the budget of 0 s is used up; predicted fast" in choice.decisions[LARGE].reason
    assert choice.decide(LARGE).kernel == "fast"
    assert choice.timer.timed == []
    choice.tune([SMALL, MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["predicted", "predicted", "measured"]


@pytest.mark.parametrize("mode", ["sparse", "reference", "heuristic"])
def test_modes_without_timing_need_no_budget(mode):
    choice = chooser(mode, device_model=FAST_GPU)
    choice.tune([SMALL, LARGE], budget_s=0, clock=Clock())
    assert [d.kernel for d in choice.decisions.values()] == ["reference" if mode == "reference" else "fast"] * 2


def recorded(tmp_path, **decisions):
    path = tmp_path / "kernels.json"
    record = Decisions(HERE)
    for gemm, kernel in decisions.items():
        record[gemm_key(gemm)] = Decision(kernel, 3.0, 2.0, 0.5, "as measured then", "measured", "other terms")
    record.save(path)
    return f"replay:{path}"


def test_replay_takes_what_is_recorded_and_reports_what_is_not(tmp_path):
    mode = recorded(tmp_path, forward="fast", dgrad="reference")
    choice = chooser(mode, reuse=4)
    keys = [gemm_key(gemm) for gemm in ("forward", "dgrad", "wgrad")]
    assert [choice.decide(key).kernel for key in keys] == ["fast", "reference", "reference"]
    assert choice.timer.timed == []
    first, _, last = map(choice.decide, keys)
    assert first == Decision("fast", 3.0, 2.0, 0.5, "as measured then", "measured", "other terms")
    assert last.reason == f"not recorded in {mode.removeprefix('replay:')}"


def test_replay_of_a_kernel_that_is_not_here_is_dense(tmp_path):
    mode = recorded(tmp_path, forward="gone", dgrad="fast")
    choice = chooser(mode, [FakeKernel(probe="no such device")])
    assert [choice.decide(gemm_key(gemm)).reason for gemm in ("forward", "dgrad")] == [
        "gone is not among the kernels",
        "fast: no such device",
    ]
    assert {choice.decide(gemm_key(gemm)).kernel for gemm in ("forward", "dgrad")} == {"reference"}


def test_nothing_to_replay(tmp_path):
    mode = recorded(tmp_path, forward="fast")
    with pytest.raises(ValueError, match=r"nothing to replay.*has no decisions for device H100"):
        chooser(mode, decisions=Decisions(replace(HERE, device="H100")))
    with pytest.raises(ValueError, match=r"nothing to replay.*No such file"):
        chooser(f"replay:{tmp_path}/none.json")
    with pytest.raises(ValueError, match=r"nothing to replay: the file is empty"):
        chooser(recorded(tmp_path / "empty"))


@pytest.mark.parametrize("mode", ["fastest", "", "replay", "replay:", "auto:file", "replay;file"])
def test_unknown_modes(mode):
    with pytest.raises(ValueError, match=r"is none of auto, sparse, reference, heuristic, replay:FILE") as error:
        chooser(mode)
    assert repr(mode) in str(error.value)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match="device_model"):
        chooser("heuristic")
    with pytest.raises(ValueError, match=r"hysteresis=-0\.1"):
        chooser(hysteresis=-0.1)
    with pytest.raises(ValueError, match="reuse=0"):
        chooser(reuse=0)
    for names in (["fast", "fast"], ["reference"]):
        with pytest.raises(ValueError, match=r"two kernels are named '(fast|reference)'"):
            chooser(kernels=[FakeKernel(name) for name in names])


def test_the_dense_product_is_timed_before_and_after_each_kernel():
    class Drifting(FakeTimer):
        def time(self, function, device):
            self.dense += 1
            return super().time(function, device)

    kernels = [FakeKernel("a"), FakeKernel("b")]
    choice = chooser(kernels=kernels)
    choice.timer = Drifting(kernels, 10, a=(8, 0), b=(9, 0))
    decision = choice.decide(KEY)
    assert choice.timer.timed == [DENSE, ("a", "linear"), ("a", "pack"), DENSE, ("b", "linear"), ("b", "pack"), DENSE]
    assert decision.dense_ms == pytest.approx((11 + 14 + 17) / 3)
