"""Layers that no optimizer trains stay dense, and are masked when they are unfrozen."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import CAST, LBC, NMPrecision, NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from tests.support.lightning_models import Data, SaveAt, assert_equal_models, callback, make_trainer
from tests.support.processes import in_processes

METHODS = ["ste", "sr-ste", "asp", "transposable", "bi-mask", "bame", "three-gemms"]


def body():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


class Validated(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class Distilled(Validated):
    """A student that imitates a teacher, which is registered after it."""

    def __init__(self, freezes=True):
        super().__init__()
        self.student, self.teacher = body(), body()
        if freezes:
            self.teacher.requires_grad_(False)

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
        self.backbone = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        )
        self.head = nn.Linear(32, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9
        )


class Unfreeze(BaseFinetuning):
    """Unfreezes the backbone at an epoch, as a new group of the optimizer."""

    def __init__(self, epoch=1):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


class Thaw(pl.Callback):
    """Lets the backbone train from an epoch on; the optimizer has held it since the start, so a resume is exact."""

    def setup(self, trainer, pl_module, stage):
        pl_module.configure_optimizers = lambda: torch.optim.SGD(
            pl_module.parameters(), 0.05, momentum=0.9
        )
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, *args):
        pl_module.backbone.requires_grad_(trainer.current_epoch >= 1)


def seeded(kind, *arguments):
    pl.seed_everything(0, verbose=False)
    return kind(*arguments)


@pytest.mark.parametrize("freezes", [True, False], ids=["requires-grad", "no-optimizer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_stays_as_it_is(tmp_path, method, freezes):
    model = seeded(Distilled, freezes)
    before = copy.deepcopy(model.teacher.state_dict())
    masks = callback(method)
    make_trainer(tmp_path, [masks]).fit(model, Data())
    assert all(
        torch.equal(value, before[name]) for name, value in model.teacher.state_dict().items()
    )
    assert set(masks.state_dict()["layers"]) == {
        "student.1",
        "student.3",
    }  # student.5 is the last that is trained


def test_the_reason_is_listed(tmp_path, capsys):
    model = seeded(Distilled)
    make_trainer(tmp_path, [NMSparsityCallback(monitor=False)]).fit(model, Data())
    listed = " ".join(capsys.readouterr().out.split())
    assert "frozen" in listed
    assert "last linear" in listed


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"include": ["student.*", "teacher.3"]}, {"student.1", "student.3", "teacher.3"}),
        ({"include": ["teacher.3", "*"]}, {"student.1", "student.3", "teacher.3"}),
        (
            {"frozen": "mask", "exclude": "*.5"},
            {"student.1", "student.3", "teacher.1", "teacher.3"},
        ),
    ],
    ids=["named", "named-among-others", "mask"],
)
def test_frozen_layers_are_masked_on_request(tmp_path, options, masked):
    masks = callback("asp", **options)
    with pytest.warns(UserWarning, match="no optimizer trains these masked layers"):
        make_trainer(tmp_path, [masks]).fit(seeded(Distilled), Data())
    assert set(masks.state_dict()["layers"]) == masked


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_is_masked_when_it_is_unfrozen(tmp_path, method):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append(list(masks.sparsifier.layers))

    model, masks = seeded(FineTuned), callback(method)
    with pytest.warns(
        UserWarning, match=r"no layer is masked yet: no optimizer trains backbone\.1, backbone\.3"
    ):
        make_trainer(tmp_path, [Unfreeze(), masks, Look()], max_epochs=3).fit(model, Data())
    assert seen == [[]] * 6 + [["backbone.1", "backbone.3"]] * 12
    for layer in (model.backbone[1], model.backbone[3]):
        assert type(layer) is nn.Linear
        # "three-gemms" ends with a dense phase.
        assert method == "three-gemms" or layer.weight.view(-1, 4).count_nonzero(1).max() <= 2
    state = masks.state_dict()
    assert {layer["step"] for layer in state["layers"].values()} == {12}
    assert state["clock"] == 18


@pytest.mark.parametrize(
    "batch", [6, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (3, 9, 13))]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_resume_is_exact_on_both_sides_of_the_unfreezing(tmp_path, method, batch):
    def fit(callbacks, **resume):
        model = seeded(FineTuned)
        make_trainer(tmp_path, [Thaw(), callback(method), *callbacks], max_epochs=3).fit(
            model, Data(), **resume
        )
        return model

    path = tmp_path / "saved.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit([SaveAt(path, batch), ModelCheckpoint(tmp_path, save_last=False, save_top_k=0)])
        assert_equal_models(fit([], ckpt_path=path), whole)


def test_layers_are_masked_in_the_next_step_of_an_own_loop():
    torch.manual_seed(0)
    model = FineTuned()
    model.backbone.requires_grad_(False)
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    assert list(sparsifier.layers) == []
    assert sparsifier.stats()["density"] == 1
    x, y = torch.randn(8, 64), torch.randint(0, 4, (8,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model.head(model.backbone(x)), y).backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()

    step()
    model.backbone[3].requires_grad_(True)
    assert [layer.name for layer in sparsifier.mask_unfrozen()] == ["backbone.3"]
    assert sparsifier.mask_unfrozen() == []
    step()
    assert sparsifier.layers["backbone.3"].step == 1
    model.backbone[1].requires_grad_(True)
    step()  # still dense here
    assert list(sparsifier.layers) == ["backbone.1", "backbone.3"]  # in the model's order
    state = sparsifier.state_dict()
    assert state["waiting"] == []
    other = copy.deepcopy(FineTuned())
    other.load_state_dict(model.state_dict())
    other.backbone.requires_grad_(False)  # the state has masks for them
    resumed = NMSparsifier(other, "2:4", "sr-ste").attach()
    assert list(resumed.layers) == []
    resumed.load_state_dict(state)
    assert list(resumed.layers) == ["backbone.1", "backbone.3"]
    assert_equal_models(model, other)
    sparsifier.bake()
    sparsifier.detach()
    assert type(model.backbone[1]) is nn.Linear


def test_a_layer_that_waited_in_a_checkpoint_may_be_masked_now(tmp_path):
    path, masks = tmp_path / "saved.ckpt", callback("asp")
    saving = [SaveAt(path, 3), ModelCheckpoint(tmp_path, save_top_k=0)]
    with pytest.warns(UserWarning, match="no layer is masked yet"):
        make_trainer(tmp_path, [Thaw(), callback("asp"), *saving], max_epochs=1).fit(
            seeded(FineTuned), Data()
        )

    class Free(Thaw):
        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            pl_module.backbone.requires_grad_(True)

    make_trainer(tmp_path, [Free(), masks, ModelCheckpoint(tmp_path, save_top_k=0)]).fit(
        seeded(FineTuned), Data(), ckpt_path=path
    )
    assert {name: layer["step"] for name, layer in masks.state_dict()["layers"].items()} == {
        # Of 9 steps: Thaw freezes them again in the other 3.
        "backbone.1": 6,
        "backbone.3": 6,
    }


def test_kernels_of_layers_that_are_unfrozen_are_measured(tmp_path):
    plugin = NMPrecision(kernels="auto", backends=[SimulatedSparseKernel()], decisions=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            tmp_path, [Unfreeze(), callback("ste")], max_epochs=3, plugins=[plugin]
        )
        trainer.fit(seeded(FineTuned), Data())
    measured = {used.product.layer for used in plugin.router.used() if used.decision is not None}
    assert measured == {"backbone.1", "backbone.3"}


def test_a_wrong_value_is_named():
    with pytest.raises(ValueError, match="frozen='sparse' is unknown: use 'dense' or 'mask'"):
        NMSparsityCallback(frozen="sparse")


class Sharded(Distilled):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for part in (self.student, self.teacher):
            fully_shard(part, mesh=mesh)
        fully_shard(self, mesh=mesh)


def in_a_process(strategy):
    model = seeded(Sharded if strategy == "fsdp2" else Distilled)
    before = copy.deepcopy(model.teacher.state_dict())
    if strategy == "fsdp2":
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    masks = callback("bame")
    trainer = make_trainer(
        ".", [masks], strategy=strategy, devices=2, max_epochs=1, num_sanity_val_steps=0
    )
    trainer.fit(model, Data())
    after = {
        name: getattr(v, "full_tensor", lambda v=v: v)()
        for name, v in model.teacher.state_dict().items()
    }
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    return sorted(masks.state_dict()["layers"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "nm_ddp", "fsdp2"])
def test_a_teacher_in_two_processes(tmp_path, strategy):
    assert (
        in_processes(2, tmp_path / strategy, in_a_process, strategy)
        == [["student.1", "student.3"]] * 2
    )


class FreezeLate(Unfreeze):
    """Freezes the backbone after DistributedDataParallel has wrapped the model."""

    def setup(self, trainer, pl_module, stage):
        pass

    def on_train_start(self, trainer, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.make_trainable(pl_module.backbone)


def fine_tuned_in_a_process(method, freezes):
    """Unfreeze the backbone in the second epoch; return the warnings, the error, and whether all ranks agree."""
    torch.manual_seed(0)
    strategy = "ddp_find_unused_parameters_true" if freezes is FreezeLate else "ddp"
    model = FineTuned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            ".", [freezes(), callback(method)], strategy=strategy, devices=2, num_sanity_val_steps=0
        )
        try:
            trainer.fit(model, Data())
            error = ""
        except RuntimeError as raised:
            error = str(raised)
    weight = model.backbone[1].weight.detach()
    weights = [torch.zeros_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    text = "does not average the gradients of"
    said = [str(warning.message) for warning in caught if text in str(warning.message)]
    return {"said": said, "error": error, "equal": torch.equal(*weights)}


@pytest.mark.slow
def test_weights_that_ddp_leaves_out_are_told(tmp_path):
    # Masks alone do not show it: those of asp are chosen once.
    told = in_processes(2, tmp_path / "asp", fine_tuned_in_a_process, "asp", Unfreeze)
    assert all("['backbone.1', 'backbone.3']" in text for text in told[0]["said"])
    assert len(told[0]["said"]) == 1
    assert not told[0]["equal"]
    # Masks that follow the weights differ; the error names the cause.
    told = in_processes(2, tmp_path / "ste", fine_tuned_in_a_process, "ste", Unfreeze)
    for rank in told:
        assert "processes that train one model disagree" in rank["error"]
        assert "The likely cause: DistributedDataParallel does not average" in rank["error"]
    # What the message advises.
    told = in_processes(2, tmp_path / "late", fine_tuned_in_a_process, "ste", FreezeLate)
    assert all(rank == {"said": [], "error": "", "equal": True} for rank in told)


def test_a_resumed_fit_with_frozen_layers_says_so(tmp_path):
    """BackboneFinetuning and its like freeze again when a run resumes, and may not unfreeze again."""

    class Again(Thaw):
        def on_train_batch_start(self, trainer, pl_module, *args):
            pl_module.backbone.requires_grad_(False)

    masks = callback("sr-ste")
    saving = SaveAt(tmp_path / "last.ckpt", 12)
    with pytest.warns(UserWarning, match="no layer is masked yet"):
        make_trainer(tmp_path, [Thaw(), masks, saving]).fit(seeded(FineTuned), Data())
    steps = {name: layer["step"] for name, layer in masks.state_dict()["layers"].items()}
    assert set(steps.values()) == {6}
    resumed = callback("sr-ste")
    model = seeded(FineTuned)
    text = r"frozen now \(requires_grad=False\).*\['backbone.1', 'backbone.3'\]"
    with pytest.warns(UserWarning, match=text):
        make_trainer(tmp_path, [Again(), resumed], max_epochs=4).fit(
            model, Data(), ckpt_path=tmp_path / "last.ckpt"
        )
    state = resumed.state_dict()
    assert {name: layer["step"] for name, layer in state["layers"].items()} == steps
    assert state["clock"] == 24
    # A second fit of the same callback, as well.
    with pytest.warns(UserWarning, match=text):
        make_trainer(tmp_path, [Again(), resumed], max_epochs=5).fit(model, Data())
    assert all(nmf.is_nm(model.backbone[k].weight, "2:4") for k in (1, 3))


@pytest.mark.parametrize("method", [CAST(end=20, decay=1e-2), LBC(stop=20)])
def test_a_frozen_layer_is_not_trained_by_what_its_method_owns(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    sparsifier.register(optimizer)
    x = torch.randn(8, 16)

    def steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()

    steps(3)
    model[0].requires_grad_(False)
    before = model[0](x)
    own = {name: p.detach().clone() for name, p in sparsifier.layers["0"].parameters.items()}
    assert own
    steps(3)
    layers = sparsifier.layers
    assert (layers["0"].step, layers["2"].step) == (3, 6)
    assert all(torch.equal(own[name], p) for name, p in layers["0"].parameters.items())
    if isinstance(method, CAST):  # masks of LBC go on narrowing by its schedule
        assert torch.equal(model[0](x), before)
    model[0].requires_grad_(True)
    steps(1)
    assert not all(torch.equal(own[name], p) for name, p in layers["0"].parameters.items())


def test_masks_of_frozen_layers_end_in_the_weights(tmp_path):
    """Also where no masked layer makes a step, and others train."""
    model = seeded(FineTuned)
    model.backbone.requires_grad_(False)
    masks = callback("asp", frozen="mask", skip_first_last=True)
    trainer = make_trainer(tmp_path, [masks], max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, Data())
    assert {layer["step"] for layer in masks.state_dict()["layers"].values()} == {0}
    assert all(nmf.is_nm(model.backbone[k].weight, "2:4") for k in (1, 3))


def test_a_failed_wake_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    model[0].weight.requires_grad_(False)
    rules = [{"include": "[0]", "method": "bame"}]
    sparsifier = NMSparsifier(model, "2:4", "ste", rules=rules, planned_steps=100).attach()
    sparsifier.register(torch.optim.Adagrad(model.parameters()))
    model[0].weight.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="Adagrad"):
            sparsifier.mask_unfrozen()
        assert list(sparsifier.layers) == ["2"]
        assert [layer.name for layer in sparsifier.selection.frozen] == ["0"]
        assert type(model[0]) is nn.Linear


def test_a_schedule_that_needs_a_plan_is_refused_at_the_start():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"BAME's stop=0\.66 is a share"):
        NMSparsifier(model, "2:4", "ste", rules=[{"include": "[0]", "method": "bame"}]).attach()


def test_a_waiting_layer_is_not_masked_twice():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].weight.requires_grad_(False)
    first = NMSparsifier(model, "2:4", "ste", include=["[02]"]).attach()
    second = NMSparsifier(model, "2:4", "ste", include=["[01]"]).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for sparsifier in (first, second):
        sparsifier.register(optimizer)
    model[0].weight.requires_grad_(True)
    first.mask_unfrozen()
    with pytest.raises(ValueError, match="layer '0' is masked already"):
        second.mask_unfrozen()
    assert model[0].nm_layers["weight"] is first.layers["0"]


def test_steps_in_which_a_layer_waited_count_as_dense():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    model[0].weight.requires_grad_(False)
    sparsifier = NMSparsifier(model, "2:4", "ste").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    ratios = []
    for step in range(10):
        if step == 9:
            model[0].weight.requires_grad_(True)
            sparsifier.mask_unfrozen()
        model(torch.randn(4, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
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
    model, masks = seeded(FineTuned), callback("ste", skip_first_last=False)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.05)
    model.backbone.requires_grad_(False)
    make_trainer(tmp_path, [ReplaceOptimizer(), masks]).fit(model, Data())
    state = masks.state_dict()
    assert set(state["layers"]) == {"head"}
    assert state["waiting"] == ["backbone.1", "backbone.3"]
    assert state["layers"]["head"]["step"] == 12  # of both optimizers


def test_an_own_loop_says_which_optimizers_it_has():
    model = FineTuned()
    model.backbone.requires_grad_(False)
    sparsifier = NMSparsifier(model, "2:4", "ste", skip_first_last=False).attach()
    old, new = (torch.optim.SGD(part.parameters(), 0.1) for part in (model, model.head))
    sparsifier.training.follow([old])
    sparsifier.training.follow([new])
    model.backbone.requires_grad_(True)
    assert sparsifier.mask_unfrozen() == []
    old.step()
    assert not sparsifier.step()  # its steps do not count
    sparsifier.training.follow([old, new])
    assert [layer.name for layer in sparsifier.mask_unfrozen()] == ["backbone.1", "backbone.3"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_module_that_is_replaced_is_named(tmp_path, waits):
    class Replace(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.backbone[3] = nn.Linear(32, 32)

    model = seeded(FineTuned)
    model.backbone[3].requires_grad_(not waits)
    with pytest.warns(
        UserWarning, match=r"no longer in the model, and what replaced them .*\['backbone\.3'\]"
    ):
        make_trainer(tmp_path, [callback("ste"), Replace()]).fit(model, Data())
