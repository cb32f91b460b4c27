"""A small CNN of depthwise and pointwise convolutions."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_nm.demo import ResidualCNN


class SeparableBlock(nn.Module):
    """A depthwise 3x3 and a pointwise convolution, each with batch norm and a ReLU (MobileNet, arXiv 1704.04861)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.norm1 = nn.BatchNorm2d(inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, outputs, H/stride, W/stride]`."""
        x = F.relu(self.norm1(self.depthwise(x)))
        return F.relu(self.norm2(self.pointwise(x)))


class MobileCNN(ResidualCNN):
    """A :class:`ResidualCNN` whose stages are depthwise and pointwise convolutions, as MobileNet's (arXiv 1704.04861).

    Pointwise convolutions, which hold nearly all weights, can be N:M. A depthwise one reads a single channel, and stays
    dense. The arguments are those of :class:`ResidualCNN`; a block of `depth` has one convolution of each kind.

    Example:
        >>> MobileCNN(width=16)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    block = SeparableBlock
