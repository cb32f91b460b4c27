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
    """The state of a kernel on a device."""

    name: str
    works: bool  # whether it passed its numeric probe
    reason: str  # why it did not, else empty
    remark: str  # what users should know about it on this device, usually empty


@dataclass(frozen=True)
class Machine:
    """A device with its libraries and kernels."""

    environment: Environment
    capability: str | None  # compute capability, such as "9.0"; None without CUDA
    kernels: tuple[KernelState, ...]

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {**asdict(self.environment), "capability": self.capability, "kernels": kernels}


def examine(registry: KernelRegistry | None = None, device: torch.device | None = None) -> Machine:
    """Probe every kernel, by default those of the package, on a device, by default CUDA's current one, else the CPU.

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
