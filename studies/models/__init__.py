"""Models that only studies train; `lightning_nm.demo` has the others."""

from studies.models.causal_lm import CausalLM
from studies.models.mlp import MLP
from studies.models.mobile_cnn import MobileCNN
from studies.models.resnet import ResNet50
from studies.models.tiny_transformer import TinyTransformer

__all__ = ["MLP", "CausalLM", "MobileCNN", "ResNet50", "TinyTransformer"]
