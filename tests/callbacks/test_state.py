"""The masked model in a fit: state dicts, optimizers, steps, warnings."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_nm import NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.nn.adapters import Adapter
from tests.support.lightning_models import (
    Data,
    Inspect,
    Net,
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


@pytest.mark.parametrize("placed", ["tuner", "callback-before", "callback-after"])
def test_learning_rate_finder_in_between(tmp_path, placed):
    class Tunable(Net):
        lr = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    pl.seed_everything(0, verbose=False)
    model, nm, data = Tunable(), callback(), Data()
    steps = []
    look = Inspect(
        lambda trainer, module: steps.append({n: x.step for n, x in nm.sparsifier.layers.items()})
    )
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
    make_trainer(tmp_path, [nm, look], max_epochs=1, accumulate_grad_batches=4).fit(
        new_model(), Data()
    )
    assert counts == [0, 0, 0, 1, 1, 2]


class TwoOptimizers(Net):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.net[:6], self.net[6:])]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 == 0 else (first,):
            optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            optimizer.step()


def test_a_layer_follows_the_optimizer_that_owns_it(tmp_path):
    nm = callback("sr-ste")
    counts = []
    look = Inspect(
        lambda trainer, module: counts.append({n: x.step for n, x in nm.sparsifier.layers.items()})
    )
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


@pytest.mark.parametrize("every", [0, 50])
def test_masks_follow_the_weights_whether_or_not_anything_is_logged(tmp_path, every):
    def look(trainer, module):
        for layer in nm.sparsifier.layers.values():
            weight = layer.weight.detach()
            assert torch.equal(layer.forward_mask, nmf.nm_mask(weight.abs(), "2:4", dim=1))

    nm = callback("ste")
    inspect = Inspect(look)
    make_trainer(tmp_path, [nm, inspect], max_epochs=1, log_every_n_steps=every).fit(
        new_model(), Data()
    )
    assert inspect.calls == 6


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
        make_trainer(tmp_path, [callback("ste", frozen="mask")], max_epochs=1).fit(Partly(), Data())


def test_a_masked_layer_that_is_read_instead_of_called_is_named(tmp_path):
    class Reads(Net):
        def forward(self, x):
            for k, module in enumerate(self.net):
                x = nn.functional.linear(x, module.weight, module.bias) if k == 6 else module(x)
            return x

    with pytest.raises(ValueError, match=r"have a gradient, but were not called: 'net.6'\."):
        make_trainer(tmp_path, [callback("ste")], max_epochs=1).fit(Reads(), Data())
    trainer = make_trainer(tmp_path, [callback("ste", direct_reads="warn")], max_epochs=1)
    with pytest.warns(UserWarning, match=r"have a gradient, but were not called: 'net.6'\."):
        trainer.fit(Reads(), Data())


def test_a_masked_layer_that_the_first_batch_does_not_call_is_named(tmp_path):
    class Skips(Net):
        def forward(self, x):
            for k, module in enumerate(self.net):
                x = x[:, :32] if k == 6 else module(x)
            return x

    with pytest.warns(UserWarning, match=r"not called in the first batch: \['net.6'\]"):
        make_trainer(tmp_path, [callback("ste")], max_epochs=1).fit(Skips(), Data())
