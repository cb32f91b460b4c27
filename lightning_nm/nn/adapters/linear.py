"""Linear layers and embeddings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_nm.nn.adapters.adapter import Adapter, Args, Kwargs, WeightSpec, register_adapter
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products import nm_embedding, nm_linear
from lightning_nm.nn.tensor_parallel import parallel_linear
from lightning_nm.nn.weight import Layout


@register_adapter
class NMLinear(Adapter):
    """``nn.Linear``: weight ``[out, in]``."""

    handles = nn.Linear
    role: ClassVar[Literal["linear", ""]] = "linear"
    tensor_parallel = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def macs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any) -> int:
        """Return ``tokens * in * out``."""
        return output.numel() * _only_input(args, kwargs).shape[-1]

    @classmethod
    def inputs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return the input as ``[tokens, in]``."""
        return [_only_input(args, kwargs).flatten(0, -2)]

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ W_F^T + bias``."""
        layer = self.nm_layers["weight"]
        # A subclass of a user's may hold a packed weight instead, for inference.
        if isinstance(layer, NMLayer):
            # One of the two alone is a replicated DTensor, or a mistake with FSDP, which parallel_linear() refuses.
            is_sharded = isinstance(self.weight, DTensor)
            if is_sharded or layer.spec.tensor_parallel:
                return parallel_linear(input, self.weight, self.bias, layer)
        return nm_linear(input, self.weight, self.bias, layer)


@register_adapter
class NMTransposedLinear(NMLinear):
    """``transformers.pytorch_utils.Conv1D``: a linear layer whose weight is ``[in, out]``."""

    role = ""
    tensor_parallel = False

    @classmethod
    def handled(cls, kind: type[nn.Module]) -> type[nn.Module] | None:
        """Return the class of Hugging Face's transformers, if a module class is derived from it."""
        # A model that uses the class has imported it; nobody else shall wait for transformers.
        hugging_face = sys.modules.get("transformers.pytorch_utils")
        if hugging_face is None or not issubclass(kind, hugging_face.Conv1D):
            return None
        return hugging_face.Conv1D

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Yield the one weight, which is transposed."""
        yield WeightSpec("weight", Layout.TRANSPOSED)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ W_F + bias``."""
        return nm_linear(x, self.weight, self.bias, self.nm_layers["weight"])


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
    def macs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any) -> int:
        """Return 0: rows are looked up."""
        return 0

    def forward(self, input: Tensor) -> Tensor:
        """Return rows of W_F."""
        module: Any = self
        layer = self.nm_layers["weight"]
        return nm_embedding(
            input, self.weight, layer, module.padding_idx, module.scale_grad_by_freq
        )


def _only_input(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the one argument of a call, by position or by name, with a dimension for tokens."""
    (x,) = (*args, *kwargs.values())
    # One token without a batch.
    return x if x.dim() > 1 else x.unsqueeze(0)
