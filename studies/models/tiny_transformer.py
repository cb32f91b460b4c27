"""A small decoder-only transformer for byte-level text, trained by plain AdamW."""

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from lightning_nm.demo import GPT
from lightning_nm.demo.learning_rate import check_warmup, warmup_cosine


class TinyTransformer(GPT):
    """A :class:`~lightning_nm.demo.GPT` that trains in seconds; AdamW decays all its parameters.

    The learning rate warms up over a fraction of the steps, and falls to zero on a half cosine.

    Args:
        vocab_size: Number of tokens.
        context: Longest sequence.
        dim: Features of a token; a multiple of 16 and of `heads`.
        depth: Decoder blocks.
        heads: Attention heads.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, on all parameters.
        dropout: Dropout after attention and after the MLP of each block.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).

    Raises:
        ValueError: If `dim` is not a multiple of 16 and of `heads`, or `warmup` is out of range.

    Example:
        >>> TinyTransformer()(torch.zeros(2, 64, dtype=torch.long)).shape
        torch.Size([2, 64, 256])
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 64,
        dim: int = 64,
        depth: int = 2,
        heads: int = 4,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        dropout: float = 0.0,
        warmup: float = 0.05,
    ) -> None:
        super().__init__(vocab_size, context, dim, depth, heads, lr, weight_decay, dropout)
        check_warmup(warmup)
        self.warmup = warmup

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW under a warm-up and a half cosine."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.lr, weight_decay=self.weight_decay, betas=(0.9, 0.95)
        )
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches, self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
