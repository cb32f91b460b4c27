"""Predictions for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.kernels.backends.cusparselt import CuSparseLtKernel
from lightning_nm.kernels.backends.two_four import TwoFourKernel
from lightning_nm.kernels.cache import Decisions
from lightning_nm.kernels.cost import DeviceModel
from lightning_nm.kernels.dispatch import Product, Router
from lightning_nm.kernels.environment import Environment
from lightning_nm.kernels.registry import KernelRegistry, answer
from lightning_nm.kernels.tuner import Chooser


class _Rules(TwoFourKernel):
    """The rules of patterns and shapes of 2:4 hardware, without hardware: it multiplies nothing."""

    name = "cusparselt"
    dtypes = CuSparseLtKernel.dtypes


class _Untried(KernelRegistry):
    """Kernels that are asked what they support, and neither probed nor tried."""

    def reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """What the kernel says of the product."""
        return answer(partial(kernel.supports, key))

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that support a product."""
        for kernel in list(self.kernels.values())[1:]:
            if reason := self.reason(kernel, key):
                notes.append(f"{kernel.name}: {reason}")
            else:
                yield kernel


class EstimateRouter(Router):
    """Decides as :class:`~lightning_nm.kernels.dispatch.Router` in mode ``"heuristic"`` would on another GPU.

    Nothing is probed, tried or measured, so that it says the same on every machine; the kernels are taken to work
    there. It is asked about products, and runs none.

    Args:
        gpu: The figures of the GPU.
        reuse: As :class:`~lightning_nm.kernels.dispatch.Router`'s.

    Example::

        >>> from lightning_nm import NMPattern
        >>> from lightning_nm.kernels.cost import device_model
        >>> key = GemmKey("forward", 4096, 4096, 16384, torch.bfloat16, NMPattern(2, 4), "cpu")
        >>> router = EstimateRouter(device_model("H200"))
        >>> router.open(torch.device("cpu")).decide(key).kernel
        'cusparselt'
    """

    gpu: DeviceModel

    def __init__(self, gpu: DeviceModel, reuse: int = 1) -> None:
        super().__init__("heuristic", [], reuse=reuse, gpu=gpu)
        self.registry = _Untried([_Rules()])

    def open(self, device: torch.device) -> Chooser:
        """The chooser for the GPU, whatever the device."""
        if self.chooser is None:
            environment = Environment(self.gpu.name, None, torch.__version__, torch.version.cuda, None)
            self.chooser = Chooser(
                "heuristic", self.registry, Decisions(environment), self.timer, self.gpu, reuse=self.reuse
            )
        return self.chooser


def as_16_bit(product: Product) -> Product:
    """The product as it would be in bfloat16; one of 16 bits stays as it is."""
    if product.key.dtype.itemsize == 2:
        return product
    return product._replace(key=replace(product.key, dtype=torch.bfloat16))
