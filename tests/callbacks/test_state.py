"""The masked model in a fit: state dicts, optimizers, steps, warnings."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import functional as nmf
from tests.support.lightning_models import (
    MASKED,
    Inspect,
    Net,
    TwoOptimizers,
    callback,
    fit,
    is_sparse,
    make_trainer,
    new_model,
)


@pytest.mark.parametrize("method", ["dense", "ste", "sr-ste", "asp", "asp-late", "bi-mask", "bame"])
def test_state_dict_is_the_sparse_model_while_training(tmp_path, method):
    def look(trainer, module):
        state, fresh, x = module.state_dict(), Net().eval(), torch.randn(3, 1, 8, 8)
        assert list(state) == list(fresh.state_dict())
        fresh.load_state_dict(state)
        module.eval()
        assert torch.equal(module(x), fresh(x))
        module.train()
        return is_sparse(state)

    inspect = Inspect(look)
    # placed after ours, as ModelCheckpoint is
    fit(tmp_path, [callback(method), inspect], max_epochs=1)
    expected = {"dense": [False] * 6, "asp-late": [False] * 3 + [True] * 3}
    assert inspect.seen == expected.get(method, [True] * 6)


@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "asp", "bame"])
def test_last_validation_test_and_fresh_load_agree_exactly(tmp_path, method):
    trainer, model = fit(tmp_path, [callback(method)])
    during, data = trainer.callback_metrics["val_loss"], trainer.datamodule
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
    after = trainer.test(model, data, verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fresh = new_model(1)
    fresh.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    loaded = make_trainer(tmp_path).test(fresh, data, verbose=False)[0]["val_loss"]
    assert during.item() == after == loaded


def steps(nm):
    return Inspect(lambda *_: {name: x.step for name, x in nm.sparsifier.layers.items()})


def test_accumulated_gradients_make_one_step(tmp_path):
    nm = callback("sr-ste")
    look = steps(nm)
    fit(tmp_path, [nm, look], max_epochs=1, accumulate_grad_batches=4)
    assert [seen["net.6"] for seen in look.seen] == [0, 0, 0, 1, 1, 2]


def test_a_layer_follows_the_optimizer_that_owns_it(tmp_path):
    nm = callback("sr-ste")
    look = steps(nm)
    fit(tmp_path, [nm, look], TwoOptimizers(), max_epochs=1)
    assert look.seen[-1] == {"net.3": 6, "net.6": 3}


def test_weights_loaded_while_installed_get_new_masks(tmp_path):
    other = {key: value.clone() for key, value in Net().state_dict().items()}

    def load(trainer, module):
        module.load_state_dict(other)
        for key in MASKED:
            assert torch.equal(module.state_dict()[key], nmf.nm_prune(other[key], "2:4", dim=1))

    fit(tmp_path, [callback("ste"), Inspect(load)], max_epochs=1)


@pytest.mark.parametrize("every", [0, 50])
def test_masks_follow_the_weights_whether_or_not_anything_is_logged(tmp_path, every):
    def look(trainer, module):
        for layer in nm.sparsifier.layers.values():
            weight = layer.weight.detach()
            assert torch.equal(layer.forward_mask, nmf.nm_mask(weight.abs(), "2:4", dim=1))

    nm = callback("ste")
    fit(tmp_path, [nm, Inspect(look)], max_epochs=1, log_every_n_steps=every)


def test_an_optimizer_that_is_replaced_while_training_is_followed(tmp_path):
    class Replace(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.strategy.optimizers = [module.configure_optimizers()]

    nm = callback("sr-ste")
    look = steps(nm)
    fit(tmp_path, [nm, Replace(), look])
    assert look.seen[-1] == {"net.3": 12, "net.6": 12}


def test_a_masked_layer_that_the_first_batch_does_not_call_is_named(tmp_path):
    class Skips(Net):
        def forward(self, x):
            return self.net[7:](self.net[:6](x)[:, :32])

    with pytest.warns(UserWarning, match=r"not called in the first batch: \['net.6'\]"):
        fit(tmp_path, [callback("ste")], new_model(of=Skips), max_epochs=1)
