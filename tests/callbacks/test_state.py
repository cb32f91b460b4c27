"""Nothing is lost: checkpoints, resume, second fits, interruptions."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_nm import NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.demo import ExactResume
from lightning_nm.nn.adapters import Adapter
from tests.lightning_models import (
    Data,
    Inspect,
    Net,
    SaveAt,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
MASKED = ("net.3.weight", "net.6.weight")


@pytest.mark.parametrize("method", ["dense", "ste", "sr-ste", "asp", "asp-late", "bi-mask", "bame"])
def test_state_dict_is_the_sparse_model_while_training(tmp_path, method):
    dense_keys = list(Net().state_dict())
    masked_steps = []

    def look(trainer, module):
        state = module.state_dict()
        assert list(state) == dense_keys
        sparse = all(nmf.is_nm(state[key], "2:4", dim=1) for key in MASKED)
        masked_steps.append(sparse)
        fresh = Net().eval()
        fresh.load_state_dict(state)
        x = torch.randn(3, 1, 8, 8)
        was = module.training
        module.eval()
        assert torch.equal(module(x), fresh(x))
        module.train(was)

    inspect = Inspect(look)
    # placed after ours, as ModelCheckpoint is
    make_trainer(tmp_path, [callback(method), inspect], max_epochs=1).fit(new_model(), Data())
    assert inspect.calls == 6
    expected = {"dense": [False] * 6, "asp-late": [False] * 3 + [True] * 3}.get(method, [True] * 6)
    assert masked_steps == expected


@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "asp", "bame"])
def test_last_validation_test_and_fresh_load_agree_exactly(tmp_path, method):
    model, data = new_model(), Data()
    trainer = make_trainer(tmp_path, [callback(method)])
    trainer.fit(model, data)
    during = trainer.callback_metrics["val_loss"]
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
    after = trainer.test(model, data, verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fresh = new_model(1)
    fresh.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    loaded = make_trainer(tmp_path).test(fresh, data, verbose=False)[0]["val_loss"]
    assert during.item() == after == loaded


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "method",
    ["dense", "ste", "sr-ste", "asp", "asp-late", "bi-mask", "bame", "bame-bi-mask", "three-gemms", "bi-mask-phases"],
)
@pytest.mark.parametrize(
    ("batch", "accumulate"), [(6, 1), (8, 1), (8, 3)], ids=["epoch-end", "mid-epoch", "mid-window"]
)
def test_resume_is_bit_exact(tmp_path, method, optimizer, batch, accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    straight = new_model(optimizer=optimizer)
    save = SaveAt(tmp_path / "mid.ckpt", batch)
    make_trainer(tmp_path, [callback(method), ExactResume(), save], **options).fit(straight, Data())

    resumed = new_model(7, optimizer=optimizer)
    trainer = make_trainer(tmp_path, [callback(method), ExactResume()], **options)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "mid.ckpt")
    assert_equal_models(straight, resumed)


def test_resume_of_a_dense_run_with_the_callback_added_and_of_a_sparse_run_with_it_removed(tmp_path):
    save = SaveAt(tmp_path / "dense.ckpt", 6)
    make_trainer(tmp_path, [save]).fit(new_model(), Data())
    model = new_model(1)
    sparse_save = SaveAt(tmp_path / "sparse.ckpt", 3)
    make_trainer(tmp_path, [callback(), sparse_save]).fit(model, Data(), ckpt_path=tmp_path / "dense.ckpt")
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)

    model = new_model(2)
    trainer = make_trainer(tmp_path, max_epochs=3)
    with pytest.warns(UserWarning, match="NMSparsityCallback"):  # Lightning says that its state is not used
        trainer.fit(model, Data(), ckpt_path=tmp_path / "sparse.ckpt")
    assert not nmf.is_nm(model.state_dict()["net.6.weight"], "2:4", dim=1)


@pytest.mark.parametrize("method", ["sr-ste", "asp", "bi-mask", "bame-bi-mask", "mvue"])
def test_a_second_fit_continues_exactly(tmp_path, method):
    def run(*epochs):
        model, nm = new_model(dropout=0.0), callback(method)
        optimizer = model.configure_optimizers()  # the same in all fits, so that only our own state could differ
        model.configure_optimizers = lambda: optimizer
        for number in epochs:
            trainer = make_trainer(tmp_path, [nm], max_epochs=number, num_sanity_val_steps=0)
            trainer.fit(model, train_dataloaders=Data().val_dataloader(), val_dataloaders=Data().val_dataloader())
        return model

    assert_equal_models(run(8), run(5, 3))


def test_saving_after_fit_resumes_exactly(tmp_path):
    straight = new_model()
    make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=3).fit(straight, Data())

    first = new_model()
    trainer = make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=2)
    trainer.fit(first, Data())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = new_model(5)
    make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=3).fit(
        resumed, Data(), ckpt_path=tmp_path / "after.ckpt"
    )
    assert_equal_models(straight, resumed)


def test_a_reused_callback_on_another_model_starts_anew(tmp_path):
    nm = callback()
    make_trainer(tmp_path, [nm], max_epochs=1).fit(new_model(), Data())
    model = new_model(1)
    with pytest.warns(UserWarning, match=r"starts anew.*net\.3"):
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)


def test_interruption_leaves_a_model_that_resumes(tmp_path):
    def stop(trainer, module):
        if trainer.global_step == 4:
            raise RuntimeError("out of luck")

    model, nm = new_model(), callback()
    trainer = make_trainer(tmp_path, [nm, Inspect(stop)])
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)
    trainer.save_checkpoint(tmp_path / "crash.ckpt")
    state = torch.load(tmp_path / "crash.ckpt", weights_only=True)["callbacks"]["NMSparsityCallback"]
    assert state["layers"]["net.6"]["step"] == 4
    assert state["layers"]["net.6"]["latent"].numel() == 256 * 32 // 2


@pytest.mark.parametrize("placed", ["tuner", "callback-before", "callback-after"])
def test_learning_rate_finder_in_between(tmp_path, placed):
    class Tunable(Net):
        lr = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    pl.seed_everything(0, verbose=False)
    model, nm, data = Tunable(), callback(), Data()
    steps = []
    look = Inspect(lambda trainer, module: steps.append({n: x.step for n, x in nm.sparsifier.layers.items()}))
    finder = LearningRateFinder(num_training_steps=5)
    extra = {"callback-before": [finder, nm], "callback-after": [nm, finder]}.get(placed, [nm])
    trainer = make_trainer(tmp_path, [*extra, look], enable_checkpointing=False)
    latent = model.net[6].weight.detach().clone()
    if placed == "tuner":
        Tuner(trainer).lr_find(model, data, num_training=5)
        assert torch.equal(model.net[6].weight, latent)
        assert not any(isinstance(m, Adapter) for m in model.modules())
    trainer.fit(model, data)
    assert steps[0] == {"net.3": 1, "net.6": 1}, "steps of the search were counted"
    assert steps[-1] == {"net.3": 12, "net.6": 12}
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)


def test_deepcopy_while_training(tmp_path):
    copies = []
    look = Inspect(
        lambda trainer, module: copies.append(
            (copy.deepcopy(module.net), {k: v.clone() for k, v in module.net.state_dict().items()})
        )
    )
    make_trainer(tmp_path, [callback(), look], max_epochs=1).fit(new_model(), Data())
    for net, state in copies:
        assert all(torch.equal(net.state_dict()[key], value) for key, value in state.items())


def test_gradient_accumulation_and_manual_steps_count_real_steps(tmp_path):
    counts = []
    nm = callback("sr-ste")
    look = Inspect(lambda trainer, module: counts.append(nm.sparsifier.layers["net.6"].step))
    make_trainer(tmp_path, [nm, look], max_epochs=1, accumulate_grad_batches=4).fit(new_model(), Data())
    assert counts == [0, 0, 0, 1, 1, 2]


class TwoOptimizers(Net):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[3].parameters(), 0.05), torch.optim.SGD(self.net[6].parameters(), 0.05)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 == 0 else (first,):
            optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            optimizer.step()


def test_a_layer_follows_the_optimizer_that_owns_it(tmp_path):
    nm = callback("sr-ste")
    counts = []
    look = Inspect(lambda trainer, module: counts.append({n: x.step for n, x in nm.sparsifier.layers.items()}))
    make_trainer(tmp_path, [nm, look], max_epochs=1).fit(TwoOptimizers(), Data())
    assert counts[-1] == {"net.3": 6, "net.6": 3}


def test_sr_ste_decay_enters_once_per_step_before_clipping(tmp_path):
    seen = {}

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            weight = module.net[6].weight
            seen.setdefault("grads", []).append(weight.grad.clone())

    def run(decay, accumulate):
        seen.clear()
        from lightning_nm import SRSTE

        nm = NMSparsityCallback("2:4", SRSTE(decay), show_tables=False)
        make_trainer(
            tmp_path,
            [nm, Spy()],
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.5,
            limit_train_batches=4,
        ).fit(new_model(dropout=0.0), Data())
        return seen["grads"][0]

    weight = new_model(dropout=0.0).net[6].weight.detach()
    pruned = torch.where(nmf.nm_mask(weight.abs(), "2:4"), 0, weight)
    for accumulate in (1, 4):
        torch.testing.assert_close(run(0.5, accumulate) - run(0.0, accumulate), 0.5 * pruned)


def test_a_future_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema 99.*reads schema 1"):
        NMSparsityCallback().load_state_dict({"schema": 99, "layers": {}})


def test_weights_loaded_while_installed_get_new_masks(tmp_path):
    other = {key: value.clone() for key, value in Net().state_dict().items()}

    def load(trainer, module):
        module.load_state_dict(other)
        for key in MASKED:
            assert torch.equal(module.state_dict()[key], nmf.nm_prune(other[key], "2:4", dim=1))

    make_trainer(tmp_path, [callback("ste"), Inspect(load)], max_epochs=1).fit(new_model(), Data())


def test_ordinary_checkpoint_size(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256))
    from lightning_nm import NMSparsifier

    sparsifier = NMSparsifier(model, skip_first_last=False).attach()
    layer = sparsifier.state_dict()["layers"]["0"]
    size = sum(t.numel() * t.element_size() for t in layer.values() if isinstance(t, torch.Tensor))
    dense = 256 * 256 * 4
    assert size < 0.6 * dense  # half of the weights, two bits each, and a permutation


@pytest.mark.parametrize(
    "method", ["sr-ste", "bi-mask", "asp-late", "bame", "bame-bi-mask", "three-gemms", "bi-mask-phases"]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_between_a_step_and_the_move_of_the_masks_resumes_exactly(tmp_path, method, accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    straight = new_model()
    save = SaveAt(tmp_path / "early.ckpt", 4)  # before our callback
    make_trainer(tmp_path, [save, callback(method), ExactResume()], **options).fit(straight, Data())
    resumed = new_model(7)
    trainer = make_trainer(tmp_path, [callback(method), ExactResume()], **options)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "early.ckpt")
    assert_equal_models(straight, resumed)


@pytest.mark.parametrize("every", [0, 50])
def test_masks_follow_the_weights_whether_or_not_anything_is_logged(tmp_path, every):
    def look(trainer, module):
        for layer in nm.sparsifier.layers.values():
            weight = layer.weight.detach()
            assert torch.equal(layer.forward_mask, nmf.nm_mask(weight.abs(), "2:4", dim=1))

    nm = callback("ste")
    inspect = Inspect(look)
    make_trainer(tmp_path, [nm, inspect], max_epochs=1, log_every_n_steps=every).fit(new_model(), Data())
    assert inspect.calls == 6


def test_evaluating_a_checkpoint_between_fits_does_not_break_the_next(tmp_path):
    nm = callback()
    for fold in range(2):
        model = new_model(fold)
        trainer = make_trainer(tmp_path, [nm], max_epochs=1)
        if fold:
            with pytest.warns(UserWarning, match="starts anew"):
                trainer.fit(model, Data())
        else:
            trainer.fit(model, Data())
        assert model.net[6].weight.count_nonzero() == 256 * 32 // 2
        trainer.save_checkpoint(tmp_path / "fold.ckpt")
        trainer.test(model, Data(), ckpt_path=tmp_path / "fold.ckpt", verbose=False, weights_only=True)


class Fails(pl.Callback):
    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *args):
        raise RuntimeError("a typo")


@pytest.mark.parametrize("hook", ["on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_batch_start"])
@pytest.mark.parametrize("method", ["bi-mask", "asp", "bame"])
def test_a_crash_before_the_first_step_leaves_the_model_as_it_came(tmp_path, hook, method):
    model = new_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="a typo"):
        make_trainer(tmp_path, [callback(method), Fails(hook)]).fit(model, Data())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(m, Adapter) for m in model.modules())


def test_a_fit_that_could_not_end_does_not_make_the_next_one_dense(tmp_path):
    class Rude(pl.Callback):
        def on_train_batch_start(self, *args):
            raise RuntimeError("first")

        def on_exception(self, *args):
            raise RuntimeError("second")

    nm, first, second = callback(), new_model(), new_model(1)
    with pytest.raises(RuntimeError, match="second"):
        make_trainer(tmp_path, [Rude(), nm]).fit(first, Data())
    make_trainer(tmp_path, [nm], max_epochs=1).fit(second, Data())
    assert all(nmf.is_nm(second.state_dict()[key], "2:4", dim=1) for key in MASKED)
    assert not any(isinstance(m, Adapter) for m in first.modules())


def test_folds_before_pruning_do_not_share_a_clock(tmp_path):
    nm = callback("asp-late")
    for fold in range(2):
        model = new_model(fold)
        trainer = make_trainer(tmp_path, [nm], max_epochs=1, limit_train_batches=3)
        if fold:
            with pytest.warns(UserWarning, match="starts anew"):
                trainer.fit(model, Data())
        else:
            trainer.fit(model, Data())
        assert not nmf.is_nm(model.net[6].weight, "2:4"), "pruned before its time"


def test_averaged_checkpoints_are_sparse(tmp_path):
    average = EMAWeightAveraging(decay=0.5)
    model = new_model()
    save = ModelCheckpoint(tmp_path / "ema", every_n_train_steps=4)
    trainer = make_trainer(tmp_path, [average, callback(), save], max_epochs=1)
    trainer.fit(model, Data())
    weights = torch.load(save.best_model_path, weights_only=True)["state_dict"]
    assert all(nmf.is_nm(weights[key], "2:4", dim=1) for key in MASKED)
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)
    with pytest.raises(ValueError, match="EMAWeightAveraging comes after NMSparsityCallback"):
        make_trainer(tmp_path, [callback(), EMAWeightAveraging()]).fit(new_model(), Data())


def test_an_optimizer_that_is_replaced_while_training_is_followed(tmp_path):
    class Replace(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.strategy.optimizers = [module.configure_optimizers()]

    nm = callback("sr-ste")
    counts = []
    look = Inspect(lambda trainer, module: counts.append(nm.sparsifier.layers["net.6"].step))
    make_trainer(tmp_path, [nm, Replace(), look], max_epochs=2).fit(new_model(), Data())
    assert counts[-1] == 12


def test_a_masked_layer_that_no_optimizer_trains_is_named(tmp_path):
    class Partly(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[3].parameters(), 0.05)

    with pytest.warns(UserWarning, match=r"no optimizer trains these masked layers.*\['net.6'\]"):
        make_trainer(tmp_path, [callback("ste")], max_epochs=1).fit(Partly(), Data())


def test_a_masked_layer_that_is_read_instead_of_called_is_named(tmp_path):
    class Reads(Net):
        def forward(self, x):
            for k, module in enumerate(self.net):
                x = nn.functional.linear(x, module.weight, module.bias) if k == 6 else module(x)
            return x

    with pytest.warns(UserWarning, match=r"not called in the first batch: \['net.6'\]"):
        make_trainer(tmp_path, [callback("ste")], max_epochs=1).fit(Reads(), Data())
