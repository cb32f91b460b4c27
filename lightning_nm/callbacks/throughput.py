"""Keep ThroughputMonitor from logging a wrong ``mfu`` while layers run on sparse kernels."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities import rank_zero_info

from lightning_nm.callbacks.report.environment import router_of


def turn_off_mfu(trainer: pl.Trainer) -> None:
    """Turn off ``mfu`` where 16-bit products are routed.

    Lightning's table of peaks holds dense ones for some GPUs and sparse ones for others (Lightning#21677), so the ratio
    to the dense model's FLOPs has no meaning, and may exceed 1. A monitor whose ``available_flops`` was set after its
    `setup` to another value than the table's keeps its ``mfu``.
    """
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    # Where Lightning knows no peak of the device, available_flops is None, and there is no mfu.
    monitors = []
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor) and callback.available_flops is not None:
            monitors.append(callback)
    # An inactive router leaves every product dense: mfu is right then.
    router = router_of(trainer)
    if not monitors or router is None or router.active_or_none() is None:
        return
    device: Any = trainer.strategy.root_device
    is_float32 = str(trainer.precision).startswith("32")
    if device.type != "cuda" or is_float32:
        return

    # Not before it is known that there is a monitor: the look-up warns of devices that it does not know.
    peaks = {get_available_flops(device, dtype) for dtype in (torch.bfloat16, torch.float16)}
    monitors = [monitor for monitor in monitors if monitor.available_flops in peaks]
    for monitor in monitors:
        monitor.available_flops = None
        # These are Lightning's own objects of each stage. They were made before the fit, each with a copy.
        for throughput in getattr(monitor, "_throughputs", {}).values():
            throughput.available_flops = None
    if monitors:
        rank_zero_info(
            "ThroughputMonitor: no mfu is logged while sparse kernels may run, because Lightning's table of peaks "
            "mixes dense and sparse ones. Set monitor.available_flops after its setup to have it"
        )
