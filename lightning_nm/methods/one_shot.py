"""prune(): a trained model becomes N:M in one go, before or without fine-tuning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.budget import (
    DENSE,
    Choice,
    Counted,
    check_budget,
    check_counted,
)
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.select import masked
from lightning_nm.methods.calibration import (
    Calibration,
    call_model,
    evaluation,
    matrices_of,
    set_matrices,
    squared_output,
)
from lightning_nm.methods.sensitivity import (
    LayerScan,
    Score,
    check_blocks,
    check_max_error,
    check_score,
    measure,
    parse_patterns,
    pruned_matrix,
    refuse_layer,
    relative_error,
    scan_layer,
    select_layers,
    sensitivity,
    sparsest_within,
)
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast


@dataclass
class Pruned:
    """The result of :func:`prune`.

    Attributes:
        errors: By layer, the relative output error on the calibration data, ``|X (W - W_pruned)^T| / |X W^T|`` in the
            Frobenius norm; empty without data, and without the layers that no calibration token reached at all.
        layers: Names of the pruned layers, in the order in which they were pruned.
        skipped: Why each other weight is dense, by name.
        uncalibrated: By layer, the experts, or the groups of a convolution, that no calibration token reached, or only
            zeros; they are pruned by magnitude. A layer that has neither experts nor groups is ``[0]``.
        patterns: The pattern of each pruned layer, as text.
        choices: With ``budget`` or ``max_error``, what was chosen for each layer, also for those that stay dense.
    """

    errors: dict[str, float] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    uncalibrated: dict[str, list[int]] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The layers of each pattern as ``rules`` of :class:`~lightning_nm.NMSparsityCallback`, for fine-tuning."""
        # One rule for each pattern, in the order of the layers.
        layers_by_pattern: dict[str, list[str]] = {}
        for name in self.layers:
            layers_by_pattern.setdefault(self.patterns[name], []).append(name)
        return [
            {"include": names, "pattern": pattern} for pattern, names in layers_by_pattern.items()
        ]

    def table(self) -> str:
        """Return the pattern of every layer and why it was chosen, as lines of text; empty without choices."""
        if not self.choices:
            return ""
        rows = [("layer", "pattern", "kept", "measured", "why")]
        for name, choice in self.choices.items():
            rows.append(
                (name, choice.pattern, f"{choice.density:.3f}", f"{choice.value:.4f}", choice.why)
            )
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


