"""The layer kinds: how each module class runs its GEMMs by the masked operators."""

from lightning_nm.nn.adapters.adapter import (
    Adapter,
    WeightSpec,
    _new,
    adapted_class,
    find_adapter,
    register_adapter,
)
from lightning_nm.nn.adapters.attention import NMMultiheadAttention
from lightning_nm.nn.adapters.conv import NMConv1d, NMConv2d, NMConv3d
from lightning_nm.nn.adapters.experts import NMExperts, nm_grouped_linear, register_experts
from lightning_nm.nn.adapters.linear import NMEmbedding, NMLinear, NMTransposedLinear

__all__ = [
    "Adapter",
    "NMConv1d",
    "NMConv2d",
    "NMConv3d",
    "NMEmbedding",
    "NMExperts",
    "NMLinear",
    "NMMultiheadAttention",
    "NMTransposedLinear",
    "WeightSpec",
    "_new",
    "adapted_class",
    "find_adapter",
    "nm_grouped_linear",
    "register_adapter",
    "register_experts",
]
