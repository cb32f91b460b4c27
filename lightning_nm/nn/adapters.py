"""The layer kinds: how each module class runs its matmul through the op seam.

A module is adapted by swapping its ``__class__`` for a subclass that mixes one of the adapters in. The module object,
its parameters and its state-dict keys stay what they were, so optimizers, hooks and references made before still hold.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.ops import nm_conv, nm_linear
from lightning_nm.nn.sharding import as_sharded
from lightning_nm.nn.state import fits, layer_state, restore_weights
from lightning_nm.nn.tensor_parallel import parallel_linear
from lightning_nm.nn.weight import Layout


class WeightSpec(NamedTuple):
    """A weight that an adapter can mask.

    Args:
        parameter: Name of the parameter in its module.
        layout: How its blocks lie, see :class:`~lightning_nm.nn.layer.NMLayer`.
        groups: Groups of output rows that no dgrad block may cross.
    """

    parameter: str
    layout: Layout = "plain"
    groups: int = 1


class Adapter(nn.Module):
    """Mixed into a module's class while its weights are masked; ``nm_layers`` maps parameter names to their layers."""

    handles: ClassVar[type[nn.Module]]
    """The class whose ``forward`` this adapter replaces."""
    nm_base: ClassVar[type[nn.Module]]
    """The class that the module had before the swap."""
    nm_layers: dict[str, NMLayer]

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """The weights of a module of the handled class."""
        raise NotImplementedError

    @classmethod
    def macs(cls, module: Any, parameter: str, inputs: tuple[Any, ...], output: Any) -> int:
        """Multiply-adds of the dense forward GEMM of one call."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # The state dict is the model's function: it holds W_F under the dense model's keys.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parameter, layer in self.nm_layers.items():
            destination[prefix + parameter] = as_sharded(layer.forward_part(), layer.param)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded = [layer for parameter, layer in self.nm_layers.items() if prefix + parameter in state_dict]
        for layer in loaded:
            # The state dict holds no latent values. Swapping weights out and in again, as averaging for validation
            # does, must not lose them.
            layer.parked = layer.parked or layer_state(layer)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for layer in loaded:
            with layer.whole():
                if fits(layer, layer.parked):  # type: ignore[arg-type]
                    restore_weights(layer, layer.parked)  # type: ignore[arg-type]  # its clocks and counts went on
                else:
                    layer.method.init(layer)  # other weights: the old masks say nothing about them

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        for layer in self.nm_layers.values():
            layer.follow()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The swapped class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


class NMLinear(Adapter):
    """``nn.Linear``: weight ``[out, in]``."""

    handles = nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """One weight."""
        yield WeightSpec("weight")

    @classmethod
    def macs(cls, module: Any, parameter: str, inputs: tuple[Any, ...], output: Any) -> int:
        """``tokens * in * out``."""
        return output.numel() * module.in_features

    def forward(self, input: Tensor) -> Tensor:
        """``input @ W_F^T + bias``."""
        layer = self.nm_layers["weight"]
        if isinstance(self.weight, DTensor) or layer.cut:
            return parallel_linear(input, self.weight, self.bias, layer)
        return nm_linear(input, self.weight, self.bias, layer)


class NMTransposedLinear(Adapter):
    """``transformers.pytorch_utils.Conv1D``: a linear layer whose weight is ``[in, out]``."""

    weight: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """One transposed weight."""
        yield WeightSpec("weight", "transposed")

    @classmethod
    def macs(cls, module: Any, parameter: str, inputs: tuple[Any, ...], output: Any) -> int:
        """``tokens * in * out``."""
        return output.numel() * module.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """``x @ W_F + bias``."""
        return nm_linear(x, self.weight, self.bias, self.nm_layers["weight"])


class _NMConv(Adapter):
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """One weight, its output rows in the convolution's groups."""
        yield WeightSpec("weight", "flat" if conv_layout == "flat" else "plain", module.groups)

    @classmethod
    def macs(cls, module: Any, parameter: str, inputs: tuple[Any, ...], output: Any) -> int:
        """``batch * positions * out * in / groups * taps``."""
        return output.numel() * math.prod(module.weight.shape[1:])

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with W_F."""
        conv: Any = self
        spatial = self.weight.dim() - 2
        if input.dim() not in (spatial + 1, spatial + 2):
            raise RuntimeError(
                f"expected {spatial + 1}-d (unbatched) or {spatial + 2}-d input, got {list(input.shape)}"
            )
        unbatched = input.dim() == spatial + 1
        x = input.unsqueeze(0) if unbatched else input
        padding = conv.padding
        if isinstance(padding, str):
            extra = (
                [0] * spatial
                if padding == "valid"
                else [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            )
            sides = [(total // 2, total - total // 2) for total in extra]
        else:
            sides = [(p, p) for p in padding]
        if conv.padding_mode != "zeros" or any(left != right for left, right in sides):
            # As torch does: the input is padded first. F.pad counts dimensions from the last.
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, [p for side in reversed(sides) for p in side], mode=mode)
            sides = [(0, 0)] * spatial
        y = nm_conv(
            x,
            self.weight,
            self.bias,
            self.nm_layers["weight"],
            conv.stride,
            tuple(left for left, _ in sides),
            conv.dilation,
            conv.groups,
        )
        return y.squeeze(0) if unbatched else y


class NMConv1d(_NMConv):
    """``nn.Conv1d``: weight ``[out, in / groups, taps]``."""

    handles = nn.Conv1d


class NMConv2d(_NMConv):
    """``nn.Conv2d``: weight ``[out, in / groups, height, width]``."""

    handles = nn.Conv2d


class NMConv3d(_NMConv):
    """``nn.Conv3d``: weight ``[out, in / groups, depth, height, width]``."""

    handles = nn.Conv3d


class NMMultiheadAttention(Adapter):
    """``nn.MultiheadAttention``: masks the input projections; its ``out_proj`` is a linear layer of its own.

    The stock module hands its weights to a fused function and never calls ``out_proj``, so the projections are called
    here one by one around ``scaled_dot_product_attention``, in training and in evaluation alike.
    """

    handles = nn.MultiheadAttention

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """The joint input projection in its three groups q, k, v, or three weights when their sizes differ."""
        if module.in_proj_weight is not None:
            yield WeightSpec("in_proj_weight", groups=3)
        else:
            for parameter in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                yield WeightSpec(parameter)

    @classmethod
    def macs(cls, module: Any, parameter: str, inputs: tuple[Any, ...], output: Any) -> int:
        """Multiply-adds of the projections of query, key and value that use this weight."""
        sizes = dict(
            zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (x.numel() for x in inputs), strict=False)
        )
        return module.embed_dim * (sum(sizes.values()) if parameter == "in_proj_weight" else sizes[parameter])

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        mha: Any = self
        width = mha.embed_dim
        if mha.in_proj_weight is not None:
            joint = partial(
                _linear, weight=mha.in_proj_weight, bias=mha.in_proj_bias, layer=self.nm_layers.get("in_proj_weight")
            )
            if query is key and key is value:
                return list(joint(query).chunk(3, dim=-1))
            return [joint(x, rows=(i * width, (i + 1) * width)) for i, x in enumerate((query, key, value))]
        biases = [None] * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [
            _linear(x, getattr(self, name), bias, self.nm_layers.get(name))
            for x, name, bias in zip((query, key, value), names, biases, strict=True)
        ]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``, with every projection through the op seam."""
        mha: Any = self
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: pass the causal attn_mask with it")
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not mha.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        batch, targets, _ = q.shape
        if mha.bias_k is not None:
            k = torch.cat([k, mha.bias_k.to(k.dtype).expand(batch, 1, -1)], dim=1)
            v = torch.cat([v, mha.bias_v.to(v.dtype).expand(batch, 1, -1)], dim=1)
        if mha.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(batch, 1, x.shape[-1])], dim=1) for x in (k, v))
        sources = k.shape[1]
        q, k, v = (x.unflatten(-1, (mha.num_heads, mha.head_dim)).transpose(1, 2) for x in (q, k, v))

        bias = self._attention_bias(attn_mask, key_padding_mask, batch, sources, q.dtype)
        dropout = mha.dropout if self.training else 0.0
        if need_weights:
            scores = (q / math.sqrt(mha.head_dim)) @ k.transpose(-2, -1)
            weights = F.softmax(scores if bias is None else scores + bias, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            heads = weights @ v
        else:
            weights = None
            heads = F.scaled_dot_product_attention(q, k, v, bias, dropout)
        merged = heads.transpose(1, 2).reshape(batch, targets, mha.embed_dim)
        if not batched:
            merged = merged.squeeze(0)
        elif not mha.batch_first:
            merged = merged.transpose(0, 1)
        output = mha.out_proj(merged)
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return output, weights

    def _attention_bias(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, sources: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Both masks as one additive bias ``[batch or 1, heads or 1, targets or 1, sources]``."""
        bias = None
        if attn_mask is not None:
            bias = _additive(attn_mask, dtype)
            bias = bias.unflatten(0, (batch, -1)) if bias.dim() == 3 else bias[None, None]
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, dtype).view(batch, 1, 1, -1)
            bias = padding if bias is None else bias + padding
        if bias is not None and bias.shape[-1] < sources:  # bias_k and add_zero_attn append keys that all may see
            bias = F.pad(bias, (0, sources - bias.shape[-1]))
        return bias


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: NMLayer | None, rows: tuple[int, int] | None = None
) -> Tensor:
    if layer is not None:
        return nm_linear(x, weight, bias, layer, rows)
    part = slice(None) if rows is None else slice(*rows)
    return F.linear(x, weight[part], None if bias is None else bias[part])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (True = not allowed) or an additive one, as an additive one."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


_ADAPTERS: tuple[type[Adapter], ...] = (NMLinear, NMConv1d, NMConv2d, NMConv3d, NMMultiheadAttention)


def find_adapter(cls: type[nn.Module]) -> tuple[type[Adapter], type[nn.Module]] | None:
    """The adapter for a module class, and the class it handles, from which ``cls`` may be derived."""
    for adapter in _ADAPTERS:
        if issubclass(cls, adapter.handles):
            return adapter, adapter.handles
    hugging_face = sys.modules.get("transformers.pytorch_utils")  # no import: it is there if the model uses it
    if hugging_face is not None and issubclass(cls, hugging_face.Conv1D):
        return NMTransposedLinear, hugging_face.Conv1D
    return None


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class that mixes the fitting adapter into ``base``; one per base class, made at first use."""
    if base not in _CLASSES:
        found = find_adapter(base)
        if found is None:
            raise TypeError(f"no adapter for {base.__name__}")
        _CLASSES[base] = type(f"NM{base.__name__}", (found[0], base), {"nm_base": base, "__module__": __name__})
    return _CLASSES[base]


def _new(base: type[nn.Module]) -> nn.Module:
    """An empty module of the adapted class, for pickle and deepcopy to fill."""
    cls = adapted_class(base)
    return cls.__new__(cls)
