"""Which layers `skip_first_last` leaves dense: by the way of values in the sanity validation, else by registration."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_nm import ASP, NMSparsifier
from lightning_nm.training.flow import ValueFlow
from lightning_nm.training.forwards import can_watch
from tests.callbacks.test_frozen_layers import Distilled, seeded
from tests.lightning_models import Data, Inspect, Net, SaveAt, assert_equal_models, callback, make_trainer, new_model

pytestmark = pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")


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


@pytest.mark.parametrize("layer", ["body.3", "body.1"], ids=["masked only then", "masked before, too"])
def test_a_warning_of_a_layer_comes_once(tmp_path, layer):
    """Whether the first selection or the second one is the first that masks the layer."""
    never = {"include": f"*{layer}", "method": ASP(start=10**6)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(tmp_path, [callback("asp", rules=[never])], max_epochs=1).fit(seeded(HeadFirst), Data())
    assert [str(each.message).partition(":")[0] for each in found if "ASP" in str(each.message)] == ["ASP never prunes"]


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


@pytest.mark.parametrize(("steps", "reason"), [(1, "last linear layer, by data flow"), (0, "last linear layer")])
def test_the_reason_says_which_rule(tmp_path, steps, reason):
    masks, found = callback("asp"), []
    look = Inspect(lambda trainer, module: found.append(masks.sparsifier.skipped["net.8"]))
    make_trainer(tmp_path, [masks, look], num_sanity_val_steps=steps, max_epochs=1).fit(new_model(), Data())
    assert set(found) == {reason}


def test_a_compiled_model_is_not_followed():
    model = new_model()
    model.net.compile(backend="eager")
    with ValueFlow(model) as flow:
        model.net(torch.randn(2, 1, 8, 8))
    assert not flow.feeds


def hooks(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def modes():
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["validation", "training"])
def test_nothing_is_left_after_an_exception(tmp_path, error, when):
    class Failing(HeadFirst):
        def forward(self, x):
            found = super().forward(x)
            if self.training == (when == "training"):
                raise error("no")
            return found

    model = seeded(Failing)
    with pytest.raises((error, SystemExit)):
        make_trainer(tmp_path, [callback("asp")]).fit(model, Data())
    assert not modes()
    assert not hooks(model)


@pytest.mark.parametrize("steps", [0, 1])
def test_no_hook_is_left_after_a_fit(tmp_path, steps):
    model = seeded(HeadFirst)
    make_trainer(tmp_path, [callback("asp")], num_sanity_val_steps=steps).fit(model, Data())
    assert not hooks(model)
    sparsifier = NMSparsifier(model, "2:4", "asp").attach()
    sparsifier.detach()
    assert not hooks(model)


class Inline(HeadFirst):
    """Operators between calls of modules."""

    def loss(self, x, y):
        features = F.relu(self.body[1](x.flatten(1)))
        return F.cross_entropy(self.head(F.relu(self.body[3](features)) + features), y)


class Decoding(HeadFirst):
    """Reads its own decoded tokens again."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 64)

    def forward(self, x):
        logits = self.head(self.body(x))
        return logits + self.head(self.body(self.embed(logits.argmax(-1))))


class Refining(HeadFirst):
    """Improves its input by its own output, three times."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(32, 64)

    def forward(self, x):
        x = x.flatten(1)
        for _ in range(3):
            x = x - 0.1 * self.back(self.body(x))
        return x


class Siamese(HeadFirst):
    """Multiplies the predictor's result with that of the layer before it."""

    def __init__(self):
        super().__init__()
        self.predictor = nn.Linear(4, 4)

    def loss(self, x, y):
        z = self(x)
        return -(self.predictor(z) * z.detach()).mean()


class Ensemble(Module):
    """Only output layers."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(64, 4) for _ in range(3))

    def forward(self, x):
        return sum(member(x.flatten(1)) for member in self.members)


class Conditional(HeadFirst):
    def forward(self, x):
        features = self.body(x)
        features = torch.cond(features.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (features,))
        return self.head(features)


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        (Inline, {"head"}),
        (Decoding, {"head"}),
        (Refining, {"back"}),
        (Siamese, {"predictor"}),
        (Conditional, {"head"}),
    ],
)
def test_ends_of_unusual_models(tmp_path, model, ends):
    found = []
    masks = callback("asp")
    look = Inspect(lambda trainer, module: found.append(set(masks.sparsifier.selection.ends)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="these masked layers were not called")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        make_trainer(tmp_path, [masks, look], max_epochs=1).fit(seeded(model), Data())
    assert found[0] == ends


def test_a_model_of_output_layers_alone_keeps_the_order_of_registration(tmp_path):
    masks = callback("asp")
    make_trainer(tmp_path, [masks], max_epochs=1).fit(seeded(Ensemble), Data())
    assert set(masks.state_dict()["layers"]) == {"members.0", "members.1"}


def test_a_frozen_first_convolution_is_not_the_students():
    teacher, student = (nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)) for _ in range(2))
    model = nn.ModuleDict({"teacher": teacher.requires_grad_(False), "student": student, "head": nn.Linear(16, 8)})
    assert set(NMSparsifier(model, "2:4", "ste").attach().selection.ends) == {"student.0", "head"}


def test_a_state_brings_its_ends():
    torch.manual_seed(0)
    model = HeadFirst()
    with ValueFlow(model) as flow:
        model(torch.randn(2, 1, 8, 8))
    sparsifier = NMSparsifier(model, "2:4", "asp").attach(flow=flow)
    assert list(sparsifier.layers) == ["body.1", "body.3"]
    state = sparsifier.state_dict()
    other = HeadFirst()
    other.load_state_dict(model.state_dict())
    resumed = NMSparsifier(other, "2:4", "asp").attach()
    assert list(resumed.layers) == ["head", "body.1"]
    resumed.load_state_dict(state)
    assert list(resumed.layers) == ["body.1", "body.3"]
    del state["ends"]  # as version 0.1.0 saved it, which may have masked what is an end now
    old = NMSparsifier(other, "2:4", "asp")
    resumed.detach()
    assert {"body.1", "body.3"} <= set(old.attach(state).layers)
