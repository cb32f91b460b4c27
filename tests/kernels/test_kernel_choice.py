"""The tuner: which kernel it takes, when it measures, and what it says."""

import pytest
import torch
from hypothesis import given, settings
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


@settings(max_examples=50)
@given(
    dense=MILLISECONDS,
    times=st.lists(st.tuples(MILLISECONDS, MILLISECONDS), min_size=1, max_size=3),
    reuse=st.integers(1, 8),
    gemm=st.sampled_from(["forward", "dgrad", "wgrad"]),
)
def test_auto_takes_the_fastest_and_sparse_only_with_a_margin(dense, times, reuse, gemm):
    kernels = [FakeKernel(f"kernel{index}") for index in range(len(times))]
    named = {kernel.name: pair for kernel, pair in zip(kernels, times, strict=True)}
    decision = tuner("auto", kernels, dense, times=named, reuse=reuse).decide(gemm_key(gemm, 8, 8))
    # A pack is shared by micro-batches, but not in wgrad.
    totals = [product + pack / (1 if gemm == "wgrad" else reuse) for product, pack in times]
    best = min(range(len(times)), key=lambda index: totals[index])
    assert (decision.dense_ms, decision.sparse_ms, decision.pack_ms) == pytest.approx(
        (dense, *times[best])
    )
    if abs(dense / totals[best] - 1.03) > 1e-6:
        assert decision.kernel == (f"kernel{best}" if dense / totals[best] > 1.03 else "reference")
    gains = ", ".join(f"kernel{i} {dense / total:.3f}x" for i, total in enumerate(totals))
    assert decision.reason == f"measured {gains}; sparse from 1.03x"
    assert decision.source == "measured"


def broken(product):
    raise RuntimeError("no such algorithm")


@pytest.mark.parametrize("mode", ["auto", "sparse"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"probe": "no sparse tensor cores"}, "bad: no sparse tensor cores"),
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
        return broken(product) if len(calls) > 3 else product  # the check runs it three times

    choice = tuner(kernels=[FakeKernel("bad", spoil=spoil), FakeKernel("good")])
    decision = choice.decide(KEY)
    assert decision.kernel == "good"
    assert choice.timer.timed == [DENSE, ("good", "linear"), ("good", "pack"), DENSE]
    assert "bad: RuntimeError: no such algorithm" in decision.reason


def test_conditions_that_fail_keep_no_product_from_running():
    kernel = FakeKernel("good")
    kernel.conditions = lambda key: 1 // 0
    decision = tuner(kernels=[kernel]).decide(KEY)
    assert decision.kernel == "good"
    assert "good ZeroDivisionError" in decision.terms


@pytest.mark.parametrize(
    ("mode", "kernels", "key", "reason"),
    [
        ("auto", [], KEY, "there is no sparse kernel"),
        ("sparse", [], KEY, "there is no sparse kernel"),
        ("sparse", None, gemm_key(columns=0), "the GEMM is empty"),
        ("reference", None, KEY, "mode 'reference'"),
    ],
)
def test_what_is_dense_without_a_trial(mode, kernels, key, reason):
    choice = tuner(mode, kernels)
    decision = choice.decide(key)
    assert (decision.kernel, decision.reason) == ("reference", reason)
    assert choice.timer.timed == []
    assert not any(kernel.calls for kernel in choice.registry.backends)


def test_sparse_takes_the_first_legal_kernel_untimed():
    choice = tuner("sparse", [FakeKernel("first"), FakeKernel("second")])
    terms = "kernels reference, first, second; reuse 1; hysteresis 0.03"
    assert choice.decide(KEY) == Decision(
        "first", None, None, None, "mode 'sparse'", "forced", terms
    )
    assert choice.timer.timed == []


def test_lengths_of_a_bucket_are_measured_once_at_the_first_of_them():
    sizes, probes = [], []
    kernel = FakeKernel(supports=lambda key: sizes.append(key.columns) or "")
    kernel.probe = lambda device: probes.append(device) or ""
    choice = tuner(kernels=[kernel])
    for columns in (1000, 1024, 897, 960):
        assert choice.decide(gemm_key(columns=columns)).kernel == "fast"
    assert choice.timer.timed == [DENSE, ("fast", "linear"), ("fast", "pack"), DENSE]
    assert sizes == [1000, 1000, 1024, 897, 960]
    assert len(choice.decisions) == 1
    assert probes == [torch.device("cpu")]


def test_a_length_that_a_kernel_does_not_support_is_dense():
    choice = tuner(kernels=[FakeKernel(supports=lambda key: "odd" if key.columns % 2 else "")])
    found = [choice.decide(gemm_key(columns=columns)) for columns in (128, 127, 126)]
    assert [decision.kernel for decision in found] == ["fast", "reference", "fast"]
    assert found[1].reason == "fast: odd"


