"""A run of two processes goes on in one, and the other way round."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import BAME, MVUE, BiMask, NMSparsityCallback, RNGState
from lightning_nm.nn.state import layer_state
from tests.support.lightning_models import Data
from tests.support.processes import in_processes

GLOBAL_BATCH = 16


class Plain(pl.LightningModule):
    """No batch norm and no dropout: a batch's gradient is the mean over its halves."""

    def __init__(self, seed=0):
        super().__init__()
        pl.seed_everything(seed, verbose=False)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))
        self.double()  # else Lightning restores the weights in float32, before its plugin converts the model

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Write(pl.Callback):
    """Saves a checkpoint after the second epoch; writes the layers as training begins and ends, on every rank."""

    def __init__(self, folder, name, nm):
        self.folder, self.name, self.nm, self.started = folder, name, nm, None

    def look(self):
        return {name: layer_state(layer) for name, layer in self.nm.sparsifier.layers.items()}

    def on_train_start(self, trainer, pl_module):
        self.started = self.look()

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(f"{self.folder}/{self.name}.ckpt")

    def on_train_end(self, trainer, pl_module):
        written = {"started": self.started, "ended": self.look(), "weights": pl_module.state_dict()}
        torch.save(written, f"{self.folder}/{self.name}-{trainer.global_rank}.pt")


def method(name):
    return {
        "bi-mask": (BiMask(permute_every=3, decay=0.1), None),
        "bame": (BAME(stop=24, every=2, budget=1.0), None),
        "three-gemms": ("transposable", MVUE("1:2")),
    }[name]


def train(folder, name, kind, ranks, ckpt_path):
    nm = NMSparsityCallback("2:4", *method(kind), skip_first_last=False, show_tables=False)
    pl.Trainer(
        max_epochs=4,
        precision="64-true",
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[nm, RNGState(), Write(str(folder), name, nm)],
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(
        Plain(0 if ckpt_path is None else 5),
        Data(batch_size=GLOBAL_BATCH // ranks),
        ckpt_path=ckpt_path,
    )


def run(folder, name, kind, ranks, ckpt_path=None):
    if ranks == 1:
        train(folder, name, kind, 1, ckpt_path)
    else:
        in_processes(ranks, folder / name, train, folder, name, kind, ranks, ckpt_path)
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:You passed in a `val_dataloader`",
    "ignore:the checkpoint is of . processes",
)
@pytest.mark.parametrize("kind", ["bi-mask", "bame", "three-gemms"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_on_another_number_of_processes(tmp_path, kind, before, after):
    straight = run(tmp_path, "straight", kind, before)
    saved = torch.load(tmp_path / "straight.ckpt", weights_only=True)
    assert len(saved["nm_rng_states"]) == before
    resumed = run(tmp_path, "resumed", kind, after, tmp_path / "straight.ckpt")

    layers = saved["callbacks"]["NMSparsityCallback"]["layers"]
    for rank in resumed:
        for name, state in layers.items():
            for key in state:
                same(rank["started"][name][key], state[key], key)
            assert rank["ended"][name]["step"] == 24
            assert rank["ended"][name]["draws"] == straight[0]["ended"][name]["draws"]
    for rank in (*straight[1:], *resumed[1:]):
        first = straight[0] if rank in straight[1:] else resumed[0]
        assert all(
            torch.equal(value, first["weights"][key]) for key, value in rank["weights"].items()
        )
    if kind == "three-gemms":  # the noise of its gradients depends on the ranks
        return
    moved = 0
    for name, state in straight[0]["ended"].items():
        assert torch.equal(resumed[0]["ended"][name]["forward_mask"], state["forward_mask"])
        moved += int((state["forward_mask"] != layers[name]["forward_mask"]).any())
    assert moved, "the masks stood still after the checkpoint"
    for key, value in straight[0]["weights"].items():
        torch.testing.assert_close(resumed[0]["weights"][key], value, rtol=0, atol=1e-10)


def same(here, saved, key):
    if isinstance(saved, torch.Tensor):
        assert torch.equal(here, saved), key
    elif isinstance(saved, dict):
        for name, value in saved.items():
            same(here[name], value, key)
    else:
        assert here == saved, key
