"""Small real data sets and models for examples and studies. Nothing here depends on sparsity."""

from lightning_nm.demo.datamodule import ResumableDataModule
from lightning_nm.demo.digits import Digits
from lightning_nm.demo.exact_resume import ExactResume
from lightning_nm.demo.fashion_mnist import FashionMNIST
from lightning_nm.demo.gpt import GPT
from lightning_nm.demo.help_topics import HelpTopics
from lightning_nm.demo.imagenet import ImageNet
from lightning_nm.demo.loader import ResumableLoader, ResumableSampler
from lightning_nm.demo.mlp import MLP
from lightning_nm.demo.python_source import PythonSource
from lightning_nm.demo.residual_cnn import MobileCNN, ResidualCNN
from lightning_nm.demo.resnet import ResNet50
from lightning_nm.demo.tiny_transformer import TinyTransformer

__all__ = [
    "GPT",
    "MLP",
    "Digits",
    "ExactResume",
    "FashionMNIST",
    "HelpTopics",
    "ImageNet",
    "MobileCNN",
    "PythonSource",
    "ResNet50",
    "ResidualCNN",
    "ResumableDataModule",
    "ResumableLoader",
    "ResumableSampler",
    "TinyTransformer",
]
