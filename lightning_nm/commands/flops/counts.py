"""The multiply-adds of every weight and of its three GEMMs in a planned training; their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import nn

from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.gemms import mean_densities
from lightning_nm.nn.layer.layout import known_shape, known_size
from lightning_nm.nn.layer.names import layer_name, plain_name
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.macs import OTHERS, READ

REST = "(biases, norms and others)"
"""The row of all parameters that are no weight of a known layer kind, with their products."""
GEMMS = ("forward", "dgrad", "wgrad")


def _dense() -> dict[FlopsKind, GemmDensity]:
    return dict.fromkeys(get_args(FlopsKind), GemmDensity())


@dataclass(frozen=True)
class LayerFlops:
    """One weight with the multiply-adds of its products.

    Example:
        >>> row = LayerFlops("head", shape=(10, 64), parameters=640, macs=640)
        >>> row.shares("arithmetic")
        {'forward': 1.0, 'dgrad': 1.0, 'wgrad': 1.0, 'all': 1.0}
    """

    name: str
    shape: tuple[int, ...]
    parameters: int  # 0 for a weight that an earlier row has counted
    macs: int  # dense multiply-adds of the forward pass
    pattern: str | None = None  # None for a dense weight
    method: str | None = None
    estimator: str | None = None
    why: str = ""  # why it is dense
    # Averaged over the training.
    densities: Mapping[FlopsKind, GemmDensity] = field(default_factory=_dense)

    def shares(self, kind: FlopsKind) -> dict[str, float]:
        """Return the multiply-adds of each GEMM over the dense ones; their mean as ``all``."""
        density = self.densities[kind]
        return _with_mean({gemm: getattr(density, gemm) for gemm in GEMMS})

    def to_dict(self) -> dict[str, Any]:
        """Return the row as primitives, for JSON."""
        content = dict(vars(self))
        del content["densities"]
        content["shape"] = list(self.shape)
        for kind in get_args(FlopsKind):
            content[kind] = self.shares(kind)
        return content


@dataclass(frozen=True)
class Report:
    """All weights of a model under one choice of masks.

    Example:
        >>> layers = (LayerFlops("0", (64, 32), 2048, 2048), LayerFlops("1", (10, 64), 640, 640))
        >>> report = Report("Net", ("float32 [1, 32]",), layers, planned_steps=100)
        >>> report.macs, report.ratios("paper")["all"]
        (2688, 1.0)
    """

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
        """Return the training's multiply-adds over those of dense training, of each GEMM and of all.

        Args:
            kind: The way of counting.
            masked_alone: Leave the dense layers out.

        Returns:
            A ratio for each GEMM and for ``all``; ``None`` if there are no multiply-adds.
        """
        layers = self.masked if masked_alone else self.layers
        total = sum(layer.macs for layer in layers)
        if not total:
            return None
        ratios = {}
        for gemm in GEMMS:
            # A dense dgrad and a dense wgrad have as many multiply-adds as the forward GEMM.
            macs = [layer.macs * layer.shares(kind)[gemm] for layer in layers]
            ratios[gemm] = sum(macs) / total
        return _with_mean(ratios)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as primitives, for JSON."""
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
    """Return a row for every weight of the model, and :data:`REST` for what is left.

    Args:
        model: The model.
        macs: Multiply-adds by layer name.
        sparsifiers: Those of the model, whose layers have been charged.
    """
    masked: dict[int, NMLayer] = {}  # by the id of the weight, which tied names share
    skipped: dict[str, str] = {}  # reasons by layer name
    for sparsifier in sparsifiers:
        for layer in sparsifier.layers.values():
            masked[id(layer.param)] = layer
        skipped |= sparsifier.skipped
    # A masked weight has a row even if the forward pass did not use it.
    shown_names = {key.removesuffix(READ) for key in macs}
    shown_names.update(layer.name for layer in masked.values())

    rows: list[LayerFlops] = []
    first_name: dict[int, str] = {}
    # A tied weight has a row for each of its names, and its parameters in the first.
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        module_name, _, parameter_name = full_name.rpartition(".")
        name = layer_name(plain_name(module_name), parameter_name)
        if name not in shown_names:
            continue
        key = id(parameter)
        is_tied = key in first_name
        row = LayerFlops(
            name,
            shape=known_shape(parameter) or (),
            parameters=0 if is_tied else known_size(parameter),
            macs=macs.get(name, 0),
            why=skipped.get(name, ""),
        )
        read_macs = macs.get(name + READ, 0)
        if key not in masked:
            why = f"tied to {first_name[key]}" if is_tied else row.why
            row = replace(row, macs=row.macs + read_macs, why=why)
        first_name.setdefault(key, name)
        rows.append(row if key not in masked else _with_method(row, masked[key]))
        if key in masked and read_macs:
            why = "other code reads the weight without its mask, and multiplies by all of it"
            rows.append(LayerFlops(name + READ, row.shape, parameters=0, macs=read_macs, why=why))

    all_parameters = sum(map(known_size, model.parameters()))
    rest = all_parameters - sum(row.parameters for row in rows)
    rest_macs = macs.get(OTHERS, 0)
    if rest or rest_macs:
        rows.append(LayerFlops(REST, shape=(), parameters=rest, macs=rest_macs))
    return tuple(rows)


def _with_method(row: LayerFlops, layer: NMLayer) -> LayerFlops:
    """Return the row of a masked weight, whose layer has been charged for the training."""
    estimator = None if layer.spec.estimator is None else type(layer.spec.estimator).__name__
    return replace(
        row,
        pattern=str(layer.spec.pattern),
        method=layer.spec.method.short_name or type(layer.spec.method).__name__,
        estimator=estimator,
        why="",
        densities=mean_densities(layer),
    )


def _with_mean(shares: dict[str, float]) -> dict[str, float]:
    mean = sum(shares.values()) / len(shares)
    return {**shares, "all": mean}
