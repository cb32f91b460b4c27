"""What this machine can do: its device, the libraries, and which kernels work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lightning_nm.kernels.cache import Environment, environment_of
from lightning_nm.kernels.registry import KernelRegistry, reason_or_error


@dataclass(frozen=True)
class KernelState:
    """A kernel on a device.

    Args:
        name: The kernel's.
        works: Whether it passed its numeric probe.
        reason: Why it did not; empty if it did.
        remark: What users should know about the kernel on this device; mostly empty.
    """

    name: str
    works: bool
    reason: str
    remark: str


@dataclass(frozen=True)
class Machine:
    """A device with what is installed for it.

    Args:
        environment: Device, driver and libraries.
        capability: Compute capability, such as ``"9.0"``; None off CUDA.
        kernels: Each kernel of a registry.
    """

    environment: Environment
    capability: str | None
    kernels: tuple[KernelState, ...]

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        return {
            **asdict(self.environment),
            "capability": self.capability,
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }


def examine(registry: KernelRegistry | None = None, device: torch.device | None = None) -> Machine:
    """Probe every kernel on a device.

    Args:
        registry: The kernels; those of the package by default.
        device: By default CUDA's current device, or the CPU where there is none.

    Example::

        >>> [kernel.name for kernel in examine(device=torch.device("cpu")).kernels if kernel.works]
        ['reference']
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    on_cuda = device.type == "cuda"
    states = []
    for kernel in (registry or KernelRegistry()).kernels.values():
        reason = reason_or_error(partial(kernel.probe, device))
        states.append(KernelState(kernel.name, not reason, reason, reason_or_error(partial(kernel.remark, device))))
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if on_cuda else None
    return Machine(environment_of(device), capability, tuple(states))
