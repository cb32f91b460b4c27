"""The first convolution and the last linear layer of a model, which papers leave dense."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from lightning_nm.nn.layer.layout import row_sizes
from lightning_nm.nn.selection.ties import Candidate

SkipFirstLast = bool | Literal["first", "last"]
"""Which of the first convolution and the last linear layer stay dense: both, none, or one of them."""

Trained = Callable[[nn.Parameter], bool]
"""Whether a weight is trained."""


def parse_skip_first_last(value: Any) -> tuple[bool, bool]:
    """Return whether the first convolution, and whether the last linear layer stays dense.

    Raises:
        ValueError: If the value is neither a bool nor ``"first"`` nor ``"last"``.

    Example:
        >>> parse_skip_first_last(True), parse_skip_first_last("last")
        ((True, True), (False, True))
    """
    if isinstance(value, bool):
        return value, value
    if value in ("first", "last"):
        return value == "first", value == "last"
    raise ValueError(f"skip_first_last={value!r} is unknown: use True, False, 'first' or 'last'")


def first_and_last(
    candidates: Sequence[Candidate],
    is_trained: Trained | None,
    saved: Mapping[str, str] | None,
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """Return the layers to leave dense by module name, with the reason.

    They are the first convolution and the last linear layer in the order in which the model registers its modules.

    Args:
        candidates: The weights of known kinds, in the order of registration.
        is_trained: Layers that are not trained do not count, unless no layer of their kind is trained.
        saved: What this function returned when the training began, if it goes on from a saved state: it stays.
        skip_first: Whether to leave the first convolution dense.
        skip_last: Whether to leave the last linear layer dense.
    """
    if saved is not None:
        skips = {"convolution": skip_first, "linear": skip_last}
        roles = {candidate.module_name: candidate.adapter.role for candidate in candidates}
        return {
            name: reason for name, reason in saved.items() if skips.get(roles.get(name, ""), True)
        }
    found = {}
    convolutions = _counted(candidates, "convolution", is_trained)
    if skip_first and convolutions:
        found[convolutions[0].module_name] = "first convolution"
    linears = _counted(candidates, "linear", is_trained)
    if skip_last and linears:
        found[linears[-1].module_name] = "last linear layer"
    return found


def head_hint(candidates: Sequence[Candidate], is_trained: Trained | None) -> str:
    """Return a hint if an earlier linear layer looks more like the output layer than the last one; else "".

    It does if the outputs of the last one fit the inputs of some layer, while the earlier one has fewer outputs, which
    fit the inputs of none. Layers that blocks repeat are no output layers.
    """
    linears = [c for c in _counted(candidates, "linear", is_trained) if _has_rows(c.weight)]
    if not linears:
        return ""
    sizes = [row_sizes(candidate.weight.shape, candidate.spec.layout) for candidate in linears]
    inputs = {depth for _, depth in sizes}
    last, last_outputs = linears[-1], sizes[-1][0]
    if last_outputs not in inputs:
        return ""
    kinds = Counter(_without_numbers(candidate) for candidate in linears)
    for candidate, (outputs, _) in zip(linears, sizes, strict=True):
        if (
            outputs < last_outputs
            and outputs not in inputs
            and kinds[_without_numbers(candidate)] == 1
        ):
            return (
                f"'{last.module_name}' is taken for the output layer because it is registered last. If that is "
                f"'{candidate.module_name}', give skip_first_last='first' and exclude='{candidate.module_name}'"
            )
    return ""


def _counted(
    candidates: Sequence[Candidate], role: str, is_trained: Trained | None
) -> list[Candidate]:
    """Return the candidates among which the first or the last one is looked for."""
    found = [candidate for candidate in candidates if candidate.adapter.role == role]
    if role == "linear":
        # The output projection of an attention layer is inside a block, never the output layer.
        found = [
            candidate for candidate in found if not candidate.module_name.endswith(".out_proj")
        ]
    if is_trained is None:
        return found
    trained = [candidate for candidate in found if is_trained(candidate.weight)]
    return trained or found


def _has_rows(weight: nn.Parameter) -> bool:
    """Whether a weight has a shape yet, and is no flat part of one, as FSDP1 keeps weights."""
    return not nn.parameter.is_lazy(weight) and weight.dim() >= 2


def _without_numbers(candidate: Candidate) -> str:
    """Return the layer's kind of name, which the layers of repeated blocks share."""
    return re.sub(r"\d+", "#", candidate.module_name)
