"""The first convolution and the last linear layer stay dense: by the order of registration, always."""

import io

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch import nn

from lightning_nm import NMSparsifier, NMSparsityCallback
from lightning_nm.callbacks.tables import print_layers
from tests.callbacks.test_frozen_layers import Distilled, seeded
from tests.support.lightning_models import Data, SaveAt, assert_equal_models, callback, make_trainer


class Module(pl.LightningModule):
    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class HeadFirst(Module):
    """The head is declared before the body."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 4)
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        )

    def forward(self, x):
        return self.head(self.body(x))


class HeadLast(HeadFirst):
    def __init__(self):
        super().__init__()
        self.head = self._modules.pop("head")


class ConvolutionsBackwards(Module):
    """Convolutions are declared in the reverse of their order."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(1, 16, 3, padding=1)
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.middle(self.second(self.first(x).relu()).mean((2, 3))).relu())


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize(
    ("model", "masked"),
    [
        (HeadFirst, {"head", "body.1"}),
        (HeadLast, {"body.1", "body.3"}),
        (
            ConvolutionsBackwards,
            {"middle"},
        ),  # `second` is the first one, and `first` has one input channel
        (Distilled, {"student.1", "student.3"}),
    ],
)
def test_registration_decides_with_and_without_validation_data(tmp_path, model, masked, validates):
    masks = callback("asp")
    sanity = {} if validates else {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    make_trainer(tmp_path, [masks], max_epochs=1, **sanity).fit(seeded(model), Data())
    assert set(masks.state_dict()["layers"]) == masked


def fit(tmp_path, model, path=None, callbacks=(), **options):
    masks = NMSparsityCallback("2:4", "sr-ste", show_tables=False, **options)
    trained = seeded(model)
    trainer = make_trainer(tmp_path, [masks, ModelCheckpoint(tmp_path, save_top_k=0), *callbacks])
    trainer.fit(trained, Data(), ckpt_path=path)
    return masks.state_dict(), trained


@pytest.mark.parametrize(
    ("skips", "masked", "dense"),
    [
        (True, {"middle"}, {"second", "head"}),
        ("first", {"middle", "head"}, {"second"}),
        ("last", {"second", "middle"}, {"head"}),
        (False, {"second", "middle", "head"}, set()),
    ],
)
def test_either_one_can_be_masked(tmp_path, skips, masked, dense):
    state, _ = fit(tmp_path, ConvolutionsBackwards, skip_first_last=skips)
    assert set(state["layers"]) == masked
    assert set(state["ends"]) == dense


@pytest.mark.parametrize("value", ["both", 1, None, ("first", "last")])
def test_an_unknown_value_is_refused_at_once(value):
    if value is None:  # the default
        assert NMSparsifier(HeadLast(), skip_first_last=None).settings.skip_last
        return
    with pytest.raises(
        ValueError, match=r"skip_first_last=.* is unknown: use True, False, 'first' or 'last'"
    ):
        NMSparsityCallback(skip_first_last=value)


def test_a_resume_keeps_the_choice(tmp_path):
    path = tmp_path / "saved.ckpt"
    _, whole = fit(tmp_path, HeadFirst, callbacks=[SaveAt(path, 8)], skip_first_last="first")
    with pytest.warns(
        UserWarning, match="this training began with its last layer masked, which stays"
    ):
        state, resumed = fit(tmp_path, HeadFirst, path)
    assert set(state["layers"]) == {"head", "body.1", "body.3"}
    assert_equal_models(whole, resumed)


def test_a_checkpoint_whose_layers_were_found_by_data_flow_resumes(tmp_path):
    """Version 0.2 took the head for the last layer wherever it was registered, and saved that."""
    path = tmp_path / "saved.ckpt"
    _, whole = fit(
        tmp_path, HeadFirst, callbacks=[SaveAt(path, 8)], exclude="head", skip_first_last="first"
    )
    checkpoint = torch.load(path)
    state = checkpoint["callbacks"]["NMSparsityCallback"]
    state |= {
        "ends": {"head": "last linear layer, by data flow"},
        "skip_first": True,
        "skip_last": True,
    }
    torch.save(checkpoint, path)
    state, resumed = fit(tmp_path, HeadFirst, path)
    assert set(state["layers"]) == {"body.1", "body.3"}
    assert_equal_models(whole, resumed)


def test_a_state_brings_its_first_and_last_layers():
    state = NMSparsifier(HeadFirst(), "2:4", "asp").attach().state_dict()
    state["ends"] = {}
    assert list(NMSparsifier(HeadFirst(), "2:4", "asp").attach(state).layers) == [
        "head",
        "body.1",
        "body.3",
    ]


def printed(model, **options):
    sparsifier = NMSparsifier(model, "2:4", "asp", **options).attach()
    output = io.StringIO()
    print_layers(sparsifier, Console(file=output, width=200))
    sparsifier.detach()
    return output.getvalue()


def test_frozen_layers_are_neither():
    student = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    teacher = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Linear(8, 8))
    parts = {"teacher": teacher.requires_grad_(False), "student": student, "head": nn.Linear(16, 8)}
    selection = NMSparsifier(nn.ModuleDict(parts), "2:4", "ste").attach().selection
    assert set(selection.first_last) == {"student.0", "head"}


def test_the_output_projection_of_attention_is_not_the_last_layer():
    model = nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    assert set(NMSparsifier(model, "2:4", "ste").attach().selection.first_last) == {"0"}
