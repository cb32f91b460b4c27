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
        raise ValueError(f"score={score!r} is unknown: use {', '.join(map(repr, get_args(Score)))}")
    if data is None and score != "magnitude":
        raise ValueError(f"score={score!r} needs calibration batches: data=loader")
    if data is not None and iter(data) is data:
        raise TypeError(
            "`data` can be read only once, but every layer reads it: pass a DataLoader or a list"
        )
    rule = Rule(as_globs(include, "include"), NMPattern.parse(pattern), STE(), None, conv_layout)
    first, last = parse_skip_first_last(skip_first_last)
    selection = select(
        model, [rule], as_globs(exclude, "exclude") or (), skip_first=first, skip_last=last
    )
    for layer in selection.layers:
        if layer.sharded:
            raise ValueError(
                f"the weight of layer '{layer.name}' is sharded: prune before sharding"
            )
        if data is not None and isinstance(layer.module, nn.Embedding):
            fault = f"layer '{layer.name}' is an embedding, whose inputs are tokens: they cannot calibrate it"
            raise ValueError(f"{fault}. Prune it by magnitude, in a call of its own without data")
        if data is not None and not _has_inputs(layer):
            fault = f"layer '{layer.name}' cannot be calibrated: its adapter defines no inputs()"
            raise ValueError(f"{fault}. Name it in `exclude`, or prune by magnitude without data")
    result = Pruned(skipped=dict(selection.skipped))
    with _evaluation(model):
        if data is None:
            for layer in selection.layers:
                _set(layer, _by_magnitude(layer))
                result.layers.append(layer.name)
            return result
        calibration = _Calibration(model, data, call or _call)
        for layer, calls in calibration.order(selection.layers):
            weight = _matrices(layer)
            new, whole, lost = torch.empty_like(weight), 0.0, 0.0
            for groups, moments in calibration.moments(layer, calls):
                for group, moment in zip(groups, moments, strict=True):
                    part = weight[group]
                    if not bool(moment.any()):  # nothing is known of its inputs
                        result.uncalibrated.setdefault(layer.name, []).append(group)
                        new[group] = masked(part, magnitude_mask(part, layer.pattern, dim=1))
                        continue
                    try:
                        new[group] = _prune(part, moment, layer.pattern, score, damping)
                    except ValueError as error:
                        raise ValueError(f"layer '{layer.name}': {error}") from error
                    whole, lost = (
                        whole + _square(part, moment),
                        lost + _square(part - new[group], moment),
                    )
            if len(result.uncalibrated.get(layer.name, ())) < layer.groups:
                result.errors[layer.name] = (lost / whole) ** 0.5 if whole else 0.0
            _set(layer, new)
            result.layers.append(layer.name)
    _warn(result)
    return result


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
    found = adapter_of(layer.name, layer.module, [layer.name])
    return found is not None and found[0].inputs.__func__ is not Adapter.inputs.__func__  # type: ignore[attr-defined]


def _prune(
    weight: Tensor, moment: Tensor, pattern: NMPattern, score: Score, damping: float
) -> Tensor:
    if score == "sparsegpt":
        return sparsegpt(weight, moment, pattern, damping)
    if not bool(moment.isfinite().all()):
        raise ValueError("its inputs hold values that are not finite")
    norms = (
        moment.diagonal().sqrt()
    )  # float64: they overflow float16, and bfloat16 makes ties of scores that differ
    mask = (
        wanda_mask(weight, norms, pattern)
        if score == "wanda"
        else magnitude_mask(weight, pattern, dim=1)
    )
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
    row = layer.rows(layer.param)[0]
    places = torch.arange(row.numel(), device=row.device).view(row.shape)
    return places.movedim(0, -1).flatten() if row.dim() > 1 else places


def _matrices(layer: NMLayer) -> Tensor:
    """The weight as ``[groups, out / groups, in]``, with the columns in the order of :func:`_columns`."""
    matrix = layer.matrix(layer.param.detach())[:, _columns(layer)]
    return matrix.unflatten(0, (layer.groups, -1))


def _set(layer: NMLayer, matrices: Tensor) -> None:
    rows = layer.rows(layer.param)
    new = torch.empty_like(matrices.flatten(0, 1))
    new[:, _columns(layer)] = matrices.flatten(0, 1)
    layer.param.detach().copy_(layer.unrows(new.view(rows.shape)))


