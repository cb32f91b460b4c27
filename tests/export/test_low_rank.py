"""Low-rank adapters after a training: in fits and evaluations, merged, dropped, saved, loaded and exported."""

import copy
import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_nm as nm
from lightning_nm import functional as nmf
from lightning_nm.commands.export.command import main
from lightning_nm.demo import ResumableDataModule
from lightning_nm.export import read_checkpoint, verify
from lightning_nm.export.low_rank import factors_of, merge_into
from lightning_nm.export.sources import Source
from lightning_nm.nn.products.low_rank import low_rank_modules, put_low_rank
from tests.support.lightning_models import SaveAt, make_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You passed in a `val_dataloader` but have no `validation_step`",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self(x) - x[:, :8]).square().mean()

    def test_step(self, batch, batch_idx):
        self.losses.append(self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return [tensor[indices] for tensor in self.tensors]


class Data(ResumableDataModule):
    """In an order that resumes."""

    def __init__(self):
        super().__init__(8)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
        self.train_set = self.test_set = Rows(x)

    def test_dataloader(self):
        return DataLoader(TensorDataset(*self.test_set.tensors), batch_size=8)


def callback(**options):
    method = nm.SLoPe(adapters={"rank": 2, "last": 0.5})
    return nm.NMSparsityCallback(
        "2:4", method, skip_first_last=False, show_tables=False, monitor=None, **options
    )


def fit(path, *others, seed=0, ckpt_path=None, nm_callback=None):
    """Eight steps, of which the last four have adapters."""
    torch.manual_seed(seed)
    model = Net()
    trainer = make_trainer(path, [*others, nm_callback or callback()])
    trainer.fit(model, Data(), ckpt_path=ckpt_path)
    return model, trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model after its fit, and a checkpoint of it."""
    path = tmp_path_factory.mktemp("trained")
    model, trainer = fit(path)
    trainer.save_checkpoint(path / "last.ckpt")
    return model, path / "last.ckpt"


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained[0])


def weights_of(checkpoint):
    fresh = Net()
    fresh.load_state_dict(read_checkpoint(checkpoint)[0])
    return fresh


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def test_the_model_has_them_after_fit_and_its_state_dict_has_not(model, trained):
    assert list(low_rank_modules(model)) == ["net.0", "net.2"]
    assert list(model.state_dict()) == list(Net().state_dict())
    assert verify(trained[1]).ok
    plain = weights_of(trained[1])
    assert not torch.allclose(plain(X), model(X))
    assert nm.load_adapters(plain, trained[1]) == ["net.0", "net.2"]
    torch.testing.assert_close(plain(X), model(X))


@pytest.mark.parametrize("batch", [3, 4, 6])
def test_a_resumed_fit_ends_with_the_same_bits(tmp_path, batch, model):
    fit(tmp_path, SaveAt(tmp_path / "mid.ckpt", batch))
    resumed, _ = fit(tmp_path, seed=7, ckpt_path=tmp_path / "mid.ckpt")
    assert torch.equal(resumed(X), model(X))


def test_an_evaluated_checkpoint_has_its_own(tmp_path, trained):
    save = SaveAt(tmp_path / "early.ckpt", 2)  # before the adapters
    nm_callback = callback()
    model, trainer = fit(tmp_path, save, nm_callback=nm_callback)
    for file, names in (("early.ckpt", []), ("last.ckpt", ["net.0", "net.2"])):
        path = tmp_path / file
        if file == "last.ckpt":
            path = trained[1]
        trainer.test(model, Data(), ckpt_path=path, verbose=False, weights_only=True)
        assert list(low_rank_modules(model)) == names
        plain = weights_of(path)
        if names:
            nm.load_adapters(plain, path)
        torch.testing.assert_close(model(X), plain(X))


class FirstLeft(pl.Callback):
    """L of the first layer at the first batch of a fit, and whether the layer adds its product."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 0:
            sparsity = next(c for c in trainer.callbacks if isinstance(c, nm.NMSparsityCallback))
            layer = sparsity.sparsifier.layers["net.0"]
            self.left = layer.spec.method.low_rank(layer)[0].detach().clone()


def test_a_second_fit_continues_with_them(tmp_path):
    nm_callback, look = callback(), FirstLeft()
    model, _ = fit(tmp_path, nm_callback=nm_callback)
    before = model.net[0].low_rank.left.clone()
    with pytest.warns(UserWarning, match=r"scheduled at steps \(0, 4\), which stays"):
        make_trainer(tmp_path, [look, nm_callback], max_epochs=1).fit(model, Data())
    assert torch.equal(look.left, before)
    assert not torch.equal(model.net[0].low_rank.left, before)


def test_averaged_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"WeightAveraging averages .*layer 'net\.0'"):
        fit(tmp_path, WeightAveraging())


def test_an_unknown_length_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, [callback()], max_epochs=-1)
    with pytest.raises(ValueError, match=r"last 0\.5 of the planned .*max_steps"):
        trainer.fit(Net(), Data())


def test_merged_weights_are_dense_and_compute_the_same(model):
    y = model(X)
    assert nm.merge_adapters(model) == ["net.0", "net.2"]
    torch.testing.assert_close(model(X), y)
    assert not nmf.is_nm(model.net[0].weight, "2:4", dim=1)
    assert not low_rank_modules(model)
    assert nm.merge_adapters(model) == []


def test_dropped_ones_leave_the_sparse_weights(model, trained):
    assert nm.drop_adapters(model) == ["net.0", "net.2"]
    assert torch.equal(model(X), weights_of(trained[1])(X))


