"""Layers that no optimizer trains stay dense, and are masked when they are unfrozen."""

import copy
import warnings
from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import CAST, LBC, NMPrecision, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.lightning_models import (
    Inspect,
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    new_model,
    whole_and_resumed,
)
from tests.support.processes import in_processes

METHODS = ["sr-ste", "asp", "bi-mask", "bame", "three-gemms"]
BACKBONE = ["backbone.1", "backbone.3"]
NOT_YET = "ignore:no layer is masked yet"


def body():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


class Validated(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class Distilled(Validated):
    """A student that imitates a teacher, which is registered after it."""

    def __init__(self, freezes=True, shards=False):
        super().__init__()
        self.student, self.teacher, self.shards = body(), body(), shards
        self.teacher.requires_grad_(not freezes)

    def configure_model(self):
        for part in (self.student, self.teacher, self) if self.shards else ():
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
        found = self.student(x)
        return F.cross_entropy(found, y) + F.mse_loss(found, target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), 0.05, momentum=0.9)


class FineTuned(Validated):
    """A head on a backbone that is frozen at first."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = body()[:5], nn.Linear(32, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x)), y)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, 0.05, momentum=0.9)


class Frozen(FineTuned):
    """An optimizer that holds all from the start, so that a resume is exact."""

    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Unfreeze(BaseFinetuning):
    """Unfreezes the backbone at the second epoch, as a new group of the optimizer."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


class Thaw(pl.Callback):
    """Lets the backbone train in some epochs."""

    def __init__(self, *epochs):
        self.epochs = epochs

    def on_train_batch_start(self, trainer, pl_module, *args):
        pl_module.backbone.requires_grad_(trainer.current_epoch in self.epochs)


def steps_of(masks):
    return {name: layer["step"] for name, layer in masks.state_dict()["layers"].items()}


def linears(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def train(sparsifier, optimizer, steps=1, width=16):
    for _ in range(steps):
        optimizer.zero_grad()
        sparsifier.model(torch.randn(8, width)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


@pytest.mark.parametrize("freezes", [True, False], ids=["requires-grad", "no-optimizer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_stays_as_it_is(tmp_path, method, freezes):
    model = new_model(of=Distilled, freezes=freezes)
    before, masks = copy.deepcopy(model.teacher), callback(method)
    fit(tmp_path, [masks], model)
    assert_equal_models(model.teacher, before)
    assert set(steps_of(masks)) == {"student.1", "student.3"}  # student.5 is the last trained one


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"include": ["student.*", "teacher.3"]}, {"teacher.3"}),
        ({"include": ["teacher.3", "*"]}, {"teacher.3"}),
        ({"frozen": "mask", "exclude": "*.5"}, {"teacher.1", "teacher.3"}),
    ],
    ids=["named", "named-among-others", "mask"],
)
def test_frozen_layers_are_masked_on_request(tmp_path, options, masked):
    model, masks = new_model(of=Distilled), callback("asp", **options)
    before = {name: model.get_submodule(name).weight.clone() for name in masked}
    with pytest.warns(UserWarning, match=rf"no optimizer trains these .*\['{min(masked)}'"):
        fit(tmp_path, [masks], model)
    assert steps_of(masks) == {"student.1": 12, "student.3": 12} | dict.fromkeys(masked, 0)
    for name, weight in before.items():
        assert torch.equal(model.get_submodule(name).weight, nmf.nm_prune(weight, "2:4"))


@pytest.mark.filterwarnings("ignore:no optimizer trains these masked layers")
def test_masks_of_frozen_layers_end_in_the_weights_where_no_masked_layer_steps(tmp_path):
    model, masks = new_model(of=Frozen), callback("asp", frozen="mask")
    fit(tmp_path, [masks], model, max_epochs=1)
    assert set(steps_of(masks).values()) == {0}
    assert all(nmf.is_nm(model.backbone[k].weight, "2:4") for k in (1, 3))


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_is_masked_when_it_is_unfrozen(tmp_path, method):
    model, masks = new_model(of=FineTuned), callback(method)
    look = Inspect(lambda *_: list(masks.sparsifier.layers))
    with pytest.warns(
        UserWarning, match=r"no layer is masked yet: no optimizer trains backbone\.1, backbone\.3"
    ):
        fit(tmp_path, [Unfreeze(), masks, look], model, max_epochs=3)
    assert look.seen == [[]] * 6 + [BACKBONE] * 12
    for layer in (model.backbone[1], model.backbone[3]):
        assert type(layer) is nn.Linear
        # "three-gemms" ends with a dense phase.
        assert method == "three-gemms" or nmf.is_nm(layer.weight, "2:4")
    assert set(steps_of(masks).values()) == {12}
    assert masks.state_dict()["clock"] == 18


@pytest.mark.filterwarnings("ignore:MVUE is in the dense phase that began")
@pytest.mark.filterwarnings(NOT_YET)
@pytest.mark.parametrize(
    "batch", [6, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (3, 9, 13))]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_resume_is_exact_on_both_sides_of_the_unfreezing(tmp_path, method, batch):
    def callbacks():
        return [Thaw(1, 2), callback(method)]

    def new(seed):
        return new_model(seed, Frozen)

    assert_equal_models(*whole_and_resumed(tmp_path, callbacks, batch, new=new, max_epochs=3))


