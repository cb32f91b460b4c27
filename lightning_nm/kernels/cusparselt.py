"""NVIDIA's 2:4 products: cuSPARSELt through the two operators that torch core binds to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import nm_prune
from lightning_nm.kernels.base import GemmKey
from lightning_nm.kernels.patterns import two_four_violation
from lightning_nm.kernels.two_four import TwoFourKernel, packed_width

# Compute capabilities that cuSPARSELt 0.8 names. torch's other 2:4 operators know 8.x alone, and those that prune by
# tiles write the packed form of 8.x on whatever device they run: none of them is used.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (11, 0), (12, 0), (12, 1))

# [rows, depth] of the checked matrices and the tokens. The first is what tiles are made of; if the second, whose sizes
# are multiples of 16 alone, goes wrong, the kernel keeps to multiples of 128.
_TILED = (256, 512, 256)
_RAGGED = (144, 176, 72)
_REPEATS = 3

_thread = threading.local()


class _Verdict(NamedTuple):
    reason: str
    multiple: int = 128


class CuSparseLtKernel(TwoFourKernel):
    """2:4 products on sparse tensor cores, by ``torch._cslt_compress`` and ``torch._cslt_sparse_mm``.

    | product | call |
    |---|---|
    | ``pack(A)`` | ``_cslt_compress(A)`` |
    | ``linear(A, x, bias)`` | ``_cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True, alg_id=algorithm)`` |
    | ``matmul(A, B)`` | ``_cslt_sparse_mm(packed, B, alg_id=algorithm)`` |

    Neither call copies an operand or a result. The operators take A for row-major and B for row-major or its
    transpose, whatever their strides are, and drop a group's third nonzero, without a word: the checks of
    :class:`TwoFourKernel` stand before them. No `alpha` is passed, which would stop the device to be read.

    Nothing runs on a device before :meth:`probe` passed there, once for each kernel object and device.

    Args:
        algorithm: The library's id of an algorithm. Some ids were seen to give wrong results (pytorch#155333), so each
            has to pass the probe; 0 is the library's default.
        check: Look into every matrix to pack for a group of more than two entries that are not ``+0``, at the cost of
            a pass and a synchronisation; to find errors with.

    Raises:
        ValueError: If `algorithm` is negative.

    Source: torch's aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp, and the cuSPARSELt documentation.
    """

    dtypes = (torch.bfloat16, torch.float16)
    ops: Any = torch  # what holds the two operators

    def __init__(self, algorithm: int = 0, check: bool = False) -> None:
        if algorithm < 0:
            raise ValueError(f"algorithm={algorithm} is not an id of cuSPARSELt: pass 0, its default, or a larger one")
        self.name = f"cusparselt:{algorithm}" if algorithm else "cusparselt"
        self.algorithm = algorithm
        self.check = check
        self._verdicts: dict[torch.device, _Verdict] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the verdicts behind: a copy may wake up on another machine."""
        return {**self.__dict__, "_verdicts": {}}

    def machine_reason(self, device: torch.device) -> str:
        """Why cuSPARSELt cannot run on a device, as far as can be said without trying; empty if it may."""
        if device.type != "cuda":
            return f"cuSPARSELt needs a CUDA device, not {device}"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        if torch.version.hip:
            return "hipSPARSELt, which takes cuSPARSELt's place on ROCm, was never tried"
        if not torch.backends.cusparselt.is_available():
            return f"torch {torch.__version__} was built without cuSPARSELt: install a CUDA build from pytorch.org"
        capability = torch.cuda.get_device_capability(device)
        if capability not in CAPABILITIES:
            known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
            return f"compute capability {capability[0]}.{capability[1]} is not one that cuSPARSELt knows: {known}"
        return ""

    def remark(self, device: torch.device) -> str:
        """Warn of cuSPARSELt 0.8.0 on Hopper, which is correct but slower than what came before and after."""
        if self.machine_reason(device) or torch.cuda.get_device_capability(device) != (9, 0):
            return ""
        if torch.backends.cusparselt.version() != 800:
            return ""
        return (
            "cuSPARSELt 0.8.0 has a performance regression on H100 and H200, which 0.8.1 fixes (NVIDIA's release "
            "notes): install a torch that brings 0.8.1 or later, such as 2.13"
        )

    def probe(self, device: torch.device) -> str:
        """Multiply on the device and compare with float64; the answer is kept for the life of this object.

        Both dtypes, both products, with and without bias, three times each; matrices with pruned negative weights,
        with groups of zeros, and with groups of one nonzero. Every exception is a reason.
        """
        return self._verdict(device).reason

    def supports(self, key: GemmKey) -> str:
        """Why a product cannot run: the probe's reason, its dtype, its pattern, or the first size that does not fit."""
        return self.probe(torch.device(key.device)) or super().supports(key)

    def multiple(self, device: torch.device) -> int:
        """16 where the probe saw that it works, else 128.

        Raises:
            RuntimeError: If the kernel did not pass the probe of this device.
        """
        verdict = self._verdict(device)
        if verdict.reason:
            raise RuntimeError(f"{self.name} does not work on {device}: {verdict.reason}")
        return verdict.multiple

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack by the library; with ``check``, refuse what it might drop or misread.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        if self.check and (violation := two_four_violation(matrix.view(torch.int16) != 0)):
            raise ValueError(
                f"{self.name}: a matrix of shape {tuple(matrix.shape)} cannot be packed, {violation}, counting -0.0: "
                "prune it by a select (`torch.where`, `nm_prune`), which leaves +0.0, and not by a product with a mask"
            )
        _claim_thread(matrix.device)
        return self.ops._cslt_compress(matrix)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        _claim_thread(x.device)
        return self.ops._cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True, alg_id=self.algorithm)

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        _claim_thread(matrix.device)
        return self.ops._cslt_sparse_mm(packed, matrix, alg_id=self.algorithm)

    def _verdict(self, device: torch.device) -> _Verdict:
        try:
            if device.type == "cuda" and device.index is None and torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
            if device not in self._verdicts:
                self._verdicts[device] = self._judge(device)
        except Exception as error:
            return self._verdicts.setdefault(device, _Verdict(f"{type(error).__name__}: {error}"))
        return self._verdicts[device]

    def _judge(self, device: torch.device) -> _Verdict:
        if reason := self.machine_reason(device):
            return _Verdict(reason)
        # A thread of its own: the library's handle belongs to a thread and to the device that is current when it is
        # made, and neither autocast nor a tracer of the caller's reaches in there.
        with ThreadPoolExecutor(1) as pool:
            if reason := pool.submit(self._try, device, *_TILED).result():
                return _Verdict(reason)
            try:
                ragged = pool.submit(self._try, device, *_RAGGED).result()
            except Exception as error:
                ragged = str(error)
        return _Verdict("", multiple=128 if ragged else 16)

    @torch.no_grad()
    def _try(self, device: torch.device, rows: int, depth: int, tokens: int) -> str:
        """Compare all products of one shape with float64; return what differs first, or an empty string."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        for dtype in self.dtypes:
            matrix, x, bias = nm_prune(normal(rows, depth), "2:4"), normal(tokens, depth), normal(rows)
            matrix[::2, :4] = 0
            matrix[:, 4] = 0
            dense = x.t().contiguous()
            packed = self.compress(matrix)
            if packed.numel() != rows * packed_width(depth, dtype):
                return f"{dtype} [{rows}, {depth}] is packed into {packed.numel()} values, not 9/16 of its own"
            packed = packed.view(rows, -1)
            product, shift = matrix.double() @ dense.double(), bias.double()
            for _ in range(_REPEATS):
                for what, result, expected in (
                    ("linear", self.sparse_linear(packed, x, None), product.t()),
                    ("linear with bias", self.sparse_linear(packed, x, bias), product.t() + shift),
                    ("matmul", self.sparse_matmul(packed, dense), product),
                ):
                    if result.shape != expected.shape or not result.is_contiguous():
                        return f"{dtype} {what} of [{rows}, {depth}] returned shape {tuple(result.shape)}"
                    error = (result.double() - expected).abs()
                    # Sums in float32, rounded once or, before the bias, twice: a lost value would show at once.
                    allowed = torch.finfo(dtype).eps * (expected.abs() + shift.abs().max()) + 1e-2
                    if not bool((error <= allowed).all()):
                        return f"{dtype} {what} of [{rows}, {depth}] is wrong by up to {float(error.max()):.3g}"
        return ""


def _claim_thread(device: torch.device) -> None:
    """Refuse a second device in one thread: torch's cuSPARSELt handle belongs to the first one that a thread used."""
    if device.type != "cuda":
        return
    first = getattr(_thread, "device", device)
    if first != device:
        raise RuntimeError(
            f"this thread used cuSPARSELt on {first} and cannot use it on {device}: one thread or process a device"
        )
    _thread.device = device
