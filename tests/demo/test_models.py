import ast
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from torch import nn

import lightning_nm.demo
from lightning_nm.demo import GPT, Digits, HelpTopics, ResidualCNN
from lightning_nm.demo.schedule import warmup_cosine
from studies.models import MLP, MobileCNN, TinyTransformer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def fit(model, data, **kwargs):
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **kwargs,
    )
    trainer.fit(model, data)
    return trainer


@pytest.fixture(scope="session")
def trained_cnn():
    """A CNN after six epochs of digits, and its trainer."""
    seed_everything(0, verbose=False)
    model = ResidualCNN(width=16)
    return model, fit(model, Digits(), max_epochs=6)


@pytest.fixture(scope="session")
def trained_transformer():
    """A transformer after 150 steps of help text, and its trainer."""
    seed_everything(0, verbose=False)
    model = TinyTransformer(depth=1, dim=32, lr=0.01)
    return model, fit(model, HelpTopics(train_size=4800), max_epochs=1)


def test_cnn_learns_digits(trained_cnn):
    model, trainer = trained_cnn
    assert trainer.callback_metrics["val_acc"] > 0.95
    assert {"train_loss", "val_loss", "val_acc"} <= set(trainer.callback_metrics)
    tested = trainer.test(model, Digits(), verbose=False)[0]
    assert tested["test_acc"] == pytest.approx(trainer.callback_metrics["test_acc"].item())
    assert tested["test_acc"] > 0.95


def test_cnn_loads_from_its_checkpoint(trained_cnn, tmp_path):
    model, trainer = trained_cnn
    trainer.save_checkpoint(tmp_path / "cnn.ckpt")
    loaded = ResidualCNN.load_from_checkpoint(tmp_path / "cnn.ckpt", weights_only=True)
    images = torch.rand(5, 1, 8, 8)
    assert torch.equal(loaded.eval()(images), model.eval()(images))


@pytest.mark.parametrize(("width", "depth", "channels"), [(16, 1, 1), (32, 2, 3)])
def test_cnn_channels_fit_every_pattern(width, depth, channels):
    model = ResidualCNN(in_channels=channels, num_classes=7, width=width, depth=depth)
    assert model(torch.rand(2, channels, 12, 12)).shape == (2, 7)
    convolutions = [
        m for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and "stem" not in name
    ]
    assert len(convolutions) == 6 * depth + 2
    assert all(c.in_channels % 16 == 0 and c.out_channels % 16 == 0 for c in convolutions)


def test_an_mlp_learns_digits():
    model = MLP(pixels=64, width=64, lr=3e-3)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Digits())
    assert trainer.callback_metrics["val_acc"] > 0.9
    assert [layer.in_features for layer in model.hidden] == [64, 64, 64]


def test_transformer_learns_text(trained_transformer):
    _, trainer = trained_transformer
    metrics = trainer.callback_metrics
    assert metrics["val_loss"] < 3.2  # log(256) is 5.5, the entropy of single bytes about 3.3
    assert metrics["val_bits_per_byte"] == pytest.approx(
        metrics["val_loss"].item() / math.log(2), rel=1e-5
    )


def test_transformer_does_not_look_ahead(trained_transformer):
    model, _ = trained_transformer
    model.eval()
    tokens = torch.randint(0, 256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model(tokens)[:, :12], model(changed)[:, :12])


