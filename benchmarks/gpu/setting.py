"""Where the questions are asked: on a GPU, or on the CPU with tiny sizes to prove that they can be asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu.simulated import SimulatedSparseKernel, compress, expand
from lightning_nm.functional import nm_prune
from lightning_nm.kernels import GemmKernel, KernelRegistry
from lightning_nm.kernels.tuner import DeviceTimer

Choice = TypeVar("Choice")


class NotAsked(Exception):
    """A question that this machine cannot answer, and why."""


class Operators:
    """torch's operators of cuSPARSELt as our kernel calls them, with nothing checked before."""

    def pack(self, matrix: Tensor) -> Tensor:
        """Pack ``A [rows, depth]``, whatever its strides."""
        return torch._cslt_compress(matrix).view(len(matrix), -1)

    def linear(self, packed: Tensor, x: Tensor, algorithm: int = 0) -> Tensor:
        """``x A^T``: ``x [tokens, depth]``, result ``[tokens, rows]``; the library's TN layout."""
        return torch._cslt_sparse_mm(packed, x.t(), transpose_result=True, alg_id=algorithm)

    def matmul(self, packed: Tensor, matrix: Tensor, algorithm: int = 0) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``; the library's TT layout."""
        return torch._cslt_sparse_mm(packed, matrix, alg_id=algorithm)

    def search(self, packed: Tensor, other: Tensor, transpose_result: bool) -> tuple[int, ...]:
        """Let the library search: its algorithm, split-k, the mode of that, and the largest id of an algorithm."""
        library: Any = torch._C
        return tuple(
            library._cusparselt.mm_search(packed, other, None, None, None, transpose_result)
        )


class SoftwareOperators(Operators):
    """The same by :mod:`benchmarks.gpu.simulated`."""

    def pack(self, matrix: Tensor) -> Tensor:
        """Pack ``A [rows, depth]``."""
        return compress(matrix)

    def linear(self, packed: Tensor, x: Tensor, algorithm: int = 0) -> Tensor:
        """``x A^T``."""
        return torch.nn.functional.linear(x, expand(packed, x.shape[1]))

    def matmul(self, packed: Tensor, matrix: Tensor, algorithm: int = 0) -> Tensor:
        """``A B``."""
        return expand(packed, len(matrix)) @ matrix

    def search(self, packed: Tensor, other: Tensor, transpose_result: bool) -> tuple[int, ...]:
        """Two algorithms, 0 and 1."""
        return 0, 1, -1, 1


@dataclass(frozen=True)
class Setting:
    """Where questions are asked.

    Args:
        dry_run: On the CPU, with tiny sizes and the simulated kernel: times mean nothing.
    """

    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        """The first GPU, or the CPU in a dry run."""
        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    @property
    def operators(self) -> Operators:
        """The operators, in software in a dry run."""
        return SoftwareOperators() if self.dry_run else Operators()

    @property
    def timer(self) -> DeviceTimer:
        """Times one call; in a dry run it is made once."""
        return DeviceTimer(0, 1, 1) if self.dry_run else DeviceTimer(warmup=3, samples=7, calls=5)

    @property
    def kernels(self) -> list[GemmKernel]:
        """The sparse kernels, new ones each time; in a dry run the simulated one alone."""
        return [SimulatedSparseKernel()] if self.dry_run else KernelRegistry().backends

    def registry(self) -> KernelRegistry:
        """All kernels, new ones each time."""
        return KernelRegistry(self.kernels)

    def pick(self, real: Choice, tiny: Choice) -> Choice:
        """Return what belongs to a GPU, or what belongs to a dry run."""
        return tiny if self.dry_run else real

    def needs_gpu(self) -> None:
        """Give up a question that has no meaning on a CPU.

        Raises:
            NotAsked: In a dry run.
        """
        if self.dry_run:
            raise NotAsked("it has no meaning on a CPU")

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Draw normal numbers: zeros would need less power, and flatter every time."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def pruned(self, rows: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Draw normal numbers, 2:4 along the depth, the others +0."""
        return nm_prune(self.random(rows, depth, dtype=dtype), "2:4")

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry_run:
            torch.cuda.synchronize(self.device)

    def medians(
        self, functions: Mapping[str, Callable[[], object]], rounds: int = 7
    ) -> dict[str, float]:
        """Median milliseconds of a call of each function, measured in turn."""
        timer = DeviceTimer(warmup=1, samples=1, calls=self.pick(5, 1))
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.pick(rounds, 1)):
            for name, function in functions.items():
                times[name].append(1e3 * timer.time(function, self.device))
        return {name: median(row) for name, row in times.items()}
