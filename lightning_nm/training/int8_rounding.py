"""Training with the rounding of an int8 export: kept weights are rounded for a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_nm.functional.int8 import INT8_DTYPES, fake_quantise_tokens, fake_quantise_weight
from lightning_nm.nn.layer import NMLayer


class Int8Rounding:
    """Rounds the kept weights of masked layers to what int8 stands for, and back.

    Between :meth:`begin` and :meth:`end` the parameters hold ``scale * integer`` at kept entries, as
    ``pack(model, dtype="int8")`` makes them: masks and rounding see the same weight. Gradients that are computed
    there are taken as those of the weights before rounding (the straight-through estimator, arXiv 1308.3432). Pruned
    entries, and with them latent values, stay as they are.

    Args:
        activations: Also round each token that a masked linear layer reads, as the kernel ``cpu-int8`` does. Inputs of
            other layers are not rounded.

    Example::

        >>> from lightning_nm import NMSparsifier
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> sparsifier = NMSparsifier(model, "2:4", "ste", skip_first_last=False).attach()
        >>> with Int8Rounding().within(sparsifier.layers.values()):
        ...     model(torch.ones(1, 8)).sum().backward()
    """

    def __init__(self, *, activations: bool = False) -> None:
        self.activations = activations
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # parameters, and their values
        self._hooks: list[RemovableHandle] = []

    @torch.no_grad()
    def begin(self, layers: Iterable[NMLayer]) -> None:
        """Round the weights of layers. If one cannot be, none is.

        Raises:
            ValueError: For a layer that :func:`rounding_fault` refuses, or with weights that are not finite.
        """
        self.end()  # an exception may have left weights rounded
        rounded = []
        for layer in layers:
            fault = rounding_fault(layer)
            if fault:
                raise ValueError(
                    f"layer '{layer.name}' cannot be trained with int8 rounding: {fault}"
                )
            try:
                values = _rounded(layer)
            except ValueError as error:
                raise ValueError(f"layer '{layer.name}': {error}") from None
            rounded.append((layer, values))
        # All are made before the first one is written: an error leaves every weight as it was.
        for layer, values in rounded:
            # Of a copy the values come back bit for bit. In place: `.grad` and optimizers belong to the parameter.
            self._kept.append((layer.param, layer.param.detach().clone()))
            layer.param.copy_(values)
            # The projections of attention and the taps of convolutions read no tokens of the module's input.
            reads_tokens = layer.param.dim() == 2 and layer.spec.parameter == "weight"
            if self.activations and reads_tokens:
                self._hooks.append(layer.spec.module.register_forward_pre_hook(_round_tokens))

    @torch.no_grad()
    def end(self) -> None:
        """Give all parameters their values back; nothing outside of :meth:`begin`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter, values in self._kept:
            parameter.copy_(values)
        self._kept = []

    @contextmanager
    def within(self, layers: Iterable[NMLayer]) -> Iterator[None]:
        """Round the weights of layers within a ``with`` block."""
        self.begin(layers)
        try:
            yield
        finally:
            self.end()


def rounding_fault(layer: NMLayer) -> str:
    """Why the weight of a layer cannot be rounded; empty if it can.

    Only where W_F is W under a mask does a rounded W give a rounded W_F.
    """
    if layer.view.is_sharded:
        return "its weight is sharded, and no process has whole rows: use DDP"
    if not layer.spec.method.selects_entries:
        return f"{type(layer.spec.method).__name__} changes the values that it keeps: take sr-ste, bi-mask or asp"
    if layer.param.dtype not in INT8_DTYPES:
        return f"it is {layer.param.dtype}, and int8 GEMMs take float32 and bfloat16"
    return ""


def _rounded(layer: NMLayer) -> Tensor:
    """The weight with its kept entries rounded."""
    weight, mask = layer.param.detach(), layer.forward_mask
    if layer.spec.layout.is_transposed:
        # [in, out] or [experts, in, out]: a scale belongs to an output, whose axis comes last.
        outputs_first = fake_quantise_weight(
            weight.mT, None if mask is None else mask.mT, weight.dim() - 1
        )
        return outputs_first.mT
    axes = 2 if layer.spec.layout.has_experts else 1  # [experts, out, in]
    return fake_quantise_weight(weight, mask, axes)


def _round_tokens(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = inputs
    return fake_quantise_tokens(x), *others
