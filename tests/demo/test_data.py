import gzip
from pathlib import Path

import pytest
import torch

from lightning_nm.demo import Digits, FashionMNIST, HelpTopics, PythonSource
from lightning_nm.demo.fashion_mnist import read_idx
from lightning_nm.demo.images import ImageArrays, shift_and_flip

INSTALLED = Path("/usr/share/datasets/fashion-mnist")


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
    raw = header + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Fashion-MNIST in miniature: 20 training and 6 test images of 28x28; image i has all its pixels at i."""
    folder = tmp_path_factory.mktemp("fashion")
    for part, size in (("train", 20), ("t10k", 6)):
        images = torch.arange(size).repeat_interleave(28 * 28).reshape(size, 28, 28)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", torch.arange(size) % 10)
    return folder


@pytest.fixture(scope="session")
def digits():
    data = Digits()
    data.setup("fit")
    return data


@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_idx_files_are_read_as_written(tmp_path, name):
    values = torch.randint(0, 256, (3, 4, 5))
    write_idx(tmp_path / name, values)
    read = read_idx(tmp_path / name)
    assert read.dtype == torch.uint8
    assert torch.equal(read.long(), values)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "not an IDX file"),
        (b"\0\0\x08\x01\0\0\0\x03\1\2", r"states shape \[3\], 3 values, but holds 2"),
        (b"\0\0\x08\x01\0\0\0\x01\1\2", r"states shape \[1\], 1 values, but holds 2"),
    ],
)
def test_other_files_are_refused(tmp_path, raw, message):
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "bad")


def test_digits(digits):
    images, labels = next(iter(digits.train_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.shape == (64,)
    assert labels.dtype == torch.int64
    assert (len(digits.train_set), len(digits.val_set)) == (1438, 359)
    assert digits.test_set is digits.val_set


def test_digits_split_does_not_depend_on_the_seed(digits):
    other = Digits(seed=1)
    other.setup("fit")
    assert torch.equal(other.train_set.images, digits.train_set.images)
    first, second = (next(iter(data.train_dataloader()))[1] for data in (digits, other))
    assert not torch.equal(first, second)


def test_fashion_mnist_subsets(tiny_folder):
    data = FashionMNIST(str(tiny_folder), batch_size=4, train_size=12, val_size=5)
    data.setup("fit")
    data.setup("test")
    assert data.train_set.images[:, 0, 0, 0].tolist() == list(range(12))
    assert data.val_set.images[:, 0, 0, 0].tolist() == list(range(15, 20))
    assert data.test_set.images[:, 0, 0, 0].tolist() == list(range(6))
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (4, 1, 28, 28)
    torch.testing.assert_close(images[2, 0, 0, 0].item(), (2 / 255 - 0.2860) / 0.3530)
    assert labels.tolist() == [0, 1, 2, 3]
    data = FashionMNIST(str(tiny_folder), val_size=5)
    data.setup("fit")
    assert len(data.train_set) == 15


def test_fashion_mnist_tunes_without_the_test_file(tiny_folder, tmp_path):
    for part in ("images-idx3", "labels-idx1"):
        (tmp_path / f"train-{part}-ubyte.gz").symlink_to(tiny_folder / f"train-{part}-ubyte.gz")
    data = FashionMNIST(str(tmp_path), train_size=12, val_size=5, tuning=True)
    data.setup("test")
    assert data.test_set.images[:, 0, 0, 0].tolist() == list(range(15, 20))
    data.setup("fit")
    assert data.train_set.images[:, 0, 0, 0].tolist() == list(range(12))


def test_fashion_mnist_says_what_is_wrong(tiny_folder, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path}.*apt-get install dataset-fashion-mnist"
    ):
        FashionMNIST(str(tmp_path)).setup("fit")
    with pytest.raises(
        ValueError,
        match=r"train_size=12 and val_size=9 need 21 images, but the training file has 20",
    ):
        FashionMNIST(str(tiny_folder), train_size=12, val_size=9).setup("fit")
    with pytest.raises(ValueError, match="the training file has 60000"):
        FashionMNIST(train_size=70_000)
    with pytest.raises(ValueError, match="train_size must be at least 1"):
        FashionMNIST(train_size=0)
    with pytest.raises(ValueError, match="val_size must be at least 1"):
        FashionMNIST(val_size=0)


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist_statistics():
    data = FashionMNIST(val_size=10_000)
    data.setup("fit")
    images, labels = data.train_set.images, data.train_set.labels
    assert images.shape == (50_000, 1, 28, 28)
    pixels = images[:10_000].float() / 255
    assert pixels.mean().item() == pytest.approx(0.286, abs=2e-3)
    assert pixels.std().item() == pytest.approx(0.353, abs=2e-3)
    assert labels.unique().tolist() == list(range(10))


def test_augmentation_is_a_function_of_seed_epoch_and_index():
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)

    def draw(seed, epoch, indices):
        data = ImageArrays(images, torch.zeros(50), scale=255, augment=True, seed=seed)
        data.set_epoch(epoch)
        return data.__getitems__(indices)[0]

    everything = draw(0, 3, list(range(50)))
    assert torch.equal(draw(0, 3, [7, 3]), everything[[7, 3]])
    assert not torch.equal(draw(0, 4, list(range(50))), everything)
    assert not torch.equal(draw(1, 3, list(range(50))), everything)


def test_shift_and_flip_against_a_loop():
    images = torch.randint(1, 256, (40, 2, 5, 6), dtype=torch.uint8)
    shifts = torch.randint(0, 5, (40, 2))
    flips = torch.rand(40) < 0.5
    found = shift_and_flip(images, shifts, flips)
    for image, (dy, dx), flip, result in zip(images, shifts.tolist(), flips, found, strict=True):
        expected = torch.zeros_like(image)
        for y in range(5):
            for x in range(6):
                if 0 <= y + dy - 2 < 5 and 0 <= x + dx - 2 < 6:
                    expected[:, y, x] = image[:, y + dy - 2, x + dx - 2]
        assert torch.equal(result, expected.flip(-1) if flip else expected)


def test_help_topics():
    data = HelpTopics(context=16, batch_size=8)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    train = data.train_set.__getitems__(list(range(len(data.train_set))))[0]
    text = bytes(train.flatten().tolist())
    assert b"statement" in text
    validation = bytes(data.val_set.__getitems__(list(range(20)))[0].flatten().tolist())
    assert validation not in text
    limited = HelpTopics(context=16, batch_size=8, train_size=24)
    assert len(limited.train_dataloader()) == 3
    assert torch.equal(limited.train_set[5][0], train[5])


def test_help_topics_tunes_on_training_text():
    data, tuning = (
        HelpTopics(context=16, val_fraction=0.2, tuning=tuning) for tuning in (False, True)
    )
    for module in (data, tuning):
        module.setup("fit")
    whole = bytes(
        data.train_set.windows[:, :-1].flatten().tolist()
    )  # what the held-out text follows
    train, test = (
        bytes(part.windows[:, :-1].flatten().tolist())
        for part in (tuning.train_set, tuning.test_set)
    )
    assert whole.startswith(train)
    assert whole.find(test[:400]) >= len(train)
    assert (
        0 <= len(whole) - len(train) - len(test) < 2 * 16
    )  # ends of the texts that fill no window
    assert len(test) == pytest.approx(0.2 * len(whole), abs=32)


@pytest.fixture(scope="session")
def python_source():
    """Another package than the default one, which is an extra."""
    data = PythonSource(["lightning-utilities"], context=16, val_fraction=0.1, val_size=50)
    data.setup("fit")
    return data


def test_python_source(python_source):
    inputs, targets = next(iter(python_source.train_dataloader()))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(python_source.train_set.windows[:, :-1].flatten().tolist())
    assert b"import" in text
    assert len(python_source.val_set) == 50
    held_out = [bytes(window) for window in python_source.val_set.windows.tolist()]
    assert sum(window in text for window in held_out) < 10, "more than what all files begin with"


def test_python_source_is_the_same_each_time(python_source):
    again = PythonSource(("lightning-utilities",), context=16, val_fraction=0.1, val_size=10**9)
    again.setup("fit")
    assert torch.equal(again.train_set.windows, python_source.train_set.windows)
    held_out = len(again.val_set)
    assert held_out / (held_out + len(again.train_set)) == pytest.approx(
        0.1, abs=0.08
    )  # a file is a large part here


def test_python_source_tunes_on_training_files(python_source):
    tuning = PythonSource(
        ["lightning-utilities"], context=16, val_fraction=0.1, val_size=10**9, tuning=True
    )
    tuning.setup("fit")
    whole, train, held_out = (
        bytes(part.windows[:, :-1].flatten().tolist())
        for part in (python_source.train_set, tuning.train_set, tuning.val_set)
    )
    assert whole.startswith(train)
    assert held_out[:400] in whole[len(train) - 16 :]


def test_python_source_of_one_text_alone():
    with pytest.raises(ValueError, match=r"has the SHA-256 [0-9a-f]{64}, not digest='0'") as error:
        PythonSource(["lightning-utilities"], digest="0").setup("fit")
    digest = str(error.value).split("SHA-256 ")[1][:64]
    PythonSource(["lightning-utilities"], digest=digest).setup("fit")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PythonSource(["no-such-package"]).setup("fit"),
            "'no-such-package' is not installed: run `pip inst",
        ),
        (lambda: PythonSource(context=0), "context must be at least 1"),
        (lambda: PythonSource(val_size=0), "val_size must be at least 1"),
        (lambda: Digits(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: Digits(num_workers=-1), "num_workers must not be negative"),
        (lambda: Digits(val_fraction=1.0), r"val_fraction must lie between 0 and 1, got 1\.0"),
        (lambda: HelpTopics(val_fraction=0), "val_fraction must lie between 0 and 1"),
        (lambda: HelpTopics(context=0), "context must be at least 1"),
        (lambda: HelpTopics(train_size=0), "train_size must be at least 1"),
        (lambda: HelpTopics(train_size=10**6).setup("fit"), "but the text has"),
        (lambda: HelpTopics(context=10**6).setup("fit"), "too short for a context of 1000000"),
        (
            lambda: ImageArrays(torch.zeros(2, 1, 1, 1), torch.zeros(3), scale=1),
            "2 images but 3 labels",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
