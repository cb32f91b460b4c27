"""Calibration data run through a model, layer by layer: the second moments of what each layer multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_nm.nn.adapters import Adapter, adapter_of
from lightning_nm.nn.adapters.experts.products import watching
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection.install import install, uninstall


def has_experts(layer: NMLayer) -> bool:
    """Whether the weight holds one matrix for each expert."""
    return layer.spec.layout.startswith("experts")


def has_inputs(layer: NMLayer) -> bool:
    """Whether it can be known what the layer multiplies by the weight."""
    if has_experts(layer):
        return True
    found = adapter_of(layer.name, layer.spec.module, [layer.name])
    return found is not None and found[0].inputs.__func__ is not Adapter.inputs.__func__  # type: ignore[attr-defined]


def squared_output(matrix: Tensor, moment: Tensor) -> float:
    """``tr(D H D^T)``, the squared norm of the output of a matrix D."""
    matrix = matrix.double()
    return float(((matrix @ moment) * matrix).sum().clamp(min=0))


def _columns(layer: NMLayer) -> Tensor:
    """The order of a row's entries in which blocks lie together: input features of a convolution's tap."""
    row = layer.view.rows(layer.param)[0]
    places = torch.arange(row.numel(), dtype=torch.int64, device=row.device).view(row.shape)
    if row.dim() == 1:
        return places
    return places.movedim(0, -1).flatten()  # the taps outside, the input features of each inside


def matrices_of(layer: NMLayer) -> Tensor:
    """The weight as ``[groups, out / groups, in]``, with the columns in the order of :func:`_columns`."""
    matrix = layer.view.matrix(layer.param.detach())[:, _columns(layer)]
    return matrix.unflatten(0, (layer.spec.groups, -1))


def set_matrices(layer: NMLayer, matrices: Tensor) -> None:
    """Write matrices of the form of :func:`matrices_of` into the weight."""
    rows = layer.view.rows(layer.param)
    new = torch.empty_like(matrices.flatten(0, 1))
    new[:, _columns(layer)] = matrices.flatten(0, 1)
    layer.param.detach().copy_(layer.view.unrows(new.view(rows.shape)))


def check_data(data: Iterable[Any]) -> None:
    """Refuse data that can be read only once, by a ``TypeError``."""
    if iter(data) is data:
        raise TypeError(
            "`data` can be read only once, but every layer reads it: pass a DataLoader or a list"
        )


class _Reached(Exception):
    """The model ran as far as is needed."""


class Calibration:
    """Runs calibration batches through a model in evaluation mode.

    Args:
        model: The model.
        data: The batches, which are read several times.
        call: ``call(model, batch)`` runs the model.
    """

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
        if has_experts(layer):
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
            if has_experts(layer):
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


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: a mapping by name, the first element of a list or tuple, anything else itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, and restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
