import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.kernels.tuner import Decision, Decisions, Environment, KernelRegistry, Tuner
from tests.support.fake_kernels import DENSE, FakeKernel, FakeTimer, Flickering, gemm_key

HERE = Environment("H200", None, "2.13.0", None, None)
KEY = gemm_key()


def tuner(mode="auto", kernels=None, dense=10.0, decisions=None, times=None, **options):
    kernels = [FakeKernel()] if kernels is None else kernels
    timer = FakeTimer(kernels, dense, **(times or {kernel.name: (5.0, 1.0) for kernel in kernels}))
    decisions = Decisions(HERE) if decisions is None else decisions
    return Tuner(mode, KernelRegistry(kernels), decisions, timer, **options)


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
    choice = tuner("auto", kernels, dense, times=named, reuse=reuse)
    decision = choice.decide(gemm_key(gemm, 8, 8, 8))
    totals = [product + pack / (1 if gemm == "wgrad" else reuse) for product, pack in times]
    best = min(range(len(times)), key=lambda index: totals[index])
    assert (decision.dense_ms, decision.sparse_ms, decision.pack_ms) == pytest.approx(
        (dense, *times[best])
    )
    if abs(dense / totals[best] - 1.03) > 1e-6:
        assert decision.kernel == (f"kernel{best}" if dense / totals[best] > 1.03 else "reference")
    assert decision.source == "measured"
    assert all(kernel.name in decision.reason for kernel in kernels)


@pytest.mark.parametrize(("dense", "kernel"), [(6.15, "reference"), (6.25, "fast")])
def test_a_margin_of_three_percent_and_packing_count(dense, kernel):
    choice = tuner(dense=dense, times={"fast": (5.0, 1.0)})
    assert choice.decide(KEY).kernel == kernel
    assert f"measured fast {dense / 6:.3f}x; sparse from 1.03x" == choice.decide(KEY).reason


def test_a_pack_is_shared_by_micro_batches_but_not_in_wgrad():
    choice = tuner(dense=6.0, times={"fast": (5.0, 1.0)}, reuse=4)
    assert [choice.decide(gemm_key(gemm)).kernel for gemm in ("forward", "dgrad", "wgrad")] == [
        "fast",
        "fast",
        "reference",
    ]


def test_the_choice_runs():
    choice = tuner()
    matrix, x = torch.randn(32, 64), torch.randn(128, 64)
    kernel = choice.registry.kernels[choice.decide(KEY).kernel]
    assert torch.equal(kernel.linear(kernel.pack(matrix), x), torch.nn.functional.linear(x, matrix))


def broken(product):
    raise RuntimeError("no such algorithm")


@pytest.mark.parametrize("mode", ["auto", "sparse"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"probe": "this device has no sparse tensor cores"},
            "bad: this device has no sparse tensor cores",
        ),
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
    decision = tuner(mode, [bad, good], times=times).decide(KEY)
    assert decision.kernel == "good"
    assert words in decision.reason
    decision = tuner(mode, [bad], times=times).decide(KEY)
    assert (decision.kernel, decision.source, decision.dense_ms) == ("reference", "default", None)
    assert decision.reason.startswith(words)


@pytest.mark.parametrize("mode", ["auto", "sparse"])
def test_kernels_for_other_devices_are_not_mentioned(mode):
    other, good = FakeKernel("other", probe="needs a GPU"), FakeKernel("good")
    other.device_type, good.device_type = "cuda", "cpu"
    assert "other" not in tuner(mode, [other, good]).decide(KEY).reason
    good.supports = lambda key: "too small"
    assert tuner(mode, [other, good]).decide(KEY).reason == "good: too small"
    assert tuner(mode, [other]).decide(KEY).reason == "other: needs a GPU"


