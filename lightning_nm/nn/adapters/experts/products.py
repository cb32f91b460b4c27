"""The products of a layer of experts within one forward pass of its module: each expert's by the masked operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_nm.nn.adapters.experts.expert import ExpertLayer, WholeValues, expert_of
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products.ops import nm_linear

Watch = Callable[[int, Tensor], None]
"""Gets an expert's number and what is multiplied by its matrix, ``[..., in]``."""

# The layers whose products are told to somebody.
_WATCHES: dict[NMLayer, Watch] = {}


@contextmanager
def watching(layer: NMLayer, watch: Watch) -> Iterator[None]:
    """Call `watch` before every product with a masked layer of experts, while the context is open.

    Raises:
        ValueError: In a product that is not made expert by expert.
    """
    _WATCHES[layer] = watch
    try:
        yield
    finally:
        del _WATCHES[layer]


class ExpertsInUse:
    """A layer of experts in one forward pass of its module.

    All products read one node of the graph, :attr:`weight`. Its backward pass gets the sum of their gradients once, so
    that the method routes the gradient of all experts together, and experts without tokens cost nothing.

    Args:
        layer: The layer, with a weight ``[experts, out, in]`` or ``[experts, in, out]``.
    """

    def __init__(self, layer: NMLayer) -> None:
        self.layer = layer
        self.macs = 0
        """Multiply-adds of the products so far."""
        parameter = layer.param
        # Where each entry is masked for itself, W_F of one expert needs no other expert.
        self.values = None
        if not layer.spec.method.selects_entries:
            self.values = WholeValues(layer, parameter.detach())
        # The module may first read the weight in a block without gradients, and then in one with them.
        with torch.enable_grad():
            self.weight: Tensor = _Routed.apply(
                layer, self.values, parameter, *layer.parameters.values()
            )
        self._parts: Sequence[Tensor] = ()  # the matrix of each expert, made for the first product
        self._forward_weight: Tensor | None = None

    def product(
        self, expert: int, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``x W_F[expert]^T + bias`` for ``x [..., in]``, in a dtype or by default the one that torch takes."""
        if not self._parts:
            with torch.enable_grad():
                self._parts = self.weight.unbind(0)
        if _WATCHES and self.layer in _WATCHES:
            _WATCHES[self.layer](expert, x)
        part = self._parts[expert]
        tokens = x.numel() // max(x.shape[-1], 1)
        self.macs += tokens * part.numel()
        if self.values is None:
            layer = expert_of(self.layer, expert)
        else:
            # Its method lives for this forward pass, so the layer is not kept either.
            layer = ExpertLayer.__new__(ExpertLayer).follow(self.layer, expert, self.values)
        return nm_linear(x, part, bias, layer, dtype=dtype)

    def grouped(self, x: Tensor, counts: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the products of ``x [tokens, in]``, sorted by expert; tokens beyond all counts give 0.

        Args:
            x: The tokens of expert 0, then those of expert 1, and so on.
            counts: How many tokens each expert has.
            dtype: As :meth:`product`'s.
        """
        *pieces, rest = x.split([*counts, len(x) - sum(counts)])
        made = []
        for expert, piece in enumerate(pieces):
            if len(piece):
                made.append(self.product(expert, piece, dtype=dtype))
        if not made:
            # An empty product still has the right width, dtype and gradient.
            made.append(self.product(0, x[:0], dtype=dtype))
        if len(rest):
            _, out = made[0].shape
            made.append(made[0].new_zeros(len(rest), out))
        return torch.cat(made) if len(made) > 1 else made[0]

    def by_index(self, x: Tensor, experts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the products of ``x [tokens, in]`` with the expert that ``experts [tokens]`` names for each token."""
        # Stable, so that equal routing gives equal sums, bit for bit.
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(self.weight)).tolist()
        made = self.grouped(x[order], counts, dtype)
        # Back to the order in which the tokens came.
        return torch.empty_like(made).index_copy(0, order, made)

    def forward_weight(self) -> Tensor:
        """Return W_F of all experts, its gradient routed by the method."""
        if self.layer in _WATCHES:
            raise ValueError(
                f"layer '{self.layer.name}' multiplies by an operator that does not tell the inputs of single experts"
            )
        if self._forward_weight is None:
            with torch.enable_grad():
                self._forward_weight = _ForwardWeight.apply(self.layer, self.weight)
        return self._forward_weight

    def close(self) -> None:
        """Free what only the forward pass needs, and record its multiply-adds."""
        self._parts = ()
        self._forward_weight = None
        if self.values is not None:
            self.values.release()
        self.layer.costs.record_call(self.macs)


class _Routed(torch.autograd.Function):
    """Passes the latent weight on; in the backward pass the method routes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer: NMLayer, values: WholeValues | None, weight: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.layer = layer
        ctx.values = values
        ctx.save_for_backward(weight)
        # A view: autograd does not take an input for an output.
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        # The backward passes of all products came before this one.
        if ctx.values is not None:
            ctx.values.release()
        if not torch.compiler.is_compiling():
            ctx.layer.progress.note_gradient()
        gradients = ctx.layer.spec.method.weight_gradient(ctx.layer, weight, grads[0])
        return None, None, *gradients


class _ForwardWeight(torch.autograd.Function):
    """Makes W_F of the latent weight; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, layer: NMLayer, weight: Tensor) -> Tensor:
        made = layer.view.forward_of(weight)
        return weight.clone() if made is weight else made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]
