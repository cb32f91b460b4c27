"""The numeric check that a device must pass before a 2:4 kernel runs its first GEMM there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import nm_mask, nm_prune
from lightning_nm.kernels.gpu import hopper
from lightning_nm.kernels.gpu.two_four import TwoFourKernel, packed_width

# The last two have odd multiples of 64 and 16, and tokens that are odd multiples of 8: they fit no coarser rule.
RUNGS = ((128, (256, 512, 256)), (64, (192, 320, 136)), (16, (144, 176, 72)))
"""Multiples for rows and depth of A, with the [rows, depth] and tokens that check them. The first must be right. A
finer one is used if it and all before it are right: Hopper's metadata may need 64."""

PACKED_SIZES = ((64, 64), (192, 320), (256, 1024))
"""Rows and depth of the matrices by which two ways to pack are compared."""

# How often each GEMM is compared, each time with a bias at another address.
_REPEATS = 3


class _Verdict(NamedTuple):
    """Why a kernel does not work on a device, or with an empty reason, for which multiples of sizes it does.

    `packs_alike` says whether its `one_pass` gives the bits of its `compress` there.
    """

    reason: str
    multiple: int = 0
    packs_alike: bool = False


class DeviceProbe:
    """Checks once for each device whether a kernel's GEMMs are right there, and for which sizes.

    Both dtypes, both GEMMs, without bias and with biases at several addresses, three times each; matrices with
    pruned negative weights, with groups of zeros, and with groups of one nonzero; compared with float64. An exception
    is a reason against the kernel. A copy starts without verdicts, as it may be loaded on another machine.
    """

    def __init__(self, kernel: TwoFourKernel) -> None:
        self.kernel = kernel
        self._verdicts: dict[torch.device, _Verdict] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "_verdicts": {}}

    def reason(self, device: torch.device) -> str:
        """Return why the kernel does not work on a device; empty if it does."""
        return self._verdict(device).reason

    def multiple(self, device: torch.device) -> int:
        """Return the finest multiple of sizes that is right on a device.

        Raises:
            RuntimeError: If the kernel did not pass the probe of this device.
        """
        verdict = self._verdict(device)
        if verdict.reason:
            raise RuntimeError(f"{self.kernel.name} does not work on {device}: {verdict.reason}")
        return verdict.multiple

    def packs_alike(self, device: torch.device) -> bool:
        """Return whether the kernel's ``one_pass`` may replace its ``compress`` on a device."""
        return self._verdict(device).packs_alike

    def _verdict(self, device: torch.device) -> _Verdict:
        """Return the verdict on a device, which is judged once."""
        try:
            # "cuda" stands for the current device, which may be another one the next time.
            if device.type == "cuda" and device.index is None and torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
            if device not in self._verdicts:
                self._verdicts[device] = self._judge(device)
        except Exception as error:
            return self._verdicts.setdefault(device, _Verdict(f"{type(error).__name__}: {error}"))
        return self._verdicts[device]

    def _judge(self, device: torch.device) -> _Verdict:
        """Judge a device: climb the rungs until one is wrong."""
        reason = self.kernel.machine_reason(device)
        if reason:
            return _Verdict(reason)
        finest = 0  # the multiple of the last rung that was right
        # A thread of its own: the library's handle belongs to a thread and its current device, and the caller's
        # autocast and tracers do not apply there.
        with ThreadPoolExecutor(1) as pool:
            for multiple, sizes in RUNGS:
                try:
                    reason = pool.submit(self._compare, device, *sizes).result()
                except Exception:
                    # Only the first rung has to work; finer sizes may be unsupported.
                    if not finest:
                        raise
                    break
                if reason:
                    if not finest:
                        return _Verdict(reason)
                    break
                finest = multiple
            try:
                packs_alike = pool.submit(self._compare_packs, device, finest).result()
            except Exception:
                # No reason against the kernel: the library's own packing passed.
                packs_alike = False
        return _Verdict("", finest, packs_alike)

    @torch.no_grad()
    def _compare_packs(self, device: torch.device, multiple: int) -> bool:
        """Compare the bits of both ways to pack, for all contents of a group and for sizes of several tiles."""
        kernel = self.kernel
        # Another device than a Hopper GPU has another form, and only whole tiles have this one.
        if kernel.one_pass is None or multiple % hopper.TILE or not hopper.may_pack(device):
            return False
        generator = torch.Generator().manual_seed(0)
        for rows, depth in PACKED_SIZES:
            # As bits, so that NaN and -0 are among the values.
            bits = torch.randint(-(1 << 15), 1 << 15, (rows, depth), generator=generator)
            scores = torch.rand(rows, depth, generator=generator, dtype=torch.float32)
            kept = nm_mask(scores, "2:4") & (scores > 0.4)  # two, one or no nonzeros in a group
            matrix = torch.where(kept, bits, 0).to(torch.int16).to(device)
            for dtype in kernel.dtypes:
                ways = kernel.compress(matrix.view(dtype)), kernel.one_pass(matrix.view(dtype))
                library, own = (packed.flatten().view(torch.int16) for packed in ways)
                if not torch.equal(library, own):
                    return False
        return True

    @torch.no_grad()
    def _compare(self, device: torch.device, rows: int, depth: int, tokens: int) -> str:
        """Compare all GEMMs of one shape with float64; return what differs first, or an empty string."""
        kernel = self.kernel
        # Drawn on the CPU, so every device is checked with the same numbers.
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)

        for dtype in kernel.dtypes:
            matrix = nm_prune(normal(rows, depth), "2:4")
            x_ti = normal(tokens, depth)
            # Rows of one matrix: each bias starts at another address.
            biases = normal(_REPEATS, rows)
            matrix[::2, :4] = 0  # groups of zeros
            matrix[:, 4] = 0  # groups of one nonzero
            dense_it = x_ti.t().contiguous()
            # Not `pack` and `linear`: these ask for the verdict that is being made.
            packed = kernel.compress(matrix)
            if packed.numel() != rows * packed_width(depth, dtype):
                return f"{dtype} [{rows}, {depth}] is packed into {packed.numel()} values, not 9/16 of its own"
            packed = packed.view(rows, -1)
            # Of operands that are rounded to the dtype already: only the kernel's own rounding is left.
            product_ot = matrix.double() @ dense_it.double()
            product_to = product_ot.t()
            for bias in biases:
                shift = bias.double()
                comparisons = (
                    ("linear", kernel.sparse_linear(packed, x_ti, None), product_to),
                    (
                        "linear with bias",
                        kernel.sparse_linear(packed, x_ti, bias),
                        product_to + shift,
                    ),
                    ("matmul", kernel.sparse_matmul(packed, dense_it), product_ot),
                )
                # Sums in float32, rounded once or, before the bias, twice: a lost value would show at once.
                scale = shift.abs().max()
                for what, result, expected in comparisons:
                    product = f"{dtype} {what} of [{rows}, {depth}]"
                    if result.shape != expected.shape or not result.is_contiguous():
                        return f"{product} returned shape {tuple(result.shape)}"
                    error = (result.double() - expected).abs()
                    allowed = torch.finfo(dtype).eps * (expected.abs() + scale) + 1e-2
                    if not bool((error <= allowed).all()):  # true of NaN
                        return f"{product} is wrong by up to {float(error.max()):.3g}"
        return ""
