"""Lazy layers stay dense, with the reason, wherever parameters are counted or shown."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_nm import NMSparsifier, NMSparsityCallback, pack, prune
from lightning_nm.callbacks.tables import layer_rows, layers_markdown, print_layers
from lightning_nm.export import verify
from lightning_nm.training.macs import forward_macs
from lightning_nm.training.statistics import share_of_products
from tests.support.lightning_models import Data, make_trainer, new_model

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

REASON = "lazy: it has its shape and class only after its first batch: run one before the training"


def linears():
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 8))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.LazyConv2d(8, 3))


@pytest.mark.parametrize(
    ("make", "shape", "lazy", "masked", "known"),
    [
        (linears, (8, 12), "0", "2", "16x12"),
        (convolutions, (2, 3, 16, 16), "2", "1", "8x8x3x3"),
    ],
)
def test_a_lazy_layer_stays_dense_in_a_plain_loop(make, shape, lazy, masked, known):
    model = make()
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    assert list(sparsifier.layers) == [masked]
    assert sparsifier.skipped[lazy].startswith(REASON)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for expected in ("?", known, known):
        print_layers(sparsifier, Console(width=100, file=io.StringIO()))
        assert {row[0]: row[1] for row in layer_rows(sparsifier)}[lazy] == expected
        assert REASON in layers_markdown(sparsifier, None)
        sparsifier.shares(), sparsifier.flops_ratios()
        share_of_products(model, sparsifier.layers.values())
        model(torch.randn(shape)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert sparsifier.macs[lazy] > 0
    assert type(model[int(lazy)]) in (nn.Linear, nn.Conv2d), "no adapter"
    assert model[int(lazy)].weight.all()


@pytest.mark.parametrize("how", [(), ("wanda", [torch.randn(8, 12)])])
def test_other_ways_leave_it_dense_too(how):
    model = linears()
    result = prune(model, "2:4", *how)
    assert result.layers == ["2"]
    assert result.skipped["0"].startswith(REASON)
    if how:  # an inference model has weights: packing comes after a batch
        pack(model, kernels="reference")
    assert forward_macs(linears(), torch.randn(8, 12)) == {"0": 1536, "2": 2048, "3": 1024}


def test_a_lazy_layer_with_loaded_weights_is_still_one():
    """In its first call it takes the class Linear, which would drop the adapter without a word."""
    trained, model = linears(), linears()
    trained(torch.randn(8, 12))
    model.load_state_dict(trained.state_dict())
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    assert sparsifier.skipped["0"].startswith(REASON)
    named = f"'0' is named by `include` but cannot be masked: {REASON}"
    with pytest.raises(ValueError, match=named):
        NMSparsifier(linears(), method="bi-mask", include="0").attach()
    # After a batch it is an ordinary layer.
    sparsifier.detach()
    model(torch.randn(8, 12))
    assert list(NMSparsifier(model, "2:4", "sr-ste").attach().layers) == ["0", "2"]


def test_a_fit_with_a_lazy_layer_resumes(tmp_path):
    path = tmp_path / "first.ckpt"
    for epochs in (1, 2):
        model = new_model()
        model.net[6] = nn.LazyLinear(32)
        trainer = make_trainer(tmp_path, [NMSparsityCallback("2:4", "bi-mask")], max_epochs=epochs)
        trainer.fit(model, Data(), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        assert type(model.net[6]) is nn.Linear
        verification = verify(path)
        assert verification.ok
        assert [verdict.key for verdict in verification.verdicts] == ["net.3.weight"]
