"""The settings of papers' code, for ``preset="paper"`` and ``preset="fst"``. docs/papers.md describes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_nm.estimators import EstimatorName
from lightning_nm.methods import (
    ASP,
    LBC,
    SRSTE,
    SSTE,
    BiMask,
    Dense,
    MaskLogits,
    MaxQ,
    Method,
    MethodName,
    SLoPe,
    TransposableMask,
    resolve_method,
)
from lightning_nm.nn.layer.layout import ConvLayout

PresetName = Literal["paper", "fst"]
"""``"paper"``: the code of the paper that proposed the method. ``"fst"``: transposable masks in FST's transformers."""


@dataclass(frozen=True)
class Preset:
    """Settings of the authors' code for one method, which fill in the arguments that are not given.

    Attributes:
        method: The method's class.
        source: Where the settings are from.
        settings: Arguments of the method.
        conv_layout: How the blocks of convolutions lie.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        grad_estimator: The estimator of output gradients.

    Example:
        >>> preset = Preset(SRSTE, "arXiv 2102.04010", {"decay": 2e-4}, skip_first=False)
        >>> preset.made(decay=1e-4).decay
        0.0001
        >>> print(preset)
        arXiv 2102.04010: decay=0.0002, conv_layout=channels, skip_first=False, skip_last=True
    """

    method: type[Method]
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    conv_layout: ConvLayout = "channels"
    skip_first: bool = True
    skip_last: bool = True
    grad_estimator: EstimatorName | None = None

    def made(self, **changes: Any) -> Method:
        """Return a new method with these settings, and with ``changes`` in place of some of them."""
        arguments = {**self.settings, **changes}
        return self.method(**arguments)

    def __str__(self) -> str:
        """Return the source and all settings, on one line."""
        settings: dict[str, Any] = dict(self.settings)
        settings["conv_layout"] = self.conv_layout
        settings["skip_first"] = self.skip_first
        settings["skip_last"] = self.skip_last
        if self.grad_estimator:
            settings["grad_estimator"] = self.grad_estimator
        listed = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"{self.source}: {listed}"


# The preset of a rule that leaves layers dense, and of the dense baseline. Its source is empty, which tells it apart
# from presets that set something.
_DENSE = Preset(Dense)

# By preset, then by the method's short name. Arguments that are not listed keep the method's own default.
_PRESETS: dict[PresetName, dict[str, Preset]] = {
    "paper": {
        "dense": _DENSE,
        "sr-ste": Preset(
            SRSTE,
            "arXiv 2102.04010",
            # The code adds the decay in every process, and then sums the gradients of all.
            {"decay": 2e-4, "decay_scale": "world-size"},
            skip_first=False,
        ),
        "bi-mask": Preset(
            BiMask,
            "arXiv 2302.06058",
            {
                # The code counts forward passes from 1: rows keep their own order for 99 of them.
                "permute_every": 100,
                "first_search": 99,
                "candidates": 100,
                "search": "redraw",  # the permutation in use does not compete with the new ones
                "criterion": "retained",
                "decay": 2e-4,
                "decay_scale": "world-size",
            },
            conv_layout="flat",
        ),
        # Its code is for transformers: the layout of convolutions is the default one.
        "s-ste": Preset(SSTE, "arXiv 2409.09099", grad_estimator="approx-mvue"),
        "asp": Preset(
            ASP,
            "arXiv 2104.08378",
            {"start": 0, "init": "magnitude"},
            skip_first=False,
            skip_last=False,
        ),
        "slope": Preset(
            SLoPe,
            "arXiv 2405.16325",
            # The code selects the backward masks after every step whose number leaves 99 when divided by 100.
            {"refresh_every": 100, "first_refresh": 99, "start": 0, "init": "magnitude"},
        ),
        "transposable": Preset(
            TransposableMask,
            "arXiv 2102.08124",
            # Masks change before the 40th forward pass: after 39 steps.
            {"update_every": 40, "first_update": 39, "decay": 0.0},
            conv_layout="flat",
            skip_first=False,
        ),
        "lbc": Preset(
            LBC,
            "arXiv 2206.06662",
            # The command of the code: 60 of 120 epochs.
            {"stop": 0.5},
        ),
        "maxq": Preset(
            MaxQ,
            "arXiv 2312.07061",
            # The scripts of the code: 30 of 120 epochs. Stems of 7x7 cannot be given to its convolutions.
            {"start": 0, "stop": 0.25, "ramp": "linear", "decay": 2e-4, "temperature": 0.01},
        ),
        "mask-logits": Preset(
            MaskLogits,
            "arXiv 2409.17481",
            {
                "temperature": (4.0, 0.05),
                "scale": (1e2, 5e2),
                "prior_strength": 3.0,
                "weight_reg": 1e-5,
                "stop": 1.0,
            },
        ),
    },
    "fst": {
        "dense": _DENSE,
        "transposable": Preset(
            TransposableMask,
            "arXiv 2404.01847",
            {"update_every": 40, "decay": 6e-5, "decay_at": "after-clipping", "dense_end": 1 / 6},
            grad_estimator="approx-mvue",
        ),
    },
}


def preset_of(preset: PresetName, method: MethodName | Method) -> Preset:
    """Return the preset for a method, which is given by its short name or as an object.

    Raises:
        ValueError: If there is none.

    Example:
        >>> preset_of("paper", "bi-mask").source
        'arXiv 2302.06058'
    """
    if preset not in _PRESETS:
        choices = " or ".join(repr(name) for name in get_args(PresetName))
        raise ValueError(f"preset={preset!r} is unknown: use {choices}")
    preset_of_name = _PRESETS[preset]
    resolve_method(
        method
    )  # for its error alone: a name that no method has is not the preset's fault
    if isinstance(method, str):
        found = preset_of_name.get(method)
    else:
        # The exact class: the papers' settings say nothing about a user's subclass.
        preset_of_class = {each.method: each for each in preset_of_name.values()}
        found = preset_of_class.get(type(method))
    if found is None:
        wanted = repr(method) if isinstance(method, str) else f"{type(method).__name__} objects"
        # Dense layers have a preset for rules' sake only, so it is not offered.
        names = ", ".join(repr(name) for name in preset_of_name if name != "dense")
        raise ValueError(
            f"preset={preset!r} has no settings for method {wanted}: it has them for {names}"
        )
    return found


def preset_method(method: MethodName, preset: PresetName = "paper", **changes: Any) -> Method:
    """Return a method with the settings of a paper's code and some changes.

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
