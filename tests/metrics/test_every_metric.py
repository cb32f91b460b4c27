"""What every metric must do."""

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.checks import check_forward_full_state_property

from lightning_nm import metrics
from tests.support.metric_cases import CASES, MASKS, lone

pytestmark = pytest.mark.parametrize("name", CASES)
FULL_STATE = {"MaskViolations"}


def close(value, expected):
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def updated(name, updates=slice(None), metric=None):
    """The metric after some updates."""
    metric = CASES[name].make() if metric is None else metric
    for update in CASES[name].updates[updates]:
        metric.update(**update)
    return metric


def test_layers_by_name_may_come_in_several_updates(name):
    metric = CASES[name].make()
    for update in CASES[name].updates:
        for layer in reversed(next(iter(update.values()))):
            metric.update(
                **{argument: {layer: layers[layer]} for argument, layers in update.items()}
            )
    close(metric.compute(), CASES[name].expected)


@pytest.mark.parametrize("layer", ["encoder.0", "head", "empty"])
def test_one_tensor_is_the_function(name, layer):
    metric = CASES[name].make()
    updates = [lone(update, layer) for update in CASES[name].updates]
    for update in updates:
        metric.update(**update)
    close(metric.compute(), CASES[name].functional(updates).item())


def test_forward_returns_the_updates_share_and_adds_up(name):
    case, metric = CASES[name], CASES[name].make()
    for count, update in enumerate(case.updates):
        value = metric(**update)
        alone = updated(name, slice(count)) if hasattr(metric, "forget") else case.make()
        alone.reset()
        alone.update(**update)
        close(value, alone.compute().item())
    close(metric.compute(), case.expected)
    assert metric.update_count == len(case.updates)


class Updates(Mapping):
    """Keyword arguments whose values change: each update is handed out twice, to the two metrics that are compared."""

    def __init__(self, updates):
        self.updates, self.taken = updates, 0

    def __getitem__(self, argument):
        turn = self.taken // (2 * len(self))
        self.taken += 1
        return self.updates[turn % len(self.updates)][argument]

    def __iter__(self):
        return iter(self.updates[0])

    def __len__(self):
        return len(self.updates[0])


@pytest.mark.parametrize("changing", [False, True])
def test_full_state_update_is_what_torchmetrics_recommends(name, changing, capsys):
    case = CASES[name]
    inputs = Updates(case.updates) if changing else case.updates[0]
    kind = type(case.make())
    options = {"pattern": "1:2"} if kind is metrics.MaskViolations else {}
    check_forward_full_state_property(kind, options, inputs, num_update_to_compare=[8], reps=2)
    # It prints times only where both ways agree; which was faster on this machine says nothing.
    assert ("Partial state" in capsys.readouterr().out) == (name not in FULL_STATE)
    assert kind.full_state_update == (name in FULL_STATE)


def test_reset_then_the_same_again(name):
    metric = updated(name)
    metric.compute()
    metric.forget() if hasattr(metric, "forget") else metric.reset()
    assert metric.update_count == 0
    close(updated(name, metric=metric).compute(), CASES[name].expected)


def test_nothing_was_updated(name):
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        close(CASES[name].make().compute(), CASES[name].empty)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric)), Metric.clone]
)
def test_copies_go_on_alone(name, copied):
    first = updated(name, slice(2))
    second = updated(name, slice(2, None), copied(first))
    close(second.compute(), CASES[name].expected)
    close(first.compute(), updated(name, slice(2)).compute().item())


def test_a_persistent_state_is_loaded(name, tmp_path):
    holder = torch.nn.ModuleDict({"metric": updated(name, slice(2))})
    assert holder.state_dict() == {}
    holder["metric"].persistent(True)
    torch.save(holder.state_dict(), tmp_path / "state.pt")
    other = torch.nn.ModuleDict({"metric": updated(name, slice(3, None))})
    other["metric"].persistent(True)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    close(updated(name, slice(2, None), other["metric"]).compute(), CASES[name].expected)


def test_updates_read_no_values(name):
    """On the meta device there are none: an update that would wait for a device fails."""
    metric = CASES[name].make().to("meta")
    for update in CASES[name].updates:
        metric.update(
            **{key: {n: x.to("meta") for n, x in layers.items()} for key, layers in update.items()}
        )
    assert metric.compute().device.type == "meta"


def test_updates_keep_no_reference_and_change_nothing(name):
    case, metric = CASES[name], CASES[name].make()
    for update in case.updates:
        given = {key: {n: x.clone() for n, x in layers.items()} for key, layers in update.items()}
        metric.update(**given)
        for key, layers in given.items():
            for layer, tensor in layers.items():
                assert torch.equal(tensor, update[key][layer])
                tensor.zero_()  # masks of layers move in place
    close(metric.compute(), case.expected)


def test_reset_in_inference_mode_and_updated_outside(name):
    metric = CASES[name].make()
    with torch.inference_mode():
        metric.update(**CASES[name].updates[0])
        metric.reset()
        metric.update(**CASES[name].updates[1])
    metric.update(**CASES[name].updates[2])
    before = updated(name, slice(1)) if hasattr(metric, "forget") else CASES[name].make()
    before.reset()
    for update in CASES[name].updates[1:3]:
        before.update(**update)
    close(metric.compute(), before.compute().item())


def test_its_sums_are_wide_and_stay_so(name):
    metric = updated(name).half().bfloat16()
    assert {state.dtype for state in metric.metric_state.values()} <= {torch.int64, torch.float64}
    close(metric.compute(), CASES[name].expected)
    assert not metric.compute().requires_grad


def test_it_plots(name):
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    metric = CASES[name].make()
    values = [metric(**update) for update in CASES[name].updates]
    figure, axes = metric.plot()
    assert isinstance(figure, pyplot.Figure)
    again, same = metric.plot([*values, torch.tensor(CASES[name].empty)], ax=axes)
    assert again is None
    assert same is axes
    figure.canvas.draw()
    pyplot.close(figure)


def test_bad_arguments(name):
    metric = CASES[name].make()
    arguments = lone(CASES[name].updates[0])

    def refused(error, message, change):
        with pytest.raises(error, match=message):
            metric.update(**{key: {"x": value} for key, value in arguments.items()} | change)

    for argument, value in arguments.items():
        refused(TypeError, "list given: pass the tensor of one layer, or a dict", {argument: [1]})
        none = {argument: {"x": None}}
        refused(TypeError, "layer 'x' has None in place of a tensor: leave out layers", none)
        if len(arguments) > 1:
            other, short = {argument: {"other": value}}, {argument: {"x": value[:1]}}
            refused(ValueError, "name the same layers.*only one of them has.*'", other)
            shapes = r"of layer 'x' has shape \(.*\) and .* has shape \(.*\)"
            refused(ValueError, shapes, short)
        if not argument.endswith("masks"):
            integers = {argument: {"x": value.long()}}
            refused(TypeError, "'x' is torch.int64: pass a tensor of a floating dtype", integers)
        elif name not in ("MaskDensity", "MaskViolations"):
            floating = {argument: {"x": value.float()}}
            refused(TypeError, "'x' is torch.float32, and a mask is a bool tensor", floating)
    fresh = CASES[name].make().metric_state
    assert all(torch.equal(state, fresh[key]) for key, state in metric.metric_state.items())


def test_in_a_collection(name):
    collection = MetricCollection({"own": CASES[name].make(), "masks": metrics.MaskDensity()})
    for update, masks in zip(CASES[name].updates, MASKS, strict=True):
        collection.update(**{"masks": masks, **update})
    close(collection.compute()["own"], CASES[name].expected)
