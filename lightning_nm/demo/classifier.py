"""What the models that classify images share: their steps, and what they log."""

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]
"""Images, float32 `[B, C, H, W]`, and labels, int64 `[B]`."""


class Classifier(LightningModule):
    """Trains by cross entropy; logs `train_loss`, `val_loss`, `val_acc`, `test_loss` and `test_acc`.

    Args:
        num_classes: Number of classes.
        label_smoothing: Share of the training label that is spread over all classes.
    """

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of a batch with smoothed labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `val_loss` and `val_acc`."""
        self._evaluate(batch, "val", self.val_acc)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `test_loss` and `test_acc`."""
        self._evaluate(batch, "test", self.test_acc)

    def _evaluate(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy.update(logits, labels)
        self.log(f"{stage}_loss", loss, batch_size=len(labels), sync_dist=True)
        # Lightning computes and resets a metric object at the end of the epoch, over all processes.
        self.log(f"{stage}_acc", accuracy, prog_bar=True, batch_size=len(labels))
