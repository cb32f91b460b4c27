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


def text_of(part):
    return bytes(part.windows[:, :-1].flatten().tolist())


def python_source(**options):
    """Another package than the default one, which is an extra."""
    data = PythonSource(["lightning-utilities"], context=16, val_fraction=0.1, **options)
    data.setup("fit")
    return data


def test_python_source():
    data, again = python_source(val_size=50), python_source(val_size=10**9)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = text_of(data.train_set)
    assert b"import" in text
    assert text_of(again.train_set) == text
    assert len(data.val_set) == 50
    held_out = [bytes(window) for window in data.val_set.windows.tolist()]
    assert sum(window in text for window in held_out) < 10, "more than what all files begin with"
    share = len(again.val_set) / (len(again.val_set) + len(again.train_set))
    assert share == pytest.approx(0.1, abs=0.08)  # a file is a large part here
    tuning = python_source(val_size=10**9, tuning=True)
    train = text_of(tuning.train_set)
    assert text.startswith(train)
    assert text_of(tuning.val_set)[:400] in text[len(train) - 16 :]


def test_python_source_of_one_text_alone():
    with pytest.raises(ValueError, match=r"has the SHA-256 [0-9a-f]{64}, not digest='0'") as error:
        python_source(digest="0")
    python_source(digest=str(error.value).split("SHA-256 ")[1][:64])


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
