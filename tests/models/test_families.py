"""Every family of models trains under every method, with exact gradients and with estimated ones."""

import itertools
import logging
import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nm import NMSparsityCallback, RNGState
from lightning_nm.export import verify
from lightning_nm.nn.adapters import Adapter
from tests.docs.blocks import read
from tests.models.coverage import table
from tests.models.families import EXCLUDE, FAMILIES, loader, make

METHODS = ("dense", "ste", "sr-ste", "asp", "transposable", "bi-mask", "bame")
PATTERNS = ("2:4", "1:4", "1:16")
PAIRS = [
    (family, method, (None, "mvue")[(i + j) % 2], PATTERNS[(i + 2 * j) % 3])
    for (i, family), (j, method) in itertools.product(enumerate(FAMILIES), enumerate(METHODS))
]
"""All families with all methods; each pair of any two of family, method, estimator and pattern occurs."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet():
    """What transformers, timm and Lightning say of so small models is not the subject."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def fit(path, family, setting, *callbacks, steps, resume=None):
    """Train a family by (method, estimator, pattern), and return the callback of masks, the Trainer and the model."""
    method, estimator, pattern = setting
    options = {"exclude": EXCLUDE.get(family), "show_tables": False, "monitor": None}
    nm = NMSparsityCallback(pattern, method, estimator, **options)
    model = make(family)
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[nm, *callbacks, RNGState()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1,
        default_root_dir=path,
    )
    trainer.fit(model, loader(family), loader(family), ckpt_path=resume, weights_only=False)
    return nm, trainer, model


@pytest.mark.parametrize(("family", "method", "estimator", "pattern"), PAIRS)
def test_it_trains(tmp_path, family, method, estimator, pattern):
    nm, trainer, model = fit(tmp_path, family, (method, estimator, pattern), steps=3)
    assert len(model.losses) == 3
    assert all(map(math.isfinite, model.losses))
    assert list(model.state_dict()) == list(make(family).state_dict())
    assert not any(isinstance(module, Adapter) for module in model.modules())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    verdicts = {verdict.key: verdict.verdict for verdict in verify(tmp_path / "last.ckpt").verdicts}
    expected = "dense" if method == "dense" else "N:M"
    assert set(verdicts.values()) == {expected}, verdicts
    assert len(verdicts) == len(nm.state_dict()["layers"]) >= 3


@pytest.mark.parametrize(
    ("family", "method"), [(name, ("bi-mask", "bame")[k % 2]) for k, name in enumerate(FAMILIES)]
)
def test_it_resumes_bit_for_bit(tmp_path, family, method):
    saves = ModelCheckpoint(tmp_path, "{step}", save_on_train_epoch_end=True, save_top_k=-1)
    setting = method, "mvue", "2:4"
    *_, whole = fit(tmp_path, family, setting, saves, steps=4)
    *_, resumed = fit(tmp_path, family, setting, steps=4, resume=tmp_path / "step=2.ckpt")
    assert resumed.losses == whole.losses[2:]
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_the_page_shows_what_is_masked():
    page = read("models.md")
    shown = page.split("<!-- coverage -->\n")[1].split("<!-- end of coverage -->")[0].splitlines()
    assert [line for line in shown if line] == table()
