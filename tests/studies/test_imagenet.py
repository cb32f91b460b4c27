"""Images in folders, with a stand-in for torchvision, and random images that take their place."""

import sys
from types import ModuleType

import pytest
import torch

from lightning_nm.demo.data import keyed_generator
from studies.data import ImageNet
from studies.data.imagenet import STD, ImageFiles, random_light


def test_random_images():
    data = ImageNet(synthetic=10, image_size=16, batch_size=4, num_classes=3)
    batches = list(data.train_dataloader())
    assert [tuple(images.shape) for images, _ in batches] == [
        (4, 3, 16, 16),
        (4, 3, 16, 16),
        (2, 3, 16, 16),
    ]
    labels = torch.cat([labels for _, labels in batches])
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) <= {0, 1, 2}
    images = torch.cat([images for images, _ in batches])
    assert abs(images.mean()) < 0.1
    assert images.std() == pytest.approx(1, abs=0.1)
    (first, _), (again, _) = next(iter(data.val_dataloader())), next(iter(data.test_dataloader()))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic": 0}, "synthetic must be at least 1, got 0"),
        ({"lighting": -0.1}, "lighting must not be negative, got -0.1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ImageNet(**options)


def test_a_missing_folder_and_a_missing_torchvision_are_named(folders, tmp_path, monkeypatch):
    words = r"there is no folder .*train: pass the folder .* or synthetic=N"
    with pytest.raises(FileNotFoundError, match=words):
        ImageNet(str(tmp_path / "none")).setup("fit")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    words = r"reads the images of .*train with torchvision, .* or pass synthetic=N"
    with pytest.raises(ImportError, match=words):
        ImageNet(folders).setup("fit")


@pytest.fixture
def folders(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    return str(tmp_path)


@pytest.fixture
def torchvision(monkeypatch):
    """What the data module uses of it: pictures are numbers, and each transform notes its arguments."""
    package, datasets, transforms = map(ModuleType, ("torchvision", "datasets", "transforms"))
    package.datasets, package.transforms = datasets, transforms

    class Folder(list):
        def __init__(self, root):
            super().__init__((number, number % 2) for number in range(6))

    datasets.ImageFolder = Folder
    for name in (
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ToTensor",
        "Resize",
        "CenterCrop",
        "Normalize",
    ):
        setattr(transforms, name, lambda *args, name=name: (name, *args))
    transforms.Compose = Noise
    monkeypatch.setitem(sys.modules, "torchvision", package)


class Noise:
    """A picture with noise of torch's global generator."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, picture):
        return torch.full((3, 2, 2), float(picture)) + torch.rand(3, 2, 2)


@pytest.mark.usefixtures("torchvision")
def test_files(folders):
    data = ImageNet(folders, batch_size=4, lighting=0.1)
    data.setup("fit")
    names = [step[0] for step in data.train_set.transform.steps]
    assert names == ["RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"]
    assert data.val_set.transform.steps[:2] == [("Resize", 256), ("CenterCrop", 224)]
    assert (data.train_set.lighting, data.val_set.lighting) == (0.1, 0.0)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 2, 2)
    assert labels.shape == (4,)


def test_draws_depend_on_seed_epoch_and_index_alone():
    def batch(seed=0, epoch=0, indices=(0, 1)):
        files = ImageFiles([(0, 0)] * 4, Noise(()), 0.1, seed)
        files.set_epoch(epoch)
        return files.__getitems__(list(indices))[0]

    state = torch.get_rng_state()
    first = batch()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert torch.equal(batch(), first)
    assert torch.equal(batch(indices=(1,))[0], first[1])
    assert not torch.equal(first[0], first[1])
    for other in (batch(seed=1), batch(epoch=1)):
        assert not torch.equal(other, first)


def test_light_has_the_colours_of_imagenet():
    """The main colour is a grey of deviation 0.2175; the three are orthonormal."""
    lights = torch.stack(
        [random_light(1.0, keyed_generator(0, k)).flatten() for k in range(4000)]
    ) * torch.tensor(STD)
    deviations, colours = torch.linalg.eigh(lights.T.cov())
    assert deviations.sqrt().tolist() == pytest.approx([0.0045, 0.0188, 0.2175], rel=0.05)
    assert colours[:, 2].abs().tolist() == pytest.approx([0.5675, 0.5808, 0.5836], abs=0.01)
