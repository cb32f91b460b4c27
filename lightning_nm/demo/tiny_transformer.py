"""A small decoder-only transformer for byte-level text."""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_nm.demo.schedule import check_warmup, warmup_cosine

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
        x = x + self.dropout(self._attend(self.norm1(x)))
        hidden = F.gelu(self.fc1(self.norm2(x)))
        return x + self.dropout(self.fc2(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, dim / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attended.transpose(1, 2).reshape(batch, length, dim))


class TinyTransformer(LightningModule):
    """Token and position embeddings, decoder blocks, a layer norm and a linear head.

    Trained by AdamW; the learning rate warms up and falls to zero on a half cosine. Logs
    `train_loss`, `val_loss`, `val_bits_per_byte`, `test_loss` and `test_bits_per_byte`; losses are in nats per token,
    and bits per byte assume that a token is a byte.

    Args:
        vocab_size: Number of tokens.
        context: Longest sequence.
        dim: Features of a token; a multiple of 16 and of `heads`.
        depth: Decoder blocks.
        heads: Attention heads.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, on all parameters.
        dropout: Dropout after attention and after the MLP of each block.
        warmup: Share of the steps in which the learning rate rises, in [0, 1).

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
        super().__init__()
        if dim < 16 or dim % 16 or dim % heads:
            raise ValueError(
                f"dim must be a multiple of 16 (so that N:M blocks fit) and of heads={heads}, got {dim}"
            )
        check_warmup(warmup)
        self.save_hyperparameters()
        self.warmup = warmup
        self.lr = lr
        self.weight_decay = weight_decay
        self.context = context
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
        x = self.embed(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of the next byte, mean over tokens."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `val_loss` and `val_bits_per_byte`."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `test_loss` and `test_bits_per_byte`."""
        self._evaluate(batch, "test")

    def _loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _evaluate(self, batch: Batch, stage: str) -> None:
        loss = self._loss(batch)
        bits = loss / math.log(2)
        size = len(batch[0])
        self.log(f"{stage}_loss", loss, batch_size=size, sync_dist=True)
        self.log(f"{stage}_bits_per_byte", bits, prog_bar=True, batch_size=size, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW under a warm-up and a half cosine."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.lr, weight_decay=self.weight_decay, betas=(0.9, 0.95)
        )
        schedule = warmup_cosine(optimizer, self.trainer.estimated_stepping_batches, self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
