"""Models as a config names them: one of experts, and one that reads a weight."""

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_nm.nn import nm_grouped_linear, register_experts


@register_experts
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x, expert):
        order = expert.argsort()
        offs = expert.bincount(minlength=4).cumsum(0)
        y = nm_grouped_linear(x[order], self, "up", offs)
        return torch.empty_like(y).index_copy(0, order, y)


class Mixture(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(16, 4), Experts(), nn.Linear(32, 8)
        self.example_input_array = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return self.head(self.experts(x, self.router(x).argmax(1)))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Reads(pl.LightningModule):
    """Multiplies by a layer's weight in its training step, outside of the calls of all modules."""

    def __init__(self):
        super().__init__()
        self.first, self.masked, self.read = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def training_step(self, batch):
        hidden = nn.functional.linear(self.masked(self.first(batch).relu()), self.read.weight)
        return self.last(hidden).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)
