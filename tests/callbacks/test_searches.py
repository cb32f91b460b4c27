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
from tests.support.lightning_models import Data, callback, make_trainer, new_model

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

METHODS = ["sr-ste", "asp", "asp-late", "bi-mask", "bame", "rigl", "cast", "lbc", "three-gemms"]


class Plain(pl.LightningDataModule):
    """A stock DataLoader, whose batch size may change."""

    batch_size = 16

    def train_dataloader(self):
        return DataLoader(Data().val_dataloader().dataset, self.batch_size)


class Search:
    """Searches when the second epoch starts, and keeps what there was before and after it."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch != 1:
            return
        (optimizer,) = trainer.optimizers
        steps = []
        handle = optimizer.register_step_post_hook(lambda *_: steps.append(1))
        before = self.moment(pl_module, optimizer)
        try:
            self.search(trainer, pl_module)
        finally:
            handle.remove()
            self.moments = (before, self.moment(pl_module, optimizer))
            self.steps = len(steps)

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


def unchanged(before, after):
    for then, now in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(then, now) if isinstance(then, torch.Tensor) else then == now


CASES = [
    *[(method, FindRate, "before-ours") for method in METHODS],
    ("sr-ste", FindRate, "after-ours"),
    ("bame", FindRate, "after-ours"),
    ("bame", FindBatchSize, "before-ours"),
]


@pytest.mark.parametrize(("method", "kind", "place"), CASES)
def test_a_search_in_mid_fit_changes_nothing(tmp_path, caplog, method, kind, place):
    model = new_model(dropout=0.0, optimizer="adamw" if method == "cast" else "sgd")
    search = kind()
    search.nm = nm = callback(LBC(stop=9) if method == "lbc" else method)
    callbacks = [search, nm] if place == "before-ours" else [nm, search]
    trainer = make_trainer(
        tmp_path, callbacks, max_epochs=3, limit_val_batches=0, enable_checkpointing=False
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(model, Plain())
    said = [r for r in caplog.records if "a search trains without the callbacks" in r.message]
    assert len(said) == (search.steps > 0)
    # Lightning's finder of batch sizes makes no step in mid-fit: it counts up to its own number from the first one on.
    assert (search.steps > 0) == (kind is FindRate)
    unchanged(*search.moments)
    assert nm.state_dict()["clock"] == trainer.global_step


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("method", ["sr-ste", "asp", "bame", "lbc"])
def test_a_fit_after_a_search_that_failed_goes_on(tmp_path, method):
    """Lightning gives the callbacks back only if the search ends well, and tells none of the exception."""

    class Fails(FindRate):
        def search(self, trainer, pl_module):
            def fail(*_):
                raise RuntimeError("out of memory")

            (optimizer,) = trainer.optimizers
            handle = optimizer.register_step_post_hook(fail)
            try:
                super().search(trainer, pl_module)
            finally:
                handle.remove()

    model = new_model(dropout=0.0)
    search = Fails()
    search.nm = nm = callback(LBC(stop=9) if method == "lbc" else method)
    options = {"limit_val_batches": 0, "enable_checkpointing": False}
    with pytest.raises(RuntimeError, match="out of memory"):
        make_trainer(tmp_path, [search, nm], max_epochs=3, **options).fit(model, Plain())
    assert search.steps == 1
    unchanged(*search.moments)
    trainer = make_trainer(tmp_path, [nm], max_epochs=3, **options)
    trainer.fit(model, Plain())
    assert nm.state_dict()["clock"] == 6 + trainer.global_step == 24
    assert {layer["step"] for layer in nm.state_dict()["layers"].values()} == {24}
