"""prune(): a trained model becomes N:M in one go, before or without fine-tuning."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_nm.functional import is_nm, magnitude_mask
from lightning_nm.functional.allocation import allocate, retained_magnitudes
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.functional.select import masked
from lightning_nm.methods.calibration import (
    Calibration,
    Moments,
    call_model,
    has_inputs,
    matrices_of,
    set_matrices,
    squared_output,
    uncached_evaluation,
)
from lightning_nm.methods.checks import check_number, check_option
from lightning_nm.methods.ste import STE
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Rule, SkipFirstLast, as_globs, parse_skip_first_last, select
from lightning_nm.nn.weight import ConvLayout
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.training.macs import MacsCounter

Score = Literal["magnitude", "wanda", "sparsegpt"]
"""What decides which entries are kept, see :func:`~lightning_nm.prune`."""

Counted = Literal["parameters", "flops"]
"""What a budget is a fraction of: the entries of all weights, or the multiply-adds of their dense forward GEMMs."""

DENSE = "dense"
"""What is written in place of a pattern for a layer that keeps all of its entries."""


@dataclass(frozen=True)
class Choice:
    """The pattern of one layer, and why it was chosen.

    Args:
        pattern: The pattern as text, or ``"dense"``.
        value: What was measured for it; 0 for a dense layer.
        why: The values of the next sparser and the next denser candidate.

    Example:
        >>> Choice("4:16", 0.02, "3:16 has 0.0310, 5:16 has 0.0131").density
        0.25
    """

    pattern: str
    value: float
    why: str = ""

    @property
    def density(self) -> float:
        """The fraction of the layer's entries that is kept."""
        return 1.0 if self.pattern == DENSE else NMPattern.parse(self.pattern).density


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
            kept, measured = f"{choice.density:.3f}", f"{choice.value:.4f}"
            rows.append((name, choice.pattern, kept, measured, choice.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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
    is met with the least sum of squared output errors, which are measured in the dense model before; without data with
    the least sum of lost fractions of magnitude. Every layer counts alike, whatever its size. With ``max_error`` each
    layer gets the sparsest candidate that keeps the bound with the inputs that the pruned layers before give it.

    Args:
        model: Any module. It runs in evaluation mode, which is undone.
        pattern: The pattern of all layers, 2:4 by default; what :meth:`NMPattern.parse` reads.
        score: ``"magnitude"``: keep the largest entries. ``"wanda"``: keep the largest products with the norm of the
            input feature (arXiv 2306.11695). ``"sparsegpt"``: also change the kept entries so that the output changes
            least (arXiv 2301.00774). Magnitudes need no data.
        data: Calibration batches: a DataLoader or a list. A few hundred examples are usual. They are read once, and
            kept.
        budget: The fraction of the entries of all weights that may be kept. Weights that stay dense count whole;
            embeddings, biases and norms do not count.
        max_error: The largest relative output error of a layer.
        candidates: The patterns to choose from with ``budget`` or ``max_error``; all N:16 by default.
        counted: With ``"flops"``, the budget is a fraction of the multiply-adds of all weights in a dense forward pass.
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
        TypeError: If ``budget`` or ``max_error`` is no number, or ``data`` is one batch as a mapping.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> result = prune(model, "2:4", "sparsegpt", [torch.randn(64, 16)], skip_first_last=False)
        >>> result.layers
        ['0', '2']
    """
    patterns = _check_options(
        pattern, score, budget, max_error, candidates, counted, blocks, has_data=data is not None
    )
    layers, skipped, sizes = _select(
        model, patterns, include, exclude, skip_first_last, conv_layout
    )
    for layer in layers:
        _refuse_layer(layer, calibrated=data is not None)
    # Of several candidates, one that a layer meets already is a good choice and no mistake.
    if len(patterns) == 1:
        _warn_of_pruned(list(layers), patterns[0])
    result = Pruned(skipped=skipped)
    costs: Mapping[str, int] = sizes
    measure = partial(_try, score=score, damping=damping)

    # Without data there are no moments, and all groups are pruned by magnitude.
    # `tuple()` is the empty iterable of such moments.
    calibrated: Callable[[], Iterable[tuple[NMLayer, Moments]]]
    calibrated = partial(zip, layers, repeat(tuple))
    with uncached_evaluation(model) if data is not None else nullcontext():
        if data is not None:
            # The pass that finds the order of the layers also counts what they multiply.
            with closing(MacsCounter(model)) as counter:
                calibrated = Calibration(
                    model, list(layers), data, call or call_model, blocks, progress
                ).moments
            costs = counter.macs if counted == "flops" else costs
            if score == "sparsegpt":
                _warn_of_few_tokens(list(layers), counter.macs)
        if budget is not None:
            # All layers are measured before the first one is pruned: they share the budget.
            values = {}
            for layer, moments in calibrated():
                errors = measure(layer, moments(), layers[layer]).errors
                # There are no errors where no token reached the layer.
                values[layer.name] = errors or _lost(layer, layers[layer], squared=data is not None)
            result.choices = _choose(values, costs, budget, 1 if data is None else 2, counted)
        for layer, moments in calibrated():
            if max_error is not None:
                # With the inputs that the layers pruned before give it.
                errors = measure(layer, moments(), layers[layer]).errors
                result.choices[layer.name] = _sparsest_within(errors, max_error)
            own = _pattern_of(layer, patterns, result)
            if own is None:
                continue
            # Once more, by the chosen pattern alone: a trial has the weight of its last pattern.
            trial = measure(layer, moments(), [own])
            set_matrices(layer, trial.weight)
            if trial.unreached:
                result.uncalibrated[layer.name] = trial.unreached
            if trial.errors:
                result.errors[layer.name] = trial.errors[str(own)]
    _warn(result)
    return result


def _check_options(
    pattern: PatternLike | None,
    score: str,
    budget: float | None,
    max_error: float | None,
    candidates: Sequence[PatternLike] | None,
    counted: str,
    blocks: object,
    *,
    has_data: bool,
) -> list[NMPattern]:
    """The patterns to choose from, each once, the sparsest one first; one for all layers without a choice.

    Raises:
        TypeError: If ``budget`` or ``max_error`` is no number.
        ValueError: For impossible options, and those that contradict each other.
    """
    check_option("score", score, Score)
    check_option("counted", counted, Counted)
    needing_data = {
        f"score={score!r}": score != "magnitude",
        f"blocks={blocks!r}": blocks is not None,
        f"counted={counted!r}": counted != "parameters",
        f"max_error={max_error}": max_error is not None,
    }
    for option, is_given in needing_data.items():
        if is_given and not has_data:
            raise ValueError(f"{option} needs calibration batches: data=loader")
    if counted != "parameters" and budget is None:
        raise ValueError(f"counted={counted!r} is for a budget: give one, for example budget=0.5")
    if budget is None and max_error is None:
        if candidates is not None:
            # They would have no effect, which the user does not expect.
            raise ValueError(
                f"candidates={candidates!r} are for a budget, or max_error: give one, for example budget=0.5"
            )
        return [NMPattern.parse("2:4" if pattern is None else pattern)]
    if budget is not None and max_error is not None:
        raise ValueError(
            f"both budget={budget} and max_error={max_error} are given: layers can be chosen by one of them"
        )
    if pattern is not None:
        raise ValueError(
            f"pattern={pattern!r} is for all layers, and budget and max_error choose one for each: give the patterns "
            "to choose from as candidates=[...]"
        )
    if budget is not None:
        why = "the fraction of the model's weights that is kept, for example 0.5"
        check_number("budget", budget, why, most=1)
    if max_error is not None:
        why = "the largest relative output error of a layer, for example 0.1"
        check_number("max_error", max_error, why, zero=True, most=1)
    if candidates is None:
        candidates = [NMPattern(n, 16) for n in range(1, 16)]
    elif isinstance(candidates, (str, NMPattern, Mapping)):
        candidates = [candidates]  # one alone
    if not candidates:
        raise ValueError("there is no candidate pattern: give some, for example ['4:16', '8:16']")
    parsed = set(map(NMPattern.parse, candidates))
    # Of equal densities the shorter block comes first: it is the tighter pattern.
    return sorted(parsed, key=lambda each: (each.density, each.m))


# ------------------------------------------------------------------------------------------------------------ selection


def _select(
    model: nn.Module,
    patterns: list[NMPattern],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    skip_first_last: SkipFirstLast,
    conv_layout: ConvLayout,
) -> tuple[dict[NMLayer, list[NMPattern]], dict[str, str], dict[str, int]]:
    """Select the layers that at least one of the patterns fits.

    Returns:
        The layers in the model's order, each with the patterns that fit it, the sparsest one first; why each other
        weight is dense; and the entries of all weights of known kinds.

    Raises:
        ValueError: If the selection fails for one of the block lengths.
    """
    first, last = parse_skip_first_last(skip_first_last)
    globs = as_globs(include, "include")
    excluded = as_globs(exclude, "exclude") or ()
    skipped: dict[str, str] = {}
    sizes: dict[str, int] = {}
    layers: dict[str, NMLayer] = {}
    fitting: dict[str, list[NMPattern]] = defaultdict(list)
    # Whether a weight can be masked depends on the length of the blocks, not on N.
    for m in dict.fromkeys(pattern.m for pattern in patterns):
        # Any method that keeps N of M will do: it is only asked which layers it can mask.
        rule = Rule(globs, NMPattern(1, m), STE(), None, conv_layout)
        selection = select(model, [rule], excluded, skip_first=first, skip_last=last)
        sizes.update(selection.sizes)
        skipped.update(selection.skipped)
        for layer in selection.layers:
            # One object stands for the layer, whatever the M. Nothing here reads its own pattern.
            layers.setdefault(layer.name, layer)
            fitting[layer.name] += [pattern for pattern in patterns if pattern.m == m]
    in_order = [name for name in sizes if name in layers]
    chosen = {layers[name]: sorted(fitting[name], key=patterns.index) for name in in_order}
    # A layer that one of the block lengths does not fit is pruned to the others.
    dense = {name: why for name, why in skipped.items() if name not in layers}
    return chosen, dense, sizes


def _refuse_layer(layer: NMLayer, *, calibrated: bool) -> None:
    """Refuse a layer that cannot be pruned so, before any layer is, by a ``ValueError``."""
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


# --------------------------------------------------------------------------------------------------- errors of patterns


class _Trial(NamedTuple):
    """What some patterns do to a layer.

    Attributes:
        weight: Its matrices, pruned to the last pattern.
        errors: By pattern, the relative output error; empty if no calibration token reaches the layer.
        unreached: The groups that none reaches. They are pruned by magnitude, and count in no error.
    """

    weight: Tensor
    errors: dict[str, float]
    unreached: list[int]


def _try(
    layer: NMLayer,
    moments: Iterable[tuple[range, Tensor]],
    patterns: Sequence[NMPattern],
    score: Score,
    damping: float,
) -> _Trial:
    """Prune the matrices of a layer to each of some patterns; ``moments`` are those of its calibration."""
    weight = matrices_of(layer)  # [groups, out / groups, in]
    # By magnitude at first, which stays in the groups that no token reaches.
    pruned = masked(weight, magnitude_mask(weight, patterns[-1], dim=2))
    # Squares add up over groups, so that the error is that of the whole layer.
    output_square = 0.0
    error_squares: dict[str, float] = {}
    unreached = []
    for groups, moments_of_groups in moments:
        for group, moment in zip(groups, moments_of_groups, strict=True):
            matrix = weight[group]
            if not bool(moment.any()):  # nothing is known of its inputs
                unreached.append(group)
                continue
            output_square += squared_output(matrix, moment)
            # All patterns while the moment is in memory: of experts, it is not kept.
            for pattern in patterns:
                try:
                    pruned[group] = _pruned_matrix(matrix, moment, pattern, score, damping)
                except ValueError as error:
                    raise ValueError(f"layer '{layer.name}': {error}") from error
                square = squared_output(matrix - pruned[group], moment)
                error_squares[str(pattern)] = error_squares.get(str(pattern), 0.0) + square
    errors = {
        name: float((square / output_square if output_square else 0.0) ** 0.5)
        for name, square in error_squares.items()
    }
    return _Trial(pruned, errors, unreached)


def _pruned_matrix(
    weight: Tensor, moment: Tensor, pattern: NMPattern, score: Score, damping: float
) -> Tensor:
    """Return one matrix ``[out, in]`` of a layer as a score prunes it."""
    if score == "sparsegpt":
        return sparsegpt(weight, moment, pattern, damping)
    if not bool(moment.isfinite().all()):
        raise ValueError("its inputs hold values that are not finite")
    if score == "wanda":
        # In float64: norms overflow float16, and bfloat16 makes ties of scores that differ.
        return masked(weight, wanda_mask(weight, moment.diagonal().sqrt(), pattern))
    return masked(weight, magnitude_mask(weight, pattern, dim=1))


def _lost(layer: NMLayer, patterns: Sequence[NMPattern], *, squared: bool) -> dict[str, float]:
    """By pattern, the fraction of the sum of ``|W|`` that the largest entries of the blocks do not hold.

    ``squared``: ``|W - W_F| / |W|`` in the Frobenius norm, the error for inputs that are not correlated. Under a
    budget, a layer that no calibration token reaches is compared with the others by it.
    """
    weight = matrices_of(layer)
    if squared:
        # The largest squares are those of the largest magnitudes.
        weight = weight.double().square()
    # One sort tells what every N of a block length keeps.
    kept = {m: retained_magnitudes(weight, m).tolist() for m in {each.m for each in patterns}}
    lost = {str(each): 1 - kept[each.m][each.n - 1] for each in patterns}
    return {name: max(fraction, 0.0) ** 0.5 for name, fraction in lost.items()} if squared else lost


# --------------------------------------------------------------------------------------------------------------- choice


def _choice(values: Mapping[str, float], index: int) -> Choice:
    """The candidate at a place, the sparsest one first and dense last, with the values of its neighbours."""
    options = [*values.items(), (DENSE, 0.0)]
    # A layer that stays dense loses nothing, which needs no mention.
    why = [
        f"{options[place][0]} has {options[place][1]:.4f}"
        for place in (index - 1, index + 1)
        if 0 <= place < len(values)
    ]
    return Choice(*options[index], ", ".join(why))


def _sparsest_within(errors: Mapping[str, float], max_error: float) -> Choice:
    """The sparsest pattern whose error is not larger than a bound, or none."""
    if not errors:
        return Choice(DENSE, 0.0, "no calibration token reaches it")
    # An error may rise with N: an entry that makes up for another one's error is no rule for magnitudes.
    within = [place for place, error in enumerate(errors.values()) if error <= max_error]
    # If no pattern is within the bound, the place after them is that of dense.
    return _choice(errors, min(within, default=len(errors)))


def _choose(
    values: Mapping[str, Mapping[str, float]],
    costs: Mapping[str, int],
    budget: float,
    power: int,
    counted: Counted,
) -> dict[str, Choice]:
    r"""Choose a pattern, or none, for each layer: the least sum of losses within a budget of the whole model.

    .. math:: \min \sum_l v_l^p \quad\text{so that}\quad \sum_l c_l N_l / M_l + \sum_{dense} c \le budget \sum c

    Args:
        values: By layer and pattern, v: output errors with p = 2, since the squares of errors that do not depend on
            each other add up, or lost fractions of magnitude with p = 1.
        costs: By weight, c, what it costs when it is dense.
        budget: The fraction of the costs of all weights that may be left.
        power: The exponent p.
        counted: What the costs are, for errors.

    Raises:
        ValueError: If the budget is too small for the weights that stay dense. The message has the least one.
    """
    losses = []
    layer_costs = []
    for name, own in values.items():
        cost = costs.get(name, 0)
        patterns = map(NMPattern.parse, own)
        # Dense is the last candidate: it loses nothing, at the whole cost.
        losses.append([*(value**power for value in own.values()), 0.0])
        # In whole entries: m divides the layer's size.
        layer_costs.append([*(cost * each.n / each.m for each in patterns), float(cost)])
    dense = {name: cost for name, cost in costs.items() if name not in values and cost}
    dense_cost = sum(dense.values())
    total = dense_cost + sum(costs.get(name, 0) for name in values)
    least = dense_cost + sum(map(min, layer_costs))
    # Sums of floats: what is equal on paper is within the budget.
    if total and least > budget * total * (1 + 1e-9):
        # Rounded up, so that the number in the message can be given as it stands.
        reachable = math.ceil(least / total * 10_000) / 10_000
        whole = "entries" if counted == "parameters" else "multiply-adds"
        others = ""
        if dense:
            largest = sorted(dense, key=lambda each: -dense[each])[:3]
            others = (
                f", of which {dense_cost / total:.4f} belong to other weights, such as "
                f"{', '.join(map(repr, largest))}"
            )
        # What the user can do, the simplest first.
        raise ValueError(
            f"budget={budget:g} cannot be reached: with the sparsest candidate in every layer {reachable:.4f} of the "
            f"{whole} of all weights are left{others}. Give {reachable:.4f} or more, sparser candidates (a larger M), "
            "or mask more layers (`include`, `exclude`, `skip_first_last`)"
        )
    # What is left for the layers; not less than nothing by a rounding error.
    left = max(budget * total - dense_cost, 0.0)
    chosen = allocate(losses, layer_costs, left)
    return {
        name: _choice(own, index) for (name, own), index in zip(values.items(), chosen, strict=True)
    }


# --------------------------------------------------------------------------------------------------------------- result


def _pattern_of(layer: NMLayer, patterns: Sequence[NMPattern], result: Pruned) -> NMPattern | None:
    """The layer's pattern, which is noted in the result; ``None`` if it was chosen to stay dense."""
    chosen = patterns[0]  # the only one, unless there are choices
    choice = result.choices.get(layer.name)
    if choice is not None and choice.pattern == DENSE:
        why = f": {choice.why}" if choice.why else ""
        result.skipped[layer.name] = f"dense by choice{why}"
        return None
    if choice is not None:
        chosen = NMPattern.parse(choice.pattern)
    result.layers.append(layer.name)
    result.patterns[layer.name] = str(chosen)
    return chosen


def _warn_of_pruned(layers: Sequence[NMLayer], pattern: NMPattern) -> None:
    """Warn of layers that are N:M before anything is pruned."""
    found = [layer.name for layer in layers if is_nm(layer.view.rows(layer.param), pattern, dim=1)]
    if found:
        # stacklevel: this function, prune() and the wrapper of no_grad lie below the user's line.
        warnings.warn(
            f"{len(found)} of {len(layers)} layers, such as '{found[0]}', are {pattern} already: nothing of them is "
            "pruned. Give a sparser pattern, or the dense model",
            stacklevel=4,
        )


def _warn_of_few_tokens(layers: Sequence[NMLayer], macs: Mapping[str, int]) -> None:
    """Warn of layers with fewer calibration tokens than input features; of experts, in the mean.

    ``H = X^T X`` is singular then: some changes of the weight cost nothing on these tokens, and all the more on others.
    """
    few = []
    for layer in layers:
        # A token is multiplied by each entry once.
        tokens = macs.get(layer.name, 0) / layer.param.numel()
        features = layer.view.rows(layer.param)[0].numel()
        # Layers without any token have a warning of their own.
        if 0 < tokens < features:
            few.append(f"'{layer.name}' ({tokens:.0f} for {features})")
    if few:
        warnings.warn(
            f"score='sparsegpt' has fewer calibration tokens than input features in {len(few)} layers, such as "
            f"{few[0]}: they are fitted to these tokens, for which alone the errors of the result hold. Give more "
            "data, or score='wanda'",
            stacklevel=4,
        )


def _warn(result: Pruned) -> None:
    unreached = [name for name in result.uncalibrated if name not in result.errors]
    if unreached:
        warnings.warn(
            f"no calibration token, or only zeros, reach {len(unreached)} layers, such as '{unreached[0]}': these are "
            "pruned by magnitude. Give more data, or name them in `exclude`",
            stacklevel=4,
        )
    partly = {name: groups for name, groups in result.uncalibrated.items() if name in result.errors}
    if partly:
        name, groups = next(iter(partly.items()))
        warnings.warn(
            f"the calibration data reach not all experts or groups of {len(partly)} layers, such as {groups} of "
            f"'{name}': these are pruned by magnitude. Give more data",
            stacklevel=4,
        )
