"""What metrics remember of the masks of the update before."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from lightning_nm.metrics import MaskFlipRate, MaskOscillation, MaskViolations
from tests.support import metric_oracles as oracle
from tests.support.metric_cases import MASKS

KINDS = {MaskFlipRate: oracle.flip_rate, MaskOscillation: oracle.oscillation}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2**16),
    actions=st.lists(
        st.sampled_from(["update", "forward", "reset", "pickle", "load", "forget", "move"]),
        max_size=12,
    ),
)
def test_any_order_of_calls(kind, seed, actions):
    """Of the flips since the metric was new or forgot, those since the last reset count."""
    generator = torch.Generator().manual_seed(seed)
    metric, history, counted = kind(), [], 0
    metric.persistent(True)
    for action in actions:
        mask = torch.rand(3, 5, generator=generator) < 0.5
        if action in ("update", "forward"):
            history.append(mask.numpy())
            counted = min(counted + 1, len(history) - 1)
            value = getattr(metric, action)({"a": mask})
            if action == "forward":
                assert value.item() == pytest.approx(
                    _since(kind, history, min(1, counted)), abs=1e-6
                )
        elif action == "pickle":
            metric = pickle.loads(pickle.dumps(metric))
        elif action == "load":
            state, metric = metric.state_dict(), kind()
            metric.load_state_dict(state)
            metric.persistent(True)
        elif action == "move":
            metric.to("cpu").double()
        else:
            getattr(metric, action)()
            history, counted = ([] if action == "forget" else history), 0
    metric._update_count = 1  # a value of nothing is warned of, which is tested elsewhere
    assert metric.compute().item() == pytest.approx(_since(kind, history, counted), abs=1e-6)


def _since(kind, history, counted):
    """The oracle's value of the last `counted` comparisons: the sums of all, less those before."""
    if not counted:
        return 0.0
    before = history[: len(history) - counted]
    total = KINDS[kind]([history]) * (len(history) - 1) - KINDS[kind]([before]) * (len(before) - 1)
    return total / counted


@pytest.mark.parametrize(("kind", "bits"), [(MaskFlipRate, 1), (MaskOscillation, 2)])
def test_its_memory_is_packed(kind, bits):
    metric = kind()
    metric.update({"a.b": torch.ones(64, 64, dtype=torch.bool)})
    metric.update({"a.b": torch.ones(64, 64, dtype=torch.bool)})
    metric.persistent(True)
    state = metric.state_dict()
    assert state["memory.a.b.shape"].tolist() == [64, 64]
    assert state["memory.a.b.bits"].nbytes == 64 * 64 * bits // 8
    assert metric.to("meta").state_dict()["memory.a.b.bits"].device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_memory_is_loaded_and_one_that_is_not_persistent_is_not(kind):
    full, empty = kind(), kind()
    mask = torch.tensor([True, False])
    full.update(mask)
    full.load_state_dict({})
    assert full.persistent(True) is None
    assert "memory..bits" in full.state_dict()
    empty.persistent(True)
    full.load_state_dict(empty.state_dict())
    assert "memory..bits" not in full.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_set_dtype_leaves_the_masks_alone(kind):
    metric, same = kind(), kind()
    for step, update in enumerate(MASKS):
        metric.update(update)
        same.update(update)
        if step == 1:
            metric.set_dtype(torch.float64)
    assert metric.compute() == same.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_another_shape_is_refused_and_nothing_is_changed(kind):
    metric = kind()
    metric.update(MASKS[0])
    metric.update(MASKS[1])
    value = metric.compute()
    with pytest.raises(
        ValueError, match=r"layer 'head' has shape \(4, 2\), but had \(5, 4, 2\).*forget"
    ):
        metric.update({"encoder.0": MASKS[2]["encoder.0"], "head": MASKS[2]["head"][0]})
    assert metric.compute() == value
    metric.update(MASKS[1])
    assert metric.compute() == pytest.approx(
        value.item() / 2
    )  # the last masks are still those of update 1
    metric.forget()
    metric.update({"head": MASKS[2]["head"][0]})


def test_a_layer_that_comes_later_or_not_each_time():
    one, two = torch.tensor([True, False, False, False]), torch.tensor([False, True, False, False])
    metric = MaskFlipRate()
    for update in ({"a": one}, {"b": one}, {"a": two, "b": one}, {"b": two}):
        metric.update(update)
    assert metric.compute() == pytest.approx((2 + 0 + 2) / 12)


def test_one_update_call_of_a_collection_serves_metrics_of_other_patterns():
    """A collection updates one metric for all whose first states are equal: those of other patterns have others."""
    mask = torch.tensor([True, True, False, False])
    collection = MetricCollection(
        {"1:4": MaskViolations("1:4"), "2:4": MaskViolations("2:4"), "flips": MaskFlipRate()}
    )
    for kept in (torch.zeros_like(mask), mask):
        collection.update(masks=kept)
    assert {name: value.item() for name, value in collection.compute().items()} == {
        "1:4": 1,
        "2:4": 0,
        "flips": 0.5,
    }


def test_violations_name_the_layer():
    metric = MaskViolations("2:4")
    with pytest.raises(
        ValueError, match=r"layer 'x': shape \(2, 6\) cannot be cut into blocks of 2:4"
    ):
        metric.update({"x": torch.ones(2, 6)})
    with pytest.raises(IndexError, match=r"dim=3 is not an axis"):
        MaskViolations("2:4", dim=3).update(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"cannot read 'two of four' as an N:M pattern"):
        MaskViolations("two of four")
