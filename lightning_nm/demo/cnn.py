"""A small residual CNN for the demo image sets, and what models that classify images share."""

from typing import ClassVar, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_nm.demo.data import check_positive
from lightning_nm.demo.learning_rate import check_warmup, warmup_cosine

Batch = tuple[Tensor, Tensor]
"""Images, float32 `[B, C, H, W]`, and labels, int64 `[B]`."""


class Classifier(LightningModule):
    """Trains by cross entropy; logs `train_loss`, `val_loss`, `val_acc`, `test_loss` and `test_acc`.

    Args:
        num_classes: Number of classes.
        label_smoothing: Fraction of the training label that is spread over all classes.
    """

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        # The fraction of all images; torchmetrics' own choice is the mean over the classes.
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of a batch with smoothed labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, stage: str = "val") -> None:
        """Log `val_loss` and `val_acc`."""
        images, labels = batch
        logits = self(images)
        # Without label smoothing, so that models that are trained with and without it can be compared.
        loss = F.cross_entropy(logits, labels)
        # Lightning averages over the batches by their sizes, as the last one may be smaller, and over all processes.
        self.log(f"{stage}_loss", loss, batch_size=len(labels), sync_dist=True)
        # Lightning computes and resets a metric object at the end of the epoch, over all processes.
        accuracy = getattr(self, f"{stage}_acc")
        accuracy.update(logits, labels)
        self.log(f"{stage}_acc", accuracy, prog_bar=True, batch_size=len(labels))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `test_loss` and `test_acc`."""
        self.validation_step(batch, batch_idx, "test")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut that is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        # The batch norm that follows subtracts the mean, so that a bias would have no effect.
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, outputs, H/stride, W/stride]`."""
        shortcut = cast("Tensor", self.shortcut(x))
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + shortcut)


class ResidualCNN(Classifier):
    """A convolutional stem, three stages of residual blocks at 1x, 2x and 4x the width, average pooling, a linear head.

    Trained by SGD with momentum; the learning rate warms up and falls to zero on a half cosine.
    Patterns whose M divides the width fit everywhere but in the stem: 2:4 up to 1:16 for a multiple of 16. Logs
    `train_loss`, `val_loss`, `val_acc`, `test_loss` and `test_acc`.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        width: Channels of the first stage; a multiple of 4.
        depth: Residual blocks in each stage.
        lr: Peak learning rate.
        weight_decay: L2 penalty of SGD, on all parameters.
        momentum: Momentum of SGD.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).

    Raises:
        ValueError: If `width` is not a multiple of 4, `depth` is below 1 or `warmup` is out of range.

    Example:
        >>> ResidualCNN(width=16)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    block: ClassVar[type[nn.Module]] = ResidualBlock
    """What stages are made of, by input channels, output channels and stride."""

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        width: int = 32,
        depth: int = 1,
        lr: float = 0.1,
        weight_decay: float = 5e-4,
        momentum: float = 0.9,
        warmup: float = 0.05,
    ) -> None:
        super().__init__(num_classes)
        if width < 4 or width % 4:
            raise ValueError(f"width must be a multiple of 4, so that N:M blocks fit, got {width}")
        check_positive(depth=depth)
        check_warmup(warmup)
        # `lightning-nm export --model` creates the model with the arguments that are in the checkpoint.
        self.save_hyperparameters()
        self.warmup = warmup
        self.lr = lr
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.stages = nn.Sequential()
        inputs = width
        for outputs in (width, 2 * width, 4 * width):
            stage = nn.Sequential()
            for _ in range(depth):
                # The first block of a wider stage halves the image.
                stage.append(self.block(inputs, outputs, 1 if inputs == outputs else 2))
                inputs = outputs
            self.stages.append(stage)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[B, in_channels, H, W]` to logits `[B, num_classes]`."""
        x = self.stem(x)
        # Steps on a CPU were measured to be 10 to 15 % faster in this memory order.
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.stages(x)
        return self.head(x.mean(dim=(2, 3)))  # over all positions, so any image size fits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """SGD with momentum under a warm-up and a half cosine."""
        optimizer = torch.optim.SGD(
            self.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay
        )
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches, self.warmup)
        # Lightning would step it once in an epoch.
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
