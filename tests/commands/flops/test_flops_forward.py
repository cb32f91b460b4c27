"""The forward pass that is counted: without memory where that works, with memory elsewhere, always as it was before."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, NMSparsityCallback
from lightning_nm.commands.flops.counts import REST, layers_of
from lightning_nm.commands.flops.forward import first_forward, forward_of, plan_of
from lightning_nm.training.forwards import can_watch
from lightning_nm.training.macs import READ
from tests.support.lightning_models import Data, Net, make_trainer, new_model


class Reads(nn.Module):
    """Reads a value, which no tensor without memory has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.table = torch.ones(4)  # no buffer

    def forward(self, x, *, scale=1.0):
        y = self.linear(x * self.table * scale)
        return y if y.sum().item() < 1e9 else x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize(
    "given", [torch.ones(3, 4), (torch.ones(3, 4),), {"x": torch.ones(3, 4), "scale": 2.0}]
)
def test_a_forward_pass_with_memory(given):
    forward = forward_of(Reads(), given)
    assert dict(forward.macs) == {"linear": 3 * 4 * 8}
    assert forward.inputs == ("float32 [3, 4]",)


@pytest.mark.skipif(not can_watch(nn.Identity()), reason="modes prevent compilation in this torch")
def test_the_model_stays_as_it_was():
    model = Net()
    model.net[5].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    forward = forward_of(model, torch.zeros(2, 1, 8, 8))
    assert dict(forward.macs) == {
        "net.0": 2 * 64 * 16 * 9,
        "net.3": 2 * 16 * 16 * 16 * 9,
        "net.6": 2 * 8192,
        "net.8": 256,
    }
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_input_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"Reads does not take an input of float32 \[3, 5\]: .*"):
        forward_of(Reads(), torch.ones(3, 5))


@pytest.mark.parametrize("is_masked", [False, True])
def test_tied_weights_are_one_parameter(is_masked):
    """The product is that of the head; if the weight is masked, it is in both places."""
    model = Tied()
    forward = forward_of(model, torch.zeros(2, 5, dtype=torch.int64))
    sparsifiers = (
        [NMSparsifier(model, "2:4", "sr-ste", include=["embed", "head"]).attach()]
        if is_masked
        else []
    )
    rows = layers_of(model, forward.macs, sparsifiers)
    assert sum(row.parameters for row in rows) == 96
    assert sum(row.macs for row in rows) == 10 * 96
    head = next(row for row in rows if row.name == "head")
    assert (head.parameters, head.macs) == ((96, 960) if rows[0] is head else (0, 960))
    assert head.pattern == ("2:4" if is_masked else None)
    assert head.densities["paper"].forward == (0.5 if is_masked else 1.0)


class ReadsWeights(pl.LightningModule):
    """Multiplies by a layer's weight in its training step, outside of the calls of all modules."""

    def __init__(self):
        super().__init__()
        self.first, self.read, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def training_step(self, batch):
        hidden = nn.functional.linear(self.first(batch).relu(), self.read.weight)
        return self.last(hidden).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)


@pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_weight_that_other_code_reads_has_its_products(is_masked, tmp_path):
    model = ReadsWeights()
    forward, _ = first_forward(make_trainer(tmp_path), model, None)
    sparsifiers = [NMSparsifier(model, "2:4", "sr-ste").attach()] if is_masked else []
    rows = {row.name: row for row in layers_of(model, forward.macs, sparsifiers)}
    assert sum(row.macs for row in rows.values()) == 2 * (64 + 64 + 32)
    assert sum(row.parameters for row in rows.values()) == 64 + 8 + 64 + 8 + 32 + 4
    assert rows["read"].macs == (0 if is_masked else 2 * 64)
    if is_masked:
        # Masks do not reach these products: they are dense.
        read = rows["read" + READ]
        assert (read.pattern, read.parameters, read.macs) == (None, 0, 2 * 64)
        assert "without its mask" in read.why


def test_the_first_batch_and_the_plan(tmp_path):
    trainer = make_trainer(
        tmp_path, [NMSparsityCallback("2:4")], num_sanity_val_steps=0, accumulate_grad_batches=2
    )
    model, callbacks = new_model(), list(trainer.callbacks)
    before = {name: value.clone() for name, value in model.named_parameters()}
    forward, plan = first_forward(trainer, model, Data())
    assert forward.inputs == ("float32 [16, 1, 8, 8]", "int64 [16]")
    assert forward.macs == {
        name: 8 * macs for name, macs in forward_of(model, torch.zeros(2, 1, 8, 8)).macs.items()
    }
    assert plan.steps == 6
    assert len(plan.optimizers) == 1
    assert trainer.callbacks == callbacks
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert type(model.net[6]) is nn.Linear
    assert plan_of(make_trainer(tmp_path, limit_val_batches=0), model, Data()).steps == 12
    with pytest.raises(ValueError, match="ended before its first batch: see its max_steps"):
        plan_of(make_trainer(tmp_path, limit_train_batches=0), model, Data())


def test_the_rest_has_no_products():
    model = Net()
    rows = layers_of(model, forward_of(model, torch.zeros(2, 1, 8, 8)).macs)
    assert [row.name for row in rows] == ["net.0", "net.3", "net.6", "net.8", REST]
    assert rows[-1].parameters == 16 + 2 * 16 + 16 + 32 + 4
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
