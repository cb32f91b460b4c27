"""Kernels that run on sparse tensor cores: a device must pass a numeric check before the first product."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import nm_prune
from lightning_nm.kernels.api import GemmKey
from lightning_nm.kernels.backends.patterns import two_four_violation
from lightning_nm.kernels.backends.two_four import TwoFourKernel, packed_width

_REPEATS = 3


class _Verdict(NamedTuple):
    reason: str
    multiple: int = 0


class ProbedKernel(TwoFourKernel):
    """2:4 products by a library that says little of what it cannot do.

    Nothing runs on a device before :meth:`probe` passed there, once for each kernel object and device.

    A subclass gives ``trials``, :meth:`machine_reason` and what :class:`TwoFourKernel` asks for; its ``compress`` calls
    :meth:`refuse_crowded` first.

    Args:
        check: Look into every matrix to pack for a group of more than two entries that are not ``+0``, at the cost of
            a pass and a synchronisation; to find errors with.
    """

    dtypes = (torch.bfloat16, torch.float16)
    # What rows and depth of A must be multiples of, with [rows, depth] and tokens to check it. The first must come out
    # right; the second, a finer one, is taken where that comes out right too.
    trials = ((128, (256, 512, 256)), (16, (144, 176, 72)))

    def __init__(self, check: bool = False) -> None:
        self.check = check
        self._verdicts: dict[torch.device, _Verdict] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the verdicts behind: a copy may wake up on another machine."""
        return {**self.__dict__, "_verdicts": {}}

    def machine_reason(self, device: torch.device) -> str:
        """Why the kernel cannot run on a device, as far as can be said without a product; empty if it may."""
        raise NotImplementedError

    def probe(self, device: torch.device) -> str:
        """Multiply on the device and compare with float64; the answer is kept for the life of this object.

        Both dtypes, both products, without bias and with biases at several addresses, three times each; matrices with
        pruned negative weights, with groups of zeros, and with groups of one nonzero. Every exception is a reason.
        """
        return self._verdict(device).reason

    def supports(self, key: GemmKey) -> str:
        """Why a product cannot run: the probe's reason, its dtype, its pattern, or the first size that does not fit."""
        return self.probe(torch.device(key.device)) or super().supports(key)

    def multiple(self, device: torch.device) -> int:
        """The finest of the multiples that the probe saw to work.

        Raises:
            RuntimeError: If the kernel did not pass the probe of this device.
        """
        verdict = self._verdict(device)
        if verdict.reason:
            raise RuntimeError(f"{self.name} does not work on {device}: {verdict.reason}")
        return verdict.multiple

    def refuse_crowded(self, matrix: Tensor) -> None:
        """With ``check``, refuse what the library might drop or misread.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        if self.check and (violation := two_four_violation(matrix.view(torch.int16) != 0)):
            raise ValueError(
                f"{self.name}: a matrix of shape {tuple(matrix.shape)} cannot be packed, {violation}, counting -0.0: "
                "prune it by a select (`torch.where`, `nm_prune`), which leaves +0.0, and not by a product with a mask"
            )

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
            (multiple, tiled), (finer, ragged) = self.trials
            if reason := pool.submit(self._try, device, *tiled).result():
                return _Verdict(reason)
            try:
                works = not pool.submit(self._try, device, *ragged).result()
            except Exception:
                works = False
        return _Verdict("", finer if works else multiple)

    @torch.no_grad()
    def _try(self, device: torch.device, rows: int, depth: int, tokens: int) -> str:
        """Compare all products of one shape with float64; return what differs first, or an empty string."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        for dtype in self.dtypes:
            matrix, x, biases = nm_prune(normal(rows, depth), "2:4"), normal(tokens, depth), normal(_REPEATS, rows)
            matrix[::2, :4] = 0
            matrix[:, 4] = 0
            dense = x.t().contiguous()
            packed = self.compress(matrix)
            if packed.numel() != rows * packed_width(depth, dtype):
                return f"{dtype} [{rows}, {depth}] is packed into {packed.numel()} values, not 9/16 of its own"
            packed = packed.view(rows, -1)
            product = matrix.double() @ dense.double()
            for bias in biases:
                shift = bias.double()
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


def cuda_reason(library: str, device: torch.device, capabilities: Collection[tuple[int, int]]) -> str:
    """Why a library of CUDA cannot run on a device, from what torch tells of it; empty if it may."""
    if device.type != "cuda":
        return f"{library} needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip:
        return f"what takes the place of {library} on ROCm was never tried"
    capability = torch.cuda.get_device_capability(device)
    if capability not in capabilities:
        known = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        return f"compute capability {capability[0]}.{capability[1]} is not one that {library} knows: {known}"
    return ""
