"""The models of the demo and of the studies: they learn, their shapes, and how their learning rates go."""

import math
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from lightning_nm.demo import GPT, Digits, HelpTopics, ResidualCNN
from lightning_nm.demo.learning_rate import warmup_cosine
from studies.models import MLP, MobileCNN, TinyTransformer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def fit(model, data, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **options)
    trainer.fit(model, data)
    return trainer


def cnn():
    return ResidualCNN(width=16)


def mlp():
    return MLP(pixels=64, width=64, lr=3e-3)


@pytest.mark.parametrize("make", [cnn, mlp])
def test_a_classifier_learns_digits(make):
    seed_everything(0, verbose=False)
    model = make()
    trainer = fit(model, Digits(), max_epochs=6)
    metrics = trainer.callback_metrics
    assert {"train_loss", "val_loss", "val_acc"} <= set(metrics)
    assert metrics["val_acc"] > 0.9
    tested = trainer.test(model, Digits(), verbose=False)[0]
    assert tested["test_acc"] == pytest.approx(trainer.callback_metrics["test_acc"].item())


def test_a_transformer_learns_text_and_does_not_look_ahead():
    seed_everything(0, verbose=False)
    model = TinyTransformer(depth=1, dim=32, lr=0.01)
    metrics = fit(model, HelpTopics(train_size=4800), max_epochs=1).callback_metrics
    assert metrics["val_loss"] < 3.2  # log(256) is 5.5, the entropy of single bytes about 3.3
    bits = metrics["val_loss"].item() / math.log(2)
    assert metrics["val_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    tokens = torch.randint(0, 256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model.eval()(tokens)[:, :12], model(changed)[:, :12])


@pytest.mark.parametrize(("width", "depth", "channels"), [(16, 1, 1), (32, 2, 3)])
def test_cnn_channels_fit_every_pattern(width, depth, channels):
    model = ResidualCNN(in_channels=channels, num_classes=7, width=width, depth=depth)
    assert model(torch.rand(2, channels, 12, 12)).shape == (2, 7)
    inner = [m for m in model.stages.modules() if isinstance(m, nn.Conv2d)]
    assert len(inner) == 6 * depth + 2
    assert all(c.in_channels % 16 == 0 and c.out_channels % 16 == 0 for c in inner)


def test_a_mobile_cnn_takes_images():
    assert MobileCNN(width=16)(torch.rand(2, 1, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ResidualCNN, {"width": 18}, "width must be a multiple of 4"),
        (ResidualCNN, {"depth": 0}, "depth must be at least 1"),
        (ResidualCNN, {"warmup": -0.1}, r"warmup=-0\.1 must be a fraction of the steps"),
        (MLP, {"width": 24}, "width must be a multiple of 16"),
        (MLP, {"depth": 0}, "depth must be at least 1"),
        (MLP, {"warmup": 1.0}, r"warmup=1\.0 must be a fraction of the steps"),
        (TinyTransformer, {"dim": 40}, "dim must be a multiple of 16"),
        (TinyTransformer, {"dim": 64, "heads": 5}, "of heads=5"),
        (TinyTransformer, {"warmup": 1.0}, r"warmup=1\.0 must be a fraction of the steps"),
        (GPT, {"warmup_steps": 0}, "warmup_steps"),
        (GPT, {"block_lr": 0.0}, "block_lr"),
    ],
)
def test_bad_arguments(model, options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="9 tokens, but context=8"):
        TinyTransformer(context=8)(torch.zeros(1, 9, dtype=torch.long))


def rates(total, steps, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, total, **options)
    for _ in range(steps):
        yield schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()


def test_the_rate_warms_up_and_falls_along_a_cosine():
    found = list(rates(100, 100))
    assert found[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert all(a > b for a, b in pairwise(found[5:]))
    assert found[-1] < 1e-3
    assert set(rates(math.inf, 9)) == {1.0}
    assert list(rates(math.inf, 6, warmup_steps=4)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "model",
    [ResidualCNN(width=16, warmup=0.5), MLP(width=16, warmup=0.5), TinyTransformer(warmup=0.5)],
)
def test_the_warmup_is_a_share_of_the_steps(model):
    model.trainer = Trainer(accelerator="cpu", logger=False, max_steps=20)
    model.trainer.fit_loop.setup_data = lambda: None  # the plan is max_steps; there is no data
    schedule = model.configure_optimizers()["lr_scheduler"]["scheduler"]
    assert set(schedule.base_lrs) == {model.lr}
    found = [schedule.lr_lambdas[0](step) for step in range(11)]
    assert found == pytest.approx([*(n / 10 for n in range(1, 11)), 1.0])


@pytest.mark.parametrize("block_lr", [1.0, 4.0])
def test_a_gpt_decays_matrices_and_its_blocks_have_a_learning_rate_of_their_own(block_lr):
    model = GPT(context=16, dim=32, depth=1, heads=2, lr=1e-3, block_lr=block_lr, warmup_steps=1)
    data = HelpTopics(context=16, batch_size=2)
    trainer = fit(model, data, max_steps=1, limit_val_batches=0)
    groups = trainer.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert [group["initial_lr"] for group in groups] == [block_lr * 1e-3, 1e-3, 1e-3]
    blocks, head, _ = (group["params"] for group in groups)
    assert [p.ndim for p in blocks] == [2] * 4
    assert head == [model.head.weight]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
