"""Measure the products of a packed model before its first request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_nm.nn.packed import packed_weights

Model = TypeVar("Model", bound=nn.Module)


def warm_up(
    model: Model,
    batch: Sequence[int] = (1,),
    tokens: Sequence[int] = (1,),
    *,
    example: Tensor | tuple[Tensor, ...] | None = None,
) -> Model:
    """Choose between kernel and dense product for the sizes that a packed model will meet, however long that takes.

    It changes models that are packed with ``kernels="auto"`` alone: each layer chooses for ``b * t`` tokens, for each
    ``b`` of `batch` and ``t`` of `tokens`, as it would at its first product of that size, see :func:`pack`. Choices
    are kept in ``~/.cache/lightning_nm/packed.json``, and made for the number of threads that torch has now.

    Args:
        model: A model with packed layers.
        batch: Numbers of inputs of one call.
        tokens: Lengths of an input: 1 for a layer without a token axis, or for generating with a cache.
        example: An input of the model, or a tuple of its positional ones, each ``[1, ...]``. The model is called with
            it, repeated to each size of `batch`. Convolutions need it, because their sizes depend on the image, and
            attention whose queries, keys and values differ.

    Returns:
        The model.

    Raises:
        ValueError: If no layer is packed, a size is not a positive integer, or an example is needed or is not of one
            input. Nothing is measured then.

    Example::

        >>> from lightning_nm import pack, prune
        >>> layer = nn.Linear(64, 32)
        >>> _ = prune(layer, "1:16", skip_first_last=False)
        >>> model = warm_up(pack(layer, kernels="sparse"), batch=[1, 8], tokens=[1, 128])
    """
    weights = dict(packed_weights(model))
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has no packed layer: call lightning_nm.pack(model) first"
        )
    for name, sizes in (("batch", batch), ("tokens", tokens)):
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"{name}={sizes!r} must be positive integers, such as {name}=[1, 16]")
    inputs = (example,) if isinstance(example, Tensor) else example or ()
    for each in inputs:
        if each.dim() == 0 or len(each) != 1:
            raise ValueError(
                f"an example has the shape {list(each.shape)}: it must be one input, [1, ...]"
            )
    chosen = {name: weight for name, weight in weights.items() if weight.kernels == "auto"}
    for name, weight in chosen.items():
        if weight.role == "convolution" and weight.operand is not None and not inputs:
            raise ValueError(
                f"'{name}' is of a convolution, whose sizes depend on the image: pass example=image[None]"
            )
    with ExitStack() as stack, torch.inference_mode():
        for budget in {id(weight.budget): weight.budget for weight in chosen.values()}.values():
            stack.enter_context(budget.unlimited())
        for weight in chosen.values():
            if weight.role != "convolution":
                for size in sorted({b * t for b in batch for t in tokens}):
                    weight.measure(size)
            elif weight.operand is not None:
                weight.operand.forget()
        if inputs and chosen:
            for size in batch:
                model(*(each.expand(size, *each.shape[1:]) for each in inputs))
    return model
