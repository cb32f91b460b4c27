"""Which layers `skip_first_last` leaves dense: by the way of values in the sanity validation, else by registration."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_nm.training.flow import ValueFlow
from tests.callbacks.test_frozen_layers import Distilled, seeded
from tests.lightning_models import Data, Inspect, Net, SaveAt, assert_equal_models, callback, make_trainer, new_model


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
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())

    def forward(self, x):
        return self.head(self.body(x))


class TwoHeads(Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.classes, self.sizes = nn.Linear(32, 4), nn.Linear(32, 4)

    def loss(self, x, y):
        features = self.body(x)
        return F.cross_entropy(self.classes(features), y) + self.sizes(features).square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(Module):
    """Residual blocks without a head: the last block ends as all others do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 32)
        self.blocks = nn.Sequential(Block(), Block())

    def loss(self, x, y):
        return self.blocks(self.embed(x.flatten(1))).square().mean()


class WithHead(Encoder):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 4)

    def loss(self, x, y):
        return F.cross_entropy(self.head(self.blocks(self.embed(x.flatten(1))).relu()), y)


class Regularised(HeadFirst):
    """A loss of features beside that of the head does not hide the head."""

    def loss(self, x, y):
        features = self.body(x)
        return F.cross_entropy(self.head(features), y) + 0.1 * features.square().mean()


class ConvolutionsBackwards(Module):
    """Convolutions are declared in the reverse of their order."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(1, 16, 3, padding=1)
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.middle(self.second(self.first(x).relu()).mean((2, 3))).relu())


CASES = [
    (HeadFirst, {"body.1", "body.3"}),
    (TwoHeads, {"body.1", "body.3"}),
    (Encoder, {"embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
    (WithHead, {"embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
    (Regularised, {"body.1", "body.3"}),
    (ConvolutionsBackwards, {"second", "middle"}),
    (Distilled, {"student.1", "student.3"}),
    (Net, {"net.3", "net.6"}),
]


@pytest.mark.parametrize(("model", "masked"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_values_decide(tmp_path, model, masked):
    masks, before = callback("asp"), []

    class Before(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            before.append(copy.deepcopy(trained.state_dict()))

    trained, plain = seeded(model), seeded(model)
    make_trainer(tmp_path, [masks, Before()]).fit(trained, Data())
    assert set(masks.state_dict()["layers"]) == masked
    for name, value in plain.state_dict().items():  # selecting anew has lost no weight
        layer = name.removesuffix(".weight")
        kept = before[0][name] != 0 if layer in masked else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(before[0][name][kept], value[kept])


@pytest.mark.parametrize(
    ("model", "masked"), [(HeadFirst, {"head", "body.1"}), (TwoHeads, {"body.1", "body.3", "classes"})]
)
def test_registration_decides_without_a_validation(tmp_path, model, masked):
    masks = callback("asp")
    make_trainer(tmp_path, [masks], num_sanity_val_steps=0).fit(seeded(model), Data())
    assert set(masks.state_dict()["layers"]) == masked


@pytest.mark.parametrize("method", ["sr-ste", "asp", "bame", "bi-mask", "three-gemms"])
def test_a_training_is_that_of_a_model_declared_in_order(tmp_path, method):
    class InOrder(HeadFirst):
        def __init__(self):
            super().__init__()
            self.head = self._modules.pop("head")

    def fit(model):
        trained = seeded(model)
        make_trainer(tmp_path, [callback(method, seed=3)]).fit(trained, Data())
        return trained

    a, b = fit(HeadFirst).state_dict(), fit(InOrder).state_dict()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_resume_keeps_the_decision(tmp_path):
    path = tmp_path / "saved.ckpt"
    whole, resumed = seeded(HeadFirst), seeded(HeadFirst)
    checkpoints = ModelCheckpoint(tmp_path, save_top_k=0)
    make_trainer(tmp_path, [callback("bame"), SaveAt(path, 8), checkpoints]).fit(whole, Data())
    masks = callback("bame")
    make_trainer(tmp_path, [masks, ModelCheckpoint(tmp_path, save_top_k=0)], num_sanity_val_steps=0).fit(
        resumed, Data(), ckpt_path=path
    )
    assert set(masks.state_dict()["layers"]) == {"body.1", "body.3"}
    assert_equal_models(whole, resumed)


@pytest.mark.parametrize(
    ("steps", "reason"), [(1, "output layer: no other layer reads its result"), (0, "last linear layer")]
)
def test_the_reason_says_which_rule(tmp_path, steps, reason):
    masks, found = callback("asp"), []
    look = Inspect(lambda trainer, module: found.append(masks.sparsifier.skipped["net.8"]))
    make_trainer(tmp_path, [masks, look], num_sanity_val_steps=steps, max_epochs=1).fit(new_model(), Data())
    assert set(found) == {reason}


def test_a_compiled_model_is_not_followed():
    model = new_model()
    model.net.compile(backend="eager")
    flow = ValueFlow(model)
    model.net(torch.randn(2, 1, 8, 8))
    assert not flow.feeds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nothing_is_left_after_an_exception():
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.Sequential(nn.Linear(8, 8), Failing())
    flow = ValueFlow(model)
    with pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 8))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert flow.feeds == {"0": set()}
    flow.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
