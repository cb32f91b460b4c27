"""What Lightning's ThroughputMonitor divides by while layers run on sparse kernels."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities import rank_zero_info

from lightning_nm.kernels import Router

SPARSE_PEAKS = {
    "h200": 1979,
    "h200 nvl": 1671,
    "h100 80gb hbm3": 1979,
    "h100 pcie": 1513,
    "h100 nvl": 1671,
    "a100": 624,
    "a30": 330,
    "a10": 250,
    "l40s": 733,
    "l40": 362,
    "l4": 242,
}
"""Dense-equivalent TFLOP/s of 2:4 products of 16-bit types, from NVIDIA's data sheets ("with sparsity")."""


def sparse_peak(name: str) -> int | None:
    """Dense-equivalent TFLOP/s of a GPU for 2:4 products of 16-bit types; ``None`` if it is not known.

    Example::

        >>> sparse_peak("NVIDIA H100 80GB HBM3"), sparse_peak("NVIDIA A100-SXM4-80GB"), sparse_peak("NVIDIA T4")
        (1979, 624, None)
    """
    words = name.lower().removeprefix("nvidia ").replace("-", " ")
    known = [chip for chip in SPARSE_PEAKS if f"{words} ".startswith(f"{chip} ")]
    return SPARSE_PEAKS[max(known, key=len)] if known else None


def settle_throughput(trainer: pl.Trainer) -> None:
    """Let every ThroughputMonitor divide by the 2:4 peak, so that its ``mfu`` means one thing and stays below 1.

    Model FLOPs are those of the dense model, whatever kernels run, and Lightning's table of peaks holds dense ones for
    some GPUs and sparse ones for others (Lightning#21677). Without a known 2:4 peak no ``mfu`` is logged. Nothing
    changes where no 16-bit product is routed.
    """
    router = getattr(trainer.precision_plugin, "router", None)
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    if not monitors or not isinstance(router, Router) or router.live() is None or str(trainer.precision)[:2] == "32":
        return
    device: Any = trainer.strategy.root_device
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    peak = sparse_peak(name)
    for monitor in monitors:
        monitor.available_flops = None if peak is None else peak * 10**12
        for throughput in getattr(monitor, "_throughputs", {}).values():  # made before the fit, each with a copy
            throughput.available_flops = monitor.available_flops
    rank_zero_info(
        f"ThroughputMonitor: no 2:4 peak is known for {name}, so no mfu is logged"
        if peak is None
        else f"ThroughputMonitor: mfu is dense-equivalent FLOPs over {peak} TFLOP/s, the 2:4 peak of {name}"
    )
