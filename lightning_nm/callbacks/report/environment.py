"""Where a run trains: versions, device, precision, processes, and the router of its precision plugin."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from lightning_nm.kernels import Router
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
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "processes": str(trainer.world_size),
        "batches per step": str(trainer.accumulate_grad_batches),
    }
    # Without a GPU there is no driver, and libraries may be missing.
    return {name: part for name, part in parts.items() if part}


def router_of(trainer: pl.Trainer) -> Router | None:
    """Return the router of the Trainer's precision plugin; ``None`` for plugins that route no products.

    Example:
        >>> import lightning.pytorch as pl
        >>> print(router_of(pl.Trainer(logger=False, accelerator="cpu")))
        None
    """
    # Plugins of other packages may have an attribute of this name.
    router = getattr(trainer.precision_plugin, "router", None)
    return router if isinstance(router, Router) else None
