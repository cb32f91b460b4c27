"""ResNet-50 and its recipe: parameters, multiply-adds, weight decay, warm-up. Nothing of it needs torchvision."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_nm.training.macs import forward_macs
from studies.data import ImageNet
from studies.models import ResNet50


def test_parameters_and_multiply_adds_are_those_of_torchvision():
    """25,557,032 parameters, 4.09e9 multiply-adds at 224 pixels and these names, as it documents its resnet50."""
    with torch.device("meta"):
        model = ResNet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    macs = forward_macs(model, torch.zeros(1, 3, 224, 224, device="meta"))
    assert sum(macs.values()) == 4_089_184_256
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 53 + 2 + 53 * 5
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.downsample.1.running_mean"] == (256,)
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["layer4.2.bn3.num_batches_tracked"] == ()
    assert shapes["fc.weight"] == (1000, 2048)


def test_forward_and_initial_variance():
    torch.manual_seed(0)
    model = ResNet50(num_classes=5)
    assert model.eval()(torch.randn(2, 3, 64, 48)).shape == (2, 5)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


def small(**options):
    trainer = Trainer(
        max_epochs=4,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    with torch.device("meta"):
        model = ResNet50(**options)
    data = ImageNet(synthetic=40, image_size=8, batch_size=4)
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model, datamodule=data)
    return model


@pytest.mark.parametrize(
    ("no_decay", "undecayed"),
    [(None, 0), (["*bn*"], 2 * 49), (["*bn*", "*downsample.1*"], 2 * 53), (["fc.bias"], 1)],
)
def test_weight_decay_with_and_without_norms(no_decay, undecayed):
    model = small(no_decay=no_decay, weight_decay=3e-5)
    groups = model.configure_optimizers()["optimizer"].param_groups
    counts = {group["weight_decay"]: len(group["params"]) for group in groups}
    expected = {3e-5: 161 - undecayed}
    assert counts == (expected | {0.0: undecayed} if undecayed else expected)
    if no_decay == ["*bn*", "*downsample.1*"]:
        (without,) = (group["params"] for group in groups if group["weight_decay"] == 0)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert {id(p) for p in without} == {id(p) for norm in norms for p in norm.parameters()}


def test_the_rate_rises_for_epochs_and_falls_to_zero():
    model = small(warmup_epochs=2, lr=0.5)
    found = model.configure_optimizers()
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:20] == pytest.approx([0.5 * (step + 1) / 20 for step in range(20)])
    assert rates[20:] == pytest.approx([0.25 * (1 + math.cos(math.pi * k / 20)) for k in range(20)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"no_decay": ["*bm1*"]},
            "no_decay: '\\*bm1\\*' matches no parameter; they are named like .*bn1",
        ),
        ({"label_smoothing": 1.5}, "label_smoothing must lie within \\[0, 1\\], got 1.5"),
        ({"warmup_epochs": -1}, "warmup_epochs must be a number of epochs, 0 or more, got -1"),
    ],
)
def test_bad_arguments(options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        ResNet50(**options)
