"""``storage="packed"`` in several processes: those send kept entries; sharded weights are refused."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import BAME, NMSparsityCallback, RNGState
from tests.strategies import test_fsdp
from tests.strategies.test_ddp import OPTIONS
from tests.strategies.test_equality import STRATEGIES, Net
from tests.support.processes import in_processes

METHODS = {
    "asp": lambda: "asp",
    "bame": lambda: BAME(stop=6, every=3, budget=1.0, evidence_rate=0.5),
}


class Model(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class SentElements(pl.Callback):
    """The elements of the gradients that DistributedDataParallel sends in a step, of the model's first and last."""

    def __init__(self):
        self.sent = []

    def on_train_batch_end(self, trainer, *args):
        wrapped = trainer.strategy.model
        self.sent.append(sum(p.numel() for p in wrapped.module.parameters() if p.requires_grad))


def fit(method, strategy, storage, path=None, save_to=None, accumulate=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, 4, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (96,), generator=generator))
    pl.seed_everything(0 if path is None else 1, verbose=False)
    model, log = Model().double(), SentElements()
    nm = NMSparsityCallback(
        "2:4", METHODS[method](), storage=storage, skip_first_last=False, show_tables=False
    )
    trainer = pl.Trainer(
        devices=2,
        strategy=STRATEGIES[strategy](),
        max_epochs=1 if save_to else 2,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        callbacks=[nm, log, RNGState()],
        **OPTIONS,
    )
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=path)
    if save_to:
        trainer.save_checkpoint(save_to)
    return model.state_dict(), log.sent


def fits(runs):
    return [fit(*run) for run in runs]


RUNS = [(method, strategy) for method in METHODS for strategy in ("ddp", "nm_ddp", "static")]


@pytest.mark.slow
def test_processes_train_as_with_dense_storage(tmp_path):
    runs = [(*run, storage) for run in RUNS for storage in ("dense", "packed")]
    runs += [("asp", "ddp", storage, None, None, 2) for storage in ("dense", "packed")]
    first, second = in_processes(2, tmp_path / "run", fits, runs)
    for place in range(0, len(runs), 2):
        (dense, sent), (packed, sent_packed) = first[place : place + 2]
        for key, value in dense.items():
            # Sums over processes of buckets cut elsewhere may round otherwise.
            torch.testing.assert_close(packed[key], value, rtol=0, atol=1e-10, msg=str(runs[place]))
        other = second[place + 1][0]
        assert all(torch.equal(packed[key], other[key]) for key in packed)
        assert sent_packed[-1] < 0.6 * sent[-1]


@pytest.mark.slow
@pytest.mark.parametrize("storages", [("packed", "packed"), ("packed", "dense")])
def test_processes_resume(tmp_path, storages):
    saved, (before, after) = str(tmp_path / "saved.ckpt"), storages
    (whole, _), *_ = in_processes(2, tmp_path / "whole", fits, [("bame", "ddp", after)])[0]
    in_processes(2, tmp_path / "part", fits, [("bame", "ddp", before, None, saved)])
    resumed, other = in_processes(2, tmp_path / "rest", fits, [("bame", "ddp", after, saved)])
    for key, value in whole.items():
        torch.testing.assert_close(resumed[0][0][key], value, rtol=0, atol=1e-10)
        assert torch.equal(resumed[0][0][key], other[0][0][key])


def refusal():
    nm = NMSparsityCallback("2:4", "asp", storage="packed", show_tables=False)
    trainer = pl.Trainer(devices=2, strategy=ModelParallelStrategy(2, 1), callbacks=[nm], **OPTIONS)
    with pytest.raises(ValueError, match=r"storage='packed' cannot replace it") as raised:
        trainer.fit(test_fsdp.Net(shard=True), test_fsdp.data())
    return str(raised.value)


@pytest.mark.slow
def test_sharded_weights_are_refused(tmp_path):
    for message in in_processes(2, tmp_path / "run", refusal):
        assert "layer 'net.3' in shards" in message
