"""The multiply-adds of every weight and of its three GEMMs in a planned training; their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import nn

from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.names import layer_name, plain_name
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.macs import OTHERS

REST = "(biases, norms and others)"
"""The row of all parameters that are no weight of a known layer kind, with their products."""
GEMMS = ("forward", "dgrad", "wgrad")
_DENSE: Mapping[FlopsKind, GemmDensity] = dict.fromkeys(get_args(FlopsKind), GemmDensity())


@dataclass(frozen=True)
class LayerFlops:
    """One weight."""

    name: str
    shape: tuple[int, ...]
    parameters: int  # 0 for a weight that an earlier row has counted
    macs: int  # dense multiply-adds of the forward pass
    pattern: str | None = None  # None for a dense weight
    method: str | None = None
    estimator: str | None = None
    why: str = ""  # why it is dense
    densities: Mapping[FlopsKind, GemmDensity] = field(
        default_factory=lambda: _DENSE
    )  # averaged over the training

    def shares(self, kind: FlopsKind) -> dict[str, float]:
        """The share of the dense multiply-adds that each GEMM does, and their mean as ``all``."""
        return _with_mean({gemm: getattr(self.densities[kind], gemm) for gemm in GEMMS})

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        content = dict(vars(self))
        del content["densities"]
        content["shape"] = list(self.shape)
        for kind in get_args(FlopsKind):
            content[kind] = self.shares(kind)
        return content


@dataclass(frozen=True)
class Report:
    """All weights of a model under one choice of masks."""

    model: str
    inputs: tuple[str, ...]  # of the forward pass
    layers: tuple[LayerFlops, ...]  # in the model's order
    planned_steps: int | None
    phases: tuple[str, ...] = ()  # what begins and ends during training
    pattern: str | None = None  # the assumed one; None for those of the config

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-adds of the dense forward pass."""
        return sum(layer.macs for layer in self.layers)

    @property
    def masked(self) -> tuple[LayerFlops, ...]:
        """The layers under a method."""
        return tuple(layer for layer in self.layers if layer.pattern is not None)

    def ratios(self, kind: FlopsKind, *, masked_alone: bool = False) -> dict[str, float] | None:
        """The training's multiply-adds over those of dense training, of each GEMM and of all; None without any.

        ``masked_alone`` leaves the dense layers out.
        """
        layers = self.masked if masked_alone else self.layers
        total = sum(layer.macs for layer in layers)
        if not total:
            return None
        shares = [layer.shares(kind) for layer in layers]
        ratios = {}
        for gemm in GEMMS:
            macs = sum(
                layer.macs * share[gemm] for layer, share in zip(layers, shares, strict=True)
            )
            ratios[gemm] = macs / total
        return _with_mean(ratios)

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        kinds = get_args(FlopsKind)
        return {
            **vars(self),
            "inputs": list(self.inputs),
            "phases": list(self.phases),
            "parameters": self.parameters,
            "macs": self.macs,
            "ratios": {kind: self.ratios(kind) for kind in kinds},
            "masked_ratios": {kind: self.ratios(kind, masked_alone=True) for kind in kinds},
            "layers": [layer.to_dict() for layer in self.layers],
        }


def layers_of(
    model: nn.Module, macs: Mapping[str, int], sparsifiers: Sequence[NMSparsifier] = ()
) -> tuple[LayerFlops, ...]:
    """A row for every weight of the model, and :data:`REST`.

    Args:
        model: The model.
        macs: Multiply-adds by layer name.
        sparsifiers: Those of the model, whose layers have been charged.
    """
    masked: dict[int, NMLayer] = {}
    skipped: dict[str, str] = {}
    for sparsifier in sparsifiers:
        masked.update((id(layer.param), layer) for layer in sparsifier.layers.values())
        skipped |= sparsifier.skipped
    names = {*macs, *(layer.name for layer in masked.values())}
    rows: list[LayerFlops] = []
    counted: dict[int, str] = {}
    # A tied weight has a row for each of its names, and its parameters in the first.
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, own = full_name.rpartition(".")
        name = layer_name(plain_name(module), own)
        key = id(parameter)
        if name not in names:
            continue
        row = LayerFlops(
            name,
            shape=tuple(parameter.shape),
            parameters=0 if key in counted else parameter.numel(),
            macs=macs.get(name, 0),
            why=skipped.get(name, ""),
        )
        if key in masked:
            row = _with_method(row, masked[key])
        elif key in counted:
            row = replace(row, why=f"tied to {counted[key]}")
        counted.setdefault(key, name)
        rows.append(row)
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(
        row.parameters for row in rows
    )
    if rest or macs.get(OTHERS):
        rows.append(LayerFlops(REST, (), rest, macs.get(OTHERS, 0)))
    return tuple(rows)


def _with_method(row: LayerFlops, layer: NMLayer) -> LayerFlops:
    return replace(
        row,
        pattern=str(layer.pattern),
        method=layer.method.short_name or type(layer.method).__name__,
        estimator=None if layer.estimator is None else type(layer.estimator).__name__,
        why="",
        densities=layer.mean_densities(),
    )


def _with_mean(shares: dict[str, float]) -> dict[str, float]:
    return {**shares, "all": sum(shares.values()) / len(shares)}
