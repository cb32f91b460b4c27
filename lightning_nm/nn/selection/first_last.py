"""The first convolution and the last linear layer of a model, which papers leave dense."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from torch import nn

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
    continued: Collection[str] = (),
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """Return the layers to leave dense by module name, with the reason.

    They are the first convolution and the last linear layer in the order in which the model registers its modules.

    Args:
        candidates: The weights of known kinds, in the order of registration.
        is_trained: Layers that are not trained do not count, unless no layer of their kind is trained.
        saved: What this function returned when the training began, if it goes on from a saved state: it stays. In the
            place of a layer that is not in the model any more, because it was renamed, the present one counts.
        continued: Names of layers for which the saved state has masks.
        skip_first: Whether to leave the first convolution dense.
        skip_last: Whether to leave the last linear layer dense.
    """
    found = {}
    convolutions = _eligible(candidates, "convolution", is_trained)
    if skip_first and convolutions:
        found[convolutions[0].module_name] = "first convolution"
    linears = _eligible(candidates, "linear", is_trained)
    if skip_last and linears:
        found[linears[-1].module_name] = "last linear layer"
    if saved is None:
        return found
    still_skipped = _still_skipped(saved, candidates, skip_first=skip_first, skip_last=skip_last)
    present = {candidate.module_name for candidate in candidates}
    lost = {reason for name, reason in saved.items() if name not in present}
    for name, reason in found.items():
        if reason in lost and name not in continued:
            still_skipped[name] = reason
    return still_skipped


def _still_skipped(
    saved: Mapping[str, str],
    candidates: Sequence[Candidate],
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """Return the saved layers, less those that the settings no longer leave dense."""
    roles = {candidate.module_name: candidate.adapter.role for candidate in candidates}
    found = {}
    for name, reason in saved.items():
        if name not in roles:
            continue
        role = roles[name]
        if role == "convolution" and not skip_first:
            continue
        if role == "linear" and not skip_last:
            continue
        found[name] = reason
    return found


def _eligible(
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
    # Fine-tuning trains a new head behind frozen layers; where all are frozen, all count.
    trained = [candidate for candidate in found if is_trained(candidate.weight)]
    return trained or found
