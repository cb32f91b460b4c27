"""A run of two processes goes on in one, and the other way round."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_nm import BAME, BiMask, RNGState
from lightning_nm.nn.state import layer_state
from tests.support.lightning_models import Data, callback, fit, new_model
from tests.support.processes import in_processes

METHODS = {
    "bi-mask": lambda: {"method": BiMask(permute_every=3, decay=0.1)},
    "bame": lambda: {"method": BAME(stop=24, every=2, budget=1.0)},
    "three-gemms": lambda: {"method": "transposable", "grad_estimator": "mvue"},
}


class Plain(pl.LightningModule):
    """No batch norm and no dropout: a batch's gradient is the mean over its halves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))
        self.double()  # else Lightning restores the weights in float32, before its plugin converts the model

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Look(pl.Callback):
    """The layers as training begins and ends; saves a checkpoint after the second epoch."""

    def __init__(self, nm, path):
        self.nm, self.path = nm, path

    def look(self):
        return {name: layer_state(layer) for name, layer in self.nm.sparsifier.layers.items()}

    def on_train_start(self, trainer, pl_module):
        self.started = self.look()

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1 and self.path is not None:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer, pl_module):
        self.ended = self.look()


def train(path, kind, ranks, resumes):
    nm = callback(**METHODS[kind](), skip_first_last=False)
    look, model = Look(nm, None if resumes else path), new_model(5 if resumes else 0, Plain)
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "max_epochs": 4}
    options |= {"precision": "64-true", "limit_val_batches": 0, "log_every_n_steps": 1}
    data, ckpt_path = Data(batch_size=16 // ranks), path if resumes else None
    fit(".", [nm, RNGState(), look], model, data, ckpt_path, **options)
    return look.started, look.ended, model.state_dict()


def run(folder, ranks, *args):
    if ranks == 1:
        return [train(folder / "saved.ckpt", *args)]
    return in_processes(ranks, folder / "run", train, folder / "saved.ckpt", *args)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:You passed in a `val_dataloader`",
    "ignore:the checkpoint is of . processes",
)
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_on_another_number_of_processes(tmp_path, kind, before, after):
    straight = run(tmp_path, before, kind, before, False)
    resumed = run(tmp_path, after, kind, after, True)
    saved = torch.load(tmp_path / "saved.ckpt")
    assert len(saved["nm_rng_states"]) == before
    layers = saved["callbacks"]["NMSparsityCallback"]["layers"]
    _, expected, weights = straight[0]
    for started, ended, _ in resumed:
        for name, state in layers.items():
            here = {key: started[name][key] for key in state}
            for a, b in zip(tree_leaves(here), tree_leaves(state), strict=True):
                assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
            assert ended[name]["step"] == 24
            assert ended[name]["draws"] == expected[name]["draws"]
    for ranks in (straight, resumed):
        for *_, other in ranks:
            assert all(torch.equal(value, ranks[0][2][key]) for key, value in other.items())
    if kind == "three-gemms":  # the noise of its gradients depends on the ranks
        return
    masks = [state["forward_mask"] for state in expected.values()]
    assert all(
        torch.equal(resumed[0][1][name]["forward_mask"], mask)
        for name, mask in zip(expected, masks, strict=True)
    )
    then = [state["forward_mask"] for state in layers.values()]
    assert not all(map(torch.equal, then, masks)), "the masks stood still after the checkpoint"
    torch.testing.assert_close(resumed[0][2], weights, rtol=0, atol=1e-10)
