"""The learning-rate schedule of the demo models."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def check_warmup(warmup: float) -> None:
    """Raise a `ValueError` for a fraction of the steps that leaves none after the warm-up."""
    if not 0 <= warmup < 1:
        raise ValueError(
            f"warmup={warmup} must be a fraction of the steps, from 0 to below 1; 0 is no warm-up"
        )


def warmup_cosine(
    optimizer: Optimizer, total_steps: float, warmup: float = 0.05, warmup_steps: int | None = None
) -> LambdaLR:
    """Linear warm-up to the optimizer's learning rates, then a half cosine down to zero; step it after every step.

    The warm-up takes `warmup_steps`, or if these are None the fraction `warmup` of `total_steps`. If `total_steps` are
    infinite, the rate stays at its peak; then a fraction of them is no warm-up.
    """
    rising = warmup_steps
    if rising is None:
        # 1 is no warm-up: the first step has the whole rate already.
        rising = max(1, round(total_steps * warmup)) if math.isfinite(total_steps) else 1

    def factor(step: int) -> float:
        if step < rising:
            # Steps count from 0, and a rate of 0 would waste the first one.
            return (step + 1) / rising
        # 0 where total_steps are infinite.
        # Steps after the plan stay at a rate of 0. A plan may be no longer than its warm-up.
        done = min(1.0, (step - rising) / max(1, total_steps - rising))
        return (1 + math.cos(math.pi * done)) / 2

    # It scales the rate of each parameter group, so that their ratios stay.
    return LambdaLR(optimizer, factor)
