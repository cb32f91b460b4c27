"""A small GPT, wide enough that its linear layers take most of a training step."""

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from lightning_nm.demo.schedule import warmup_cosine
from lightning_nm.demo.tiny_transformer import TinyTransformer


class GPT(TinyTransformer):
    """A :class:`TinyTransformer` of the width of GPT-2, with the weight decay and the optimizer that GPTs use.

    Fused AdamW; matrices decay, but no embeddings, biases or layer norms. The learning rate warms up over a number of
    steps, then falls to zero on a half cosine over the planned steps; without a plan (``max_steps=-1`` and
    ``max_epochs=-1``) it stays at its peak.

    Args:
        vocab_size: Number of tokens.
        context: Longest sequence.
        dim: Features of a token; a multiple of 16 and of `heads`.
        depth: Decoder blocks, each of ``12 dim^2`` weights.
        heads: Attention heads.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of matrices.
        dropout: Dropout after attention and after the MLP of each block.
        warmup_steps: Steps of the linear warm-up.
        block_lr: Learning rate of the blocks' matrices, relative to `lr`. The best one falls with their width and rises
            with their sparsity, unless they are rescaled, see ``scale`` of the callback; that of the embeddings does
            neither.

    Raises:
        ValueError: If `dim` is not a multiple of 16 and of `heads`, `warmup_steps` is below 1, or `block_lr` is not
            positive.

    Example:
        >>> GPT(dim=32, heads=2)(torch.zeros(2, 256, dtype=torch.long)).shape
        torch.Size([2, 256, 256])
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 256,
        dim: int = 768,
        depth: int = 2,
        heads: int = 12,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        dropout: float = 0.0,
        warmup_steps: int = 10,
        block_lr: float = 1.0,
    ) -> None:
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}")
        if not block_lr > 0:
            raise ValueError(f"block_lr must be positive, got {block_lr}")
        super().__init__(vocab_size, context, dim, depth, heads, lr, weight_decay, dropout)
        self.warmup_steps = warmup_steps
        self.block_lr = block_lr

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Fused AdamW under a warm-up and a half cosine."""
        matrices = [p for block in self.blocks for p in block.parameters() if p.ndim > 1]
        decayed = {id(p) for p in [*matrices, self.head.weight]}
        groups = [
            {"params": matrices, "lr": self.lr * self.block_lr, "weight_decay": self.weight_decay},
            {"params": [self.head.weight], "weight_decay": self.weight_decay},
            {"params": [p for p in self.parameters() if id(p) not in decayed], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        total = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(optimizer, total, warmup_steps=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