class _Reached(Exception):
    """The model ran as far as is needed."""


class _Calibration:
    def __init__(
        self, model: nn.Module, data: Iterable[Any], call: Callable[[nn.Module, Any], Any]
    ) -> None:
        self.model, self.data, self.call = model, data, call
        self.number: int | None = None  # of batches
        self.device = next(
            (parameter.device for parameter in model.parameters()), torch.device("cpu")
        )

    def batches(self) -> Iterator[Any]:
        """The batches, on the model's device; as many as the first time."""
        number = 0
        for batch in self.data:
            number += 1
            yield tree_map(
                lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch
            )
        if self.number not in (None, number):
            fault = (
                f"`data` gave {self.number} batches when it was read first and {number} now, "
                "but every layer reads it"
            )
            raise TypeError(f"{fault}: pass a DataLoader or a list")
        self.number = number

    def order(self, layers: Sequence[NMLayer]) -> list[tuple[NMLayer, int | None]]:
        """The layers in the order in which they are called, and how often a batch does; ``None`` if that varies.

        A layer that the first batches do not call, as some experts, stands before the one that follows it in its batch.
        """
        modules = list({id(layer.module): layer.module for layer in layers}.values())
        called: list[nn.Module] = []
        handles = [
            module.register_forward_pre_hook(lambda module, _: called.append(module))
            for module in modules
        ]
        places: list[nn.Module] = []
        counts: dict[nn.Module, set[int]] = {module: set() for module in modules}
        try:
            for batch in self.batches():
                called.clear()
                self.call(self.model, batch)
                place = len(places)
                for module in reversed(list(dict.fromkeys(called))):
                    if module not in places:
                        places.insert(place, module)
                    place = places.index(module)
                times = Counter(called)
                for module, seen in counts.items():
                    seen.add(times[module])
        finally:
            for handle in handles:
                handle.remove()
        if not all(counts.values()):
            raise ValueError("`data` holds no batch")
        never = [layer.name for layer in layers if layer.module not in places]
        if never:
            raise ValueError(
                f"the calibration data do not call the layers {never}: name them in `exclude`"
            )
        found = sorted(layers, key=lambda layer: places.index(layer.module))
        return [
            (layer, next(iter(seen)) if len(seen := counts[layer.module]) == 1 else None)
            for layer in found
        ]

    def moments(self, layer: NMLayer, calls: int | None) -> Iterator[tuple[range, Tensor]]:
        """``X^T X`` over all batches, float64 ``[groups, in, in]``, for all groups or in turn for some of the experts.

        The matrices of as many experts as take no more memory than the weight, at least one, are summed at a time.
        """
        order = _columns(layer)
        size = len(order)
        number = layer.groups
        if _has_experts(layer):
            number = min(max(layer.param.nbytes // (8 * size**2), 1), layer.groups)
        for first in range(0, layer.groups, number):
            groups = range(first, min(first + number, layer.groups))
            total = torch.zeros(
                len(groups), size, size, dtype=torch.float64, device=layer.param.device
            )

            def add(
                group: int, matrix: Tensor, groups: range = groups, total: Tensor = total
            ) -> None:
                if group in groups:
                    matrix = matrix.reshape(-1, matrix.shape[-1])[:, order]
                    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
                    # The model may run under autocast, which would make this product in half precision, too.
                    with torch.autocast(matrix.device.type, enabled=False):
                        total[group - groups.start] += matrix.t() @ matrix

            self._run(layer, calls, add)
            yield groups, total

    def _run(self, layer: NMLayer, calls: int | None, add: Callable[[int, Tensor], None]) -> None:
        """Run all batches, up to the layer's last call if `calls` is known, and add the inputs of each group."""
        found = adapter_of(layer.name, layer.module, [layer.name])
        assert found is not None
        seen = 0

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                inputs = found[0].inputs(module, layer.parameter, args, kwargs)
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
            handle = layer.module.register_forward_hook(after)
            stack.callback(handle.remove)
            if _has_experts(layer):
                install(self.model, [layer])
                stack.callback(uninstall, self.model, [layer])
                stack.enter_context(watching(layer, add))
            else:
                handle = layer.module.register_forward_pre_hook(before, with_kwargs=True)
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
