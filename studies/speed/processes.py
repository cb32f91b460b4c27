"""How the processes of the sides start; imports nothing heavy, so that it can be called first."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

SIDE = "studies.speed.side"


def preload() -> None:
    """Start the process that imports everything, where processes can be forked from one; it serves :func:`context`."""
    if _can_fork():
        from multiprocessing import forkserver

        context()
        forkserver.ensure_running()


def context() -> Any:
    """Processes forked from one that has imported everything, where there are such."""
    if not _can_fork():
        return mp.get_context("spawn")
    found = mp.get_context("forkserver")
    found.set_forkserver_preload([SIDE])
    return found


def _can_fork() -> bool:
    return "forkserver" in mp.get_all_start_methods()
