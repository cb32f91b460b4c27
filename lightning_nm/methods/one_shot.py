"""prune(): a trained model becomes N:M in one go, before or without fine-tuning."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.select import masked
from lightning_nm.methods import STE
from lightning_nm.nn.adapters import Adapter, adapter_of
from lightning_nm.nn.adapters.experts.products import watching
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast, parse_skip_first_last
from lightning_nm.nn.selection.install import install, uninstall
from lightning_nm.nn.selection.selection import Rule, as_globs, select

Score = Literal["magnitude", "wanda", "sparsegpt"]


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
    """

    errors: dict[str, float] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    uncalibrated: dict[str, list[int]] = field(default_factory=dict)


@torch.no_grad()
def prune(
    model: nn.Module,
    pattern: PatternLike = "2:4",
    score: Score = "magnitude",
    data: Iterable[Any] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    skip_first_last: SkipFirstLast = True,
    conv_layout: ConvLayout = "channels",
    damping: float = 0.01,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> Pruned:
    """Prune the weights of a trained model to N:M in place.

    The model trains on from there with ``NMSparsityCallback(pattern, ASP(init="zeros"), include=result.layers)``, which
    keeps these masks; give it the same ``conv_layout``. The names are those in ``model``: prune the LightningModule.

    Layers are pruned in the order in which they are called, each by the inputs that the layers pruned before give it.
    For each layer the calibration data run through the model up to this layer, and only its own statistics are in
    memory: ``in * in`` numbers of 8 bytes, for convolutions with ``in = channels / groups * taps``, for each group. Of
    experts, each by the tokens that reach it, as many are done at a time as take no more memory than their weight.

    Args:
        model: Any module. It runs in evaluation mode, which is undone.
        pattern: What :meth:`NMPattern.parse` reads.
        score: ``"magnitude"``: keep the largest entries. ``"wanda"``: keep the largest products with the norm of the
            input feature (arXiv 2306.11695). ``"sparsegpt"``: also change the kept entries so that the output changes
            least (arXiv 2301.00774). Magnitudes need no data.
        data: Calibration batches, read once for the order of the layers, then once for every layer: a DataLoader or a
            list. A few hundred examples are usual.
        include: Globs over names of modules to prune; all that can be by default.
        exclude: Globs over names of modules to keep dense.
        skip_first_last: Which of the first convolution and the last linear layer stay dense: ``True`` both, ``"first"``
            or ``"last"`` one of them, ``False`` none.
        conv_layout: How the blocks of convolutions lie, see :class:`~lightning_nm.NMSparsityCallback`.
        damping: Of SparseGPT, see :func:`~lightning_nm.functional.calibrated.sparsegpt`.
        call: ``call(model, batch)`` runs the model. By default a mapping gives the arguments by name, a list or tuple
            its first element, as of (input, target), and anything else itself.

    Raises:
        ValueError: If the selection fails, data are missing or empty, a layer is not called by them, its inputs hold
            values that are not finite, or the weights are sharded. Layers that were pruned before stay pruned.
        TypeError: If ``data`` can be read only once.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> result = prune(model, "2:4", "sparsegpt", [torch.randn(64, 16)], skip_first_last=False)
        >>> result.layers
        ['0', '2']
    """
    if score not in get_args(Score):
        known = ", ".join(map(repr, get_args(Score)))
        raise ValueError(f"score={score!r} is unknown: use {known}")
    if data is None and score != "magnitude":
        raise ValueError(f"score={score!r} needs calibration batches: data=loader")
    if data is not None and iter(data) is data:
        raise TypeError(
            "`data` can be read only once, but every layer reads it: pass a DataLoader or a list"
        )
    # Any method that keeps N of M will do: it is only asked which layers it can mask.
    rule = Rule(as_globs(include, "include"), NMPattern.parse(pattern), STE(), None, conv_layout)
    first, last = parse_skip_first_last(skip_first_last)
    selection = select(
        model, [rule], as_globs(exclude, "exclude") or (), skip_first=first, skip_last=last
    )
    for layer in selection.layers:
        _refuse(layer, calibrated=data is not None)
    result = Pruned(skipped=dict(selection.skipped))
    with _evaluation(model):
        if data is None:
            for layer in selection.layers:
                _set(layer, _by_magnitude(layer))
                result.layers.append(layer.name)
            return result
        calibration = _Calibration(model, data, call or _call)
        for layer, calls in calibration.order(selection.layers):
            _prune_layer(layer, calibration.moments(layer, calls), score, damping, result)
            result.layers.append(layer.name)
    _warn(result)
    return result


def _refuse(layer: NMLayer, *, calibrated: bool) -> None:
    """Refuse a layer that cannot be pruned so, before any layer is."""
    if layer.view.is_sharded:
        raise ValueError(f"the weight of layer '{layer.name}' is sharded: prune before sharding")
    if not calibrated:
        return
    if isinstance(layer.spec.module, nn.Embedding):
        raise ValueError(
            f"layer '{layer.name}' is an embedding, whose inputs are tokens: they cannot calibrate it. Prune it by "
            "magnitude, in a call of its own without data"
        )
    if not _has_inputs(layer):
        raise ValueError(
            f"layer '{layer.name}' cannot be calibrated: its adapter defines no inputs(). Name it in `exclude`, or "
            "prune by magnitude without data"
        )


def _prune_layer(
    layer: NMLayer,
    moments: Iterable[tuple[range, Tensor]],
    score: Score,
    damping: float,
    result: Pruned,
) -> None:
    """Prune one layer, group by group, and add to the result what is known of it.

    ``moments`` are those of :meth:`_Calibration.moments`.
    """
    weight = _matrices(layer)  # [groups, out / groups, in]
    pruned = torch.empty_like(weight)
    output_square = 0.0
    error_square = 0.0
    uncalibrated = []
    for groups, moments_of_groups in moments:
        for group, moment in zip(groups, moments_of_groups, strict=True):
            matrix = weight[group]
            if not bool(moment.any()):  # nothing is known of its inputs
                uncalibrated.append(group)
                pruned[group] = masked(matrix, magnitude_mask(matrix, layer.pattern, dim=1))
                continue
            try:
                pruned[group] = _prune(matrix, moment, layer.pattern, score, damping)
            except ValueError as error:
                raise ValueError(f"layer '{layer.name}': {error}") from error
            output_square += _square(matrix, moment)
            error_square += _square(matrix - pruned[group], moment)
    if uncalibrated:
        result.uncalibrated[layer.name] = uncalibrated
    if len(uncalibrated) < layer.spec.groups:
        relative = error_square / output_square if output_square else 0.0
        result.errors[layer.name] = relative**0.5
    _set(layer, pruned)


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


def _has_experts(layer: NMLayer) -> bool:
    return layer.spec.layout.startswith("experts")


def _has_inputs(layer: NMLayer) -> bool:
    """Whether it can be known what the layer multiplies by the weight."""
    if _has_experts(layer):
        return True
    found = adapter_of(layer.name, layer.spec.module, [layer.name])
    return found is not None and found[0].inputs.__func__ is not Adapter.inputs.__func__  # type: ignore[attr-defined]


def _prune(
    weight: Tensor, moment: Tensor, pattern: NMPattern, score: Score, damping: float
) -> Tensor:
    if score == "sparsegpt":
        return sparsegpt(weight, moment, pattern, damping)
    if not bool(moment.isfinite().all()):
        raise ValueError("its inputs hold values that are not finite")
    if score == "wanda":
        # In float64: norms overflow float16, and bfloat16 makes ties of scores that differ.
        norms = moment.diagonal().sqrt()
        mask = wanda_mask(weight, norms, pattern)
    else:
        mask = magnitude_mask(weight, pattern, dim=1)
    return masked(weight, mask)


def _by_magnitude(layer: NMLayer) -> Tensor:
    weight = _matrices(layer)
    return masked(weight, magnitude_mask(weight, layer.pattern, dim=2))


def _square(matrix: Tensor, moment: Tensor) -> float:
    """``tr(D H D^T)``, the squared norm of the output of a matrix D."""
    matrix = matrix.double()
    return float(((matrix @ moment) * matrix).sum().clamp(min=0))


def _columns(layer: NMLayer) -> Tensor:
    """The order of a row's entries in which blocks lie together: input features of a convolution's tap."""
    row = layer.view.rows(layer.param)[0]
    places = torch.arange(row.numel(), device=row.device).view(row.shape)
    if row.dim() == 1:
        return places
    return places.movedim(0, -1).flatten()  # the taps outside, the input features of each inside


def _matrices(layer: NMLayer) -> Tensor:
    """The weight as ``[groups, out / groups, in]``, with the columns in the order of :func:`_columns`."""
    matrix = layer.view.matrix(layer.param.detach())[:, _columns(layer)]
    return matrix.unflatten(0, (layer.spec.groups, -1))


def _set(layer: NMLayer, matrices: Tensor) -> None:
    rows = layer.view.rows(layer.param)
    new = torch.empty_like(matrices.flatten(0, 1))
    new[:, _columns(layer)] = matrices.flatten(0, 1)
    layer.param.detach().copy_(layer.view.unrows(new.view(rows.shape)))


class _Reached(Exception):
    """The model ran as far as is needed."""


class _Calibration:
    def __init__(
        self, model: nn.Module, data: Iterable[Any], call: Callable[[nn.Module, Any], Any]
    ) -> None:
        self.model = model
        self.data = data
        self.call = call
        self.number: int | None = None  # of batches, once they were read
        devices = [parameter.device for parameter in model.parameters()]
        self.device = devices[0] if devices else torch.device("cpu")

    def batches(self) -> Iterator[Any]:
        """The batches, on the model's device; as many as the first time."""

        def moved(leaf: Any) -> Any:
            return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf

        number = 0
        for batch in self.data:
            number += 1
            yield tree_map(moved, batch)
        if self.number not in (None, number):
            raise TypeError(
                f"`data` gave {self.number} batches when it was read first and {number} now, but every layer reads it: "
                "pass a DataLoader or a list"
            )
        self.number = number

    def order(self, layers: Sequence[NMLayer]) -> list[tuple[NMLayer, int | None]]:
        """The layers in the order in which they are called, and how often a batch does; ``None`` if that varies.

        A layer that the first batches do not call, as some experts, stands before the one that follows it in its batch.
        """
        modules = list(dict.fromkeys(layer.spec.module for layer in layers))
        called: list[nn.Module] = []  # in the present batch

        def note(module: nn.Module, _: Any) -> None:
            called.append(module)

        handles = [module.register_forward_pre_hook(note) for module in modules]
        order: list[nn.Module] = []
        counts: dict[nn.Module, set[int]] = {module: set() for module in modules}
        try:
            for batch in self.batches():
                called.clear()
                self.call(self.model, batch)
                # From the last module to the first: one that is new goes right before the one that it precedes.
                place = len(order)
                for module in reversed(list(dict.fromkeys(called))):
                    if module not in order:
                        order.insert(place, module)
                    place = order.index(module)
                times = Counter(called)
                for module in modules:
                    counts[module].add(times[module])
        finally:
            for handle in handles:
                handle.remove()
        if not all(counts.values()):
            raise ValueError("`data` holds no batch")
        never = [layer.name for layer in layers if layer.spec.module not in order]
        if never:
            raise ValueError(
                f"the calibration data do not call the layers {never}: name them in `exclude`"
            )
        found: list[tuple[NMLayer, int | None]] = []
        for layer in sorted(layers, key=lambda layer: order.index(layer.spec.module)):
            seen = counts[layer.spec.module]
            always = next(iter(seen)) if len(seen) == 1 else None
            found.append((layer, always))
        return found

    def moments(self, layer: NMLayer, calls: int | None) -> Iterator[tuple[range, Tensor]]:
        """``X^T X`` over all batches, float64 ``[groups, in, in]``, for all groups or in turn for some of the experts.

        The matrices of as many experts as take no more memory than the weight, at least one, are summed at a time.
        """
        columns = _columns(layer)
        size = len(columns)
        all_groups = layer.spec.groups
        at_a_time = all_groups
        if _has_experts(layer):
            bytes_of_moment = 8 * size**2
            at_a_time = min(max(layer.param.nbytes // bytes_of_moment, 1), all_groups)
        for first in range(0, all_groups, at_a_time):
            groups = range(first, min(first + at_a_time, all_groups))
            total = torch.zeros(
                len(groups), size, size, dtype=torch.float64, device=layer.param.device
            )

            def add(
                group: int, matrix: Tensor, groups: range = groups, total: Tensor = total
            ) -> None:
                if group not in groups:
                    return
                matrix = matrix.reshape(-1, matrix.shape[-1])[:, columns]
                matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
                # The model may run under autocast, which would make this product in half precision, too.
                with torch.autocast(matrix.device.type, enabled=False):
                    total[group - groups.start] += matrix.t() @ matrix

            self._run(layer, calls, add)
            yield groups, total

    def _run(self, layer: NMLayer, calls: int | None, add: Callable[[int, Tensor], None]) -> None:
        """Run all batches, up to the layer's last call if `calls` is known, and add the inputs of each group."""
        found = adapter_of(layer.name, layer.spec.module, [layer.name])
        assert found is not None
        seen = 0

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                inputs = found[0].inputs(module, layer.spec.parameter, args, kwargs)
            except NotImplementedError as error:
                raise ValueError(
                    f"layer '{layer.name}' cannot be calibrated: {error}; name it in `exclude`"
                ) from error
            for group, matrix in enumerate(inputs):
                add(group, matrix)

        def after(*_: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == calls:
                raise _Reached

        with ExitStack() as stack:
            handle = layer.spec.module.register_forward_hook(after)
            stack.callback(handle.remove)
            if _has_experts(layer):
                install(self.model, [layer])
                stack.callback(uninstall, self.model, [layer])
                stack.enter_context(watching(layer, add))
            else:
                handle = layer.spec.module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            for batch in self.batches():
                seen = 0
                with suppress(_Reached):
                    self.call(self.model, batch)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
