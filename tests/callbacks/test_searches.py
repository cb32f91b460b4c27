"""Searches that Lightning makes in mid-fit, without the callbacks: the training goes on as if there were none."""

import copy
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_nm import LBC
from tests.support.lightning_models import Data, callback, fit, new_model

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

METHODS = ["sr-ste", "asp", "asp-late", "bi-mask", "bame", "rigl", "cast", "lbc", "three-gemms"]
OPTIONS = {"max_epochs": 3, "limit_val_batches": 0, "enable_checkpointing": False}


class Plain(pl.LightningDataModule):
    """A stock DataLoader, whose batch size may change."""

    batch_size = 16

    def train_dataloader(self):
        return DataLoader(Data().val_dataloader().dataset, self.batch_size)


class Search:
    """Searches when the second epoch starts, and keeps what there was before and after it."""

    fails = False

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch != 1:
            return
        (optimizer,) = trainer.optimizers
        self.steps = 0
        handle = optimizer.register_step_post_hook(self.count)
        self.before = self.moment(pl_module, optimizer)
        try:
            self.search(trainer, pl_module)
        finally:
            handle.remove()
            after = self.moment(pl_module, optimizer)
            for then, now in zip(tree_leaves(self.before), tree_leaves(after), strict=True):
                same = torch.equal if isinstance(then, torch.Tensor) else type(then).__eq__
                assert same(then, now)

    def count(self, *_):
        self.steps += 1
        if self.fails:
            raise RuntimeError("out of memory")

    def moment(self, model, optimizer):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        states = (parameters, self.nm.sparsifier.state_dict(), optimizer.state_dict())
        return copy.deepcopy(states)


class FindRate(Search, LearningRateFinder):
    def __init__(self):
        super().__init__(num_training_steps=8, min_lr=1e-3, max_lr=1e-1, update_attr=False)

    def search(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)


class FindBatchSize(Search, BatchSizeFinder):
    def __init__(self):
        super().__init__(steps_per_trial=2, init_val=16, max_trials=1)

    def search(self, trainer, pl_module):
        self.scale_batch_size(trainer, pl_module)


def prepared(method, kind):
    """A model, a search, and the callback that it watches."""
    model = new_model(dropout=0.0, optimizer="adamw" if method == "cast" else "sgd")
    search = kind()
    search.nm = callback(LBC(stop=9) if method == "lbc" else method)
    return model, search, search.nm


@pytest.mark.parametrize(
    ("method", "kind", "is_first"),
    [
        *[(method, FindRate, True) for method in METHODS],
        ("sr-ste", FindRate, False),
        ("bame", FindRate, False),
        ("bame", FindBatchSize, True),
    ],
)
def test_a_search_in_mid_fit_changes_nothing(tmp_path, caplog, method, kind, is_first):
    model, search, nm = prepared(method, kind)
    with caplog.at_level(logging.INFO):
        callbacks = [search, nm] if is_first else [nm, search]
        trainer, _ = fit(tmp_path, callbacks, model, Plain(), **OPTIONS)
    said = [r for r in caplog.records if "a search trains without the callbacks" in r.message]
    # Lightning's finder of batch sizes makes no step in mid-fit: it counts up to its own number from the first one on.
    assert len(said) == (search.steps > 0) == (kind is FindRate)
    assert nm.state_dict()["clock"] == trainer.global_step


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("method", ["sr-ste", "asp", "bame", "lbc"])
def test_a_fit_after_a_search_that_failed_goes_on(tmp_path, method):
    """Lightning gives the callbacks back only if the search ends well, and tells none of the exception."""
    model, search, nm = prepared(method, FindRate)
    search.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(tmp_path, [search, nm], model, Plain(), **OPTIONS)
    assert search.steps == 1
    trainer, _ = fit(tmp_path, [nm], model, Plain(), **OPTIONS)
    assert nm.state_dict()["clock"] == 6 + trainer.global_step == 24
    assert {layer["step"] for layer in nm.state_dict()["layers"].values()} == {24}
