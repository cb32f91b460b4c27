"""One process decides, all follow."""

from __future__ import annotations

import torch.distributed as dist

from lightning_nm.kernels.cache import Decisions


def share(decisions: Decisions, group: dist.ProcessGroup | None = None) -> Decisions:
    """Give the decisions of the group's first process to all of its processes.

    Processes that decide for themselves may decide differently where two kernels are equally fast. Every process of
    the group must call this; without :mod:`torch.distributed` the decisions come back as they are.

    Args:
        decisions: The decisions of this process; only those of the first one matter.
        group: The processes, all by default.

    Returns:
        The first process's decisions, with the environment where they were made.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return decisions
    box = [decisions]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    return box[0]
