"""Images in memory as bytes, and float batches of them."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from lightning_nm.demo.seeding import keyed_generator

SHIFT = 2
"""The largest shift of an augmented image, in pixels."""


class ImageArrays(Dataset[tuple[Tensor, Tensor]]):
    """Images in bytes, uint8 `[N, C, H, W]`, with labels `[N]`; a batch is `(images / scale - mean) / std` and labels.

    With `augment`, an image is shifted by up to 2 pixels each way (zeros come in) and flipped left to right with
    probability 1/2. The draw is a pure function of (seed, epoch, index).
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        scale: float,
        mean: float = 0.0,
        std: float = 1.0,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        self.images = images
        self.labels = labels.long()
        self.scale = scale
        self.mean = mean
        self.std = std
        self.augment = augment
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the shifts and flips of this epoch."""
        if not self.augment:
            return
        # For all images at once: which of them a process or a worker reads changes no draw.
        generator = keyed_generator(self.seed, "augment", epoch)
        self.shifts = torch.randint(0, 2 * SHIFT + 1, (len(self), 2), generator=generator)
        self.flips = torch.rand(len(self), generator=generator, dtype=torch.float32) < 0.5

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: float32 `[B, C, H, W]` and int64 `[B]`."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.images[chosen]
        if self.augment:
            images = shift_and_flip(images, self.shifts[chosen], self.flips[chosen])
        images = (images.float() / self.scale - self.mean) / self.std
        return images, self.labels[chosen]


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
