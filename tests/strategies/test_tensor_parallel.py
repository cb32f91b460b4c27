"""Layers under tensor parallelism, alone and with FSDP2, train as those of one process."""

from collections import OrderedDict

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    SRSTE,
    BiMask,
    NMPattern,
    NMSparsifier,
    NMSparsityCallback,
    RigL,
    SLoPe,
    TransposableMask,
)
from lightning_nm.functional import is_nm
from tests.strategies.test_equality import FIRST_MASKS_STAY, assert_equal
from tests.support.processes import in_processes

METHODS = {
    "sr-ste": lambda: SRSTE(1e-2),
    "asp": lambda: ASP(start=2),
    "bame": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5),
    "transposable": lambda: TransposableMask(update_every=2),
    "bi-mask": lambda: BiMask(permute_every=3),
    "slope": lambda: SLoPe(refresh_every=3),
    "rigl": lambda: RigL(every=2, stop=10, drop=0.9),
    "cast": lambda: CAST(decay=1e-2, refresh_every=2, scale_groups=0, end=5),
}
STEPS = 8


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, hidden), nn.Linear(hidden, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x[:, :8] + self.down(torch.tanh(self.up(x))))


class Net(pl.LightningModule):
    def __init__(self, data=1, tensor=1, hidden=32):
        super().__init__()
        self.data, self.tensor, self.hidden = data, tensor, hidden

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = Block(self.hidden).double()
        if self.tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.data > 1:
            for part in (self.net.up, self.net.down, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        part, parts = 0, 1
        if self.data > 1:
            part, parts = self.device_mesh["data_parallel"].get_local_rank(), self.data
        x, y = (tensor[part::parts] for tensor in batch)
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(method, data=1, tensor=1, estimator=None, ckpt_path=None, save=None, hidden=32, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * STEPS, 16, generator=generator, dtype=torch.float64)
    batches = DataLoader(
        TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator)), batch_size=8
    )
    callback = NMSparsityCallback(
        "2:4", METHODS[method](), estimator, skip_first_last=False, show_tables=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=data * tensor,
        strategy=ModelParallelStrategy(data, tensor) if data * tensor > 1 else "auto",
        use_distributed_sampler=False,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 1, **options},
    )
    model = Net(data, tensor, hidden)
    trainer.fit(model, batches, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = {
        k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()
    }
    return weights, callback.state_dict()["layers"]


def fits(data, tensor, folder):
    found = [fit(method, data, tensor) for method in METHODS]
    resumed = []
    for method, estimator in (("bame", None), ("bi-mask", "mvue")):
        straight = fit(method, data, tensor, estimator, max_epochs=2)
        fit(
            method,
            data,
            tensor,
            estimator,
            save=f"{folder}/{method}.ckpt",
            max_epochs=2,
            max_steps=STEPS,
        )
        resumed.append(
            (
                straight,
                fit(method, data, tensor, estimator, f"{folder}/{method}.ckpt", max_epochs=2),
            )
        )
    return found, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
def test_tensor_parallel_layers_train_as_whole_ones(tmp_path, data, tensor):
    everyone = in_processes(data * tensor, tmp_path / "run", fits, data, tensor, str(tmp_path))
    for k, method in enumerate(METHODS):
        alone = fit(method)
        for found, resumed in everyone:
            assert_equal(found[k], everyone[0][0][k], tolerance=0)
            for straight, again in resumed:
                assert_equal(again, straight, tolerance=0)
            if (
                method == "bi-mask"
            ):  # its permutation must not leave a process's rows, so it is another
                continue
            try:
                assert_equal(found[k], alone, 1e-9)
            except AssertionError as error:
                raise AssertionError(f"{method}: {error}") from error
        moved = any(layer["total_flips"] for layer in alone[1].values())
        assert moved or method in FIRST_MASKS_STAY


def cut(hidden):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(
        OrderedDict(up=nn.Linear(16, hidden), act=nn.ReLU(), down=nn.Linear(hidden, 8))
    )
    model.register_module("conv", nn.Conv1d(8, 8, 1))
    model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.conv.weight = nn.Parameter(
        distribute_tensor(model.conv.weight.detach(), mesh, [Shard(0)])
    )
    sparsifier = NMSparsifier(model, "2:4", BiMask(), skip_first_last=False).attach()
    up = sparsifier.layers["up"]
    backward = up.masks.backward
    rows = None if backward is None else up.view.rows(backward)
    local = None if rows is None else rows[up.masks.permutation].chunk(2)[dist.get_rank()]
    found = {
        "skipped": sparsifier.skipped,
        "gemms": {
            name: [[gemm.label, gemm.reason] for gemm in layer.gemms()]
            for name, layer in sparsifier.layers.items()
        },
        "whole": local is not None and bool(is_nm(local, NMPattern(2, 4), dim=0)),
        "own rows": local is not None
        and up.masks.permutation.chunk(2)[dist.get_rank()].sort().values.tolist(),
    }
    sparsifier.detach()
    whole = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU())
    fully_shard(whole, mesh=mesh)
    of_a_part = NMSparsifier(whole[0], "2:4", "sr-ste", skip_first_last=False).attach()
    with pytest.raises(
        RuntimeError, match=r"layer '0' was taken for tensor parallel, but FSDP gathers its weight"
    ):
        whole(torch.randn(4, 8))
    of_a_part.detach()
    with pytest.raises(
        ValueError,
        match=r"'conv' is named by `include` but cannot be masked: sharded while it runs",
    ):
        NMSparsifier(model, "2:4", BiMask(), include="conv").attach()
    return found


@pytest.mark.slow
def test_blocks_that_a_cut_would_split_are_named(tmp_path):
    for rank, found in enumerate(in_processes(2, tmp_path / "fit", cut, 16)):
        assert list(found["skipped"]) == ["conv"]
        assert found["gemms"]["up"][:2] == found["gemms"]["down"][:2] == [["2:4", ""], ["2:4", ""]]
        assert found["whole"]
        assert found["own rows"] == list(range(8 * rank, 8 * rank + 8)), "no row leaves its process"
    for found in in_processes(2, tmp_path / "split", cut, 20):
        assert found["gemms"]["up"][1] == [
            "masked",
            "out 20 / 2 processes % 4 != 0 (M = 2, 5, 10 would fit)",
        ]
        assert found["gemms"]["down"][0] == [
            "dense",
            "in 20 / 2 processes % 4 != 0 (M = 2, 5, 10 would fit)",
        ]
