"""The numeric check that a device must pass before a 2:4 kernel runs its first product there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import nm_prune
from lightning_nm.kernels.gpu.two_four import TwoFourKernel, packed_width

RUNGS = ((128, (256, 512, 256)), (64, (192, 320, 136)), (16, (144, 176, 72)))
"""Multiples for rows and depth of A, with the [rows, depth] and tokens that check them. The first must be right. A
finer one is used if it and all before it are right: Hopper's metadata may need 64."""

_REPEATS = 3


class _Verdict(NamedTuple):
    reason: str
    multiple: int = 0


class DeviceProbe:
    """Checks once for each device whether a kernel's products are right there, and for which sizes.

    Both dtypes, both products, without bias and with biases at several addresses, three times each; matrices with
    pruned negative weights, with groups of zeros, and with groups of one nonzero; compared with float64. An exception
    is a reason against the kernel. A copy starts without verdicts, as it may be loaded on another machine.
    """

    def __init__(self, kernel: TwoFourKernel) -> None:
        self.kernel = kernel
        self._verdicts: dict[torch.device, _Verdict] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "_verdicts": {}}

    def reason(self, device: torch.device) -> str:
        """Why the kernel does not work on a device; empty if it does."""
        return self._verdict(device).reason

    def multiple(self, device: torch.device) -> int:
        """The finest multiple of sizes that is right on a device.

        Raises:
            RuntimeError: If the kernel did not pass the probe of this device.
        """
        verdict = self._verdict(device)
        if verdict.reason:
            raise RuntimeError(f"{self.kernel.name} does not work on {device}: {verdict.reason}")
        return verdict.multiple

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
        if reason := self.kernel.machine_reason(device):
            return _Verdict(reason)
        verdict = _Verdict("")
        # A thread of its own: the library's handle belongs to a thread and its current device, and the caller's
        # autocast and tracers do not apply there.
        with ThreadPoolExecutor(1) as pool:
            for multiple, sizes in RUNGS:
                try:
                    reason = pool.submit(self._compare, device, *sizes).result()
                except Exception:
                    if not verdict.multiple:
                        raise
                    break
                if reason:
                    return verdict if verdict.multiple else _Verdict(reason)
                verdict = _Verdict("", multiple)
        return verdict

    @torch.no_grad()
    def _compare(self, device: torch.device, rows: int, depth: int, tokens: int) -> str:
        """Compare all products of one shape with float64; return what differs first, or an empty string."""
        kernel, generator = self.kernel, torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        for dtype in kernel.dtypes:
            matrix, x, biases = (
                nm_prune(normal(rows, depth), "2:4"),
                normal(tokens, depth),
                normal(_REPEATS, rows),
            )
            matrix[::2, :4] = 0
            matrix[:, 4] = 0
            dense = x.t().contiguous()
            packed = kernel.compress(matrix)
            if packed.numel() != rows * packed_width(depth, dtype):
                return f"{dtype} [{rows}, {depth}] is packed into {packed.numel()} values, not 9/16 of its own"
            packed = packed.view(rows, -1)
            product = matrix.double() @ dense.double()
            for bias in biases:
                shift = bias.double()
                for what, result, expected in (
                    ("linear", kernel.sparse_linear(packed, x, None), product.t()),
                    (
                        "linear with bias",
                        kernel.sparse_linear(packed, x, bias),
                        product.t() + shift,
                    ),
                    ("matmul", kernel.sparse_matmul(packed, dense), product),
                ):
                    if result.shape != expected.shape or not result.is_contiguous():
                        return f"{dtype} {what} of [{rows}, {depth}] returned shape {tuple(result.shape)}"
                    error = (result.double() - expected).abs()
                    # Sums in float32, rounded once or, before the bias, twice: a lost value would show at once.
                    allowed = torch.finfo(dtype).eps * (expected.abs() + shift.abs().max()) + 1e-2
                    if not bool((error <= allowed).all()):
                        return f"{dtype} {what} of [{rows}, {depth}] is wrong by up to {float(error.max()):.3g}"
        return ""
