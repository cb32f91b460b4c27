"""Small real data sets and models for the README's commands and the notebooks. Nothing here depends on sparsity."""

from lightning_nm.demo.cnn import ResidualCNN
from lightning_nm.demo.data import ResumableDataModule
from lightning_nm.demo.exact_resume import ExactResume
from lightning_nm.demo.gpt import GPT
from lightning_nm.demo.help_topics import HelpTopics
from lightning_nm.demo.images import Digits, FashionMNIST

__all__ = [
    "GPT",
    "Digits",
    "ExactResume",
    "FashionMNIST",
    "HelpTopics",
    "ResidualCNN",
    "ResumableDataModule",
]