def test_layers_are_masked_in_the_next_step_of_an_own_loop():
    def start(state=None):
        model = linears(16, 16, 16, 4)
        model[:2].requires_grad_(False)
        return model, NMSparsifier(model, "2:4", "sr-ste").attach()

    model, sparsifier = start()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    assert list(sparsifier.layers) == []
    assert sparsifier.stats()["density"] == 1
    train(sparsifier, optimizer)
    model[1].requires_grad_(True)
    assert [layer.name for layer in sparsifier.mask_unfrozen()] == ["1"]
    assert sparsifier.mask_unfrozen() == []
    train(sparsifier, optimizer)
    assert sparsifier.layers["1"].step == 1
    model[0].requires_grad_(True)
    train(sparsifier, optimizer)  # still dense here
    assert list(sparsifier.layers) == ["0", "1"], "in the model's order"

    other, resumed = start()  # the state has masks for them
    other.load_state_dict(model.state_dict())
    assert list(resumed.layers) == []
    resumed.load_state_dict(sparsifier.state_dict())
    assert list(resumed.layers) == ["0", "1"]
    assert_equal_models(model, other)
    sparsifier.bake()
    sparsifier.detach()
    assert type(model[0]) is nn.Linear


@pytest.mark.filterwarnings(NOT_YET)
def test_a_layer_that_waited_in_a_checkpoint_may_be_masked_now(tmp_path):
    path, masks = tmp_path / "saved.ckpt", callback("asp")
    fit(tmp_path, [callback("asp"), SaveAt(path, 3)], new_model(of=Frozen), max_epochs=1)
    model = new_model(of=Frozen)
    model.backbone.requires_grad_(True)
    fit(tmp_path, [masks], model, ckpt_path=path)
    assert steps_of(masks) == dict.fromkeys(BACKBONE, 9)


@pytest.mark.filterwarnings(NOT_YET)
def test_kernels_of_layers_that_are_unfrozen_are_measured(tmp_path):
    plugin = NMPrecision(kernels="auto", backends=[SimulatedSparseKernel()], decisions=None)
    masks = [Unfreeze(), callback("ste")]
    fit(tmp_path, masks, new_model(of=FineTuned), max_epochs=3, plugins=[plugin])
    measured = {used.product.layer for used in plugin.router.used() if used.decision is not None}
    assert measured == set(BACKBONE)


def teachers():
    found = []
    sharded = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    for strategy in ("ddp", "nm_ddp", sharded):
        model = new_model(of=Distilled, shards=strategy is sharded)
        before, masks = copy.deepcopy(model.teacher.state_dict()), callback("bame")
        options = {"strategy": strategy, "devices": 2, "num_sanity_val_steps": 0}
        fit(".", [masks], model, max_epochs=1, **options)
        for name, value in model.teacher.state_dict().items():
            whole = value.full_tensor() if strategy is sharded else value
            assert torch.equal(whole, before[name])
        found.append(sorted(steps_of(masks)))
    return found


@pytest.mark.slow
def test_a_teacher_in_two_processes(tmp_path):
    assert in_processes(2, tmp_path / "run", teachers) == [[["student.1", "student.3"]] * 3] * 2


