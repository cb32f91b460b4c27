"""The data of the demo: orders that depend on seed and epoch alone, files, sizes and texts."""

import gzip

import pytest
import torch

from lightning_nm.demo import Digits, FashionMNIST, HelpTopics
from lightning_nm.demo.data import SeededSampler
from lightning_nm.demo.images import ImageArrays, read_idx


def write_idx(path, values):
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    raw = bytes([0, 0, 8, values.ndim]) + sizes + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def folder(tmp_path):
    """Fashion-MNIST in miniature: 20 training and 6 test images of 28x28; image i has all its pixels at i."""
    for part, size in (("train", 20), ("t10k", 6)):
        images = torch.arange(size).repeat_interleave(28 * 28).reshape(size, 28, 28)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", torch.arange(size) % 10)
    return tmp_path


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
    ],
)
def test_other_files_are_refused(tmp_path, raw, message):
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "bad")


def test_digits_split_does_not_depend_on_the_seed():
    first, other = Digits(), Digits(seed=1)
    for data in (first, other):
        data.setup("fit")
    assert (len(first.train_set), len(first.val_set)) == (1438, 359)
    assert torch.equal(other.train_set.images, first.train_set.images)
    images, labels = next(iter(first.train_dataloader()))
    assert (images.shape, images.dtype) == ((64, 1, 8, 8), torch.float32)
    assert (images.min(), images.max()) == (0, 1)
    assert not torch.equal(labels, next(iter(other.train_dataloader()))[1])


def test_fashion_mnist_subsets(folder):
    def pixels(part):
        return part.images[:, 0, 0, 0].tolist()

    data = FashionMNIST(str(folder), batch_size=4, train_size=12, val_size=5)
    data.setup("fit")
    data.setup("test")
    assert pixels(data.train_set) == list(range(12))
    assert pixels(data.val_set) == list(range(15, 20))
    assert pixels(data.test_set) == list(range(6))
    images, labels = next(iter(data.test_dataloader()))
    assert images[2, 0, 0, 0].item() == pytest.approx((2 / 255 - 0.2860) / 0.3530)
    assert labels.tolist() == [0, 1, 2, 3]
    # Tuning needs no test file.
    for path in folder.glob("t10k-*"):
        path.unlink()
    data = FashionMNIST(str(folder), val_size=5, tuning=True)
    data.setup("test")
    assert pixels(data.test_set) == list(range(15, 20))
    data.setup("fit")
    assert pixels(data.train_set) == list(range(15))


def text_of(part):
    return bytes(part.windows[:, :-1].flatten().tolist())


@pytest.mark.parametrize("tuning", [False, True])
def test_help_topics(tuning):
    """Training and held-out text are apart, also where the latter is a part of the training text."""
    data = HelpTopics(context=16, batch_size=8, tuning=tuning)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    train, held_out = text_of(data.train_set), text_of(data.test_set if tuning else data.val_set)
    assert b"statement" in train
    assert held_out[:400] not in train
    whole = HelpTopics(context=16)
    whole.setup("fit")
    assert text_of(whole.train_set).startswith(train)
    assert (held_out[:400] in text_of(whole.train_set)) == tuning
    if tuning:
        assert len(held_out) == pytest.approx(0.1 * len(text_of(whole.train_set)), abs=32)
    limited = HelpTopics(context=16, batch_size=8, train_size=24)
    assert len(limited.train_dataloader()) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: Digits(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda _: Digits(num_workers=-1), "num_workers must not be negative"),
        (lambda _: Digits(val_fraction=1.0), r"val_fraction must lie between 0 and 1, got 1\.0"),
        (lambda _: HelpTopics(val_fraction=0), "val_fraction must lie between 0 and 1"),
        (lambda _: HelpTopics(context=0), "context must be at least 1"),
        (lambda _: HelpTopics(train_size=0), "train_size must be at least 1"),
        (lambda _: HelpTopics(train_size=10**6).setup("fit"), "but the text has"),
        (lambda _: HelpTopics(context=10**6).setup("fit"), "too short for a context of 1000000"),
        (lambda _: FashionMNIST(train_size=70_000), "the training file has 60000"),
        (lambda _: FashionMNIST(val_size=0), "val_size must be at least 1"),
        (
            lambda folder: FashionMNIST(folder, train_size=12, val_size=9).setup("fit"),
            "train_size=12 and val_size=9 need 21 images, but the training file has 20",
        ),
        (
            lambda _: ImageArrays(torch.zeros(2, 1, 1, 1), torch.zeros(3), scale=1),
            "2 images but 3 labels",
        ),
    ],
)
def test_bad_arguments(folder, make, message):
    with pytest.raises(ValueError, match=message):
        make(str(folder))


def test_a_missing_folder_says_what_to_install():
    with pytest.raises(FileNotFoundError, match=r"nowhere.*apt-get install dataset-fashion-mnist"):
        FashionMNIST("nowhere").setup("fit")
