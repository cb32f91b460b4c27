"""A run that is resumed from any checkpoint must go on as if it had never stopped."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_nm.demo import ExactResume, ResumableDataModule
from lightning_nm.demo.images import ImageArrays
from lightning_nm.demo.learning_rate import warmup_cosine
from studies.data.augmented import AugmentedArrays

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Numbered(ResumableDataModule):
    """22 images in batches of 4, so 6 batches; the label is the index."""

    def __init__(self, num_workers=0):
        super().__init__(batch_size=4, seed=7, num_workers=num_workers)

    def setup(self, stage):
        images = torch.arange(22 * 16).remainder(251).to(torch.uint8).reshape(22, 1, 4, 4)
        self.train_set = AugmentedArrays(images, torch.arange(22), seed=self.seed, scale=255)
        self.val_set = ImageArrays(images[:4], torch.arange(4), scale=255)


class Regression(LightningModule):
    def __init__(self, dropout):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return (self.net(images).squeeze(1) - labels / 22).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Records what is trained on, and saves a checkpoint at one hook, each time."""

    def __init__(self, folder, hook):
        self.folder, self.hook = folder, hook
        self.seen, self.saved = [], []

    def save(self, trainer, hook):
        if hook == self.hook and not trainer.sanity_checking:
            path = self.folder / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, len(self.seen)))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(
            (trainer.current_epoch, batch_idx, batch[1].tolist(), batch[0].sum().item())
        )

    def on_train_batch_end(self, trainer, *args):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, pl_module):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def run(folder, hook=None, path=None, num_workers=0, **options):
    """What was seen and saved, and the weights, of two epochs."""
    seed_everything(3 if path is None else 4, verbose=False)
    watch, model = Watch(folder, hook), Regression(dropout=0.5)
    options = {"max_epochs": 2, **QUIET, **options}
    trainer = Trainer(callbacks=[watch, ExactResume()], **options)
    trainer.fit(model, Numbered(num_workers), ckpt_path=path)
    return watch, nn.utils.parameters_to_vector(model.parameters()).detach()


SETTINGS = {
    "plain": {},
    "validate-inside-a-window": {"val_check_interval": 3, "accumulate_grad_batches": 4},
    "limit": {"limit_train_batches": 5},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("hook", ["batch", "validation", "epoch"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_checkpoint_resumes_exactly(tmp_path, setting, hook):
    options = SETTINGS[setting]
    whole, weights = run(tmp_path, hook, **options)
    assert len(whole.seen) == 2 * options.get("limit_train_batches", 6)
    assert whole.saved
    for path, done in whole.saved:
        resumed, resumed_weights = run(tmp_path, path=path, **options)
        assert resumed.seen == whole.seen[done:]
        assert torch.equal(resumed_weights, weights)


def test_exact_with_worker_processes(tmp_path):
    whole, weights = run(tmp_path, "batch")
    path, done = whole.saved[7]
    resumed, resumed_weights = run(tmp_path, path=path, num_workers=1)
    assert resumed.seen == whole.seen[done:]
    assert torch.equal(resumed_weights, weights)


def test_a_checkpoint_that_is_only_tested_does_not_move_the_next_fit(tmp_path):
    whole, _ = run(tmp_path, "batch", max_epochs=1)
    data, watch = Numbered(), Watch(tmp_path, None)
    trainer = Trainer(max_epochs=1, callbacks=[watch], **QUIET)
    trainer.validate(Regression(0.0), data, ckpt_path=whole.saved[2][0], verbose=False)
    trainer.fit(Regression(0.0), data)
    assert watch.seen == whole.seen
