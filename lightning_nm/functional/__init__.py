"""Functions of their arguments alone, most of them tensor to tensor: no module state, no Lightning."""

from lightning_nm.functional.allocation import allocate, retained_magnitudes
from lightning_nm.functional.flops import FlopsKind, GemmDensity, train_flops, train_flops_ratio
from lightning_nm.functional.int8 import (
    dequantise_weight,
    fake_quantise_tokens,
    fake_quantise_weight,
    int8_conv2d,
    int8_linear,
    quantise_tokens,
    quantise_weight,
)
from lightning_nm.functional.mask_storage import pack_mask, unpack_mask
from lightning_nm.functional.masks import (
    backward_mask,
    count_violations,
    is_nm,
    magnitude_mask,
    nm_mask,
    nm_prune,
)
from lightning_nm.functional.nm_format import pack_nm, unpack_nm
from lightning_nm.functional.permutation import permutation_score, search_permutation
from lightning_nm.functional.random import counter_uniform, fold_seed
from lightning_nm.functional.soft import soft_threshold_nm
from lightning_nm.functional.statistics import (
    gradient_snr,
    kept_magnitude,
    mask_density,
    mask_flip_rate,
    mask_margin,
    mask_oscillation,
    mask_overlap,
)
from lightning_nm.functional.transposable import transposable_mask
from lightning_nm.functional.unbiased import approx_mvue, mvue, mvue_probabilities

__all__ = [
    "FlopsKind",
    "GemmDensity",
    "allocate",
    "approx_mvue",
    "backward_mask",
    "count_violations",
    "counter_uniform",
    "dequantise_weight",
    "fake_quantise_tokens",
    "fake_quantise_weight",
    "fold_seed",
    "gradient_snr",
    "int8_conv2d",
    "int8_linear",
    "is_nm",
    "kept_magnitude",
    "magnitude_mask",
    "mask_density",
    "mask_flip_rate",
    "mask_margin",
    "mask_oscillation",
    "mask_overlap",
    "mvue",
    "mvue_probabilities",
    "nm_mask",
    "nm_prune",
    "pack_mask",
    "pack_nm",
    "permutation_score",
    "quantise_tokens",
    "quantise_weight",
    "retained_magnitudes",
    "search_permutation",
    "soft_threshold_nm",
    "train_flops",
    "train_flops_ratio",
    "transposable_mask",
    "unpack_mask",
    "unpack_nm",
]
