"""The learning-rate schedule of the demo models."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, total_steps: float, warmup: float = 0.05) -> LambdaLR:
    """Linear warm-up to the optimizer's learning rates, then a half cosine down to zero; step it after every step.

    `warmup` is the share of `total_steps` that the warm-up takes. If these are infinite, the rate stays at its peak.
    """
    if not math.isfinite(total_steps):
        return LambdaLR(optimizer, lambda step: 1.0)
    rising = max(1, round(total_steps * warmup))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step - rising) / max(1, total_steps - rising))
        return (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