def test_packed_layers_keep_them_beside(model, tmp_path):
    y = model(X)
    packed = nm.pack(model, kernels="reference")
    torch.testing.assert_close(packed(X), y)
    with pytest.raises(ValueError, match=r"2 layers, such as 'net\.0'.*save_adapters"):
        nm.save_packed(packed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"weight of 'net\.0' is packed"):
        nm.merge_adapters(packed)
    nm.save_adapters(packed, tmp_path / "adapters")
    nm.drop_adapters(packed)
    nm.save_packed(packed, tmp_path / "model.safetensors")
    loaded = nm.load_packed(Net(), tmp_path / "model.safetensors", kernels="reference")
    nm.load_adapters(loaded, tmp_path / "adapters")
    torch.testing.assert_close(loaded(X), y)


def test_peft_reads_the_saved_ones(model, tmp_path):
    peft = pytest.importorskip("peft")
    y = model(X)
    nm.save_adapters(model, tmp_path)
    nm.drop_adapters(model)
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path))
    torch.testing.assert_close(adapted(X), y)


def test_calls_that_cannot_work_are_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="Net has no low-rank adapters to save"):
        nm.save_adapters(Net(), tmp_path)
    torch.save(Net().state_dict(), tmp_path / "plain.pt")
    with pytest.raises(ValueError, match="holds no low-rank adapters"):
        nm.load_adapters(Net(), tmp_path / "plain.pt")
    masked = nm.NMSparsifier(Net(), "2:4", "ste", skip_first_last=False).attach().model
    for call in (nm.merge_adapters, lambda m: nm.load_adapters(m, trained[1])):
        with pytest.raises(ValueError, match=r"masks are installed in 'net\.0'.*after fit"):
            call(masked)


@pytest.mark.parametrize(("out", "columns"), [(8, 4), (4, 4)])
def test_half_precision_is_merged_by_one_rounding(out, columns):
    module = nn.Linear(columns, out, bias=False).bfloat16()
    before = module.weight.double()
    left, right = torch.randn(out, 3).bfloat16(), torch.randn(3, columns).bfloat16()
    put_low_rank(module, (left, right))
    nm.merge_adapters(module)
    expected = before + left.double() @ right.double()
    torch.testing.assert_close(module.weight.double(), expected, rtol=2**-7, atol=1e-6)


def exported(checkpoint, output, *options):
    return main([str(checkpoint), "-o", str(output), *options])


def test_an_export_asks_what_becomes_of_them(trained, tmp_path, capsys):
    output = tmp_path / "model.safetensors"
    assert exported(trained[1], output) == 2
    assert "--adapters drop, beside or merge" in capsys.readouterr().err
    assert exported(trained[1], output, "--adapters", "merge") == 2
    assert "--adapters merge is for --to torch, onnx, pt2, not packed" in capsys.readouterr().err
    assert not output.exists()
    torch.save(Net().state_dict(), tmp_path / "plain.pt")
    assert exported(tmp_path / "plain.pt", output, "--to", "torch", "--adapters", "drop") == 2
    assert "has no low-rank adapters" in capsys.readouterr().err


def test_an_export_drops_merges_or_writes_them(trained, model, tmp_path, capsys):
    y = model(X)
    output = tmp_path / "model.safetensors"
    assert exported(trained[1], output, "--adapters", "drop") == 0
    assert not (tmp_path / "model.adapters").exists()
    assert exported(trained[1], output, "--adapters", "beside") == 0
    assert "model.adapters" in capsys.readouterr().out.replace("\n", "")
    config = json.loads((tmp_path / "model.adapters" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 2
    packed = nm.load_packed(Net(), output, kernels="reference")
    nm.load_adapters(packed, tmp_path / "model.adapters")
    torch.testing.assert_close(packed(X), y)

    merged = tmp_path / "merged.pt"
    assert exported(trained[1], merged, "--to", "torch", "--adapters", "merge") == 0
    fresh = Net()
    fresh.load_state_dict(torch.load(merged, weights_only=True))
    torch.testing.assert_close(fresh(X), y)


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["beside", "merge"])
def test_a_graph_computes_what_was_trained(trained, model, tmp_path, fate):
    options = ["--to", "pt2", "--model", f"{Net.__module__}.Net", "--input", "4x16"]
    assert exported(trained[1], tmp_path / "model.pt2", *options, "--adapters", fate) == 0
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(X), model(X))


def test_a_square_transposed_weight_is_merged_as_it_lies():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(conv1d(8, 8)).double()  # shapes do not tell [in, out] from [out, in]
    put_low_rank(model[0], (torch.randn(8, 2).double(), torch.randn(2, 8).double()))
    x = torch.randn(3, 8).double()
    expected = model(x)
    nm.merge_adapters(model)
    torch.testing.assert_close(model(x), expected)


def test_a_square_transposed_weight_of_a_checkpoint_is_merged_as_it_lies():
    torch.manual_seed(0)
    weight, left, right = torch.randn(8, 8), torch.randn(8, 2), torch.randn(2, 8)
    layer = {"layout": "transposed", "parameters": {"adapter_left": left, "adapter_right": right}}
    source = Source(Path("last.ckpt"), {"0.weight": weight}, [{"layers": {"0": layer}}])
    found = merge_into(source, factors_of(source.states)).weights["0.weight"]
    torch.testing.assert_close(found, weight + (left @ right).t())
