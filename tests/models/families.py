"""Small models of the families that people train, from configurations alone: nothing is downloaded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.tiny import tiny

VOCABULARY, TOKENS, WIDTH, CLASSES, SIDE = 64, 16, 32, 8, 32
ROUTER = {"router_aux_loss_coef": 0.01, "output_router_logits": True}


def _tokens(count, *, labels):
    ids = torch.randint(3, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": labels(row)} for row in ids]


def _images(count, key):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return [{key: image, "labels": torch.tensor(k % CLASSES)} for k, image in enumerate(images)]


def _texts(count):
    return _tokens(count, labels=lambda row: row)


def _sentences(count):
    return _tokens(count, labels=lambda row: row[0] % CLASSES)


def _hugging_face(family, **settings):
    return lambda: tiny(family, width=WIDTH, layers=3, heads=4, **settings)


def timm():
    """The package timm.

    It reads torchvision, whose compiled operators fit one build of torch alone. Models need none of them, so they are
    not registered. Both are looked for next to the environment, too, see the Makefile.
    """
    if "timm" in sys.modules:
        return sys.modules["timm"]
    beside = str(Path(sys.prefix) / "vision")
    with mock.patch.object(sys, "path", [*sys.path, beside]):
        for name in ("torchvision", "timm"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
        with mock.patch.object(
            torch.library, "register_fake", return_value=lambda function: function
        ):
            importlib.import_module("torchvision")
        importlib.import_module("timm.models")
        return importlib.import_module("timm")


class WithLoss(torch.nn.Module):
    """A timm model with the call of a Hugging Face one."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.model(images), labels)}


def _timm_vit():
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 4}
    return WithLoss(timm().models.VisionTransformer(**sizes, num_classes=CLASSES))


def _timm_resnet():
    resnet = timm().models.resnet
    return WithLoss(
        resnet.ResNet(
            resnet.BasicBlock, (1, 1, 1, 1), num_classes=CLASSES, channels=(16, 32, 32, 64)
        )
    )


FAMILIES = {
    "gpt2": (_hugging_face("gpt2", vocab_size=VOCABULARY), _texts),
    "llama": (_hugging_face("llama", vocab_size=VOCABULARY), _texts),
    "bert": (_hugging_face("bert", vocab_size=VOCABULARY, num_labels=CLASSES), _sentences),
    "vit": (
        _hugging_face("vit", image_size=SIDE, patch_size=8, num_labels=CLASSES),
        lambda count: _images(count, "pixel_values"),
    ),
    "t5": (_hugging_face("t5", vocab_size=VOCABULARY, num_layers=2), _texts),
    "qwen3-moe": (_hugging_face("qwen3-moe", vocab_size=VOCABULARY, **ROUTER), _texts),
    "mixtral": (_hugging_face("mixtral", vocab_size=VOCABULARY, **ROUTER), _texts),
    "mamba": (_hugging_face("mamba", vocab_size=VOCABULARY), _texts),
    "timm-vit": (_timm_vit, lambda count: _images(count, "images")),
    "timm-resnet": (_timm_resnet, lambda count: _images(count, "images")),
}
"""Of each family, what makes a model and what makes examples."""

EXCLUDE = {"mamba": "*.dt_proj"}
"""Layers whose weights a model reads without calling them: masking these is an error."""


WHOLE = {
    "timm-vit": lambda: timm().models.VisionTransformer(),
    "timm-resnet": lambda: timm().models.resnet.ResNet(
        timm().models.resnet.Bottleneck, (3, 4, 6, 3)
    ),
}
"""Families whose default is not that of a Hugging Face configuration: ViT-B/16 and ResNet-50."""


def whole(family):
    """A model of the family's default size, without memory."""
    with torch.device("meta"):
        if family in WHOLE:
            return WithLoss(WHOLE[family]())
        model = type(FAMILIES[family][0]())
        return model(model.config_class())


class Trained(pl.LightningModule):
    """A LightningModule as people write it around such a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def make(family):
    """A new model of a family, always with the same weights, in a LightningModule."""
    torch.manual_seed(0)
    return Trained(FAMILIES[family][0]())


def loader(family, count=8):
    """Its examples in batches of four, in a fixed order: two batches an epoch."""
    return DataLoader(FAMILIES[family][1](count), 4)
