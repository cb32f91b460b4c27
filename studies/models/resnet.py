"""ResNet-50 with the training recipe of the N:M papers."""

import difflib
import math
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_nm.demo.cnn import Classifier
from lightning_nm.demo.learning_rate import warmup_cosine

BLOCKS = (3, 4, 6, 3)
"""Bottlenecks of the four stages."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 convolution has the stride (version 1.5)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 width, H / stride, W / stride]`."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        shortcut = x
        if self.downsample is not None:
            shortcut = cast("Tensor", self.downsample(x))
        return F.relu(y + shortcut)


class ResNet50(Classifier):
    """ResNet-50 (He et al., 2015, arXiv:1512.03385) in version 1.5, with torchvision's names of the parameters.

    A state dict of torchvision's `resnet50` loads into it as it is. It has 25,557,032 parameters for 1000 classes, and
    4.09e9 multiply-adds for an image of 224 x 224 pixels.

    Trained by SGD with momentum; the learning rate rises linearly for `warmup_epochs` and falls to zero on a half
    cosine, step by step. Logs `train_loss`, `val_loss`, `val_acc`, `test_loss` and `test_acc`.

    Args:
        num_classes: Number of classes.
        lr: Peak learning rate.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty of SGD.
        no_decay: Globs over names of parameters without weight decay; `*bn*` are the batch norms but for those of the
            shortcuts, which are named `*downsample.1*`.
        label_smoothing: Fraction of the training label that is spread over all classes.
        warmup_epochs: Epochs of the warm-up.
        image_size: Pixels of an image's side in `example_input_array`; the model takes any size.

    Raises:
        ValueError: If `label_smoothing` is not within [0, 1], `warmup_epochs` is negative, or a glob of `no_decay`
            matches no parameter.

    Example:
        >>> ResNet50(num_classes=10).eval()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        num_classes: int = 1000,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        no_decay: list[str] | None = None,
        label_smoothing: float = 0.0,
        warmup_epochs: float = 5,
        image_size: int = 224,
    ) -> None:
        super().__init__(num_classes, label_smoothing)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must lie within [0, 1], got {label_smoothing}")
        if not 0 <= warmup_epochs < math.inf:
            raise ValueError(
                f"warmup_epochs must be a number of epochs, 0 or more, got {warmup_epochs}"
            )
        self.save_hyperparameters()
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.no_decay = no_decay or []
        self.warmup_epochs = warmup_epochs
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.example_input_array = torch.zeros(
            1, 3, image_size, image_size, dtype=self.conv1.weight.dtype
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for number, blocks in enumerate(BLOCKS):
            width = 64 * 2**number
            stage = nn.Sequential()
            for block in range(blocks):
                # The first block of a stage halves the image, but for the first stage, after the pooling.
                halves = number > 0 and block == 0
                stage.append(Bottleneck(inputs, width, stride=2 if halves else 1))
                inputs = width * Bottleneck.expansion
            setattr(self, f"layer{number + 1}", stage)
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self._without_decay()  # refuses globs that match nothing

    def forward(self, x: Tensor) -> Tensor:
        """Images `[B, 3, H, W]` to logits `[B, num_classes]`."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.maxpool(y)
        for number in range(len(BLOCKS)):
            stage = getattr(self, f"layer{number + 1}")
            y = stage(y)
        return self.fc(y.mean(dim=(2, 3)))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """SGD in two groups, with and without weight decay, under a warm-up and a half cosine."""
        without_decay = self._without_decay()
        decayed = []
        others = []
        for name, parameter in self.named_parameters():
            if name in without_decay:
                others.append(parameter)
            else:
                decayed.append(parameter)
        groups: list[dict[str, Any]] = [{"params": decayed}]
        if others:
            groups.append({"params": others, "weight_decay": 0.0})
        optimizer = torch.optim.SGD(groups, self.lr, self.momentum, weight_decay=self.weight_decay)
        steps = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(optimizer, steps, warmup_steps=self._warmup_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _warmup_steps(self) -> int:
        if not self.warmup_epochs:
            return 0
        batches = self.trainer.num_training_batches
        if not math.isfinite(batches):
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} needs training data with a length: set it to 0"
            )
        steps_per_epoch = math.ceil(batches / self.trainer.accumulate_grad_batches)
        return round(self.warmup_epochs * steps_per_epoch)

    def _without_decay(self) -> set[str]:
        """The names of the parameters that the globs of `no_decay` match."""
        names = [name for name, _ in self.named_parameters()]
        found: set[str] = set()
        for glob in self.no_decay:
            matches = {name for name in names if fnmatchcase(name, glob)}
            if not matches:
                close = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
                raise ValueError(
                    f"no_decay: '{glob}' matches no parameter; they are named like {', '.join(close)}"
                )
            found |= matches
        return found