@pytest.mark.parametrize(
    ("gemm", "options", "again"),
    [
        ("forward", {}, False),
        ("forward", {"reuse": 2}, True),
        ("wgrad", {"reuse": 2}, False),  # packed for each GEMM
        ("forward", {"kernels": [FakeKernel("newer"), FakeKernel("fast")]}, True),
    ],
)
def test_a_decision_on_other_terms_is_made_anew(gemm, options, again, tmp_path):
    first = tuner()
    first.decide(gemm_key(gemm))
    first.decisions.save(tmp_path / "kernels.json")
    choice = tuner(decisions=Decisions.load(tmp_path / "kernels.json", HERE), **options)
    assert choice.decide(gemm_key(gemm)).kernel in ("fast", "newer")
    assert (DENSE in choice.timer.timed) == again
    choice.timer.timed.clear()
    choice.decide(gemm_key(gemm))
    assert choice.timer.timed == []


@pytest.mark.parametrize("mode", ["auto", "sparse"])
def test_a_decision_without_the_check_of_repeated_products_does_not_hold_in_deterministic_mode(
    mode, deterministic
):
    choice = tuner(mode, [FakeKernel(spoil=Flickering(*range(1, 1000, 2)))])
    for demanded in (False, True, False):
        torch.use_deterministic_algorithms(demanded)
        decision = choice.decide(KEY)
        assert decision.kernel == ("reference" if demanded else "fast")
        assert ("fast: gives other bits when it is repeated" in decision.reason) == demanded
        assert decision.terms.endswith("; deterministic") == demanded


@pytest.mark.parametrize(("mode", "kernel"), [("sparse", "fast"), ("reference", "reference")])
def test_only_auto_reads_and_adds_decisions(mode, kernel):
    known = tuner(dense=1.0)
    assert known.decide(KEY).kernel == "reference"
    before = dict(known.decisions)
    choice = tuner(mode, decisions=known.decisions)
    choice.tune([KEY, gemm_key("dgrad")], budget_s=0)  # which is for measurements
    assert [choice.decide(each).kernel for each in (KEY, gemm_key("dgrad"))] == [kernel] * 2
    assert dict(known.decisions) == before


SMALL, MIDDLE, LARGE = (gemm_key("forward", 32, 32, size) for size in (32, 64, 128))


@pytest.mark.parametrize(
    ("keys", "times", "measured"),
    [
        ([SMALL, MIDDLE, LARGE], 1, [LARGE]),  # the most expensive first
        ([SMALL] * 5 + [MIDDLE, LARGE], 1, [SMALL]),  # which may be what is used often
        ([SMALL, MIDDLE, LARGE], 2, [MIDDLE, LARGE]),  # the rest another time
        ([SMALL, MIDDLE, LARGE], 3, [SMALL, MIDDLE, LARGE]),
    ],
)
def test_a_budget_of_time(keys, times, measured):
    choice = tuner()
    for _ in range(times):
        seconds = iter(range(100))  # one passes at each look
        choice.tune(keys, budget_s=2, clock=lambda: next(seconds))  # noqa: B023
    for key in (SMALL, MIDDLE, LARGE):
        decision = choice.decisions[key]
        assert decision.source == ("measured" if key in measured else "postponed")
        assert ("the budget of 2 s is used up" in decision.reason) == (key not in measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"mode": mode}, f"{mode!r} is unknown: use 'auto' .measured., 'sparse' or 'reference'")
            for mode in ("fastest", "", "auto:file")
        ),
        ({"reuse": 0}, "reuse=0"),
        ({"kernels": [FakeKernel(), FakeKernel()]}, "two kernels are named 'fast'"),
        ({"kernels": [FakeKernel("reference")]}, "two kernels are named 'reference'"),
    ],
)
def test_settings_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tuner(**arguments)


def test_the_dense_product_is_timed_before_and_after_each_kernel():
    class Drifting(FakeTimer):
        def time(self, function, device):
            self.dense += 1
            return super().time(function, device)

    kernels = [FakeKernel("a"), FakeKernel("b")]
    choice = tuner(kernels=kernels)
    choice.timer = Drifting(kernels, 10, a=(8, 0), b=(9, 0))
    decision = choice.decide(KEY)
    of_a, of_b = ([(name, "linear"), (name, "pack")] for name in "ab")
    assert choice.timer.timed == [DENSE, *of_a, DENSE, *of_b, DENSE]
    assert decision.dense_ms == pytest.approx((11 + 14 + 17) / 3)
