"""The first and the last layers of a model, which papers leave dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_nm.nn.ties import Candidate

Trained = Callable[[nn.Parameter], bool]
"""Whether a weight is trained."""


def skipped_ends(
    skip_first: bool | None, skip_last: bool | None, skip_first_last: bool | None, default: tuple[bool, bool]
) -> tuple[bool, bool]:
    """Whether to skip the first and the last layers: by the option of one end, else by that of both, else by default.

    Example:
        >>> skipped_ends(None, None, None, (True, True)), skipped_ends(False, None, True, (True, True))
        ((True, True), (False, True))
    """
    first, last = default if skip_first_last is None else (skip_first_last, skip_first_last)
    return first if skip_first is None else skip_first, last if skip_last is None else skip_last


def first_and_last(
    candidates: Sequence[Candidate],
    is_trained: Trained | None,
    known: Mapping[str, str] | None,
    *,
    skip_first: bool,
    skip_last: bool,
) -> dict[str, str]:
    """The layers to skip, by module name, with the reason.

    Args:
        candidates: The weights of known kinds, in the order of registration.
        is_trained: The ends are those of the part of the model that is trained, or of all of it if that part has none.
        known: The first and the last layers, if they are known; by default the order of registration decides.
        skip_first: Whether to skip first convolutions.
        skip_last: Whether to skip last linear layers.
    """
    if not (skip_first or skip_last):
        return {}
    if known is not None:
        skipped = {"convolution": skip_first, "linear": skip_last}
        roles = {c.module_name: c.adapter.role for c in candidates}
        return {name: reason for name, reason in known.items() if skipped.get(roles.get(name, ""), True)}

    def trained(found: list[Candidate]) -> list[Candidate]:
        return [c for c in found if is_trained is None or is_trained(c.weight)] or found

    convolutions = trained([c for c in candidates if c.adapter.role == "convolution"])
    linears = [c for c in candidates if c.adapter.role == "linear" and not c.module_name.endswith(".out_proj")]
    linears = trained(linears)
    ends = {}
    if convolutions and skip_first:
        ends[convolutions[0].module_name] = "first convolution"
    if linears and skip_last:
        ends[linears[-1].module_name] = "last linear layer"
    return ends
