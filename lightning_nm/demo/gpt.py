"""A small GPT, wide enough that its linear layers take most of a training step."""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_nm.demo.data import check_positive
from lightning_nm.demo.learning_rate import warmup_cosine

Batch = tuple[Tensor, Tensor]
"""Tokens and the tokens that follow each of them, both int64 `[B, T]`."""


class DecoderBlock(nn.Module):
    """Causal self-attention and a GELU MLP, each with a layer norm, dropout and a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, dim]` to `[B, T, dim]`."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, dim / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # The heads of a token next to each other again, [B, T, heads, dim / heads], to be one vector.
        x = x + self.dropout(self.proj(attended.transpose(1, 2).reshape(batch, length, dim)))
        hidden = F.gelu(self.fc1(self.norm2(x)))
        return x + self.dropout(self.fc2(hidden))


class GPT(LightningModule):
    """Token and position embeddings, decoder blocks, a layer norm and a linear head, for byte-level text.

    The width is that of GPT-2, as are optimizer and weight decay. Fused AdamW; matrices decay, but no embeddings,
    biases or layer norms. The learning rate warms up over a number of steps, then falls to zero on a half cosine over
    the planned steps; without a plan (``max_steps=-1`` and ``max_epochs=-1``) it stays at its peak. Logs
    `train_loss`, `val_loss`, `val_bits_per_byte`, `test_loss` and `test_bits_per_byte`; losses are in nats per token,
    and bits per byte assume that a token is a byte.

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
        super().__init__()
        if dim < 16 or dim % 16 or dim % heads:
            raise ValueError(
                f"dim must be a multiple of 16 (so that N:M blocks fit) and of heads={heads}, got {dim}"
            )
        check_positive(warmup_steps=warmup_steps)
        if not block_lr > 0:
            raise ValueError(f"block_lr must be positive, got {block_lr}")
        # `lightning-nm export --model` creates the model with the arguments that are in the checkpoint.
        self.save_hyperparameters()
        self.context = context
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.block_lr = block_lr
        self.embed = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        # torch's own 1.0 is far larger than what the blocks add to it at first.
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens, int64 `[B, T]` with T at most `context`, to logits `[B, T, vocab_size]`."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"sequences of {length} tokens, but context={self.context}")
        x = self.embed(tokens) + self.position.weight[:length]  # [B, T, dim] + [T, dim]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        # Cross entropy wants the classes in the second axis: [B * T, vocab_size] and [B * T].
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of the next byte, mean over tokens."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, stage: str = "val") -> None:
        """Log `val_loss` and `val_bits_per_byte`."""
        loss = self._loss(batch)
        bits = loss / math.log(2)
        size = len(batch[0])
        self.log(f"{stage}_loss", loss, batch_size=size, sync_dist=True)
        self.log(f"{stage}_bits_per_byte", bits, prog_bar=True, batch_size=size, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `test_loss` and `test_bits_per_byte`."""
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Fused AdamW under a warm-up and a half cosine."""
        # Biases and layer norms have one axis.
        matrices = [p for p in self.blocks.parameters() if p.ndim > 1]
        # A set finds tensors by identity; in a list `in` would compare their values.
        decayed = {*matrices, self.head.weight}
        # A group without `lr` has that of the optimizer.
        groups = [
            {"params": matrices, "lr": self.lr * self.block_lr, "weight_decay": self.weight_decay},
            {"params": [self.head.weight], "weight_decay": self.weight_decay},
            {"params": [p for p in self.parameters() if p not in decayed], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        total = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(optimizer, total, warmup_steps=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
