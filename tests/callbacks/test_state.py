"""The masked model in a fit: state dicts, optimizers, steps, warnings."""

import pytest
import torch

from tests.support.lightning_models import (
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


def test_a_layer_follows_the_optimizer_that_owns_it(tmp_path):
    nm = callback("sr-ste")
    fit(tmp_path, [nm], TwoOptimizers(), max_epochs=1)
    steps = {name: layer["step"] for name, layer in nm.state_dict()["layers"].items()}
    assert steps == {"net.3": 6, "net.6": 3}


def test_a_masked_layer_that_the_first_batch_does_not_call_is_named(tmp_path):
    class Skips(Net):
        def forward(self, x):
            return self.net[7:](self.net[:6](x)[:, :32])

    with pytest.warns(UserWarning, match=r"not called in the first batch: \['net.6'\]"):
        fit(tmp_path, [callback("ste")], new_model(of=Skips), max_epochs=1)
