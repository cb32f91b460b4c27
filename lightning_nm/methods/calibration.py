"""Calibration data run through a model, layer by layer: the second moments of what each layer multiplies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_nm.functional.evolution import from_blocks
from lightning_nm.functional.masks import indices, wide_dtype
from lightning_nm.methods.blocks import Memory, Reached, Trace, find_lists
from lightning_nm.nn.adapters import Adapter, find_adapter
from lightning_nm.nn.adapters.experts import INPUT_HOOKS
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import install, uninstall
from lightning_nm.training.macs import evaluation, tensors_in


def has_inputs(layer: NMLayer) -> bool:
    """Whether it can be known what the layer multiplies by the weight."""
    if layer.spec.layout.has_experts:
        return True
    inputs: Any = _adapter(layer).inputs
    # A bound method is made anew at each look-up, so the functions behind them are compared.
    return inputs.__func__ is not Adapter.inputs.__func__  # type: ignore[attr-defined]


def _adapter(layer: NMLayer) -> type[Adapter]:
    found = find_adapter(type(layer.spec.module))
    assert found is not None
    return found[0]


def squared_output(matrix: Tensor, moment: Tensor) -> float:
    """``tr(D H D^T)``, the squared norm of the output of a matrix D."""
    matrix = matrix.double()
    # Rounding can make a sum near 0 negative, and roots are taken of it.
    return float(((matrix @ moment) * matrix).sum().clamp(min=0))


def _columns(layer: NMLayer) -> Tensor:
    """The order of a row's entries in which blocks lie together: input features of a convolution's tap."""
    row = layer.view.rows(layer.param)[0]
    places = indices(row.numel(), row).view(row.shape)
    return places.movedim(0, -1).flatten()  # the taps outside, the input features of each inside


def matrices_of(layer: NMLayer) -> Tensor:
    """The weight as ``[groups, out / groups, in]``, with the columns in the order of :func:`_columns`."""
    channels_last = layer.view.rows(layer.param.detach()).movedim(1, -1)
    # Each group of output rows has inputs of its own, and so a matrix and a moment of its own.
    return channels_last.flatten(1).contiguous().unflatten(0, (layer.spec.groups, -1))


def set_matrices(layer: NMLayer, matrices: Tensor) -> None:
    """Write matrices of the form of :func:`matrices_of` into the weight."""
    rows = from_blocks(matrices.contiguous(), layer.view.rows(layer.param).shape)
    layer.param.detach().copy_(layer.view.unrows(rows))


Moments = Callable[[], Iterable[tuple[range, Tensor]]]
"""Gives ``X^T X`` over all batches, float64 ``[groups, in, in]``, for all groups or in turn for some of the experts."""


class Calibration:
    """Runs calibration batches through a model in evaluation mode.

    Where a model has blocks, those that are finished answer from memory.

    Args:
        model: The model.
        layers: The layers to calibrate.
        data: The batches, which are kept.
        call: ``call(model, batch)`` runs the model.
        blocks: Names of lists of blocks; by default the longest lists of modules of one class.
        progress: Whether a progress bar is shown; by default in a terminal.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[NMLayer],
        data: Iterable[Any],
        call: Callable[[nn.Module, Any], Any],
        blocks: str | Sequence[str] | None,
        progress: bool | None,
    ) -> None:
        self.model = model
        self.call = call
        self.progress = progress
        self.memory: Memory | None = None
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        modules = {layer.spec.module for layer in layers}
        # Before the pass over the data: a wrong name in `blocks` should not cost one.
        lists = find_lists(model, blocks, modules)
        # What a block returned belongs to its batch: a loader that shuffles would give others later.
        if isinstance(data, (str, Mapping)):
            raise TypeError(
                f"`data` is a {type(data).__name__}, and takes a list of batches: give [batch] for one"
            )
        self.data = list(data)
        if not self.data:
            raise ValueError(
                "`data` holds no batch: it is empty, an iterator that was read to its end, or a DataLoader with "
                "drop_last=True and fewer samples than a batch. Give one batch or more"
            )
        tensors = tensors_in(self.data)
        if tensors and not any(map(Tensor.numel, tensors)):
            raise ValueError(
                f"`data` holds no token: the tensors of its {len(self.data)} batches are empty, the first one of shape "
                f"{tuple(tensors[0].shape)}. Give batches with tokens"
            )
        # One pass through the dense model shows the order of calls, and which layers share an input.
        trace = self.trace = Trace(model, modules, lists)
        with trace.watching():
            for batch in self.batches():
                call(model, batch)
                trace.end_batch()
        never = [layer.name for layer in layers if layer.spec.module not in trace.order]
        if never:
            raise ValueError(
                f"the calibration data do not call the layers {never}: name them in `exclude`"
            )
        self.layers = sorted(layers, key=lambda layer: trace.order.index(layer.spec.module))
        self.blocks = blocks
        self._lists = lists

    def batches(self) -> Iterator[Any]:
        """The batches, on the model's device."""
        for number, batch in enumerate(self.data):
            if self.memory is not None:
                self.memory.batch = number
            # One at a time: the device need not hold all of the data.
            yield tree_map_only(Tensor, lambda leaf: leaf.to(self.device), batch)

    def _find_blocks(self) -> None:
        """Let blocks answer from memory, if the model has some and this changes nothing."""
        chosen, reason = self.trace.choose_lists(named=self.blocks is not None)
        if chosen:
            # A module with several layers is done with the last of them, which replaces the others in the dict.
            last = {layer.spec.module: number for number, layer in enumerate(self.layers, start=1)}
            # By module, how many layers have to be done until its output does not change any more.
            ready = {
                module: max((last[need] for need in needs), default=0)
                for module, needs in self.trace.needs.items()
            }
            self.memory = Memory(self.model, self.trace, chosen, ready)
            batch = next(self.batches())
            fault = self.memory.fault(lambda: self.call(self.model, batch))
            if fault:
                self.memory = None
                reason = f"the modules of {chosen[0]} cannot be calibrated block by block: {fault}"
            # Blocks that the user named must work; those that were only tried are given up with a warning.
            if fault and self.blocks is not None:
                raise ValueError(f"blocks={self.blocks!r}: {fault}")
        if reason:
            warnings.warn(
                f"{reason}. For each layer the whole model runs up to it, which takes a time that grows with the "
                "square of the depth",
                stacklevel=5,
            )

    def moments(self) -> Iterator[tuple[NMLayer, Moments]]:
        """The layers in the order of their calls, each with its moments; its weight may be changed then."""
        # Not in the constructor, during which the caller counts multiply-adds.
        if self._lists:
            self._lists = []
            self._find_blocks()
        # An earlier round has left the answers of the last blocks.
        if self.memory is not None:
            self.memory.forget()
        done = 0
        with progress_bar(len(self.layers), self.progress) as advance:
            while done < len(self.layers):
                first = self.layers[done]
                if first.spec.layout.has_experts:
                    # The moments of all experts may take much more memory than their weight: they come in turn.
                    stage = [first]
                    yield first, partial(self._some_at_a_time, first, done)
                else:
                    stage = self._with_one_input(done)
                    every = {layer: range(layer.spec.groups) for layer in stage}
                    # Summed before the first of them is handed out: the caller may prune it at once, which does not
                    # change the input that they share.
                    summed = self._sum(every, done)
                    for layer in stage:
                        yield layer, partial(zip, [every[layer]], [summed[layer]])
                done += len(stage)
                advance(len(stage))
                if self.memory is not None and any(layer.spec.tied for layer in stage):
                    # Modules that are finished hold the weight, too.
                    self.memory.forget()

    def _with_one_input(self, start: int) -> list[NMLayer]:
        """The layers from this one on each of whose calls follows one of the layer before, with the same input."""
        stage = [self.layers[start]]
        for layer in self.layers[start + 1 :]:
            last = stage[-1].spec.module
            module = layer.spec.module
            counts = self.trace.counts[module]
            # In each of its calls, in all batches: otherwise the set has another element.
            is_shared = self.trace.shared[module] == {last} and not layer.spec.layout.has_experts
            if not is_shared or len(counts) > 1 or counts != self.trace.counts[last]:
                break
            stage.append(layer)
        return stage

    def _some_at_a_time(self, layer: NMLayer, done: int) -> Iterator[tuple[range, Tensor]]:
        """The moments of as many experts at a time as take no more memory than the weight, at least of one."""
        # 8 bytes for each number of float64.
        at_a_time = max(layer.param.nbytes // (8 * len(_columns(layer)) ** 2), 1)
        for first in range(0, layer.spec.groups, at_a_time):
            groups = range(first, min(first + at_a_time, layer.spec.groups))
            yield groups, self._sum({layer: groups}, done)[layer]

    def _sum(self, wanted: Mapping[NMLayer, range], done: int) -> dict[NMLayer, Tensor]:
        """Run all batches as far as layers with one input, and sum the moments of these groups of them.

        Args:
            wanted: The layers and their groups.
            done: How many layers come before them.
        """
        columns, summed = {}, {}
        for layer, groups in wanted.items():
            order = columns[layer] = _columns(layer)
            shape = (len(groups), len(order), len(order))
            summed[layer] = torch.zeros(shape, dtype=torch.float64, device=order.device)
        first = next(iter(wanted))
        module = first.spec.module
        counts = self.trace.counts[module]
        # The pass of a batch ends with the last call. If their number varies, it ends with that of the block.
        calls = sum(counts) if len(counts) == 1 else 0
        left = 0

        def add(group: int, inputs: Tensor) -> None:
            groups = wanted[first]
            if group in groups:
                summed[first][group - groups.start] += _gram(inputs, columns[first])

        def collect(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Only the first layer's module has this hook: the others of the stage get the same input.
            last: tuple[Tensor, Tensor, Tensor] | None = None
            for layer in wanted:
                spec = layer.spec
                order = columns[layer]
                inputs = _adapter(layer).inputs(spec.module, spec.parameter, args, kwargs)
                for group, x in enumerate(inputs):
                    # Inputs that are the same memory have the same moments.
                    if last is None or not last[0].is_set_to(x) or not torch.equal(last[1], order):
                        last = x, order, _gram(x, order)
                    summed[layer][group] += last[2]
            called()

        def called(*_: Any) -> None:
            nonlocal left
            left -= 1
            # If the number of calls varies, `left` began at 0 and is negative by now: the pass goes on.
            if not left:
                raise Reached

        def ended(*_: Any) -> None:
            raise Reached

        with ExitStack() as stack:
            if self.memory is not None:
                stack.enter_context(self.memory.answering(done))
                block = self.memory.block_of.get(module)
                if block is not None and not calls:
                    stack.callback(block.register_forward_hook(ended).remove)
            if first.spec.layout.has_experts:
                # Each call adds what it multiplies while it runs.
                stack.callback(module.register_forward_hook(called).remove)
                # The adapter alone knows which tokens each expert gets. The layer has no mask yet: its GEMMs are dense.
                install(self.model, [first])
                stack.callback(uninstall, self.model, [first])
                INPUT_HOOKS[first] = add
                stack.callback(INPUT_HOOKS.pop, first)
            else:
                # Before the layer runs: nothing needs its output after the last call.
                handle = module.register_forward_pre_hook(collect, with_kwargs=True)
                stack.callback(handle.remove)
            for batch in self.batches():
                left = calls
                with suppress(Reached):
                    self.call(self.model, batch)
        return summed


def _gram(inputs: Tensor, columns: Tensor) -> Tensor:
    """``X^T X`` of ``inputs [..., in]``, with the columns in this order."""
    matrix = inputs.reshape(-1, inputs.shape[-1])[:, columns]
    matrix = matrix.to(wide_dtype(matrix))
    # The model may run under autocast, which would make this GEMM in half precision, too.
    with torch.autocast(matrix.device.type, enabled=False):
        return matrix.t() @ matrix


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: a mapping by name, the first element of a list or tuple, anything else itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


@contextmanager
def uncached_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in which models of transformers fill no caches."""
    with ExitStack() as stack, evaluation(model):
        for module in model.modules():
            config: Any = module.__dict__.get("config")
            if getattr(config, "use_cache", None) is True:
                # What one block leaves in a cache, another one could read. A frozen config is none of transformers.
                with suppress(AttributeError):
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
        yield


@contextmanager
def progress_bar(number: int, shown: bool | None) -> Iterator[Callable[[float], None]]:
    """Show on stderr how many of the layers are done, by default in a terminal alone; the value counts more."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    is_shown = console.is_terminal if shown is None else shown
    if not is_shown:
        # Not Progress(disable=True), of which rich 13 ends the line.
        yield lambda _: None
        return
    with Progress(*columns, console=console) as progress:
        yield partial(progress.advance, progress.add_task("calibrating layers", total=number))
