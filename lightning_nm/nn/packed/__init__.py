"""Packed layers: modules for inference that hold N:M weights as values and positions."""

from lightning_nm.nn.packed.experts import packed_weight
from lightning_nm.nn.packed.kernel_choice import BUDGET_S, Budget, Kernels, return_freed_memory
from lightning_nm.nn.packed.layers import PackedLayer, refuse_to_fit
from lightning_nm.nn.packed.replace import (
    Place,
    call_packed_children,
    embeddings_of,
    packed_weights,
    places_and_reasons,
    places_of,
    put,
)
from lightning_nm.nn.packed.tensor import (
    EVERY_ENTRY,
    EXPERTS,
    LAYOUTS,
    PackedTensor,
    Role,
    check_scales,
    int8_fault,
    packed_shapes,
    scale_shapes,
)
from lightning_nm.nn.packed.weight import PackedWeight

__all__ = [
    "BUDGET_S",
    "EVERY_ENTRY",
    "EXPERTS",
    "LAYOUTS",
    "Budget",
    "Kernels",
    "PackedLayer",
    "PackedTensor",
    "PackedWeight",
    "Place",
    "Role",
    "call_packed_children",
    "check_scales",
    "embeddings_of",
    "int8_fault",
    "packed_shapes",
    "packed_weight",
    "packed_weights",
    "places_and_reasons",
    "places_of",
    "put",
    "refuse_to_fit",
    "return_freed_memory",
    "scale_shapes",
]
