"""What timings depend on beside the product: the device, its driver and the libraries."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils import collect_env


@dataclass(frozen=True)
class Environment:
    """Where decisions were measured; decisions are taken over only where all of it is equal.

    Args:
        device: The device's name.
        driver: Version of the driver, None without one.
        torch: Version of torch.
        cuda: Version of CUDA that torch was built for, None without it.
        cusparselt: Version of cuSPARSELt as torch reports it, None without it.
        nvmath: Version of nvmath-python, None without it.

    Example::

        >>> str(Environment("H200", "580.65", "2.13.0", "13.0", "801"))
        'device H200, driver 580.65, torch 2.13.0, cuda 13.0, cusparselt 801, nvmath none'
    """

    device: str
    driver: str | None
    torch: str
    cuda: str | None
    cusparselt: str | None
    nvmath: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name) or 'none'}" for field in fields(self))


def environment_of(device: torch.device) -> Environment:
    """Describe a device of this machine; every kind but CUDA goes by its type."""
    on_cuda = device.type == "cuda"
    cusparselt = torch.backends.cusparselt.version() if on_cuda else None
    return Environment(
        device=torch.cuda.get_device_name(device) if on_cuda else device.type,
        driver=collect_env.get_nvidia_driver_version(collect_env.run) if on_cuda else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cusparselt=None if cusparselt is None else str(cusparselt),
        nvmath=_nvmath() if on_cuda else None,
    )


def _nvmath() -> str | None:
    try:
        return version("nvmath-python")
    except PackageNotFoundError:
        return None