@torch.no_grad()
def prune(
    model: nn.Module,
    pattern: PatternLike | None = None,
    score: Score = "magnitude",
    data: Iterable[Any] | None = None,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    candidates: Sequence[PatternLike] | None = None,
    counted: Counted = "parameters",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    skip_first_last: SkipFirstLast = True,
    conv_layout: ConvLayout = "channels",
    damping: float = 0.01,
    call: Callable[[nn.Module, Any], Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    progress: bool | None = None,
) -> Pruned:
    """Prune the weights of a trained model to N:M in place.

    The model trains on from there with ``NMSparsityCallback(pattern, ASP(init="zeros"), include=result.layers)``, which
    keeps these masks; give it the same ``conv_layout``, and ``rules=result.rules`` if layers have patterns of their
    own. The names are those in ``model``: prune the LightningModule.

    Layers are pruned in the order in which they are called, each by the inputs that the layers pruned before give it.
    Layers with the same input are calibrated in one pass. Their statistics are in memory: ``in * in`` numbers of 8
    bytes for each, for convolutions with ``in = channels / groups * taps``, for each group. Of experts, each by the
    tokens that reach it, as many are done at a time as take no more memory than their weight.

    Blocks that are finished do not run again: what the last one returned is kept for each batch. A model of such blocks
    is pruned with no more multiply-adds than three forward passes of the calibration data, and one of a single batch
    more. Where a model has no blocks, the data run through it up to each layer; if it has a list of modules that could
    be blocks and is none, a warning says why.

    With ``budget`` or ``max_error`` each layer gets a pattern of its own among ``candidates``, or stays dense. A budget
    is met with the least sum of squared output errors, which :func:`sensitivity` measures in the dense model before;
    without data with the least sum of lost shares of magnitude. See :meth:`Sensitivity.choose`. With ``max_error`` each
    layer gets the sparsest candidate that keeps the bound with the inputs that the pruned layers before give it.

    Args:
        model: Any module. It runs in evaluation mode, which is undone.
        pattern: The pattern of all layers, 2:4 by default; what :meth:`NMPattern.parse` reads.
        score: ``"magnitude"``: keep the largest entries. ``"wanda"``: keep the largest products with the norm of the
            input feature (arXiv 2306.11695). ``"sparsegpt"``: also change the kept entries so that the output changes
            least (arXiv 2301.00774). Magnitudes need no data.
        data: Calibration batches: a DataLoader or a list. A few hundred examples are usual. They are read once and kept
            if the model has blocks, else once for every layer.
        budget: The share of the entries of all weights that may be kept. Weights that stay dense count whole;
            embeddings, biases and norms do not count.
        max_error: The largest relative output error of a layer.
        candidates: The patterns to choose from with ``budget`` or ``max_error``; all N:16 by default.
        counted: With ``"flops"``, the budget is a share of the multiply-adds of all weights in a dense forward pass.
        include: Globs over names of modules to prune; all that can be by default.
        exclude: Globs over names of modules to keep dense.
        skip_first_last: Which of the first convolution and the last linear layer stay dense: ``True`` both, ``"first"``
            or ``"last"`` one of them, ``False`` none.
        conv_layout: How the blocks of convolutions lie, see :class:`~lightning_nm.NMSparsityCallback`.
        damping: Of SparseGPT, see :func:`~lightning_nm.functional.calibrated.sparsegpt`.
        call: ``call(model, batch)`` runs the model. By default a mapping gives the arguments by name, a list or tuple
            its first element, as of (input, target), and anything else itself.
        blocks: The name of the module that holds the blocks, such as ``"model.layers"``, or a list of such names. By
            default the longest ``ModuleList`` or ``Sequential`` of modules of one class, and others outside of it.
            ``[]`` runs the whole model for every layer.
        progress: Whether a progress bar is shown on stderr; by default in a terminal.

    Raises:
        ValueError: If the selection fails, data are missing or empty, a layer is not called by them, its inputs hold
            values that are not finite, the weights are sharded, options contradict each other, the budget cannot be
            reached, or ``blocks`` names no blocks. Layers that were pruned before stay pruned.
        TypeError: If ``data`` can be read only once.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> result = prune(model, "2:4", "sparsegpt", [torch.randn(64, 16)], skip_first_last=False)
        >>> result.layers
        ['0', '2']
    """
    check_score(score, data)
    check_blocks(blocks, has_data=data is not None)
    _check_options(pattern, budget, max_error, candidates, counted, has_data=data is not None)
    is_chosen = budget is not None or max_error is not None
    patterns = parse_patterns(candidates)
    if not is_chosen:
        patterns = (NMPattern.parse("2:4" if pattern is None else pattern),)
    found = select_layers(model, patterns, include, exclude, skip_first_last, conv_layout)
    for layer in found.layers:
        refuse_layer(layer, calibrated=data is not None)
    result = Pruned(skipped=found.skipped)
    if data is None:
        if budget is not None:
            options: dict[str, Any] = {"include": include, "exclude": exclude}
            options |= {"skip_first_last": skip_first_last, "conv_layout": conv_layout}
            result.choices = sensitivity(model, None, patterns, **options).choose(budget)
        for layer in found.layers:
            own = _pattern_of(layer, patterns, result)
            if own is not None:
                set_matrices(layer, _by_magnitude(layer, own))
        return result

    with evaluation(model):
        calibration = Calibration(model, data, call or call_model, blocks, progress)
        if budget is None:
            calibration.order(found.layers)
        else:
            # All layers are measured before the first one is pruned: they share the budget.
            measured = measure(calibration, found, patterns, score, damping)
            result.choices = measured.choose(budget, counted=counted)
        # With a bound, each layer is measured and chosen for in its turn: the bound then holds for the inputs that the
        # pruned layers before give it.
        for layer, moments in calibration.layers(changes=True):
            if max_error is not None:
                scan = scan_layer(layer, moments(), found.patterns[layer.name], score, damping)
                result.choices[layer.name] = _within(scan, max_error)
            own = _pattern_of(layer, patterns, result)
            if own is not None:
                _prune_layer(layer, moments(), own, score, damping, result)
    _warn(result)
    return result


def _check_options(
    pattern: PatternLike | None,
    budget: float | None,
    max_error: float | None,
    candidates: Sequence[PatternLike] | None,
    counted: str,
    *,
    has_data: bool,
) -> None:
    """Refuse options that contradict each other, by a ``ValueError``."""
    check_counted(counted)
    if budget is not None and max_error is not None:
        raise ValueError(
            f"both budget={budget} and max_error={max_error} are given: layers can be chosen by one of them"
        )
    if budget is None and max_error is None:
        for name, is_given in (("candidates", candidates), ("counted", counted != "parameters")):
            # Without a budget they would have no effect, which the user does not expect.
            if is_given:
                raise ValueError(
                    f"{name} is for a budget, or max_error: give one, for example budget=0.5"
                )
        return
    if pattern is not None:
        raise ValueError(
            f"pattern={pattern!r} is for all layers, and budget and max_error choose one for each: give the patterns "
            "to choose from as candidates=[...]"
        )
    if budget is not None:
        check_budget(budget)
        if counted == "flops" and not has_data:
            raise ValueError("counted='flops' needs calibration batches: data=loader")
        return
    assert max_error is not None
    check_max_error(max_error)
    if counted != "parameters":
        raise ValueError(f"counted={counted!r} is for a budget, not for max_error")
    if not has_data:
        raise ValueError(f"max_error={max_error} needs calibration batches: data=loader")


def _within(scan: LayerScan, max_error: float) -> Choice:
    """The sparsest pattern within the bound; none if nothing is known of the layer's inputs."""
    if not scan.is_calibrated:
        return Choice(DENSE, 0.0, "no calibration token reaches it")
    return sparsest_within(scan.errors, max_error)


def _pattern_of(layer: NMLayer, patterns: Sequence[NMPattern], result: Pruned) -> NMPattern | None:
    """The layer's pattern, which is noted in the result; ``None`` if it was chosen to stay dense."""
    chosen = patterns[0]  # the only one, unless there are choices
    choice = result.choices.get(layer.name)
    if choice is not None and choice.pattern == DENSE:
        result.skipped[layer.name] = (
            f"dense by choice: {choice.why}" if choice.why else "dense by choice"
        )
        return None
    if choice is not None:
        chosen = NMPattern.parse(choice.pattern)
    result.layers.append(layer.name)
    result.patterns[layer.name] = str(chosen)
    return chosen


def _prune_layer(
    layer: NMLayer,
    moments: Iterable[tuple[range, Tensor]],
    pattern: NMPattern,
    score: Score,
    damping: float,
    result: Pruned,
) -> None:
    """Prune one layer, group by group, and add to the result what is known of it.

    ``moments`` are those of :meth:`~lightning_nm.methods.calibration.Calibration.layers`.
    """
    weight = matrices_of(layer)  # [groups, out / groups, in]
    pruned = torch.empty_like(weight)
    output_square = 0.0
    error_square = 0.0
    uncalibrated = []
    for groups, moments_of_groups in moments:
        for group, moment in zip(groups, moments_of_groups, strict=True):
            matrix = weight[group]
            if not bool(moment.any()):  # nothing is known of its inputs
                uncalibrated.append(group)
                pruned[group] = masked(matrix, magnitude_mask(matrix, pattern, dim=1))
                continue
            pruned[group] = pruned_matrix(layer.name, matrix, moment, pattern, score, damping)
            output_square += squared_output(matrix, moment)
            error_square += squared_output(matrix - pruned[group], moment)
    if uncalibrated:
        result.uncalibrated[layer.name] = uncalibrated
    if len(uncalibrated) < layer.spec.groups:
        result.errors[layer.name] = relative_error(error_square, output_square)
    set_matrices(layer, pruned)


def _by_magnitude(layer: NMLayer, pattern: NMPattern) -> Tensor:
    weight = matrices_of(layer)
    return masked(weight, magnitude_mask(weight, pattern, dim=2))


def _warn(result: Pruned) -> None:
    unreached = [name for name in result.uncalibrated if name not in result.errors]
    if unreached:
        warnings.warn(
            f"no calibration token, or only zeros, reach {len(unreached)} layers, such as '{unreached[0]}': these are "
            "pruned by magnitude. Give more data, or name them in `exclude`",
            stacklevel=3,
        )
    partly = {name: groups for name, groups in result.uncalibrated.items() if name in result.errors}
    if partly:
        name, groups = next(iter(partly.items()))
        warnings.warn(
            f"the calibration data reach not all experts or groups of {len(partly)} layers, such as {groups} of "
            f"'{name}': these are pruned by magnitude. Give more data",
            stacklevel=3,
        )
