"""Where a run trains: versions, device, precision and processes."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from lightning_nm.kernels.router.cache import environment_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def environment(trainer: pl.Trainer) -> dict[str, str]:
    """Return versions, the device as kernels see it, precision, strategy and processes.

    Example:
        >>> import lightning.pytorch as pl
        >>> found = environment(pl.Trainer(logger=False, accelerator="cpu"))
        >>> found["precision"], found["strategy"], found["processes"]
        ('32-true', 'SingleDeviceStrategy', '1')
    """
    device = trainer.strategy.root_device
    found = environment_of(device)
    parts = {
        "lightning-nm": version("lightning-nm"),
        "torch": found.torch,
        "lightning": version("lightning"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{device.type}: {found.device}",
        "driver": found.driver,
        "CUDA": found.cuda,
        "cuSPARSELt": found.cusparselt,
        "nvmath-python": found.nvmath,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "processes": str(trainer.world_size),
        "batches per step": str(trainer.accumulate_grad_batches),
    }
    return {name: part for name, part in parts.items() if part}
