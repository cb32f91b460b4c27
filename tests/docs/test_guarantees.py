"""The loader of the page resumes as the page says."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import NMSparsityCallback, RNGState
from tests.docs.blocks import QuietTrainer, execute, read

BATCHES, EPOCHS = 10, 2


class Net(pl.LightningModule):
    def __init__(self, planned):
        super().__init__()
        self.planned, self.seen = planned, []
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.seen.append(targets.tolist())
        return (self.net(inputs).squeeze(1) - targets).square().mean()

    def configure_optimizers(self):
        if self.planned:
            assert self.trainer.estimated_stepping_batches == BATCHES * EPOCHS
        return torch.optim.SGD(self.parameters(), 0.01)


class Save(pl.Callback):
    """Saves after every batch, and at the end of every epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, *args):
        trainer.save_checkpoint(self.folder / f"batch-{len(pl_module.seen)}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"epoch-{len(pl_module.seen)}.ckpt")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("planned", [False, True])
def test_the_loader_resumes(tmp_path, planned):
    pytest.importorskip("torchdata", reason="of the extra dev")
    data = execute(read("guarantees.md"))["Data"]

    def fit(ckpt_path=None, *callbacks):
        pl.seed_everything(0 if ckpt_path is None else 1, verbose=False)
        model = Net(planned)
        nm = NMSparsityCallback("2:4", show_tables=False, skip_first_last=False)
        trainer = QuietTrainer(
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            callbacks=[nm, RNGState(), *callbacks],
        )
        trainer.fit(model, data(), ckpt_path=ckpt_path)
        return model

    straight = fit(None, Save(tmp_path))
    steps = [step for step in range(1, BATCHES * EPOCHS) if planned or step % BATCHES]
    for name, done in [("epoch", BATCHES), *(("batch", step) for step in steps)]:
        resumed = fit(tmp_path / f"{name}-{done}.ckpt")
        assert resumed.seen == straight.seen[done:], (name, done)
        for key, value in straight.state_dict().items():
            assert torch.equal(resumed.state_dict()[key], value), (name, done, key)
