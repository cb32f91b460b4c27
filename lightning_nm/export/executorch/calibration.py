"""Inputs for calibration, in the shapes of the exported program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def calibration_inputs(
    data: Iterable[Any], example: Sequence[Tensor], batches: int = 4
) -> Iterator[tuple[Tensor, ...]]:
    """The first batches of data, cut into inputs of the shapes of an example.

    A batch of ``B`` rows becomes ``B // b`` inputs of ``b`` rows, as the example has; the rest is left out.

    Args:
        data: Batches: a tensor, or a tuple or list that begins with the model's inputs, such as ``(images, labels)``.
        example: The inputs that the program is exported with; all but the first axis must agree.
        batches: How many to take.

    Raises:
        ValueError: If there is no batch, or a batch does not fit, with its shape; while the iterator is consumed.

    Example:
        >>> [x.shape for (x,) in calibration_inputs([torch.zeros(5, 3)], [torch.zeros(2, 3)])]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    count = 0
    for position, batch in enumerate(islice(data, batches)):
        inputs = _inputs_of(batch, position, len(example))
        for index, (given, expected) in enumerate(zip(inputs, example, strict=True)):
            _check(given, expected, position, index)
        sizes = {
            len(given) // max(len(expected), 1) for given, expected in _with_rows(inputs, example)
        }
        for step in range(min(sizes, default=1)):
            count += 1
            yield tuple(_cut(*pair, step) for pair in zip(inputs, example, strict=True))
    if not count:
        raise ValueError(
            "the calibration data has no batch of enough rows: int8 scales cannot be chosen without data; give a "
            f"loader whose batches have at least {len(example[0]) if example[0].dim() else 1} rows"
        )


def check_varied(inputs: Sequence[tuple[Tensor, ...]]) -> None:
    """Refuse inputs that all hold one value: the activations of such a calibration tell nothing of those of real data.

    Args:
        inputs: Of :func:`calibration_inputs`, at least one.

    Raises:
        ValueError: If each of the model's inputs is one value in all of them.

    Example:
        >>> check_varied([(torch.zeros(1, 2), torch.zeros(1)), (torch.zeros(1, 2), torch.ones(1))])
    """
    values = [_only_value(tensors) for tensors in zip(*inputs, strict=True)]
    if all(value is not None for value in values):
        shown = ", ".join(f"{value:g}" for value in values if value is not None)
        raise ValueError(
            f"all {len(inputs)} inputs of the calibration hold one value alone ({shown}), from which no int8 scales "
            "can be chosen: give calibration= a few batches of real inputs"
        )


def _only_value(tensors: Sequence[Tensor]) -> float | None:
    """The value of all entries of some tensors; ``None`` if they differ, or there is none."""
    filled = [each for each in tensors if each.numel()]
    least = {float(each.min()) for each in filled}
    most = {float(each.max()) for each in filled}
    return least.pop() if len(least) == 1 and least == most else None


def _inputs_of(batch: Any, position: int, count: int) -> tuple[Tensor, ...]:
    """The model's inputs, which a batch begins with."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    is_sequence = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    if not is_sequence or isinstance(batch, Mapping):
        raise ValueError(
            f"calibration batch {position} is a {type(batch).__name__}: give tensors, or tuples that begin with the "
            "model's inputs"
        )
    inputs = tuple(batch[:count])
    if len(inputs) < count or not all(isinstance(each, Tensor) for each in inputs):
        kinds = ", ".join(type(each).__name__ for each in batch)
        raise ValueError(
            f"calibration batch {position} is ({kinds}), but the model takes {count} tensors"
        )
    return inputs


def _check(given: Tensor, expected: Tensor, position: int, index: int) -> None:
    """Refuse an input of another shape, dtype, or with values that are not finite."""
    what = f"calibration batch {position}, input {index}"
    if given.dim() != expected.dim() or given.shape[1:] != expected.shape[1:]:
        free = ["any"] * min(expected.dim(), 1) + [str(size) for size in expected.shape[1:]]
        raise ValueError(
            f"{what} has shape {list(given.shape)}, but the program takes [{', '.join(free)}]"
        )
    if given.is_floating_point() != expected.is_floating_point():
        raise ValueError(f"{what} is {given.dtype}, but the program takes {expected.dtype}")
    if given.is_floating_point() and not bool(torch.isfinite(given).all()):
        # An infinite range would make every int8 value of an activation 0.
        raise ValueError(f"{what} has values that are not finite")


def _with_rows(
    inputs: Sequence[Tensor], example: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    for given, expected in zip(inputs, example, strict=True):
        if expected.dim():
            yield given, expected


def _cut(given: Tensor, expected: Tensor, step: int) -> Tensor:
    """The rows of one input, in the example's dtype."""
    if expected.dim():
        rows = len(expected)
        given = given[step * rows : (step + 1) * rows]
    return given.to(expected.dtype)