def test_a_kernel_that_fails_while_it_is_timed_is_passed_over():
    calls = []

    def spoil(product):
        calls.append(product)
        if len(calls) > 3:  # the check runs it three times
            raise RuntimeError("out of workspace")
        return product

    choice = tuner(kernels=[FakeKernel("bad", spoil=spoil), FakeKernel("good")])
    decision = choice.decide(KEY)
    assert decision.kernel == "good"
    assert choice.timer.timed == [DENSE, ("good", "linear"), ("good", "pack"), DENSE]
    assert "bad: RuntimeError: out of workspace" in decision.reason


def test_conditions_that_fail_keep_no_product_from_running():
    kernel = FakeKernel("good")
    kernel.conditions = lambda key: 1 // 0
    decision = tuner(kernels=[kernel]).decide(KEY)
    assert decision.kernel == "good"
    assert "good ZeroDivisionError" in decision.terms


def test_a_probe_is_asked_once():
    kernel, probes = FakeKernel(), []
    kernel.probe = lambda device: probes.append(device) or ""
    choice = tuner(kernels=[kernel])
    for columns in (8, 64, 8):
        choice.decide(gemm_key(columns=columns))
    assert probes == [torch.device("cpu")]


@pytest.mark.parametrize("mode", ["auto", "sparse", "reference"])
def test_without_sparse_kernels_all_is_dense(mode):
    decision = tuner(mode, []).decide(KEY)
    assert decision.kernel == "reference"
    assert decision.reason == (
        "mode 'reference'" if mode == "reference" else "there is no sparse kernel"
    )


def test_an_empty_product_is_dense():
    assert tuner("sparse").decide(gemm_key(columns=0)).reason == "the product is empty"


def test_sparse_takes_the_first_legal_kernel_untimed():
    choice = tuner("sparse", [FakeKernel("first"), FakeKernel("second")])
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
    choice = tuner("reference", [kernel])
    assert choice.decide(KEY).source == "forced"
    assert kernel.calls == choice.timer.timed == []


def test_lengths_of_a_bucket_are_measured_once_at_the_first_of_them():
    sizes = []
    choice = tuner(kernels=[FakeKernel(supports=lambda key: sizes.append(key.columns) or "")])
    for columns in (1000, 1024, 897, 960):
        assert choice.decide(gemm_key(columns=columns)).kernel == "fast"
    assert choice.timer.timed == [DENSE, ("fast", "linear"), ("fast", "pack"), DENSE]
    assert sizes == [1000, 1000, 1024, 897, 960]
    assert len(choice.decisions) == 1


def test_a_length_that_a_kernel_does_not_support_is_dense():
    choice = tuner(kernels=[FakeKernel(supports=lambda key: "odd" if key.columns % 2 else "")])
    assert [choice.decide(gemm_key(columns=columns)).kernel for columns in (128, 127, 126)] == [
        "fast",
        "reference",
        "fast",
    ]
    assert choice.decide(gemm_key(columns=127)).reason == "fast: odd"


def test_what_was_measured_is_not_measured_again(tmp_path):
    path = tmp_path / "kernels.json"
    first = tuner()
    first.tune([KEY, gemm_key("wgrad")], budget_s=1, clock=lambda: 0)
    first.decisions.save(path)
    second = tuner(decisions=Decisions.load(path, HERE))
    second.tune([KEY, gemm_key("wgrad")], budget_s=1, clock=lambda: 0)
    assert dict(second.decisions) == dict(first.decisions)
    assert second.timer.timed == []


@pytest.mark.parametrize(
    "options", [{"reuse": 2}, {"kernels": [FakeKernel("newer"), FakeKernel("fast")]}]
)
def test_a_decision_on_other_terms_is_made_anew(options):
    known = tuner()
    known.decide(KEY)
    choice = tuner(decisions=known.decisions, **options)
    choice.decide(KEY)
    assert DENSE in choice.timer.timed
    assert choice.decisions is known.decisions
    times = len(choice.timer.timed)
    choice.decide(KEY)
    assert len(choice.timer.timed) == times


