"""Masked layers: one weight and its masks, the layer kinds, and the products that they run."""

from lightning_nm.nn.adapters import (
    Adapter,
    NMConv1d,
    NMConv2d,
    NMConv3d,
    NMEmbedding,
    NMExperts,
    NMLinear,
    NMMultiheadAttention,
    NMTransposedLinear,
    WeightSpec,
    nm_grouped_linear,
    register_adapter,
    register_experts,
)
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products import nm_conv, nm_linear

__all__ = [
    "Adapter",
    "NMConv1d",
    "NMConv2d",
    "NMConv3d",
    "NMEmbedding",
    "NMExperts",
    "NMLayer",
    "NMLinear",
    "NMMultiheadAttention",
    "NMTransposedLinear",
    "WeightSpec",
    "nm_conv",
    "nm_grouped_linear",
    "nm_linear",
    "register_adapter",
    "register_experts",
]
