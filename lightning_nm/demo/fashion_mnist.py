"""Fashion-MNIST from local IDX files."""

import gzip
from pathlib import Path

import torch
from torch import Tensor

from lightning_nm.demo.datamodule import ResumableDataModule, check_positive
from lightning_nm.demo.images import ImageArrays

_TRAINING_IMAGES = 60_000


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
        augment: Shift training images by up to 2 pixels and flip half of them left to right.
        seed: Seed of the training order and of the augmentation.
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
        augment: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        tuning: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.data_dir = data_dir
        self.train_size = train_size
        self.val_size = val_size
        self.augment = augment
        self.tuning = tuning
        self._resolve_train_size(_TRAINING_IMAGES)

    def setup(self, stage: str) -> None:
        """Read the files that the stage needs."""
        if (stage in ("fit", "validate") or self.tuning) and self.val_set is None:
            images, labels = self._read("train")
            train_size = self._resolve_train_size(len(images))
            self.train_set = self._dataset(
                images[:train_size], labels[:train_size], augment=self.augment
            )
            self.val_set = self._dataset(images[-self.val_size :], labels[-self.val_size :])
        if stage == "test" and self.test_set is None:
            self.test_set = self.val_set if self.tuning else self._dataset(*self._read("t10k"))

    def _resolve_train_size(self, available: int) -> int:
        check_positive(train_size=self.train_size, val_size=self.val_size)
        train_size = (
            max(1, available - self.val_size) if self.train_size is None else self.train_size
        )
        if train_size + self.val_size > available:
            wanted = f"train_size={train_size} and val_size={self.val_size} need {train_size + self.val_size} images"
            raise ValueError(f"{wanted}, but the training file has {available}")
        return train_size

    def _read(self, part: str) -> tuple[Tensor, Tensor]:
        images, labels = (
            read_idx(self._find(f"{part}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1")
        )
        return images.unsqueeze(1), labels

    def _find(self, name: str) -> Path:
        folder = Path(self.data_dir)
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"no {name}.gz in {folder}: pass the folder of Fashion-MNIST's four IDX files as data_dir, or run"
            " `apt-get install dataset-fashion-mnist`, which puts them in /usr/share/datasets/fashion-mnist"
        )

    def _dataset(self, images: Tensor, labels: Tensor, augment: bool = False) -> ImageArrays:
        return ImageArrays(
            images, labels, scale=255, mean=0.2860, std=0.3530, augment=augment, seed=self.seed
        )


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
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    values = torch.tensor(shape, dtype=torch.int64).prod().item()
    if len(raw) != header + values:
        raise ValueError(
            f"{path} states shape {shape}, {values} values, but holds {len(raw) - header}"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)
