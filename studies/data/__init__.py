"""Data sets that only studies use; `lightning_nm.demo` has the others."""

from studies.data.augmented import AugmentedFashionMNIST
from studies.data.imagenet import ImageNet
from studies.data.python_source import PythonSource

__all__ = ["AugmentedFashionMNIST", "ImageNet", "PythonSource"]
