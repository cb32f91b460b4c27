"""Small images in memory: scikit-learn's handwritten digits, and Fashion-MNIST from local files."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nm.demo.data import (
    ResumableDataModule,
    check_fraction,
    check_positive,
    keyed_generator,
)

_TRAINING_IMAGES = 60_000  # of Fashion-MNIST


# A generated == would ask tensors of many entries whether they are true, which raises.
@dataclass(eq=False)
class ImageArrays(Dataset[tuple[Tensor, Tensor]]):
    """Images in bytes, uint8 `[N, C, H, W]`, and labels `[N]`; a batch has `(images / scale - mean) / std`."""

    images: Tensor
    labels: Tensor
    scale: float
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        self.labels = self.labels.long()

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, indices: Tensor) -> Tensor:
        """The bytes of a batch, uint8 `[B, C, H, W]`."""
        return self.images[indices]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: float32 `[B, C, H, W]` and int64 `[B]`."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        # Only a batch at a time is in float32: kept so, all images would take four times the memory.
        images = (self.pixels(chosen).float() / self.scale - self.mean) / self.std
        return images, self.labels[chosen]


class Digits(ResumableDataModule):
    """1797 handwritten digits of 8x8 pixels, 10 classes, of scikit-learn. Trains in seconds.

    Batches are images, float32 `[B, 1, 8, 8]` in [0, 1], and labels, int64 `[B]`. There is no separate test set: `test`
    uses the validation images. The split is random but always the same, whatever the seed.

    Args:
        batch_size: Images in a batch, on each process.
        val_fraction: Fraction of the images that are held out for validation and test.
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
        # scikit-learn has whole numbers from 0 to 16 in float64: bytes hold them exactly.
        images = torch.from_numpy(pixels).to(torch.uint8).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(classes)

        # Not from `seed`: runs that differ in their seeds are tested on the same images.
        order = torch.randperm(len(images), generator=keyed_generator(0, "digits split"))
        val_size = max(1, round(len(images) * self.val_fraction))
        val, train = order.tensor_split([val_size])
        self.train_set = ImageArrays(images[train], labels[train], scale=16)  # pixels are 0 to 16
        self.val_set = self.test_set = ImageArrays(images[val], labels[val], scale=16)


class FashionMNIST(ResumableDataModule):
    """Images of clothing, 28x28 grey pixels, 10 classes (Xiao, Rasul and Vollgraf, arXiv:1708.07747).

    The four IDX files must be in `data_dir`, gzipped or not; nothing is downloaded. On Debian and Ubuntu the package
    `dataset-fashion-mnist` puts them in the default folder.

    Batches are images, float32 `[B, 1, 28, 28]`, normalized by the training set's mean and standard deviation, and
    labels, int64 `[B]`. Training uses the first `train_size` images of the training file, validation its last
    `val_size`, test all 10,000 images of the test file. None of this depends on the seed.

    Args:
        data_dir: Folder of the IDX files.
        batch_size: Images in a batch, on each process.
        train_size: Number of training images; by default all that validation leaves.
        val_size: Number of validation images.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Leave the test file alone and test on the validation images, to choose settings by images that a later
            test does not use.

    Raises:
        ValueError: If an argument is out of range.
        FileNotFoundError: In `setup`, if a file is missing.
    """

    def __init__(
        self,
        data_dir: str = "/usr/share/datasets/fashion-mnist",
        batch_size: int = 64,
        train_size: int | None = None,
        val_size: int = 5_000,
        seed: int = 0,
        num_workers: int = 0,
        tuning: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_positive(train_size=train_size, val_size=val_size)
        self.data_dir = data_dir
        self.train_size = train_size
        self.val_size = val_size
        self.tuning = tuning
        # Wrong sizes are refused before a file is read; setup() asks again, with the size of the file.
        self._training_size(_TRAINING_IMAGES)

    def setup(self, stage: str) -> None:
        """Read the files that the stage needs."""
        # A Trainer calls setup() for every stage, and the file is read once.
        if (stage in ("fit", "validate") or self.tuning) and self.val_set is None:
            images, labels = self._read("train")
            size = self._training_size(len(images))
            self.train_set = self.training_set(images[:size], labels[:size])
            # From the end of the file, so that they are the same for every train_size.
            self.val_set = _normalized(images[-self.val_size :], labels[-self.val_size :])
        if stage == "test" and self.test_set is None:
            self.test_set = self.val_set if self.tuning else _normalized(*self._read("t10k"))

    def training_set(self, images: Tensor, labels: Tensor) -> ImageArrays:
        """The images as they are; a subclass may augment them."""
        return _normalized(images, labels)

    def _training_size(self, available: int) -> int:
        # At least one, so that a val_size that leaves none is refused below.
        size = max(1, available - self.val_size) if self.train_size is None else self.train_size
        if size + self.val_size > available:
            raise ValueError(
                f"train_size={size} and val_size={self.val_size} need {size + self.val_size} images, but the training "
                f"file has {available}"
            )
        return size

    def _read(self, part: str) -> tuple[Tensor, Tensor]:
        images = self._read_file(f"{part}-images-idx3-ubyte")
        return images.unsqueeze(1), self._read_file(f"{part}-labels-idx1-ubyte")

    def _read_file(self, name: str) -> Tensor:
        folder = Path(self.data_dir)
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return read_idx(path)
        raise FileNotFoundError(
            f"no {name}.gz in {folder}: pass the folder of Fashion-MNIST's four IDX files as data_dir, or run"
            " `apt-get install dataset-fashion-mnist`, which puts them in /usr/share/datasets/fashion-mnist"
        )


def _normalized(images: Tensor, labels: Tensor) -> ImageArrays:
    # Of all pixels of the training file, scaled to [0, 1].
    return ImageArrays(images, labels, scale=255, mean=0.2860, std=0.3530)


def read_idx(path: str | Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not, as a uint8 tensor of the shape that the file states.

    The format is two zero bytes, a type code (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the values in row-major order.

    Raises:
        ValueError: If the file is not an IDX file of bytes, or holds fewer or more values than it states.
    """
    path = Path(path)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    header = 4 + 4 * raw[3]
    # A header that ends too early makes a shape of wrong sizes, and the length below does not fit.
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    values = math.prod(shape)
    if len(raw) != header + values:
        raise ValueError(
            f"{path} states shape {shape}, {values} values, but holds {len(raw) - header}"
        )
    # A copy in a bytearray: torch warns of memory that cannot be written, as that of bytes.
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)