def test_transformer_is_built_of_plain_linear_layers():
    names = {
        name for name, m in TinyTransformer(depth=1).named_modules() if isinstance(m, nn.Linear)
    }
    assert names == {"blocks.0.qkv", "blocks.0.proj", "blocks.0.fc1", "blocks.0.fc2", "head"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResidualCNN(width=18), "width must be a multiple of 4"),
        (lambda: ResidualCNN(depth=0), "depth must be at least 1"),
        (lambda: MLP(width=24), "width must be a multiple of 16"),
        (lambda: MLP(depth=0), "depth must be at least 1"),
        (lambda: MLP(warmup=1.0), r"warmup=1\.0 must be a share of the steps"),
        (lambda: TinyTransformer(dim=40), "dim must be a multiple of 16"),
        (lambda: TinyTransformer(dim=64, heads=5), "of heads=5"),
        (lambda: TinyTransformer(warmup=1.0), r"warmup=1\.0 must be a share of the steps"),
        (lambda: ResidualCNN(width=16, warmup=-0.1), r"warmup=-0\.1 must be a share of the steps"),
        (
            lambda: TinyTransformer(context=8)(torch.zeros(1, 9, dtype=torch.long)),
            "9 tokens, but context=8",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedule():
    def rates(total):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = warmup_cosine(optimizer, total)
        for _ in range(100):
            yield scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()

    found = list(rates(100))
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5] == 1.0
    assert all(a > b for a, b in pairwise(found[5:]))
    assert found[-1] < 1e-3
    assert set(rates(math.inf)) == {1.0}


@pytest.mark.parametrize(
    ("model", "data"),
    [(ResidualCNN, Digits), (MobileCNN, Digits), (MLP, Digits), (TinyTransformer, HelpTopics)],
)
def test_command_line_reads_the_signatures(model, data, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own call
    cli = LightningCLI(
        model,
        data,
        run=False,
        args=["--model.lr=0.01", "--data.batch_size=16", "--data.seed=3"],
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"logger": False, "accelerator": "cpu"},
    )
    assert cli.model.lr == 0.01
    assert cli.datamodule.batch_size == 16


@pytest.mark.parametrize(
    "model",
    [
        ResidualCNN(width=16, warmup=0.5),
        MLP(width=16, warmup=0.5),
        TinyTransformer(dim=16, heads=2, warmup=0.5),
    ],
)
def test_the_warmup_is_a_share_of_the_steps(model):
    model.trainer = Trainer(
        accelerator="cpu", logger=False, max_steps=20, enable_checkpointing=False
    )
    model.trainer.fit_loop.setup_data = lambda: None  # the plan is max_steps; there is no data
    schedule = model.configure_optimizers()["lr_scheduler"]["scheduler"]
    (rate,) = set(schedule.base_lrs)
    assert [schedule.lr_lambdas[0](step) for step in range(11)] == pytest.approx(
        [*(n / 10 for n in range(1, 11)), 1.0]
    )
    assert rate == model.lr


def test_nothing_depends_on_the_rest_of_the_package():
    for path in Path(lightning_nm.demo.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            ours = {name for name in names if name.startswith("lightning_nm")} - {
                "lightning_nm.callbacks.rng_state"
            }
            assert all(name.startswith("lightning_nm.demo") for name in ours)


def test_gpt_decays_matrices_and_warms_up_without_a_plan():
    model = GPT(context=16, dim=32, depth=1, heads=2, warmup_steps=4)
    trainer = fit(model, HelpTopics(context=16, batch_size=2), max_steps=6, limit_val_batches=0)
    groups = trainer.optimizers[0].param_groups
    blocks, head, _ = groups
    assert {p.ndim for p in blocks["params"]} == {2}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert len(blocks["params"]) == 4
    assert head["params"] == [model.head.weight]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="warmup_steps"):
        GPT(warmup_steps=0)


def test_the_blocks_of_a_gpt_take_a_learning_rate_of_their_own():
    model = GPT(context=16, dim=32, depth=1, heads=2, lr=1e-3, block_lr=4.0, warmup_steps=1)
    trainer = fit(model, HelpTopics(context=16, batch_size=2), max_steps=1, limit_val_batches=0)
    blocks, head, others = trainer.optimizers[0].param_groups
    assert [group["initial_lr"] for group in (blocks, head, others)] == [4e-3, 1e-3, 1e-3]
    with pytest.raises(ValueError, match="block_lr"):
        GPT(block_lr=0.0)


def test_a_warmup_in_steps_needs_no_plan():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = warmup_cosine(optimizer, math.inf, warmup_steps=4)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
