"""Inputs for calibration: batches cut to the shapes of the program, and mistakes in them; the data of the command."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_nm.commands.export import _calibration_data
from lightning_nm.export.executorch.quantized import calibration_inputs

EXAMPLE = (torch.zeros(2, 3),)


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    batches=st.integers(1, 4),
)
def test_inputs_are_the_rows_in_order(sizes, rows, batches):
    data = list(torch.arange(2.0 * sum(sizes)).reshape(-1, 2).split(sizes))
    expected = [part for batch in data[:batches] for part in batch.split(rows) if len(part) == rows]
    example = (torch.zeros(rows, 2),)
    if not expected:
        with pytest.raises(ValueError, match=f"at least {rows} rows"):
            list(calibration_inputs(data, example, batches))
        return
    found = [x for (x,) in calibration_inputs(data, example, batches)]
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_labels_are_left_out_and_dtypes_are_those_of_the_program():
    batch = (torch.eye(2, 3).double(), torch.zeros(2).long())
    ((found,),) = calibration_inputs([batch], EXAMPLE)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "no batch"),
        ([torch.zeros(1, 3)], "at least 2 rows"),
        (
            [torch.zeros(2, 4)],
            r"batch 0, input 0 has shape \[2, 4\], but the program takes \[2, 3\], or more",
        ),
        ([torch.zeros(2, 3), torch.zeros(2, 3, 1)], r"batch 1, input 0 has shape \[2, 3, 1\]"),
        ([torch.zeros(2, 3).long()], "int64"),
        ([torch.full((2, 3), float("nan"))], "not finite"),
        ([{"x": torch.zeros(2, 3)}], r"is \(dict\), but the model takes 1"),
        (["text"], r"is \(str\), but"),
        ([("text", 1)], r"\(str, int\)"),
    ],
)
def test_data_that_do_not_fit(data, says):
    with pytest.raises(ValueError, match=says):
        list(calibration_inputs(data, EXAMPLE))


def test_inputs_that_are_missing():
    with pytest.raises(ValueError, match="takes 2 tensors"):
        list(calibration_inputs([torch.zeros(2, 3)], (*EXAMPLE, torch.zeros(2))))


def test_data_of_files():
    images = torch.arange(40.0).reshape(40, 1)
    torch.save(images, "one.pt")
    save_file({"images": images}, "one.safetensors")
    np.save("one.npy", images.numpy())
    for name in ("one.pt", "one.safetensors", "one.npy"):
        first, second = _calibration_data(name)
        assert torch.equal(torch.cat([first[0], second[0]]), images)
    torch.save([images, images > 3], "two.pt")
    (_, masks), _ = _calibration_data("two.pt")
    assert torch.equal(masks, images[:32] > 3)


def test_data_of_a_data_module():
    pytest.importorskip("sklearn")
    images, _labels = next(iter(_calibration_data("lightning_nm.demo.Digits")))
    assert images.shape[1:] == (1, 8, 8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("missing.pt", "no such file"),
        ("torch.nn.Linear", "is no LightningDataModule"),
        ("studies.data.ImageNet", "studies.data.ImageNet: "),
        ("number.pt", "holds no tensors of samples"),
        ("names.safetensors", "a list with one for each input"),
    ],
)
def test_data_that_cannot_be_read(text, says):
    torch.save({"loss": 3.0}, "number.pt")
    save_file({"b": torch.zeros(2), "a": torch.ones(2)}, "names.safetensors")
    with pytest.raises(ValueError, match=says):
        _calibration_data(text)


def test_data_of_one_value_alone_are_refused():
    inputs = [(torch.zeros(1, 2), torch.zeros(1))] * 3
    example = inputs[0]
    with pytest.raises(ValueError, match="all 3 inputs of the calibration hold one value alone"):
        calibration_inputs(inputs, example)
    # One input that varies will do.
    assert len(calibration_inputs([*inputs, (torch.zeros(1, 2), torch.ones(1))], example)) == 4
