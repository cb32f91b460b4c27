"""`skip_first` and `skip_last` where values decide which layers are first and last, and in saved states."""

import pytest

from lightning_nm import NMSparsityCallback
from lightning_nm.training.forwards import can_watch
from tests.callbacks.test_first_and_last import ConvolutionsBackwards, HeadFirst, seeded
from tests.lightning_models import Data, SaveAt, make_trainer

pytestmark = pytest.mark.skipif(not can_watch(HeadFirst()), reason="this torch has no such modes")


def fit(tmp_path, model, path=None, callbacks=(), **options):
    masks = NMSparsityCallback("2:4", "sr-ste", show_tables=False, **options)
    make_trainer(tmp_path, [masks, *callbacks]).fit(seeded(model), Data(), ckpt_path=path)
    return masks.state_dict()


@pytest.mark.parametrize(
    ("model", "options", "masked"),
    [
        (ConvolutionsBackwards, {"skip_first": False}, {"second", "middle"}),  # `first` has one input channel
        (ConvolutionsBackwards, {"skip_last": False}, {"second", "middle", "head"}),
        (HeadFirst, {"skip_first": False}, {"body.1", "body.3"}),
        (HeadFirst, {"skip_last": False}, {"body.1", "body.3", "head"}),
        (HeadFirst, {"skip_last": True, "skip_first_last": False}, {"body.1", "body.3"}),
    ],
)
def test_one_end_is_skipped(tmp_path, model, options, masked):
    state = fit(tmp_path, model, **options)
    assert set(state["layers"]) == masked
    expected = {"first": options.get("skip_first", options.get("skip_first_last", True)), "head": True}
    expected["head"] = options.get("skip_last", options.get("skip_first_last", True))
    names = {name for name, skips in expected.items() if skips and hasattr(model(), name)}
    assert set(state["ends"]) == names


def test_a_resume_keeps_the_decision_of_one_end(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, HeadFirst, callbacks=[SaveAt(path, 8)], skip_first=False)
    state = fit(tmp_path, HeadFirst, path, skip_first=False, skip_last=True)
    assert state["ends"].keys() == {"head"}
    with pytest.raises(ValueError, match="layer 'head' is masked only here"):
        fit(tmp_path, HeadFirst, path, skip_last=False)
