"""Calibration data run through a model, layer by layer: the second moments of what each layer multiplies."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_nm.methods.blocks import (
    Memory,
    Reached,
    Trace,
    choose_lists,
    lists_of_one_class,
    named_lists,
)
from lightning_nm.nn.adapters import Adapter, find_adapter
from lightning_nm.nn.adapters.experts import INPUT_HOOKS
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection.install import install, uninstall


def has_experts(layer: NMLayer) -> bool:
    """Whether the weight holds one matrix for each expert."""
    return layer.spec.layout.startswith("experts")


def has_inputs(layer: NMLayer) -> bool:
    """Whether it can be known what the layer multiplies by the weight."""
    if has_experts(layer):
        return True
    found = find_adapter(type(layer.spec.module))
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


Moments = Callable[[], Iterable[tuple[range, Tensor]]]
"""Gives ``X^T X`` over all batches, float64 ``[groups, in, in]``, for all groups or in turn for some of the experts."""


class _Stage(NamedTuple):
    """Layers whose moments are summed in one pass over the data.

    Attributes:
        layers: The layers, and the module whose inputs are those of the layer.
        until: What ends the pass of a batch: so many calls of the layers, or that of a block; ``None`` runs all.
    """

    layers: dict[NMLayer, nn.Module]
    until: nn.Module | int | None


class Calibration:
    """Runs calibration batches through a model in evaluation mode.

    Where a model has blocks, those that are finished answer from memory, and the batches are kept.

    Args:
        model: The model.
        data: The batches, which are read several times if there are no blocks.
        call: ``call(model, batch)`` runs the model.
        blocks: Names of lists of blocks; by default the longest lists of modules of one class.
        progress: Whether a progress bar is shown; by default in a terminal.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        call: Callable[[nn.Module, Any], Any],
        blocks: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.call = call
        self.blocks = blocks
        self.progress = progress
        self.number: int | None = None  # of batches, once they were read
        self.memory: Memory | None = None
        devices = [parameter.device for parameter in model.parameters()]
        self.device = devices[0] if devices else torch.device("cpu")

    def batches(self) -> Iterator[Any]:
        """The batches, on the model's device; as many as the first time."""

        def moved(leaf: Any) -> Any:
            return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf

        number = 0
        for batch in self.data:
            if self.memory is not None:
                self.memory.batch = number
            number += 1
            yield tree_map(moved, batch)
        if self.number not in (None, number):
            raise TypeError(
                f"`data` gave {self.number} batches when it was read first and {number} now, but every layer reads it: "
                "pass a DataLoader or a list"
            )
        self.number = number

    def order(self, layers: Sequence[NMLayer]) -> None:
        """Find the order in which the layers are called.

        A layer that the first batches do not call, as some experts, stands before the one that follows it in its batch.
        """
        modules = list(dict.fromkeys(layer.spec.module for layer in layers))
        if self.blocks is None:
            lists = lists_of_one_class(self.model, set(modules))
        else:
            lists = named_lists(self.model, self.blocks, set(modules))
        self._given = self.data
        if lists:
            # What a block returned belongs to its batch: a loader that shuffles would give others later.
            self.data = list(self.data)
        trace = Trace(self.model, modules, lists)
        order: list[nn.Module] = []
        with trace.watching():
            for batch in self.batches():
                self.call(self.model, batch)
                # From the last module to the first: one that is new goes right before the one that it precedes.
                place = len(order)
                for module in reversed(list(dict.fromkeys(trace.end_batch()))):
                    if module not in order:
                        order.insert(place, module)
                    place = order.index(module)
        if not self.number:
            raise ValueError("`data` holds no batch")
        never = [layer.name for layer in layers if layer.spec.module not in order]
        if never:
            raise ValueError(
                f"the calibration data do not call the layers {never}: name them in `exclude`"
            )
        self._trace = trace
        self._order = sorted(layers, key=lambda layer: order.index(layer.spec.module))
        self._lists = lists

    def _find_blocks(self) -> None:
        """Let blocks answer from memory, if the model has some and this changes nothing."""
        named = self.blocks is not None
        chosen, reason = choose_lists(self._trace, self._lists, named=named)
        if chosen:
            self.memory = Memory(self.model, self._trace, chosen)
            batch = next(self.batches())
            fault = self.memory.fault(lambda: self.call(self.model, batch))
            if fault:
                self.memory = None
                reason = f"the modules of {chosen[0]} cannot be calibrated block by block: {fault}"
            if fault and named:
                raise ValueError(f"blocks={self.blocks!r}: {fault}")
        self._lists = []
        if self.memory is None:
            self.data = self._given
        if reason:
            warnings.warn(
                f"{reason}. For each layer the whole model runs up to it, which takes a time that grows with the "
                "square of the depth",
                stacklevel=5,
            )

    def layers(self, *, changes: bool) -> Iterator[tuple[NMLayer, Moments]]:
        """The layers of :meth:`order` in this order, each with its moments.

        Args:
            changes: Whether the weight of a layer is changed before the next one is asked for.
        """
        if self._lists:
            self._find_blocks()
        if self.memory is not None:
            self.memory.forget()
        left = Counter(layer.spec.module for layer in self._order)
        with progress_bar(len(self._order), self.progress) as advance:
            for stage in self._stages(changes=changes):
                own = Counter(layer.spec.module for layer in stage.layers)
                done = {module for module, number in left.items() if not number}
                if not changes and not any(map(has_experts, stage.layers)):
                    # The pass that sums the moments runs them for the last time.
                    done.update(module for module in own if own[module] == left[module])
                summed: dict[NMLayer, Tensor] = {}
                for layer in stage.layers:
                    if has_experts(layer):
                        yield layer, partial(self._of_experts, stage, done, layer)
                    else:
                        yield layer, partial(self._of_layer, stage, done, summed, layer)
                    advance()
                left.subtract(own)
                is_tied = any(layer.spec.tied for layer in stage.layers)
                if self.memory is not None and changes and is_tied:
                    # Modules that are finished hold the weight, too.
                    self.memory.forget()

    def _stages(self, *, changes: bool) -> Iterator[_Stage]:
        order = self._order
        while order:
            # Layers whose inputs do not depend on each other's weights.
            first = last = order[0]
            block = self._block(first)
            layers = {first: first.spec.module}
            for layer in order[1:]:
                if changes:
                    follows = self._shares_input(last, layer)
                else:
                    follows = block is not None and self._block(layer) is block
                if not follows or has_experts(first) or has_experts(layer):
                    break
                # Where the inputs are the same, the pass ends with those of the first.
                layers[layer] = first.spec.module if changes else layer.spec.module
                last = layer
            order = order[len(layers) :]
            calls = [self._calls(layer) for layer in layers]
            until: nn.Module | int | None = None if None in calls else sum(filter(None, calls))
            if block is not None and self.memory is not None:
                after = {layer.spec.module for layer in order}
                is_last = self.memory.needs[block].isdisjoint(after)
                if until is None or (is_last and not changes and not has_experts(first)):
                    until = block
            yield _Stage(layers, until)

    def _block(self, layer: NMLayer) -> nn.Module | None:
        return None if self.memory is None else self.memory.block_of.get(layer.spec.module)

    def _calls(self, layer: NMLayer) -> int | None:
        """How often a batch calls a layer; ``None`` if that varies."""
        counts = self._trace.counts[layer.spec.module]
        return next(iter(counts)) if len(counts) == 1 else None

    def _shares_input(self, first: NMLayer, second: NMLayer) -> bool:
        """Whether each call of the second layer follows one of the first, with the same input."""
        if self._trace.shared[second.spec.module] != {first.spec.module}:
            return False
        calls = self._calls(first)
        return calls is not None and calls == self._calls(second)

    def _of_layer(
        self, stage: _Stage, done: set[nn.Module], summed: dict[NMLayer, Tensor], layer: NMLayer
    ) -> list[tuple[range, Tensor]]:
        """The moments of a layer, which are summed with those of its stage."""
        if layer not in summed:
            gram = _Gram()
            columns = {each: _columns(each) for each in stage.layers}
            for each in stage.layers:
                summed[each] = _zeros(each, each.spec.groups)

            def add(layer: NMLayer, group: int, matrix: Tensor) -> None:
                gram.add(summed[layer][group], matrix, columns[layer])

            self._run(stage, done, add)
        return [(range(layer.spec.groups), summed[layer])]

    def _of_experts(
        self, stage: _Stage, done: set[nn.Module], layer: NMLayer
    ) -> Iterator[tuple[range, Tensor]]:
        """The moments of as many experts at a time as take no more memory than the weight, at least of one."""
        columns = _columns(layer)
        bytes_of_moment = 8 * len(columns) ** 2
        at_a_time = max(layer.param.nbytes // bytes_of_moment, 1)
        for first in range(0, layer.spec.groups, at_a_time):
            groups = range(first, min(first + at_a_time, layer.spec.groups))
            total = _zeros(layer, len(groups))

            def add(
                _: NMLayer,
                group: int,
                matrix: Tensor,
                groups: range = groups,
                total: Tensor = total,
            ) -> None:
                if group in groups:
                    _Gram().add(total[group - groups.start], matrix, columns)

            self._run(stage, done, add)
            yield groups, total

    def _run(
        self, stage: _Stage, done: set[nn.Module], add: Callable[[NMLayer, int, Tensor], None]
    ) -> None:
        """Run all batches up to the stage's end, and add the inputs of each group of its layers."""
        left: int | None = None  # calls in the present batch

        def before(
            layer: NMLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            module = layer.spec.module
            found = find_adapter(type(module))
            assert found is not None
            try:
                inputs = found[0].inputs(module, layer.spec.parameter, args, kwargs)
            except NotImplementedError as error:
                raise ValueError(
                    f"layer '{layer.name}' cannot be calibrated: {error}; name it in `exclude`"
                ) from error
            for group, matrix in enumerate(inputs):
                add(layer, group, matrix)
            called()

        def called(*_: Any) -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if not left:
                    raise Reached

        def ended(*_: Any) -> None:
            raise Reached

        with ExitStack() as stack:
            if self.memory is not None:
                stack.enter_context(self.memory.answering(done))
            if isinstance(stage.until, nn.Module):
                stack.callback(stage.until.register_forward_hook(ended).remove)
            for layer, module in stage.layers.items():
                if has_experts(layer):
                    # Each call adds what it multiplies while it runs.
                    stack.callback(module.register_forward_hook(called).remove)
                    install(self.model, [layer])
                    stack.callback(uninstall, self.model, [layer])
                    INPUT_HOOKS[layer] = partial(add, layer)
                    stack.callback(INPUT_HOOKS.pop, layer)
                else:
                    handle = module.register_forward_pre_hook(
                        partial(before, layer), with_kwargs=True
                    )
                    stack.callback(handle.remove)
            for batch in self.batches():
                left = stage.until if isinstance(stage.until, int) else None
                with suppress(Reached):
                    self.call(self.model, batch)


class _Gram:
    """Adds ``X^T X``, which layers with the same input share."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.columns: Tensor | None = None
        self.gram: Tensor | None = None

    def add(self, total: Tensor, inputs: Tensor, columns: Tensor) -> None:
        """Add that of ``inputs [..., in]``, with the columns in this order."""
        if not self._is_last(inputs, columns):
            self.inputs = inputs
            self.columns = columns
            matrix = inputs.reshape(-1, inputs.shape[-1])[:, columns]
            matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            # The model may run under autocast, which would make this product in half precision, too.
            with torch.autocast(matrix.device.type, enabled=False):
                self.gram = matrix.t() @ matrix
        assert self.gram is not None
        total += self.gram

    def _is_last(self, inputs: Tensor, columns: Tensor) -> bool:
        """Whether these are the inputs of the last call, which are kept so that no other tensor takes their memory."""
        if self.inputs is None or self.columns is None or inputs.is_inference():
            return False
        return (
            inputs.data_ptr() == self.inputs.data_ptr()
            and inputs._version == self.inputs._version
            and inputs.dtype == self.inputs.dtype
            and inputs.shape == self.inputs.shape
            and inputs.stride() == self.inputs.stride()
            and torch.equal(columns, self.columns)
        )


def _zeros(layer: NMLayer, groups: int) -> Tensor:
    size = len(_columns(layer))
    return torch.zeros(groups, size, size, dtype=torch.float64, device=layer.param.device)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: a mapping by name, the first element of a list or tuple, anything else itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, and restore the mode of each module; models of transformers fill no caches."""
    training = [module for module in model.modules() if module.training]
    configs: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    model.eval()
    # What one block leaves in a cache, another one could read.
    for config in caching:
        with suppress(AttributeError):  # a frozen one is none of transformers
            config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            with suppress(AttributeError):
                config.use_cache = True
        for module in training:
            module.training = True


@contextmanager
def progress_bar(number: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Show on stderr how many of the layers are done, by default in a terminal alone; the value counts one more."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    is_shown = console.is_terminal if shown is None else shown
    if not is_shown:
        yield lambda: None
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("calibrating layers", total=number)
        yield partial(progress.advance, task)
