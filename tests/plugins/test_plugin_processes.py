"""Two processes whose devices disagree on what is fastest: the first decides for both."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMPrecision, NMSparsityCallback
from tests.support.processes import in_processes


class Opinion:
    """The first process finds the sparse kernel faster, the other slower: dense, sparse and pack are timed in turn."""

    def __init__(self):
        self.timed = 0

    def time(self, function, device):
        self.timed += 1
        return ((1.0, 9.0, 1.0) if dist.get_rank() == 0 else (9.0, 1.0, 9.0))[self.timed % 3]


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def run(decisions):
    """What the products of a training used, and its weights."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64, 32, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    )
    plugin = NMPrecision(backends=[SimulatedSparseKernel()], decisions=decisions)
    plugin.router.timer = Opinion()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        plugins=[plugin],
        callbacks=[NMSparsityCallback(include="net.0", show_tables=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=8))
    used = [(u.product.key.gemm, u.kernel, u.calls, u.product.reason) for u in plugin.router.used()]
    return used, model.state_dict()


@pytest.mark.slow
def test_the_first_process_decides(tmp_path):
    decisions = tmp_path / "kernels.json"
    (first, weights), (second, other_weights) = in_processes(
        2, tmp_path / "run", run, str(decisions)
    )
    assert first == second
    assert ("forward", "simulated", 3, "") in first, first
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
    assert decisions.exists()
