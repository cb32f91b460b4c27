"""Lazy layers stay dense, with the reason, wherever parameters are counted or shown."""

import io
import warnings

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import NMSparsifier, NMSparsityCallback, pack, prune
from lightning_nm.callbacks.tables import layer_rows, print_layers
from lightning_nm.callbacks.tensorboard import layers_markdown
from lightning_nm.export import verify
from lightning_nm.nn import Adapter
from lightning_nm.training.macs import forward_macs
from lightning_nm.training.statistics import share_of_products

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

REASON = "lazy: it has its shape and class only after its first batch: run one before the training"


def linears():
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 8))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.LazyConv2d(8, 3))


def batch(make):
    return torch.randn(8, 12) if make is linears else torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize(
    ("make", "lazy", "masked"), [(linears, "0", "2"), (convolutions, "2", "1")]
)
@pytest.mark.parametrize("method", ["bi-mask", "sr-ste"])
def test_a_lazy_layer_stays_dense_in_a_plain_loop(make, lazy, masked, method):
    model = make()
    sparsifier = NMSparsifier(model, "2:4", method).attach()
    assert list(sparsifier.layers) == [masked]
    assert sparsifier.skipped[lazy].startswith(REASON)
    known = "16x12" if make is linears else "8x8x3x3"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for shape in ("?", known, known):
        print_layers(sparsifier, Console(width=100, file=io.StringIO()))
        assert {row[0]: row[1] for row in layer_rows(sparsifier)}[lazy] == shape
        assert REASON in layers_markdown(sparsifier, None)
        sparsifier.shares(), sparsifier.flops_ratios()
        share_of_products(model, sparsifier.layers.values())
        model(batch(make)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert sparsifier.macs[lazy] > 0
    dense = model[int(lazy)]
    assert not isinstance(dense, Adapter)
    assert dense.weight.count_nonzero() == dense.weight.numel()


@pytest.mark.parametrize("calibrated", [False, True])
def test_other_ways_leave_it_dense_too(calibrated):
    how = ("wanda", [torch.randn(8, 12)]) if calibrated else ()
    model = linears()
    result = prune(model, "2:4", *how)
    assert result.layers == ["2"]
    assert result.skipped["0"].startswith(REASON)
    if calibrated:  # an inference model has weights: packing comes after a batch
        pack(model, kernels="reference")
    assert forward_macs(linears(), torch.randn(8, 12)) == {"0": 1536, "2": 2048, "3": 1024}


def test_a_lazy_layer_with_loaded_weights_is_still_one():
    """In its first call it takes the class Linear, which would drop the adapter without a word."""
    trained = linears()
    trained(torch.randn(8, 12))
    model = linears()
    model.load_state_dict(trained.state_dict())
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    assert sparsifier.skipped["0"].startswith(REASON)
    with pytest.raises(
        ValueError, match=f"'0' is named by `include` but cannot be masked: {REASON}"
    ):
        NMSparsifier(linears(), include="0").attach()
    # After a batch it is an ordinary layer.
    sparsifier.detach()
    model(torch.randn(8, 12))
    assert list(NMSparsifier(model, "2:4", "sr-ste").attach().layers) == ["0", "2"]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = linears()

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_fit_with_a_lazy_layer_resumes(tmp_path):
    pl.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(32, 12), torch.randint(0, 8, (32,))), 8)
    ends = {}
    for stop in (1, 2):
        path = tmp_path / "first.ckpt"
        model = Module()
        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            max_epochs=stop,
            callbacks=[NMSparsityCallback("2:4")],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, data, ckpt_path=path if stop == 2 else None)
            trainer.save_checkpoint(path)
        ends[stop] = verify(path)
        assert type(model.net[0]) is nn.Linear
    for verification in ends.values():
        assert verification.ok
        assert [verdict.key for verdict in verification.verdicts] == ["net.2.weight"]
