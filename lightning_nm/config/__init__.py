"""The settings of a sparse training: presets, rules for layers, and SparsityConfig, which holds them all."""

from lightning_nm.config.sparsity import SparsityConfig, arguments_of, chosen_config, refuse_unknown

__all__ = ["SparsityConfig", "arguments_of", "chosen_config", "refuse_unknown"]
