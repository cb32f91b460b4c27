"""ImageNet, or other images in folders; and random images that take their place."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nm.demo.data import ResumableDataModule, check_positive, keyed_generator
from lightning_nm.demo.images import ImageArrays

if TYPE_CHECKING:
    from collections.abc import Callable

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_COLOURS = ((-0.5675, -0.5808, -0.5836), (0.7192, -0.0045, -0.6948), (0.4009, -0.8140, 0.4203))


class ImageNet(ResumableDataModule):
    """Colour images of the folders `train` and `val`, which hold one folder for each class.

    Files are read by torchvision, which must be installed for them. Training images are cropped at random (8 to 100 %
    of the area) to `image_size`, flipped with probability 1/2 and lit by `lighting`; others are resized to 8/7 of
    `image_size` and cropped in the middle. A draw is a pure function of (seed, epoch, index), so a resume repeats it.
    Batches are float32 `[B, 3, image_size, image_size]`, normalized by ImageNet's mean and standard deviation, and
    labels, int64 `[B]`. Test uses the validation images.

    With `synthetic`, nothing is read: so many random images, with random labels, stand for each set, to try a training.

    Args:
        data_dir: The folder of `train` and `val`.
        batch_size: Images in a batch, on each process.
        image_size: Pixels of an image's side.
        lighting: Standard deviation of the random light along the main colours of ImageNet (Krizhevsky et al., 2012).
        synthetic: Number of random images; `None` reads files.
        num_classes: Number of classes of random labels.
        seed: Seed of the training order and of the augmentation.
        num_workers: Worker processes of each loader.

    Raises:
        ValueError: If an argument is out of range.
        FileNotFoundError: In `setup`, if a folder is missing.
        ImportError: In `setup`, without torchvision.
    """

    def __init__(
        self,
        data_dir: str = "imagenet",
        batch_size: int = 256,
        image_size: int = 224,
        lighting: float = 0.0,
        synthetic: int | None = None,
        num_classes: int = 1000,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_positive(image_size=image_size, synthetic=synthetic, num_classes=num_classes)
        if lighting < 0:
            raise ValueError(f"lighting must not be negative, got {lighting}")
        self.data_dir, self.image_size, self.lighting = data_dir, image_size, lighting
        self.synthetic, self.num_classes = synthetic, num_classes

    def setup(self, stage: str) -> None:
        """List the files, or draw the random images."""
        if self.val_set is not None:
            return
        if self.synthetic is not None:
            self.train_set, self.val_set = (self._random(part) for part in ("train", "val"))
        else:
            folders = [Path(self.data_dir) / part for part in ("train", "val")]
            for folder in folders:
                if not folder.is_dir():
                    found = f"there is no folder {folder}: pass the folder of ImageNet's train and val as data_dir"
                    raise FileNotFoundError(
                        f"{found}, or synthetic=N to try a training on N random images"
                    )
            self.train_set, self.val_set = (
                self._files(folders[0], train=True),
                self._files(folders[1], train=False),
            )
        self.test_set = self.val_set

    def _random(self, part: str) -> ImageArrays:
        generator = keyed_generator(self.seed, "images", part)
        shape = (self.synthetic or 0, 3, self.image_size, self.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, self.num_classes, shape[:1], generator=generator)
        return ImageArrays(images, labels, scale=255, mean=0.5, std=0.29)

    def _files(self, folder: Path, *, train: bool) -> "ImageFiles":
        try:
            from torchvision import datasets, transforms
        except ImportError as error:
            read = f"ImageNet reads the images of {folder} with torchvision, which cannot be imported ({error})"
            install = "install the torchvision that belongs to this torch"
            raise ImportError(
                f"{read}: {install}, or pass synthetic=N to try a training on N random images"
            ) from error
        size = self.image_size
        if train:
            steps = [
                transforms.RandomResizedCrop(size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        else:
            steps = [
                transforms.Resize(size * 8 // 7),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
            ]
        transform = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
        lighting = self.lighting if train else 0.0
        return ImageFiles(datasets.ImageFolder(str(folder)), transform, lighting, seed=self.seed)


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Batches of a dataset of pictures and labels, such as torchvision's `ImageFolder`.

    Args:
        pictures: The dataset; `pictures[index]` is a picture and its label.
        transform: Makes a normalized tensor `[3, H, W]` of a picture; it may draw from torch's global generator.
        lighting: Standard deviation of the random light.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        pictures: Any,
        transform: "Callable[[Any], Tensor]",
        lighting: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.pictures, self.transform, self.lighting, self.seed = (
            pictures,
            transform,
            lighting,
            seed,
        )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw as in this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, label = self.pictures[index]
        generator = keyed_generator(self.seed, "augment", self.epoch, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            image = self.transform(picture)
        if self.lighting:
            image = image + random_light(self.lighting, generator)
        return image, torch.tensor(label, dtype=torch.int64)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: float32 `[B, 3, H, W]` and int64 `[B]`."""
        images, labels = zip(*map(self.__getitem__, indices), strict=True)
        return torch.stack(images), torch.stack(labels)


def random_light(deviation: float, generator: torch.Generator) -> Tensor:
    """What a random light adds to a normalized image: float32 `[3, 1, 1]`.

    Before the normalization it is the sum of `a s e` over the three main colours `e` of ImageNet's pixels, with their
    deviations `s` and for `a` drawn from N(0, deviation) (Krizhevsky et al., 2012).
    """
    amounts = (
        torch.randn(3, generator=generator, dtype=torch.float32)
        * deviation
        * torch.tensor(_DEVIATIONS, dtype=torch.float32)
    )
    return (
        amounts
        @ torch.tensor(_COLOURS, dtype=torch.float32)
        / torch.tensor(STD, dtype=torch.float32)
    ).view(3, 1, 1)
