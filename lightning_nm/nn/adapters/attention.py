"""Multi-head attention, and the fused paths of torch that would bypass it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.nn.adapters.adapter import Adapter, Args, Kwargs, WeightSpec, register_adapter
from lightning_nm.nn.products import nm_linear

FUSED_PATHS: tuple[tuple[type[nn.Module], str, Any], ...] = (
    # In evaluation these classes call a fused kernel that reads the weights of their parts directly. Each has an
    # attribute that switches it off for the instance, so the switch also travels with copies and pickles.
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
"""Module class, attribute, and the value that switches its fused path off."""


def switch_fused_paths(model: nn.Module) -> None:
    """Switch the fused paths off around modules whose weights are masked or packed, and on again where none is left."""
    for module in model.modules():
        for kind, attribute, off in FUSED_PATHS:
            if not isinstance(module, kind):
                continue
            # The module's own value, while another one is in its place; so it travels with copies and pickles.
            key = f"_nm_own_{attribute}"
            # The classes of both kinds were made of the module's own.
            is_read = any(hasattr(type(part), "nm_base") for part in module.modules())
            if is_read and key not in vars(module):
                vars(module)[key] = getattr(module, attribute)
                setattr(module, attribute, off)
            elif not is_read and key in vars(module):
                setattr(module, attribute, vars(module).pop(key))


_INPUTS = ("query", "key", "value")

# The parameters that project them where query, key and value have different sizes.
_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionForward(nn.Module):
    """The forward of ``nn.MultiheadAttention`` with projections that are called one by one, by :meth:`project`.

    The stock module hands its weights to a fused function and never calls ``out_proj``.
    """

    @classmethod
    def macs_of_child(cls, module: Any, child: str, output: Any) -> int:
        """Return the multiply-adds of ``out_proj``, whose result is the first one of the module."""
        attention: Tensor = output[0]
        # `out_proj` is square: each of its outputs sums embed_dim inputs.
        return attention.numel() * module.embed_dim

    def project(
        self, x: Tensor, parameter: str, bias: Tensor | None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """Return ``x @ W^T + bias`` of the projection with this parameter, or of some rows of it; here dense."""
        part = slice(None) if rows is None else slice(*rows)
        weight = getattr(self, parameter)[part]
        return F.linear(x, weight, None if bias is None else bias[part])

    @classmethod
    def inputs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return query, key and value for the joint projection, else the one that this weight projects."""
        given = _given_inputs(args, kwargs)
        tokens = [x.flatten(0, -2) for x in given]  # [tokens, in]
        if parameter == "in_proj_weight":
            return tokens
        return [tokens[_PROJECTIONS.index(parameter)]]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected query, key and value."""
        mha: Any = self
        width = mha.embed_dim
        if mha.in_proj_weight is None:
            # torch keeps the three biases in one vector, also where it keeps three weights.
            biases = [None] * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
            return [
                self.project(x, name, bias)
                for x, name, bias in zip((query, key, value), _PROJECTIONS, biases, strict=True)
            ]
        joint = partial(self.project, parameter="in_proj_weight", bias=mha.in_proj_bias)
        # Self-attention: one product of all rows.
        if query is key and key is value:
            return list(joint(query).chunk(3, dim=-1))
        # Rows of the weight for q, then k, then v.
        inputs = enumerate((query, key, value))
        return [joint(x, rows=(k * width, (k + 1) * width)) for k, x in inputs]

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
        """Attend as ``nn.MultiheadAttention.forward`` does, with every projection by :meth:`project`."""
        mha: Any = self
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal is a hint about attn_mask: pass the causal attn_mask with it"
            )
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        # All three as [batch, tokens, embed_dim].
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not mha.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        batch, targets, _ = q.shape
        # Before the masks are read: these must cover the extra keys, too.
        k, v = self._with_extra_keys(k, v)
        sources = k.shape[1]
        # [batch, heads, tokens, head_dim]
        heads_and_size = (mha.num_heads, mha.head_dim)
        q, k, v = (x.unflatten(-1, heads_and_size).transpose(1, 2) for x in (q, k, v))

        bias = self._attention_bias(attn_mask, key_padding_mask, batch, sources, q.dtype)
        dropout = mha.dropout if self.training else 0.0
        weights = None
        if need_weights:
            # The fused function returns no weights: [batch, heads, targets, sources].
            scores = (q / math.sqrt(mha.head_dim)) @ k.transpose(-2, -1)
            if bias is not None:
                scores = scores + bias
            weights = F.softmax(scores, dim=-1)
            # As torch: the weights that are returned have had their dropout.
            if dropout:
                weights = F.dropout(weights, dropout)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, bias, dropout)
        merged = heads.transpose(1, 2).reshape(batch, targets, mha.embed_dim)
        # Back to the shape of the query.
        if not batched:
            merged = merged.squeeze(0)
        elif not mha.batch_first:
            merged = merged.transpose(0, 1)
        output = mha.out_proj(merged)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if weights is not None and not batched:
            weights = weights.squeeze(0)
        return output, weights

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys that belong to no token, a learned one and zeros; all are ``[batch, sources, embed_dim]``."""
        mha: Any = self
        batch, _, width = k.shape
        # In torch's order, which shows in the columns of the attention weights: the learned key before the zeros.
        extra = [] if mha.bias_k is None else [(mha.bias_k, mha.bias_v)]
        if mha.add_zero_attn:
            zeros = k.new_zeros(1, 1, width)
            extra.append((zeros, zeros))
        for more_k, more_v in extra:
            k = torch.cat([k, more_k.to(k.dtype).expand(batch, 1, -1)], dim=1)
            v = torch.cat([v, more_v.to(v.dtype).expand(batch, 1, -1)], dim=1)
        return k, v

    def _attention_bias(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        batch: int,
        sources: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Return both masks as one additive bias ``[batch or 1, heads or 1, targets or 1, sources]``."""
        bias = None
        if attn_mask is not None:
            bias = _additive(attn_mask, dtype)
            if bias.dim() == 3:
                bias = bias.unflatten(0, (batch, -1))  # [batch x heads, targets, sources]
            else:
                bias = bias[None, None]  # [targets, sources], for all of them
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, dtype).view(batch, 1, 1, -1)
            bias = padding if bias is None else bias + padding
        # bias_k and add_zero_attn append keys that all may see.
        if bias is not None and bias.shape[-1] < sources:
            bias = F.pad(bias, (0, sources - bias.shape[-1]))
        return bias


@register_adapter
class NMMultiheadAttention(AttentionForward, Adapter):
    """``nn.MultiheadAttention``: masks the input projections; its ``out_proj`` is a linear layer of its own.

    The projections are called one by one around ``scaled_dot_product_attention``, in training and in evaluation alike.
    """

    handles = nn.MultiheadAttention
    reads_children = ("out_proj",)

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Yield the joint input projection in its three groups q, k, v, or three weights when their sizes differ."""
        if module.in_proj_weight is not None:
            # Cross-attention multiplies with the rows of q, k and v apart, so no dgrad block may cross them.
            yield WeightSpec("in_proj_weight", groups=3)
        else:
            for parameter in _PROJECTIONS:
                yield WeightSpec(parameter)

    @classmethod
    def macs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any) -> int:
        """Return the multiply-adds of the projections of query, key and value that use this weight."""
        given = _given_inputs(args, kwargs)
        if parameter == "in_proj_weight":
            entries = sum(x.numel() for x in given)
        else:
            entries = given[_PROJECTIONS.index(parameter)].numel()
        return module.embed_dim * entries

    def project(
        self, x: Tensor, parameter: str, bias: Tensor | None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """Return ``x @ W_F^T + bias`` of a projection, or of some rows of it."""
        layer = self.nm_layers.get(parameter)
        if layer is None:  # next to others that are masked
            # By name: packed layers, which are no subclass, also use this method.
            return AttentionForward.project(self, x, parameter, bias, rows)
        return nm_linear(x, getattr(self, parameter), bias, layer, rows)


def _given_inputs(args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    """Return query, key and value of a call, by position or by name."""
    named = [kwargs[name] for name in _INPUTS if name in kwargs]
    # Further positional arguments are masks and flags.
    return (*args, *named)[:3]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask (True = not allowed) or an additive one as an additive one."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
