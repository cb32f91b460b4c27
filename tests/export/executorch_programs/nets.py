"""Models for exports by ExecuTorch."""

import torch
from torch import nn

from lightning_nm.functional import nm_prune


class ConvNet(nn.Module):
    """Convolutions, one of them with a batch norm, and linear layers; the first and the last layer are dense."""

    def __init__(self, width=64):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(2 * width)
        self.c3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.fc = nn.Linear(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.c1(x).relu()
        x = self.norm(self.c2(x)).relu()
        x = self.depthwise(self.c3(x).relu()).relu()
        x = self.fc(x.mean((2, 3))).relu()
        return self.head(x)


def sparse_conv_net(pattern="2:4", width=64):
    torch.manual_seed(0)
    model = ConvNet(width).eval()
    model.norm.running_mean.normal_(std=0.1)
    model.norm.running_var.uniform_(0.5, 2.0)
    model.norm.weight.data.normal_()
    for layer in (model.c2, model.c3, model.fc):
        layer.weight.data = nm_prune(layer.weight.data, pattern, dim=1)
    return model


def images(*batches, width=32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 3, width, width, generator=generator), torch.zeros(rows))
        for rows in batches
    ]
