"""A multilayer perceptron for the demo image sets."""

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_nm.demo.cnn import Classifier
from lightning_nm.demo.learning_rate import check_warmup, warmup_cosine


class MLP(Classifier):
    """Hidden linear layers of one width with ReLU between them, and a linear head.

    Trained by AdamW; the learning rate warms up and falls to zero on a half cosine. The number of pixels and the width
    are multiples of 16 for 28x28 images, so 2:4 up to 1:16 fit every layer. Logs `train_loss`, `val_loss`, `val_acc`,
    `test_loss` and `test_acc`.

    Args:
        pixels: Values of an image.
        num_classes: Number of classes.
        width: Features of a hidden layer; a multiple of 16.
        depth: Hidden layers.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of matrices.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).

    Raises:
        ValueError: If `width` is not a multiple of 16, `depth` is below 1 or `warmup` is out of range.

    Example:
        >>> MLP(width=32)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        pixels: int = 784,
        num_classes: int = 10,
        width: int = 256,
        depth: int = 3,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
    ) -> None:
        super().__init__(num_classes)
        if width < 16 or width % 16:
            raise ValueError(f"width must be a multiple of 16, so that N:M blocks fit, got {width}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        check_warmup(warmup)
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        inputs = [pixels] + [width] * (depth - 1)
        self.hidden = nn.ModuleList(nn.Linear(features, width) for features in inputs)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[B, C, H, W]` to logits `[B, num_classes]`."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Fused AdamW under a warm-up and a half cosine."""
        matrices = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": biases, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self.lr, weight_decay=self.weight_decay, fused=True
        )
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches, self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
