"""A checkpoint of another sparse model is refused with what differs, and nothing is changed."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_nm import ASP, BAME, MVUE, SRSTE, BiMask, NMSparsifier, TopN
from tests.support.lightning_models import (
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    is_plain,
    new_model,
)


def load(saved, now, change=lambda model, state: None):
    """Load the state of a sparsifier with some settings into one with others."""
    model, other = new_model(), new_model(1)
    state = NMSparsifier(model, **{"method": "sr-ste"} | saved).attach().state_dict()
    change(model, state)
    other.load_state_dict(model.state_dict())
    resumed = NMSparsifier(other, **{"method": "sr-ste"} | now).attach(state)
    before = copy.deepcopy([other.state_dict(), resumed.state_dict()])
    try:
        resumed.load_state_dict(state)
    except ValueError:
        after = [other.state_dict(), resumed.state_dict()]
        for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        raise


BAME_EVERY_2 = {"method": BAME(stop=4, every=2)}
SAVED = {**BAME_EVERY_2, "grad_estimator": MVUE("1:2"), "exclude": "net.3"}
RULE = {"include": "net.6", "pattern": "1:4"}


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            {},
            {"pattern": "1:4"},
            r"model: layer 'net\.\{3,6\}' \(2\): pattern 2:4 in the checkpoint, 1:4 here\. C",
        ),
        ({}, {"rules": [RULE]}, r"another .*: layer 'net\.6': pattern 2:4 in the .*, 1:4 here\. C"),
        ({"method": BiMask()}, {}, "method bi-mask in the checkpoint, sr-ste here"),
        ({}, BAME_EVERY_2, "method sr-ste in the checkpoint, bame here"),
        (
            SAVED,
            SAVED | {"method": BAME(stop=4, every=2, dgrad="bi-mask")},
            "dgrad masked in the checkpoint, bi-mask",
        ),
        ({}, {"grad_estimator": "mvue"}, "estimator none in the checkpoint, mvue here"),
        (SAVED, SAVED | {"grad_estimator": None}, "estimator mvue in the checkpoint, none here"),
        (SAVED, SAVED | {"grad_estimator": TopN("1:2")}, "estimator mvue in .*, top-n here"),
        (SAVED, SAVED | {"grad_estimator": MVUE()}, "estimator pattern 1:2 in the .*, 2:4 here"),
        ({}, {"conv_layout": "flat"}, r"layer 'net\.3': layout plain in the checkpoint, flat here"),
        ({}, {"exclude": "net.6"}, r"layer 'net\.6' is masked only in the checkpoint"),
        ({"exclude": "net.6"}, {}, r"layer 'net\.6' is masked only here"),
        (
            SAVED,
            {},
            r"(?s)'net\.3' is masked only here.*method bame .* sr-ste here, estimator mvue .* none here",
        ),
    ],
)
def test_a_state_of_another_sparse_model_is_refused(saved, now, message):
    with pytest.raises(ValueError, match=message):
        load(saved, now)


def other_weights(model, state):
    with torch.no_grad():
        model.net[6].weight.mul_(2)


def other_shape(model, state):
    state["layers"]["net.6"]["shape"] = [32, 128]


@pytest.mark.parametrize("method", ["sr-ste", ASP(start=5)])  # the latter has no mask to compare by
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_weights, r"do not belong to the weights of layer 'net\.6'"),
        (other_shape, r"layer 'net\.6': shape \[32, 128\] in the checkpoint, \[32, 256\] here"),
    ],
)
def test_a_state_of_other_weights_is_refused(method, change, message):
    with pytest.raises(ValueError, match=message):
        load({"method": method}, {"method": method}, change)


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            {"method": SRSTE(1e-3)},
            {"method": SRSTE(5e-4)},
            r"goes on with other settings: SRSTE's decay 0\.001 in the checkpoint, 0\.0005 here$",
        ),
        (
            BAME_EVERY_2,
            {"method": BAME(stop=4, every=1, evidence_rate=0.5)},
            "BAME's every 2 in the checkpoint, 1 here; BAME's evidence_rate 0.04 in the checkpoint, 0.5 here",
        ),
        (
            {"method": ASP()},
            {"method": ASP(start=5)},
            r"ASP scheduled at steps \(\), which stays.* make that \(5,\)",
        ),
        (
            {"skip_first_last": "first"},
            {},
            "this training began with its last layer masked, which stays",
        ),
        (SAVED, SAVED, None),  # warnings are errors here
    ],
)
def test_settings_that_may_change_are_said_and_used(saved, now, message):
    if message is None:
        load(saved, now)
    else:
        with pytest.warns(UserWarning, match=message):
            load(saved, now)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_refused_checkpoint_leaves_the_model_and_the_callback_as_they_were(tmp_path):
    path, model, nm = tmp_path / "a.ckpt", new_model(1), callback(pattern="1:4")
    fit(tmp_path, [callback(), SaveAt(path, 3)], max_epochs=1)
    with pytest.raises(ValueError, match="of another sparse model"):
        fit(tmp_path, [nm], model, ckpt_path=path)
    assert is_plain(model)
    assert nm.sparsifier is None
    # Lightning has loaded the weights before.
    saved = new_model(2)
    saved.load_state_dict(torch.load(path)["state_dict"])
    assert_equal_models(model, saved)
