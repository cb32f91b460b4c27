"""Fashion-MNIST whose training images are shifted and flipped."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.demo.data import keyed_generator
from lightning_nm.demo.images import FashionMNIST, ImageArrays

SHIFT = 2
"""The largest shift of an augmented image, in pixels."""


class AugmentedFashionMNIST(FashionMNIST):
    """:class:`~lightning_nm.demo.FashionMNIST` with :class:`AugmentedArrays` for training; the same arguments."""

    def training_set(self, images: Tensor, labels: Tensor) -> ImageArrays:
        """The images, shifted and flipped."""
        return AugmentedArrays(images, labels, seed=self.seed, scale=255, mean=0.2860, std=0.3530)


class AugmentedArrays(ImageArrays):
    """Images that are shifted by up to 2 pixels each way, zeros coming in, and flipped with probability 1/2.

    The draw is a pure function of (seed, epoch, index).
    """

    def __init__(self, images: Tensor, labels: Tensor, *, seed: int, **normalization: Any) -> None:
        super().__init__(images, labels, **normalization)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the shifts and flips of this epoch."""
        # For all images at once: which of them a process or a worker reads changes no draw.
        generator = keyed_generator(self.seed, "augment", epoch)
        self.shifts = torch.randint(0, 2 * SHIFT + 1, (len(self), 2), generator=generator)
        self.flips = torch.rand(len(self), generator=generator, dtype=torch.float32) < 0.5

    def pixels(self, indices: Tensor) -> Tensor:
        """The bytes of a batch, uint8 `[B, C, H, W]`."""
        return shift_and_flip(self.images[indices], self.shifts[indices], self.flips[indices])


def shift_and_flip(images: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    """Crop each zero-padded image, then flip some.

    Args:
        images: `[B, C, H, W]`, as the result.
        shifts: Row and column offset of the crop, int64 `[B, 2]` in `[0, 4]`; 2 is the middle.
        flips: Images to flip left to right, bool `[B]`.
    """
    batch, channels, height, width = images.shape
    padded = pad(images, (SHIFT, SHIFT, SHIFT, SHIFT))

    # The row and the column of the padded image that each pixel of the result is read from: [B, H] and [B, W].
    rows = torch.arange(height, dtype=torch.int64) + shifts[:, :1]
    columns = torch.arange(width, dtype=torch.int64).expand(batch, width)
    columns = torch.where(flips[:, None], width - 1 - columns, columns)
    columns = columns + shifts[:, 1:]

    # One gather for the whole batch; the four indices broadcast to [B, C, H, W].
    index_b = torch.arange(batch, dtype=torch.int64)[:, None, None, None]
    index_c = torch.arange(channels, dtype=torch.int64)[None, :, None, None]
    index_h = rows[:, None, :, None]
    index_w = columns[:, None, None, :]
    return padded[index_b, index_c, index_h, index_w]
