"""Checks for mistakes of a training loop: forgotten calls, and masked weights that are read without their layer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import local_values

STEPS_WITHOUT_END = 16
"""Steps of one optimizer after which a missing ``step()`` is said. A loop may take a few of them in one batch."""


class ForgottenCallWarning(UserWarning):
    """A training loop left out a call of :class:`~lightning_nm.NMSparsifier`."""


class ForgottenCalls:
    """Notices the calls that a loop leaves out.

    Args:
        in_plain_loop: Whether the user makes the calls. Where a callback makes them, only ``before_step()`` can be
            missing, for an optimizer that the Trainer does not know.
    """

    def __init__(self, in_plain_loop: bool) -> None:
        self.in_plain_loop = in_plain_loop
        self._given: set[str] = set()  # calls that were warned of: each is told once
        self.unbaked = False  # whether an optimizer has stepped since the last bake()

    def optimizer_stepped(
        self, layers: Sequence[NMLayer], announced: bool, steps_in_batch: int
    ) -> None:
        """An optimizer made a real step of these layers; ``announced``: after ``before_step()``."""
        if not layers:
            return
        if not announced and "before_step" not in self._given:
            for layer in layers:
                lost = layer.spec.method.lost_without_before_step(layer)
                if lost:
                    self._warn(
                        "before_step",
                        f"the optimizer stepped without sparsifier.before_step(optimizer), so {lost} is missing at "
                        f"layer '{layer.name}': call it after the last backward pass of each step; with Lightning, "
                        "step the optimizer of self.optimizers()",
                    )
                    break
        if self.in_plain_loop and steps_in_batch == STEPS_WITHOUT_END:
            self._warn(
                "step",
                f"the optimizer made {STEPS_WITHOUT_END} steps without sparsifier.step(): masks stand still and no "
                "training step is counted. Call sparsifier.step() after each optimizer.step()",
            )

    def detaching(self, layers: Sequence[NMLayer]) -> None:
        """``detach()`` is about to restore ordinary modules."""
        if not (self.in_plain_loop and self.unbaked):
            return
        latent = [layer.name for layer in layers if _holds_more(layer)]
        if latent:
            self._warn(
                "bake",
                f"detach() without bake() after training gives back the latent weights of {len(latent)} layers, such "
                f"as '{latent[0]}': they are not N:M sparse. Call sparsifier.bake() before detach() for the sparse "
                "weights",
            )

    def _warn(self, call: str, message: str) -> None:
        if call not in self._given:
            self._given.add(call)
            warnings.warn(message, ForgottenCallWarning, stacklevel=2)


@torch.no_grad()
def _holds_more(layer: NMLayer) -> bool:
    """Whether the parameter has values that W_F does not have. A shard is compared by its own process."""
    if layer.view.is_sharded and not layer.spec.method.selects_entries:
        return layer.masks.has_forward  # gathering the weight would take all processes
    # NaN is not equal to itself, and would pass for a value that W_F lacks.
    return not torch.equal(
        layer.view.local.nan_to_num(), layer.forward_weight(local=True).nan_to_num()
    )


# ------------------------------------------------------------------------------------------------ direct reads

OnDirectRead = Literal["error", "warn"]
"""What happens when a masked weight has a gradient that is not of its masked layer."""


class DirectReads:
    """Finds masked weights whose gradient did not come from their own layer, before their first optimizer step.

    A weight with a gradient, whose layer has run no backward pass, was read by other code: ``F.linear(x,
    layer.weight)``. A layer that is not used has no gradient. Both are facts of this process: under
    DistributedDataParallel a gradient may be of another process alone, so ``.grad`` does not tell.

    Args:
        model: The model, whose compiled parts run backward passes that are not seen.
        on_read: What to do.
    """

    def __init__(self, model: nn.Module, on_read: OnDirectRead) -> None:
        self.with_gradient: set[NMLayer] = set()
        """Layers of whose weight a backward pass of this process made a gradient."""
        self.pending = True
        """Whether a layer is not settled yet; without one, there is nothing to watch or to check."""
        self._model = model
        self._is_error = on_read == "error"
        self._watched: dict[NMLayer, RemovableHandle] = {}
        self._settled: set[NMLayer] = set()

    def watch(self, layers: Sequence[NMLayer]) -> None:
        """Note gradients of layers that are trained and not settled yet; to be called between steps."""
        for layer in layers:
            if layer in self._settled or layer in self._watched:
                continue
            parameter = layer.view.optimizer_param
            if not parameter.requires_grad:
                continue  # it may be trained later
            # Bound by partial(): a closure would see the last layer of the loop.
            note = partial(lambda layer, _: self.with_gradient.add(layer), layer)
            self._watched[layer] = parameter.register_post_accumulate_grad_hook(note)
        self.pending = not self._settled.issuperset(layers)

    def check(self, layers: Sequence[NMLayer]) -> None:
        """Look at layers whose optimizer is about to step.

        Raises:
            ValueError: If the weight of one was read by other code, naming all.
        """
        found = []
        for layer in layers:
            if layer not in self._watched:
                continue
            if layer.progress.trained_by_layer:
                self._settle(layer)
            elif layer in self.with_gradient:
                # DDP is told of unused layers by a gradient of zeros, as that of ``0 * weight.sum()``.
                grad = layer.view.optimizer_param.grad
                if grad is not None and bool(local_values(grad).any()):
                    found.append(layer)
        if found:
            self._report(found)

    def close(self) -> None:
        """Remove what is left of the hooks."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()
        self._settled.clear()
        self.pending = True  # a second attach() looks again
        self.with_gradient.clear()

    def _settle(self, layer: NMLayer) -> None:
        self._watched.pop(layer).remove()
        self._settled.add(layer)

    def _report(self, layers: Sequence[NMLayer]) -> None:
        """Raise or warn, unless compiled code may have run the layers themselves."""
        compiled = compiled_parts(self._model)
        names = [layer.name for layer in layers if layer.spec.module not in compiled]
        # Calls in the graphs that TorchDynamo has compiled in this process are not seen. Whoever compiles imports it.
        dynamo = sys.modules.get("torch._dynamo.utils")
        is_certain = dynamo is None or not dynamo.counters["stats"]["unique_graphs"]
        if not is_certain and not any(layer.progress.trained_by_layer for layer in self._settled):
            names = []  # the whole model may be compiled
        if names and is_certain and self._is_error:
            raise ValueError(_message(names))
        for layer in layers:
            self._settle(layer)  # each is told once
        if names:
            doubt = "" if is_certain else "; unless compiled functions call them, which is not seen"
            warnings.warn(f"{_message(names)}{doubt}", stacklevel=2)


def _message(names: Sequence[str]) -> str:
    return (
        f"these masked layers have a gradient, but were not called: {', '.join(map(repr, names))}. Other code reads "
        "their weights, as F.linear(x, layer.weight) or a penalty in the loss does, and gets the dense values: they "
        "would train dense and be pruned at the end. Call the layers, name them in `exclude`, or allow it by "
        "direct_reads='warn'"
    )


def compiled_parts(model: nn.Module) -> set[nn.Module]:
    """The modules that ``module.compile()`` or ``torch.compile(module)`` has compiled, and those within them."""
    return {
        module
        for part in model.modules()
        # module.compile() sets the former; the wrapper that torch.compile(module) returns holds the latter.
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules
        for module in part.modules()
    }
