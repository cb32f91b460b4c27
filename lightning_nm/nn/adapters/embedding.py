"""Embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_nm.nn.adapters.base import Adapter, WeightSpec, register_adapter
from lightning_nm.nn.products import nm_embedding


@register_adapter
class NMEmbedding(Adapter):
    """``nn.Embedding``: weight ``[num_embeddings, embedding_dim]``, masked by name alone."""

    handles = nn.Embedding
    role = "embedding"
    weight: nn.Parameter

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Why this embedding cannot be masked: for sparse gradients or renormalised rows."""
        if module.sparse:
            return "sparse=True: no method takes a sparse gradient"
        if module.max_norm is not None:
            return "max_norm: it renormalises rows of the weight in place in each forward pass"
        return ""

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Yield the one weight."""
        yield WeightSpec("weight")

    @classmethod
    def macs(
        cls, module: Any, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        """Return 0: rows are looked up."""
        return 0

    def forward(self, input: Tensor) -> Tensor:
        """Return rows of W_F."""
        module: Any = self
        layer = self.nm_layers["weight"]
        return nm_embedding(
            input, self.weight, layer, module.padding_idx, module.scale_grad_by_freq
        )
