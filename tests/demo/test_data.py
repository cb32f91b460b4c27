import gzip
from pathlib import Path

import pytest
import torch

from lightning_nm.demo import Digits, FashionMNIST, HelpTopics
from lightning_nm.demo.data import SeededSampler
from lightning_nm.demo.images import ImageArrays, read_idx

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


def test_an_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = SeededSampler(range(100), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    before = torch.get_rng_state()
    assert order(0, 0) == order(0, 0)
    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16  # in particular (0, 1) and (1, 0) differ
    assert all(sorted(o) == list(range(100)) for o in orders)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("start", [0, 1, 6, 10])
def test_a_pass_leaves_out_its_start_once(start):
    whole, resumed = (SeededSampler(range(10), 1, 0, seed=3) for _ in range(2))
    resumed.start = start
    iterator = iter(resumed)
    resumed.set_epoch(0)
    assert list(iterator) == list(whole)[start:]
    assert list(resumed) == list(whole)
    resumed.start = start
    resumed.set_epoch(1)  # another epoch has no start
    assert len(list(resumed)) == len(resumed) == 10


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_processes_share_an_order(replicas):
    """Each takes every R-th sample of one order, which begins again so that all get equally many."""
    whole = list(SeededSampler(range(10), 1, 0, seed=3))
    parts = [list(SeededSampler(range(10), replicas, rank, seed=3)) for rank in range(replicas)]
    joined = [index for group in zip(*parts, strict=True) for index in group]
    assert joined == (whole + whole)[: len(joined)]


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
    assert torch.equal(limited.train_set.__getitems__([5])[0][0], train[5])


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
