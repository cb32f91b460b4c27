"""Inputs for calibration, in the shapes of the exported program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def calibration_inputs(
    data: Iterable[Any], example: Sequence[Tensor], batches: int = 4
) -> list[tuple[Tensor, ...]]:
    """The first batches of data, cut into inputs of the shapes of an example.

    A batch of ``B`` rows becomes ``B // b`` inputs of ``b`` rows, as the example has; the rest is left out.

    Args:
        data: Batches: a tensor, or a tuple or list that begins with the model's inputs, such as ``(images, labels)``.
        example: The inputs that the program is exported with; all but the first axis must agree.
        batches: How many to take.

    Raises:
        ValueError: If there is no batch, a batch does not fit, with its shape, or all inputs hold one value: the
            activations of such a calibration tell nothing of those of real data.

    Example:
        >>> [x.shape for (x,) in calibration_inputs([torch.arange(15.0).view(5, 3)], [torch.zeros(2, 3)])]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    found: list[tuple[Tensor, ...]] = []
    for position, batch in enumerate(islice(data, batches)):
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        inputs = tuple(parts[: len(example)])
        if len(inputs) < len(example) or not all(isinstance(each, Tensor) for each in inputs):
            kinds = ", ".join(type(each).__name__ for each in parts)
            raise ValueError(
                f"calibration batch {position} is ({kinds}), but the model takes {len(example)} tensors: give tensors, "
                "or tuples that begin with the model's inputs"
            )
        pairs = list(zip(inputs, example, strict=True))
        for index, (given, expected) in enumerate(pairs):
            what = f"calibration batch {position}, input {index}"
            if given.dim() != expected.dim() or given.shape[1:] != expected.shape[1:]:
                raise ValueError(
                    f"{what} has shape {list(given.shape)}, but the program takes {list(expected.shape)}, or more rows"
                )
            if given.is_floating_point() != expected.is_floating_point():
                raise ValueError(f"{what} is {given.dtype}, but the program takes {expected.dtype}")
            if not bool(torch.isfinite(given).all()):
                # An infinite range would make every int8 value of an activation 0.
                raise ValueError(f"{what} has values that are not finite")
        counts = [len(x) // max(len(like), 1) for x, like in pairs if like.dim()]
        for step in range(min(counts, default=1)):
            rows = [x[step * len(e) : (step + 1) * len(e)] if e.dim() else x for x, e in pairs]
            found.append(tuple(x.to(e.dtype) for x, e in zip(rows, example, strict=True)))
    if not found:
        raise ValueError(
            "the calibration data has no batch of enough rows: int8 scales cannot be chosen without data; give a "
            f"loader whose batches have at least {len(example[0]) if example[0].dim() else 1} rows"
        )
    values = [torch.cat([x.flatten() for x in tensors]) for tensors in zip(*found, strict=True)]
    if all(bool((each == each[:1]).all()) for each in values):
        raise ValueError(
            f"all {len(found)} inputs of the calibration hold one value alone, from which no int8 scales can be "
            "chosen: give calibration= a few batches of real inputs"
        )
    return found
