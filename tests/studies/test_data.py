"""The data sets of studies."""

import pytest
import torch

from studies.data import PythonSource
from studies.data.augmented import AugmentedArrays, shift_and_flip


def test_augmentation_is_a_function_of_seed_epoch_and_index():
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)

    def draw(seed, epoch, indices):
        data = AugmentedArrays(images, torch.zeros(50), scale=255, seed=seed)
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
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
