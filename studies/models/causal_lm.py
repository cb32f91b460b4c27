"""A language model of transformers that is fine-tuned on labels, on a teacher's outputs, or on both."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_nm.demo.gpt import Batch
from lightning_nm.demo.learning_rate import check_warmup, warmup_cosine

IGNORED = -100
"""A target that is no label, as in torch and transformers."""


class CausalLM(LightningModule):
    """A pretrained decoder, fine-tuned by AdamW.

    The loss of a token is ``labels * cross_entropy(student, target) + (1 - labels) * KL(teacher || student)``
    (1503.02531, at a temperature of 1), in nats. The learning rate warms up over a fraction of the steps, and falls to
    zero on a half cosine. Matrices decay, norms do not. Logs `train_loss`, and for validation and test `loss`, the
    cross entropy on the labels, and `perplexity`, its exponential. Targets of -100 are no labels: they have no cross
    entropy.

    Args:
        folder: The model's folder, as `save_pretrained` writes it.
        teacher: Folder of the teacher, whose vocabulary is the student's. It stays as it is.
        labels: Weight of the labels in the loss, from 0 to 1; below 1 it needs a teacher.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of matrices.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).

    Raises:
        ValueError: If an argument is out of range, a folder is missing, or a teacher is missing, without effect or of
            another vocabulary; in `setup` if the data module's `vocabulary` is larger than the model's; in a step whose
            batch has no labels, before anything is computed.
    """

    def __init__(
        self,
        folder: str,
        teacher: str | None = None,
        labels: float = 1.0,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        warmup: float = 0.1,
    ) -> None:
        super().__init__()
        check_warmup(warmup)
        if not 0 <= labels <= 1:
            raise ValueError(f"labels={labels} must be a weight from 0 to 1")
        if (teacher is None) != (labels == 1):
            raise ValueError(
                f"labels={labels} with teacher={teacher!r}: a teacher has the weight 1 - labels; give both, or neither"
            )
        self.model = _load(folder).train()
        self.teacher = None
        if teacher is not None:
            self.teacher = _load(teacher).requires_grad_(False).eval()
            if (own := self.model.config.vocab_size) != (other := self.teacher.config.vocab_size):
                raise ValueError(
                    f"the teacher in {teacher} has {other} tokens and the student in {folder} has {own}: their outputs "
                    "cannot be compared; take a teacher with the same tokenizer"
                )
        self.labels = labels
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.held_out = MeanMetric()

    def setup(self, stage: str) -> None:
        """Refuse data whose tokenizer has tokens that the model does not know."""
        data = getattr(self.trainer, "datamodule", None)
        given = getattr(data, "vocabulary", 0)
        if given > (known := self.model.config.vocab_size):
            raise ValueError(
                f"the tokenizer of the data has {given} tokens, and the model has {known}: take the model's tokenizer"
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, T]` to logits `[B, T, vocabulary]`."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        tokens, targets = batch
        if self.labels > 0:
            _labelled(targets, f"training batch {batch_idx}")
        logits = self(tokens).flatten(0, 1).float()
        loss = logits.new_zeros(())
        if self.labels > 0:
            loss = loss + self.labels * F.cross_entropy(logits, targets.flatten())
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
                wanted = wanted.float().log_softmax(-1)
            divergence = F.kl_div(
                logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean"
            )
            loss = loss + (1 - self.labels) * divergence
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def _evaluate(self, batch: Batch, which: str) -> None:
        tokens, targets = batch
        labelled = _labelled(targets, which)
        losses = F.cross_entropy(
            self(tokens).flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        self.held_out.update(losses[labelled])

    def _log_held_out(self, stage: str) -> None:
        loss = self.held_out.compute()
        self.held_out.reset()
        self.log_dict({f"{stage}_loss": loss, f"{stage}_perplexity": loss.exp()}, prog_bar=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Collect the losses of one batch."""
        self._evaluate(batch, f"validation batch {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity."""
        self._log_held_out("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Collect the losses of one batch."""
        self._evaluate(batch, f"test batch {batch_idx}")

    def on_test_epoch_end(self) -> None:
        """Log the perplexity."""
        self._log_held_out("test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW under a warm-up and a half cosine."""
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches, self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _labelled(targets: Tensor, which: str) -> Tensor:
    """Which of the targets, flattened, are labels; a `ValueError` that names the batch if none is."""
    labelled = targets.flatten() != IGNORED
    if not labelled.any():
        raise ValueError(
            f"all {targets.numel()} targets of {which} are {IGNORED}, which are ignored, so it has no loss: leave the "
            "batch out, or label some of its tokens"
        )
    return labelled


def _load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    if not Path(folder).is_dir():
        raise ValueError(
            f"there is no folder {folder!r} of a model; docs/fine-tune.md makes those of SmolLM2"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
