"""Random states of a process as tensors and primitives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def rng_state(devices: Sequence[int] = ()) -> dict[str, Any]:
    """Return the global random states of torch, CUDA devices, numpy and Python.

    Args:
        devices: Indices of CUDA devices.

    Returns:
        Tensors and primitives; ``numpy`` is ``None`` if its global generator is not MT19937.

    Example::

        >>> state = rng_state()
        >>> first = torch.rand(1), random.random()
        >>> set_rng_state(state)
        >>> first == (torch.rand(1), random.random())
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": None,
    }
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        state["numpy"] = {
            "words": torch.tensor(numpy["state"]["key"].tolist()),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        }
    return state


def set_rng_state(state: dict[str, Any], devices: Sequence[int] = ()) -> None:
    """Restore the result of :func:`rng_state`; with another number of devices, the first ones.

    Args:
        state: A result of :func:`rng_state`.
        devices: Indices of CUDA devices.
    """
    torch.set_rng_state(state["torch"].cpu())
    for device, words in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(words.cpu(), device)
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    if numpy is not None:
        words = np.array(numpy["words"].tolist(), np.uint32)
        np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
