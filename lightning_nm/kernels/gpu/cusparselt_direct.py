"""NVIDIA's 2:4 products: cuSPARSELt without torch's operators, which create a plan in each product."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_nm.kernels.api import Algorithm, GemmName
from lightning_nm.kernels.gpu.cusparselt import (
    DTYPES,
    cuda_reason,
    named,
    refuse_crowded,
    regression,
)
from lightning_nm.kernels.gpu.cusparselt_plans import Library
from lightning_nm.kernels.gpu.probe import DeviceProbe
from lightning_nm.kernels.gpu.two_four import TwoFourKernel

VERSIONS = (800, 801)
"""The supported versions of cuSPARSELt: 0.8.0 and 0.8.1."""

# Its attribute `libraries` has those of this thread, by binding and index of the device.
_thread = threading.local()


class CuSparseLtDirectKernel(TwoFourKernel):
    """The products of ``CuSparseLtKernel`` by the same library, called through ``nvmath.bindings.cusparseLt``.

    torch's operators create descriptors and a plan in each call, at a reported cost to the host of 50-200 us
    (pytorch#179642), or 0.46 ms between kernels (pytorch#177866). This kernel creates them once for each shape,
    algorithm, thread and device. Nothing is copied.

    In mode ``"auto"`` the library's search proposes an algorithm, with a split of the contraction, for each product. It
    is used if its products are right and it is faster than the default.

    It needs nvmath-python, ``pip install -e '.[cuda]'``, which finds the library that torch brings. It has not
    run on a GPU yet; whether a CUDA graph can capture the first product of a shape is not known.

    Args:
        algorithm: The library's id of an algorithm, 0 for its default; with another one no algorithm is searched.
        check: For debugging: refuse matrices with more than two entries other than ``+0`` in a group, which costs a
            pass and a synchronisation.
        any_version: Try versions of the library besides 0.8.0 and 0.8.1.

    Raises:
        ValueError: If `algorithm` is negative.

    Source: the cuSPARSELt and nvmath-python documentation; pytorch#179642 on kept plans.
    """

    name = "cusparselt-direct"
    device_type = "cuda"
    dtypes = DTYPES

    def __init__(self, algorithm: int = 0, check: bool = False, any_version: bool = False) -> None:
        self.name = named(self.name, algorithm)
        self.algorithm = Algorithm(algorithm)
        self.check = check
        self.any_version = any_version
        self.device_probe = DeviceProbe(self)

    def binding(self) -> Any:
        """Import the module with the library's calls when it is first needed."""
        # nvmath-python is optional, and importing it loads the library.
        return importlib.import_module("nvmath.bindings.cusparseLt")

    def machine_reason(self, device: torch.device) -> str:
        """Return why cuSPARSELt cannot run on a device, as far as is known without a product; empty if it may."""
        # Without a CUDA device there is no handle to ask for the version.
        return cuda_reason(device) or self.library_reason(device)

    def library_reason(self, device: torch.device) -> str:
        """Return why the library is not used, as it is missing or of an unknown version; empty if it is used."""
        try:
            version = self.version(device)
        except ImportError as error:
            return f"nvmath-python cannot be imported ({error}): pip install -e '.[cuda]' in a checkout of lightning_nm"
        except Exception as error:
            return f"cuSPARSELt does not start: {type(error).__name__}: {error}"
        if self.any_version or version in VERSIONS:
            return ""
        known = ", ".join(map(_dotted, VERSIONS))
        return (
            f"cuSPARSELt {_dotted(version)} is not one of the versions that this kernel was written for, {known}: "
            "any_version=True tries it"
        )

    def remark(self, device: torch.device) -> str:
        """Warn of cuSPARSELt 0.8.0 on Hopper, which is slower than other versions."""
        if self.machine_reason(device):
            return ""
        return regression(device, self.version(device))

    def version(self, device: torch.device) -> int:
        """Return the version of the loaded library, 801 for 0.8.1."""
        with self._entered(device) as (library, _):
            return library.version

    def algorithms(self, gemm: GemmName, packed: Tensor, dense: Tensor) -> Sequence[Algorithm]:
        """Return the algorithm that the library's search proposes, unless one was given or it is the default."""
        if self.algorithm != Algorithm():
            return ()
        # The wgrad is `A B`, the others `x A^T`.
        transposed = gemm != "wgrad"
        with self._entered(dense.device) as (library, stream):
            found = library.search(packed, dense, transposed=transposed, stream=stream)
        # The default is measured in any case.
        if found == self.algorithm:
            return ()
        return (found,)

    def with_algorithm(self, algorithm: Algorithm) -> CuSparseLtDirectKernel:
        """Return this kernel with another algorithm; the device's probe is shared."""
        # A shallow copy, under the same name: a Decision has the algorithm beside the name.
        other = copy(self)
        other.algorithm = algorithm
        return other

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack by the library.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        if self.check:
            refuse_crowded(self.name, matrix)
        with self._entered(matrix.device) as (library, stream):
            return library.compress(matrix, stream)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        with self._entered(x.device) as (library, stream):
            return library.multiply(
                packed, x, bias, transposed=True, algorithm=self.algorithm, stream=stream
            )

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        with self._entered(matrix.device) as (library, stream):
            return library.multiply(
                packed, matrix, None, transposed=False, algorithm=self.algorithm, stream=stream
            )

    @contextmanager
    def stream(self, device: torch.device) -> Iterator[tuple[int, int]]:
        """Make a device current; gives its index and the pointer of its current stream."""
        with torch.cuda.device(device):
            yield torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream

    @contextmanager
    def _entered(self, device: torch.device) -> Iterator[tuple[Library, int]]:
        """Give the library of this thread and a device, and the stream for its work."""
        binding = self.binding()
        libraries = _thread.__dict__.setdefault("libraries", {})
        with self.stream(device) as (index, stream):
            # Made while the device is current: the handle belongs to it.
            if (binding, index) not in libraries:
                libraries[binding, index] = Library(binding)
            yield libraries[binding, index], stream


def _dotted(version: int) -> str:
    """A version of the library as people write it: 0.8.1 for 801."""
    return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