class FreezeLate(Unfreeze):
    """Freezes the backbone after DistributedDataParallel has wrapped the model."""

    def setup(self, trainer, pl_module, stage):
        pass

    def on_train_start(self, trainer, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(pl_module.backbone)


def fine_tuned(method, freezes):
    """Unfreeze the backbone in the second epoch; return the warnings, the error, and whether all ranks agree."""
    model, error = new_model(of=FineTuned), ""
    strategy = "ddp_find_unused_parameters_true" if freezes is FreezeLate else "ddp"
    options = {"strategy": strategy, "devices": 2, "num_sanity_val_steps": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(".", [freezes(), callback(method)], model, **options)
        except RuntimeError as raised:
            error = str(raised)
    weight = model.backbone[1].weight.detach()
    weights = [torch.zeros_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    texts = [str(warning.message) for warning in caught]
    said = [text for text in texts if "does not average the gradients of" in text]
    return said, error, torch.equal(*weights)


def left_out():
    return [fine_tuned("asp", Unfreeze), fine_tuned("ste", Unfreeze), fine_tuned("ste", FreezeLate)]


@pytest.mark.slow
def test_weights_that_ddp_leaves_out_are_told(tmp_path):
    first, other = in_processes(2, tmp_path / "run", left_out)
    # Masks alone do not show it: those of asp are chosen once.
    (said,), error, agree = first[0]
    assert str(BACKBONE) in said
    assert (error, agree) == ("", False)
    # Masks that follow the weights differ; the error names the cause.
    for _, error, _ in (first[1], other[1]):
        assert "processes that train one model disagree" in error
        assert "The likely cause: DistributedDataParallel does not average" in error
    # What the message advises.
    assert first[2] == other[2] == ([], "", True)


@pytest.mark.filterwarnings(NOT_YET)
def test_a_resumed_fit_with_frozen_layers_says_so(tmp_path):
    """BackboneFinetuning and its like freeze again when a run resumes, and may not unfreeze again."""
    masks, path = callback("sr-ste"), tmp_path / "last.ckpt"
    fit(tmp_path, [Thaw(1), masks, SaveAt(path, 12)], new_model(of=Frozen))
    assert steps_of(masks) == dict.fromkeys(BACKBONE, 6)
    model, resumed = new_model(of=Frozen), callback("sr-ste")
    for epochs, ckpt_path in ((4, path), (5, None)):  # and in a second fit of the same callback
        with pytest.warns(
            UserWarning, match=r"frozen now \(requires_grad=False\).*backbone.1', 'b"
        ):
            fit(tmp_path, [Thaw(), resumed], model, ckpt_path=ckpt_path, max_epochs=epochs)
        assert steps_of(resumed) == dict.fromkeys(BACKBONE, 6)
    assert resumed.state_dict()["clock"] == 24 + 30
    assert all(nmf.is_nm(model.backbone[k].weight, "2:4") for k in (1, 3))


@pytest.mark.parametrize("method", [CAST(end=20, decay=1e-2), LBC(stop=20)])
def test_a_frozen_layer_is_not_trained_by_what_its_method_owns(method):
    model = linears(16, 16, 8)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    sparsifier.register(optimizer)
    layers, x = sparsifier.layers, torch.randn(8, 16)

    def own():
        return torch.cat([p.detach().flatten() for p in layers["0"].parameters.values()])

    train(sparsifier, optimizer, 3)
    model[0].requires_grad_(False)
    output, before = model[0](x), own()
    train(sparsifier, optimizer, 3)
    assert (layers["0"].step, layers["1"].step) == (3, 6)
    assert torch.equal(own(), before)
    if isinstance(method, CAST):  # masks of LBC go on narrowing by its schedule
        assert torch.equal(model[0](x), output)
    model[0].requires_grad_(True)
    train(sparsifier, optimizer)
    assert not torch.equal(own(), before)


def test_a_failed_wake_changes_nothing():
    model = linears(16, 16, 16, 4)
    model[0].weight.requires_grad_(False)
    rules = [{"include": "[0]", "method": "bame"}]
    sparsifier = NMSparsifier(model, "2:4", "ste", rules=rules, planned_steps=100).attach()
    sparsifier.register(torch.optim.Adagrad(model.parameters()))
    model[0].weight.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="Adagrad"):
            sparsifier.mask_unfrozen()
        assert list(sparsifier.layers) == ["1"]
        assert type(model[0]) is nn.Linear


def test_a_schedule_that_needs_a_plan_is_refused_at_the_start():
    model = linears(16, 16, 4)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"BAME's stop=0\.66 is a fraction"):
        NMSparsifier(model, "2:4", "ste", rules=[{"include": "[0]", "method": "bame"}]).attach()


def test_a_waiting_layer_is_not_masked_twice():
    model = linears(16, 16, 16, 16, 4)
    model[0].weight.requires_grad_(False)
    first, second = (
        NMSparsifier(model, "2:4", "ste", include=[names]).attach() for names in ("[02]", "[01]")
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for sparsifier in (first, second):
        sparsifier.register(optimizer)
    model[0].weight.requires_grad_(True)
    first.mask_unfrozen()
    with pytest.raises(ValueError, match="layer '0' is masked already"):
        second.mask_unfrozen()
    assert model[0].nm_layers["weight"] is first.layers["0"]


def test_steps_in_which_a_layer_waited_count_as_dense():
    model = linears(16, 16, 16, 4)
    model[0].weight.requires_grad_(False)
    sparsifier = NMSparsifier(model, "2:4", "ste").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    ratios = []
    for step in range(10):
        model[0].weight.requires_grad_(step == 9)
        sparsifier.mask_unfrozen()
        train(sparsifier, optimizer)
        ratios.append(sparsifier.flops_ratios()["eligible"])
    assert ratios[8] > ratios[9]
    assert sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx(sum(ratios) / 10)


class ReplaceOptimizer(pl.Callback):
    """From the second batch on the head alone is trained; the first optimizer held the backbone, too."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.head.parameters(), 0.05)]
            pl_module.backbone.requires_grad_(True)


def test_an_optimizer_that_was_replaced_trains_no_layer(tmp_path):
    model, masks = new_model(of=Frozen), callback("ste", skip_first_last=False)
    fit(tmp_path, [ReplaceOptimizer(), masks], model)
    assert steps_of(masks) == {"head": 12}  # of both optimizers
    assert masks.state_dict()["waiting"] == BACKBONE


class Replace(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.backbone[3] = nn.Linear(32, 32)


@pytest.mark.parametrize("waits", [True, False])
def test_a_module_that_is_replaced_is_named(tmp_path, waits):
    model = new_model(of=FineTuned)
    model.backbone[3].requires_grad_(not waits)
    with pytest.warns(
        UserWarning, match=r"no longer in the model, and what replaced them .*\['backbone\.3'\]"
    ):
        fit(tmp_path, [callback("ste"), Replace()], model)
