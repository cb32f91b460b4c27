"""The device, the libraries, and which kernels work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lightning_nm.kernels.cache import Environment, environment_of
from lightning_nm.kernels.registry import KernelRegistry, reason_or_error


@dataclass(frozen=True)
class KernelState:
    """The state of a kernel on a device.

    Args:
        name: Name of the kernel.
        works: Whether it passed its numeric probe.
        reason: Why it did not; empty if it did.
        remark: What users should know about the kernel on this device; usually empty.
    """

    name: str
    works: bool
    reason: str
    remark: str


@dataclass(frozen=True)
class Machine:
    """A device with its libraries and kernels.

    Args:
        environment: Device, driver and libraries.
        capability: Compute capability, such as ``"9.0"``; None without CUDA.
        kernels: The state of each kernel.
    """

    environment: Environment
    capability: str | None
    kernels: tuple[KernelState, ...]

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {**asdict(self.environment), "capability": self.capability, "kernels": kernels}


def examine(registry: KernelRegistry | None = None, device: torch.device | None = None) -> Machine:
    """Probe every kernel on a device.

    Args:
        registry: The kernels; those of the package by default.
        device: By default CUDA's current device, or the CPU if there is none.

    Example::

        >>> [kernel.name for kernel in examine(device=torch.device("cpu")).kernels if kernel.works]
        ['reference']
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    states = []
    for kernel in (registry or KernelRegistry()).kernels.values():
        reason, remark = (reason_or_error(partial(ask, device)) for ask in (kernel.probe, kernel.remark))
        states.append(KernelState(kernel.name, not reason, reason, remark))
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else None
    return Machine(environment_of(device), capability, tuple(states))
