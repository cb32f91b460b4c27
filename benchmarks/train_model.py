"""The model and the text of :mod:`benchmarks.train`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nm import demo
from lightning_nm.demo import HelpTopics


class Size(NamedTuple):
    """What is trained: `depth` blocks of ``12 dim^2`` weights, on `batch` windows of `context` bytes a step."""

    dim: int = 2048
    depth: int = 7
    heads: int = 16
    context: int = 1024
    batch: int = 16
    warmup: int = 8
    backend: str = "inductor"


TINY = Size(32, 2, 2, 16, 4, 2, "aot_eager")


class ScratchGPT(demo.GPT):
    """The demo's transformer, with a learning rate that needs no plan: a run ends when its seconds do."""

    def configure_optimizers(self) -> Any:
        """AdamW, warmed up over 20 steps."""
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            self.parameters(),
            self.lr,
            betas=(0.9, 0.95),
            weight_decay=self.weight_decay,
            fused=fused,
        )
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step"}}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Random windows of a text, on the device from the start: batch k is the same in every run.

    Args:
        text: uint8 ``[length]``.
        size: Of windows and batches.
        device: Where.
    """

    def __init__(self, text: Tensor, size: Size, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(len(text) - size.context, (1024, size.batch, 1), generator=generator)
        self.text, self.starts = text.to(device).long(), starts.to(device)
        self.window = torch.arange(size.context + 1, device=device)

    def __len__(self) -> int:
        return 1 << 40  # no run ends before its seconds do

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        windows = self.text[self.starts[index % len(self.starts)] + self.window]
        return windows[:, :-1], windows[:, 1:]


def help_topics() -> tuple[Tensor, str]:
    """The bytes of Python's help topics, or of a random text, and which it is."""
    try:
        data = HelpTopics(context=1)
        data.setup("fit")
    except ImportError:
        return random_text(), "random text"
    windows: Any = data.train_set
    return windows.windows[:, 0].contiguous(), "help topics"


def random_text(chains: int = 512, length: int = 1024) -> Tensor:
    """Draw bytes each of which has four successors: two bits a byte for who knows them.

    Returns:
        uint8 ``[chains * length]``.

    Example::

        >>> text = random_text(4, 8)
        >>> text.shape, text.dtype
        (torch.Size([32]), torch.uint8)
    """
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(256, (256, 4), generator=generator)
    draws = torch.randint(4, (length, chains), generator=generator)
    byte, found = torch.arange(chains) % 256, []
    for draw in draws:
        byte = successors[byte, draw]
        found.append(byte)
    return torch.stack(found, 1).flatten().to(torch.uint8)
