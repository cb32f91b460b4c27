"""Keep ThroughputMonitor from logging a wrong ``mfu`` while layers run on sparse kernels."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities import rank_zero_info

from lightning_nm.kernels import Router


def turn_off_mfu(trainer: pl.Trainer) -> None:
    """Turn off ``mfu`` where 16-bit products are routed.

    Lightning's table of peaks holds dense ones for some GPUs and sparse ones for others (Lightning#21677), so the ratio
    to the dense model's FLOPs has no meaning, and may exceed 1. A monitor whose ``available_flops`` was set after its
    `setup` to another value than the table's keeps its ``mfu``.
    """
    router = getattr(trainer.precision_plugin, "router", None)
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    # Where Lightning knows no peak of the device, available_flops is None and there is no mfu.
    monitors = [
        c for c in callbacks if isinstance(c, ThroughputMonitor) and c.available_flops is not None
    ]
    if not monitors or not isinstance(router, Router) or router.active_or_none() is None:
        return
    device: Any = trainer.strategy.root_device
    if device.type != "cuda" or str(trainer.precision)[:2] == "32":
        return
    table = {get_available_flops(device, dtype) for dtype in (torch.bfloat16, torch.float16)}
    monitors = [monitor for monitor in monitors if monitor.available_flops in table]
    for monitor in monitors:
        monitor.available_flops = None
        # They were made before the fit, each with a copy.
        for throughput in getattr(monitor, "_throughputs", {}).values():
            throughput.available_flops = None
    if monitors:
        rank_zero_info(
            "ThroughputMonitor: no mfu is logged while sparse kernels may run, because Lightning's table of peaks "
            "mixes dense and sparse ones. Set monitor.available_flops after its setup to have it"
        )
