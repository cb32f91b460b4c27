"""What each pattern would do to each layer of a trained model: output errors and retained magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.allocation import retained_magnitudes
from lightning_nm.functional.budget import (
    DENSE,
    Candidates,
    Choice,
    Counted,
    all_patterns,
    check_counted,
    choose_patterns,
    neighbours,
)
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.select import masked
from lightning_nm.methods.calibration import (
    Calibration,
    call_model,
    check_data,
    evaluation,
    has_inputs,
    matrices_of,
    squared_output,
)
from lightning_nm.methods.ste import STE
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast, parse_skip_first_last
from lightning_nm.nn.selection.selection import Rule, as_globs, select
from lightning_nm.training.macs import MacsCounter

Score = Literal["magnitude", "wanda", "sparsegpt"]
"""What decides which entries are kept, see :func:`~lightning_nm.prune`."""


@dataclass(frozen=True)
class LayerSensitivity:
    """What the candidate patterns would do to one layer.

    Args:
        size: Entries of its weight.
        macs: Multiply-adds of its dense forward product over all calibration data; 0 without data.
        errors: By pattern, the relative output error on the calibration data, ``|X (W - W_F)^T| / |X W^T|``; empty
            without data.
        retained: By pattern, the share of the magnitude that the largest entries of the blocks hold.

    Example:
        >>> LayerSensitivity(size=64, retained={"2:4": 0.76}).errors
        {}
    """

    size: int
    macs: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)
    retained: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sensitivity:
    """The result of :func:`sensitivity`.

    Args:
        layers: By name; with data in the order in which they are called, else in the model's.
        patterns: The candidates, the sparsest one first.
        score: What decided which entries are kept.
        skipped: Why each other weight was not scanned, by name.
        dense_sizes: The entries of those of them whose kind is known, by name.
        dense_macs: Their multiply-adds over all calibration data, and those of all other weights.
        uncalibrated: Layers that no calibration token reached, or only zeros. Their errors are ``|W - W_F| / |W|``,
            those for inputs that are not correlated and of equal size.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> found = sensitivity(model, [torch.randn(64, 16)], patterns=["2:8", "4:8"])
        >>> {name: choice.pattern in ("2:8", "4:8", "dense") for name, choice in found.choose(budget=0.5).items()}
        {'0': True, '2': True}
    """

    layers: dict[str, LayerSensitivity]
    patterns: tuple[NMPattern, ...]
    score: Score = "magnitude"
    skipped: dict[str, str] = field(default_factory=dict)
    dense_sizes: dict[str, int] = field(default_factory=dict)
    dense_macs: dict[str, int] = field(default_factory=dict)
    uncalibrated: tuple[str, ...] = ()

    def choose(
        self,
        budget: float | None = None,
        max_error: float | None = None,
        *,
        counted: Counted = "parameters",
    ) -> dict[str, Choice]:
        """Choose a pattern, or none, for each layer.

        With ``budget``, the sum of the squared output errors is least; without data that of the lost shares of
        magnitude. Every layer counts alike, whatever its size. With ``max_error``, each layer gets the sparsest
        candidate whose error is not larger.

        Args:
            budget: The share of the entries of all weights, the dense ones included, that may be kept.
            max_error: The largest output error of a layer.
            counted: With ``"flops"``, the budget is a share of the multiply-adds of the dense forward pass.

        Raises:
            ValueError: If not exactly one of the two is given, it is out of range, the budget cannot be reached, or
                data are missing for it.
        """
        check_counted(counted)
        # Neither of them says how the other one is met.
        if (budget is None) == (max_error is None):
            raise ValueError("give one of budget and max_error")
        if max_error is not None:
            check_max_error(max_error)
            if not self._has_errors:
                raise ValueError(f"max_error={max_error} needs calibration batches: data=loader")
            return {
                name: sparsest_within(layer.errors, max_error)
                for name, layer in self.layers.items()
            }
        assert budget is not None
        dense = self.dense_sizes
        if counted == "flops":
            if not any(layer.macs for layer in self.layers.values()):
                raise ValueError("counted='flops' needs calibration batches: data=loader")
            dense = self.dense_macs
        candidates = {}
        for name, layer in self.layers.items():
            cost = layer.macs if counted == "flops" else layer.size
            values: Mapping[str, float] = layer.errors
            # Without data, what a mask leaves of the magnitude stands for what it leaves of the output.
            if not self._has_errors:
                values = {pattern: 1 - share for pattern, share in layer.retained.items()}
            candidates[name] = Candidates(cost, values)
        # Squares of errors that do not depend on each other add up; shares of magnitude add up as they are.
        power = 2 if self._has_errors else 1
        return choose_patterns(candidates, budget, dense, power=power, counted=counted)

    @property
    def _has_errors(self) -> bool:
        return any(layer.errors for layer in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as primitives, for JSON."""
        return {
            "score": self.score,
            "patterns": [str(pattern) for pattern in self.patterns],
            "layers": {
                name: {
                    "size": layer.size,
                    "macs": layer.macs,
                    "errors": dict(layer.errors),
                    "retained": dict(layer.retained),
                }
                for name, layer in self.layers.items()
            },
            "skipped": dict(self.skipped),
            "dense_sizes": dict(self.dense_sizes),
            "dense_macs": dict(self.dense_macs),
            "uncalibrated": list(self.uncalibrated),
        }


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    patterns: Sequence[PatternLike] | None = None,
    *,
    score: Score = "magnitude",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    skip_first_last: SkipFirstLast = True,
    conv_layout: ConvLayout = "channels",
    damping: float = 0.01,
    call: Callable[[nn.Module, Any], Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Measure what each pattern would do to each layer of a model, one layer at a time; the model is not changed.

    The inputs of a layer are those that the dense model gives it. As in :func:`~lightning_nm.prune`, the model runs
    block by block: all layers of a block are measured in one pass, with a matrix ``in * in`` of 8-byte numbers for
    each in memory. Where there are no blocks, the calibration data run through the model up to each layer.

    Args:
        model: Any module. It runs in evaluation mode, which is undone.
        data: Calibration batches: a DataLoader or a list. Without them only retained magnitudes are measured.
        patterns: The candidates, all N:16 by default. A layer lacks those whose blocks do not fit into its rows.
        score: What decides which entries are kept, see :func:`~lightning_nm.prune`.
        include: Globs over names of modules to scan; all that can be masked by default.
        exclude: Globs over names of modules to leave out.
        skip_first_last: Which of the first convolution and the last linear layer are left out.
        conv_layout: How the blocks of convolutions lie, see :class:`~lightning_nm.NMSparsityCallback`.
        damping: Of SparseGPT, see :func:`~lightning_nm.functional.calibrated.sparsegpt`.
        call: ``call(model, batch)`` runs the model, see :func:`~lightning_nm.prune`.
        blocks: The names of the modules that hold the blocks, see :func:`~lightning_nm.prune`.
        progress: Whether a progress bar is shown on stderr; by default in a terminal.

    Raises:
        ValueError: If the selection fails, a pattern is impossible, data are empty or missing for the score, a layer
            is not called by them, its inputs hold values that are not finite, its weight is sharded, or ``blocks``
            names none.
        TypeError: If ``data`` can be read only once.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> found = sensitivity(model, [torch.randn(64, 16)], patterns=["2:4", "1:4"])
        >>> errors = found.layers["0"].errors
        >>> errors["2:4"] < errors["1:4"]
        True
    """
    check_score(score, data)
    check_blocks(blocks, has_data=data is not None)
    candidates = parse_patterns(patterns)
    found = select_layers(model, candidates, include, exclude, skip_first_last, conv_layout)
    for layer in found.layers:
        refuse_layer(layer, calibrated=data is not None)
    if data is None:
        layers = {}
        for layer in found.layers:
            retained = _retained(layer, found.patterns[layer.name])
            layers[layer.name] = LayerSensitivity(layer.view.shape.numel(), retained=retained)
        return Sensitivity(layers, candidates, score, found.skipped, found.dense_sizes)
    with evaluation(model):
        calibration = Calibration(model, data, call or call_model, blocks, progress)
        return measure(calibration, found, candidates, score, damping)


def measure(
    calibration: Calibration,
    found: Selected,
    candidates: tuple[NMPattern, ...],
    score: Score,
    damping: float,
) -> Sensitivity:
    """Measure selected layers by calibration data, see :func:`sensitivity`."""
    # The pass that finds the order of the layers also counts what they multiply.
    counter = MacsCounter(calibration.model)
    try:
        calibration.order(found.layers)
    finally:
        counter.close()
    layers: dict[str, LayerSensitivity] = {}
    uncalibrated = []
    for layer, moments in calibration.layers(changes=False):
        own_patterns = found.patterns[layer.name]
        scan = scan_layer(layer, moments(), own_patterns, score, damping)
        errors = scan.errors
        if not scan.is_calibrated:
            uncalibrated.append(layer.name)
            # Every layer needs an error to be compared with the others.
            errors = _errors_of_weight(layer, own_patterns)
        layers[layer.name] = LayerSensitivity(
            layer.view.shape.numel(),
            counter.macs.get(layer.name, 0),
            errors,
            _retained(layer, own_patterns),
        )
    dense_macs = {name: macs for name, macs in counter.macs.items() if name not in layers and macs}
    return Sensitivity(
        layers,
        candidates,
        score,
        found.skipped,
        found.dense_sizes,
        dense_macs,
        tuple(uncalibrated),
    )


# ------------------------------------------------------------------------------------------------------------ selection


@dataclass(frozen=True)
class Selected:
    """The layers that a set of candidate patterns fits, and what is left.

    Args:
        layers: In the model's order.
        patterns: By name, the candidates that fit the layer, the sparsest one first.
        skipped: Why each other weight is dense.
        dense_sizes: The entries of those of them whose kind is known.
    """

    layers: list[NMLayer]
    patterns: dict[str, list[NMPattern]]
    skipped: dict[str, str]
    dense_sizes: dict[str, int]


def parse_patterns(patterns: Sequence[PatternLike] | None) -> tuple[NMPattern, ...]:
    """Return the candidates, each once, the sparsest one first; all N:16 by default.

    Raises:
        ValueError: If one is impossible, or there is none.
    """
    if patterns is None:
        return tuple(all_patterns(16))
    if isinstance(patterns, (str, NMPattern, Mapping)):
        patterns = [patterns]  # one alone
    parsed = {NMPattern.parse(pattern) for pattern in patterns}
    if not parsed:
        raise ValueError("there is no candidate pattern: give some, for example ['4:16', '8:16']")
    return tuple(sorted(parsed, key=lambda pattern: (pattern.density, pattern.m)))


def select_layers(
    model: nn.Module,
    patterns: Sequence[NMPattern],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    skip_first_last: SkipFirstLast,
    conv_layout: ConvLayout,
) -> Selected:
    """Select the layers that at least one of the patterns fits.

    Raises:
        ValueError: If the selection fails for one of the block lengths.
    """
    first, last = parse_skip_first_last(skip_first_last)
    globs = as_globs(include, "include")
    excluded = as_globs(exclude, "exclude") or ()
    layers: dict[str, NMLayer] = {}
    own_patterns: dict[str, list[NMPattern]] = {}
    reasons: dict[str, str] = {}
    sizes: dict[str, int] = {}
    # Whether a weight can be masked depends on the length of the blocks, not on N.
    for m in dict.fromkeys(pattern.m for pattern in patterns):
        fitting = [pattern for pattern in patterns if pattern.m == m]
        # Any method that keeps N of M will do: it is only asked which layers it can mask.
        rule = Rule(globs, fitting[0], STE(), None, conv_layout)
        selection = select(model, [rule], excluded, skip_first=first, skip_last=last)
        sizes.update(selection.sizes)
        reasons.update(selection.skipped)
        for layer in selection.layers:
            layers.setdefault(layer.name, layer)
            own_patterns.setdefault(layer.name, []).extend(fitting)
    for own in own_patterns.values():
        own.sort(key=lambda pattern: (pattern.density, pattern.m))
    return Selected(
        [layers[name] for name in sizes if name in layers],
        own_patterns,
        skipped={name: reason for name, reason in reasons.items() if name not in layers},
        dense_sizes={name: size for name, size in sizes.items() if name not in layers and size},
    )


def check_score(score: str, data: Iterable[Any] | None) -> None:
    """Refuse an unknown score, missing data and data that can be read only once."""
    if score not in get_args(Score):
        known = ", ".join(map(repr, get_args(Score)))
        raise ValueError(f"score={score!r} is unknown: use {known}")
    if data is None and score != "magnitude":
        raise ValueError(f"score={score!r} needs calibration batches: data=loader")
    if data is not None:
        check_data(data)


def check_blocks(blocks: object, *, has_data: bool) -> None:
    """Refuse blocks without data, which would have no effect."""
    if blocks is not None and not has_data:
        raise ValueError(f"blocks={blocks!r} is for calibration batches: give data=loader")


def refuse_layer(layer: NMLayer, *, calibrated: bool) -> None:
    """Refuse a layer that cannot be pruned or measured so, before any layer is, by a ``ValueError``."""
    if layer.view.is_sharded:
        raise ValueError(f"the weight of layer '{layer.name}' is sharded: prune before sharding")
    if not calibrated:
        return
    if isinstance(layer.spec.module, nn.Embedding):
        raise ValueError(
            f"layer '{layer.name}' is an embedding, whose inputs are tokens: they cannot calibrate it. Prune it by "
            "magnitude, in a call of its own without data"
        )
    if not has_inputs(layer):
        raise ValueError(
            f"layer '{layer.name}' cannot be calibrated: its adapter defines no inputs(). Name it in `exclude`, or "
            "prune by magnitude without data"
        )


def check_max_error(max_error: float) -> None:
    """Refuse a bound that is no error, by a ``ValueError``."""
    is_number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if not is_number or not 0 <= max_error < 1:
        raise ValueError(
            f"max_error={max_error!r} must be the largest relative output error of a layer: 0 or more and less than 1, "
            "for example 0.1"
        )


def sparsest_within(errors: Mapping[str, float], max_error: float) -> Choice:
    """Return the sparsest pattern whose error is not larger than a bound, or none."""
    # An error may rise with N: an entry that makes up for another one's error is no rule for magnitudes.
    options = [str(pattern) for pattern in Candidates(0, errors).patterns]
    options.append(DENSE)
    values = {**errors, DENSE: 0.0}
    index = next(place for place, option in enumerate(options) if values[option] <= max_error)
    return Choice(options[index], values[options[index]], neighbours(options, values, index))


# ---------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class LayerScan:
    """The relative output errors of one layer by pattern, and whether anything is known of its inputs."""

    errors: dict[str, float]
    is_calibrated: bool


def scan_layer(
    layer: NMLayer,
    moments: Iterable[tuple[range, Tensor]],
    patterns: Sequence[NMPattern],
    score: Score,
    damping: float,
) -> LayerScan:
    """Measure the output errors of some patterns; groups without calibration tokens are left out.

    ``moments`` are those of :meth:`~lightning_nm.methods.calibration.Calibration.layers`.
    """
    weight = matrices_of(layer)  # [groups, out / groups, in]
    output_square = 0.0
    error_squares = dict.fromkeys(map(str, patterns), 0.0)
    is_calibrated = False
    for groups, moments_of_groups in moments:
        for group, moment in zip(groups, moments_of_groups, strict=True):
            if not bool(moment.any()):
                continue  # nothing is known of its inputs
            is_calibrated = True
            matrix = weight[group]
            output_square += squared_output(matrix, moment)
            # All candidates while the moment is in memory: of experts, it is not kept.
            for pattern in patterns:
                pruned = pruned_matrix(layer.name, matrix, moment, pattern, score, damping)
                error_squares[str(pattern)] += squared_output(matrix - pruned, moment)
    errors = {}
    for name, square in error_squares.items():
        errors[name] = relative_error(square, output_square)
    return LayerScan(errors, is_calibrated)


def relative_error(error_square: float, output_square: float) -> float:
    """Return the root of a quotient of squared norms, 0 for an output that is zero."""
    relative = error_square / output_square if output_square else 0.0
    return float(relative**0.5)


def pruned_matrix(
    name: str,
    weight: Tensor,
    moment: Tensor,
    pattern: NMPattern,
    score: Score,
    damping: float,
) -> Tensor:
    """Return one matrix ``[out, in]`` of a layer as a score prunes it; an error has the layer's name."""
    try:
        if score == "sparsegpt":
            return sparsegpt(weight, moment, pattern, damping)
        if not bool(moment.isfinite().all()):
            raise ValueError("its inputs hold values that are not finite")
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from error
    if score == "wanda":
        # In float64: norms overflow float16, and bfloat16 makes ties of scores that differ.
        norms = moment.diagonal().sqrt()
        mask = wanda_mask(weight, norms, pattern)
    else:
        mask = magnitude_mask(weight, pattern, dim=1)
    return masked(weight, mask)


def _retained(layer: NMLayer, patterns: Sequence[NMPattern]) -> dict[str, float]:
    """The retained magnitude of each pattern."""
    return _kept(matrices_of(layer), patterns)


def _errors_of_weight(layer: NMLayer, patterns: Sequence[NMPattern]) -> dict[str, float]:
    """``|W - W_F| / |W|`` of each pattern in the Frobenius norm, by magnitude."""
    # The largest squares are those of the largest magnitudes.
    kept = _kept(matrices_of(layer).double().square(), patterns)
    return {pattern: max(1 - share, 0.0) ** 0.5 for pattern, share in kept.items()}


def _kept(weight: Tensor, patterns: Sequence[NMPattern]) -> dict[str, float]:
    """The share of a weight's sum that each pattern keeps, sorted once for each block length."""
    shares: dict[int, list[float]] = {}
    for m in {pattern.m for pattern in patterns}:
        shares[m] = retained_magnitudes(weight, m).tolist()
    return {str(pattern): shares[pattern.m][pattern.n - 1] for pattern in patterns}
