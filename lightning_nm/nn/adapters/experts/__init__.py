"""Weights of several experts in one tensor: each expert is a matrix with masks of its own."""

from lightning_nm.nn.adapters.experts.adapter import NMExperts, register_experts

__all__ = ["NMExperts", "register_experts"]
