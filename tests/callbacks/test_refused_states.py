"""A checkpoint of another sparse model is refused with what differs, and nothing is changed."""

import pytest
import torch

from lightning_nm import ASP, BAME, MVUE, SRSTE, BiMask, NMSparsityCallback, TopN
from lightning_nm.nn.adapters import Adapter
from tests.support.lightning_models import Data, SaveAt, make_trainer, new_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def nm(**options):
    return NMSparsityCallback(
        **{"pattern": "2:4", "method": "sr-ste", "show_tables": False, **options}
    )


def save(tmp_path, **options):
    trainer = make_trainer(tmp_path, [nm(**options), SaveAt(tmp_path / "a.ckpt", 3)], max_epochs=1)
    trainer.fit(new_model(), Data())


def refuse(tmp_path, message, model=None, **options):
    model = model or new_model(1)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, [nm(**options)]).fit(model, Data(), ckpt_path=tmp_path / "a.ckpt")
    assert not any(isinstance(m, Adapter) for m in model.modules())


SAVED = {"method": BAME(stop=4, every=2), "grad_estimator": MVUE("1:2"), "exclude": "net.3"}
RULE = {"include": "net.6", "pattern": "1:4"}


@pytest.mark.parametrize(
    ("saved", "change", "message"),
    [
        (
            {},
            {"pattern": "1:4"},
            r"model: layer 'net\.\{3,6\}' \(2\): pattern 2:4 in the checkpoint, 1:4 here\. C",
        ),
        (
            {},
            {"rules": [RULE]},
            r"another sparse model: layer 'net\.6': pattern 2:4 in the checkpoint, 1:4 here\. C",
        ),
        ({"method": BiMask()}, {}, "method bi-mask in the checkpoint, sr-ste here"),
        ({}, {"method": BAME(stop=4, every=2)}, "method sr-ste in the checkpoint, bame here"),
        (
            SAVED,
            {**SAVED, "method": BAME(stop=4, every=2, dgrad="bi-mask")},
            "dgrad masked in the checkpoint, bi-mask",
        ),
        ({}, {"grad_estimator": "mvue"}, "estimator none in the checkpoint, mvue here"),
        (SAVED, {**SAVED, "grad_estimator": None}, "estimator mvue in the checkpoint, none here"),
        (
            SAVED,
            {**SAVED, "grad_estimator": TopN("1:2")},
            "estimator mvue in the checkpoint, top-n here",
        ),
        (
            SAVED,
            {**SAVED, "grad_estimator": MVUE()},
            "estimator pattern 1:2 in the checkpoint, 2:4 here",
        ),
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
def test_a_checkpoint_of_another_sparse_model_is_refused(tmp_path, saved, change, message):
    save(tmp_path, **saved)
    refuse(tmp_path, message, **change)


def test_other_shapes_are_refused_whoever_looks_first(tmp_path):
    save(tmp_path)
    model = new_model(1, width=32)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for net\.3\.weight"
    ):  # Lightning loads weights first
        make_trainer(tmp_path, [nm()]).fit(model, Data(), ckpt_path=tmp_path / "a.ckpt")

    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["NMSparsityCallback"]["layers"]["net.6"]
    state["shape"] = [32, 128]
    torch.save(checkpoint, tmp_path / "a.ckpt")
    refuse(tmp_path, r"layer 'net\.6': shape \[32, 128\] in the checkpoint, \[32, 256\] here")


def test_weights_of_another_run_are_refused(tmp_path):
    save(tmp_path)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["state_dict"]["net.6.weight"].mul_(2)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    refuse(tmp_path, r"do not belong to the weights of layer 'net\.6'")


@pytest.mark.parametrize(
    ("saved", "change", "message"),
    [
        (
            {"method": SRSTE(1e-3)},
            {"method": SRSTE(5e-4)},
            r"goes on with other settings: SRSTE's decay 0\.001 in the checkpoint, 0\.0005 here$",
        ),
        (
            {"method": BAME(stop=4, every=2)},
            {"method": BAME(stop=4, every=1, evidence_rate=0.5)},
            "BAME's every 2 in the checkpoint, 1 here; BAME's evidence_rate 0.015 in the checkpoint, 0.5 here",
        ),
        (
            {"method": ASP()},
            {"method": ASP(start=5)},
            r"ASP scheduled at steps \(\), which stays.* make that \(5,\)",
        ),
    ],
)
def test_settings_that_may_change_are_said_and_used(tmp_path, saved, change, message):
    save(tmp_path, **saved)
    with pytest.warns(UserWarning, match=message):
        make_trainer(tmp_path, [nm(**change)]).fit(
            new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt"
        )


def test_the_same_settings_say_nothing(tmp_path):
    save(tmp_path, **SAVED)  # warnings are errors here
    make_trainer(tmp_path, [nm(**SAVED)]).fit(new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt")
