"""The settings of papers' code, for ``preset="paper"`` and ``preset="fst"``. docs/papers.md describes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_nm.estimators import EstimatorName
from lightning_nm.methods import ASP, SRSTE, BiMask, Dense, Method, MethodName, TransposableMask
from lightning_nm.nn.layer.layout import ConvLayout

PresetName = Literal["paper", "fst"]
"""``"paper"``: the code of the paper that proposed the method. ``"fst"``: transposable masks in FST's transformers."""


@dataclass(frozen=True)
class Preset:
    """What the authors' code sets, for arguments that are not given.

    Attributes:
        method: The method's class.
        source: Where the settings are from.
        settings: Arguments of the method.
        conv_layout: How the blocks of convolutions lie.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        grad_estimator: The estimator of output gradients.
    """

    method: type[Method]
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    conv_layout: ConvLayout = "channels"
    skip_first: bool = True
    skip_last: bool = True
    grad_estimator: EstimatorName | None = None

    def made(self, **changes: Any) -> Method:
        """The method with these settings."""
        return self.method(**{**self.settings, **changes})

    def __str__(self) -> str:
        """The source and all settings, on one line."""
        values: dict[str, Any] = {**self.settings, "conv_layout": self.conv_layout}
        values |= {"skip_first": self.skip_first, "skip_last": self.skip_last}
        values |= {"grad_estimator": self.grad_estimator} if self.grad_estimator else {}
        return f"{self.source}: " + ", ".join(f"{name}={value}" for name, value in values.items())


_NONE = Preset(Dense)  # layers that a rule leaves dense, and the baseline
_PRESETS: dict[PresetName, dict[str, Preset]] = {
    "paper": {
        "dense": _NONE,
        "sr-ste": Preset(
            SRSTE,
            "arXiv 2102.04010",
            {"decay": 2e-4, "decay_scale": "world-size"},
            skip_first=False,
        ),
        "bi-mask": Preset(
            BiMask,
            "arXiv 2302.06058",
            {
                "permute_every": 100,
                "first_search": 99,
                "candidates": 100,
                "search": "redraw",
                "criterion": "retained",
                "decay": 2e-4,
                "decay_scale": "world-size",
            },
            conv_layout="flat",
        ),
        "asp": Preset(
            ASP,
            "arXiv 2104.08378",
            {"start": 0, "init": "magnitude"},
            skip_first=False,
            skip_last=False,
        ),
        "transposable": Preset(
            TransposableMask,
            "arXiv 2102.08124",
            {"update_every": 40, "first_update": 39, "decay": 0.0},
            conv_layout="flat",
            skip_first=False,
        ),
    },
    "fst": {
        "dense": _NONE,
        "transposable": Preset(
            TransposableMask,
            "arXiv 2404.01847",
            {"update_every": 40, "decay": 6e-5, "decay_at": "after-clipping", "dense_end": 1 / 6},
            grad_estimator="approx-mvue",
        ),
    },
}


def preset_of(preset: PresetName, method: MethodName | Method) -> Preset:
    """The preset for a method, given by its short name or as an object.

    Raises:
        ValueError: If there is none.
    """
    if preset not in _PRESETS:
        raise ValueError(
            f"preset={preset!r} is unknown: use {' or '.join(map(repr, get_args(PresetName)))}"
        )
    known = _PRESETS[preset]
    if isinstance(method, str):
        found = known.get(method)
    else:
        found = next((each for each in known.values() if type(method) is each.method), None)
    if found is None:
        name = repr(method) if isinstance(method, str) else f"{type(method).__name__} objects"
        names = ", ".join(repr(each) for each in known if each != "dense")
        raise ValueError(
            f"preset={preset!r} has no settings for method {name}: it has them for {names}"
        )
    return found


def preset_method(method: MethodName, preset: PresetName = "paper", **changes: Any) -> Method:
    """A method with the settings of a paper's code and some changes.

    ``preset="paper"`` alone uses the settings as they are; this is for experiments that depart from them.

    Args:
        method: The short name.
        preset: Whose settings, see docs/papers.md.
        changes: Arguments of the method's class that are to be others.

    Raises:
        ValueError: If there is no such preset, or for a bad argument of the method.
        TypeError: If the method has no such argument.

    Example:
        >>> from lightning_nm import NMSparsityCallback
        >>> callback = NMSparsityCallback("2:4", preset_method("bi-mask", permute_every=50), preset="paper")
        >>> preset_method("bi-mask").search
        'redraw'
    """
    return preset_of(preset, method).made(**changes)
