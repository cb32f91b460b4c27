"""Data sets that only studies use; `lightning_nm.demo` has the others."""

from studies.data.augmented import AugmentedFashionMNIST
from studies.data.imagenet import ImageNet
from studies.data.python_source import PythonSource
from studies.data.text_files import TextFiles

__all__ = ["AugmentedFashionMNIST", "ImageNet", "PythonSource", "TextFiles"]
