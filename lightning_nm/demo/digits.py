"""Scikit-learn's handwritten digits."""

import torch

from lightning_nm.demo.datamodule import ResumableDataModule, check_fraction
from lightning_nm.demo.images import ImageArrays
from lightning_nm.demo.seeding import keyed_generator


class Digits(ResumableDataModule):
    """1797 handwritten digits of 8x8 pixels, 10 classes, of scikit-learn. Trains in seconds.

    Batches are images, float32 `[B, 1, 8, 8]` in [0, 1], and labels, int64 `[B]`. There is no separate test set: `test`
    uses the validation images. The split is random but always the same, whatever the seed.

    Args:
        batch_size: Images in a batch, on each process.
        val_fraction: Share of the images that are held out for validation and test.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, batch_size: int = 64, val_fraction: float = 0.2, seed: int = 0, num_workers: int = 0
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_fraction("val_fraction", val_fraction)
        self.val_fraction = val_fraction

    def setup(self, stage: str) -> None:
        """Load and split the images."""
        from sklearn.datasets import load_digits

        pixels, classes = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).to(torch.uint8).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(classes)

        # Not from `seed`: runs that differ in their seeds are tested on the same images.
        generator = keyed_generator(0, "digits split")
        order = torch.randperm(len(images), generator=generator)
        val_size = max(1, round(len(images) * self.val_fraction))
        val, train = order.tensor_split([val_size])
        self.train_set = ImageArrays(images[train], labels[train], scale=16)  # pixels are 0 to 16
        self.val_set = ImageArrays(images[val], labels[val], scale=16)
        self.test_set = self.val_set