def test_a_decision_without_the_check_of_repeated_products_does_not_hold_in_deterministic_mode(
    deterministic,
):
    flickering = [FakeKernel(spoil=Flickering(*range(1, 1000, 2)))]
    torch.use_deterministic_algorithms(False)
    known = tuner(kernels=flickering)
    assert known.decide(KEY).kernel == "fast"
    torch.use_deterministic_algorithms(True)
    decision = known.decide(KEY)
    assert decision.kernel == "reference"
    assert "fast: gives other bits when it is repeated" in decision.reason
    assert decision.terms.endswith("; deterministic")
    torch.use_deterministic_algorithms(False)
    assert known.decide(KEY).kernel == "fast"


def test_sparse_checks_repeated_products_as_well(deterministic):
    choice = tuner("sparse", [FakeKernel(spoil=Flickering(*range(1, 1000, 2)))])
    torch.use_deterministic_algorithms(False)
    assert choice.decide(KEY).kernel == "fast"
    torch.use_deterministic_algorithms(True)
    assert choice.decide(KEY).kernel == "reference"


def test_more_micro_batches_do_not_matter_to_gradients():
    known = tuner()
    known.decide(gemm_key("wgrad"))
    choice = tuner(decisions=known.decisions, reuse=2)
    choice.decide(gemm_key("wgrad"))
    assert choice.timer.timed == []


@pytest.mark.parametrize("mode", ["sparse", "reference"])
def test_only_auto_reads_and_adds_decisions(mode):
    known = tuner(dense=1.0)
    known.decide(KEY)
    assert known.decisions[KEY].kernel == "reference"
    before = dict(known.decisions)
    choice = tuner(mode, decisions=known.decisions)
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


def test_what_the_budget_left_is_measured_another_time():
    choice = tuner()
    for _ in range(3):
        choice.tune([SMALL, MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["measured"] * 3


def sources(choice):
    return [
        choice.decisions[key].source if key in choice.decisions else None
        for key in (SMALL, MIDDLE, LARGE)
    ]


def test_the_most_expensive_is_tuned_first():
    choice = tuner()
    choice.tune([SMALL, MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["postponed", "postponed", "measured"]
    assert "the budget of 2 s is used up" in choice.decisions[MIDDLE].reason
    assert [key.columns for key in choice.decisions] == [128, 64, 32]


def test_what_is_used_often_is_more_expensive():
    choice = tuner()
    choice.tune([SMALL] * 5 + [MIDDLE, LARGE], budget_s=2, clock=Clock())
    assert sources(choice) == ["measured", "postponed", "postponed"]


@pytest.mark.parametrize("mode", ["sparse", "reference"])
def test_modes_without_timing_need_no_budget(mode):
    choice = tuner(mode)
    choice.tune([SMALL, LARGE], budget_s=0, clock=Clock())
    assert [d.kernel for d in choice.decisions.values()] == [
        "reference" if mode == "reference" else "fast"
    ] * 2


@pytest.mark.parametrize("mode", ["fastest", "", "auto:file"])
def test_unknown_modes(mode):
    with pytest.raises(
        ValueError, match=r"is unknown: use 'auto' \(measured\), 'sparse' or 'reference'"
    ) as error:
        tuner(mode)
    assert repr(mode) in str(error.value)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match="reuse=0"):
        tuner(reuse=0)
    for names in (["fast", "fast"], ["reference"]):
        with pytest.raises(ValueError, match=r"two kernels are named '(fast|reference)'"):
            tuner(kernels=[FakeKernel(name) for name in names])


def test_the_dense_product_is_timed_before_and_after_each_kernel():
    class Drifting(FakeTimer):
        def time(self, function, device):
            self.dense += 1
            return super().time(function, device)

    kernels = [FakeKernel("a"), FakeKernel("b")]
    choice = tuner(kernels=kernels)
    choice.timer = Drifting(kernels, 10, a=(8, 0), b=(9, 0))
    decision = choice.decide(KEY)
    assert choice.timer.timed == [
        DENSE,
        ("a", "linear"),
        ("a", "pack"),
        DENSE,
        ("b", "linear"),
        ("b", "pack"),
        DENSE,
    ]
    assert decision.dense_ms == pytest.approx((11 + 14 + 17) / 3)
