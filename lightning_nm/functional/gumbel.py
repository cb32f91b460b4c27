"""Random choices between patterns that gradients pass: Gumbel-softmax by counter-based noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_nm.functional.random import counter_uniform

# Half the distance of two numbers of counter_uniform(): it takes the place of 0, whose logarithm is not finite.
_SMALLEST = 2.0**-25


def gumbel_noise(count: int, seed: Tensor) -> Tensor:
    """Draw from the standard Gumbel distribution: ``-log(-log u)`` of :func:`counter_uniform`'s numbers.

    Args:
        count: How many numbers.
        seed: Four words, from :func:`fold_seed`; the numbers are made on its device.

    Returns:
        A float32 tensor [count].

    Example:
        >>> from lightning_nm.functional import fold_seed
        >>> round(float(gumbel_noise(10_000, fold_seed(0)).mean()), 1)  # Euler's constant is 0.577
        0.6
    """
    uniform = counter_uniform(count, seed).clamp(min=_SMALLEST)
    return -torch.log(-torch.log(uniform))


def normal_noise(count: int, seed: Tensor) -> Tensor:
    """Draw from the standard normal distribution, by Box and Muller; see :func:`gumbel_noise`.

    Example:
        >>> from lightning_nm.functional import fold_seed
        >>> round(float(normal_noise(10_000, fold_seed(0)).std()), 1)
        1.0
    """
    radius, angle = counter_uniform(2 * count, seed).view(2, count).unbind()
    # 1 - u is in (0, 1].
    return torch.sqrt(-2 * torch.log(1 - radius)) * torch.cos(2 * math.pi * angle)


def soft_choice(logits: Tensor, noise: Tensor, scale: Tensor, temperature: Tensor) -> Tensor:
    r"""Return the weights of a soft random choice, :math:`\mathrm{softmax}((\kappa\, \pi + g) / \tau)`, along dim -1.

    Args:
        logits: :math:`\pi`, ``[..., C]``.
        noise: g, of the same number of entries, of :func:`gumbel_noise`.
        scale: :math:`\kappa`, without axes.
        temperature: :math:`\tau`, likewise; towards 0 the choice becomes hard.

    Source: Jang et al., Categorical Reparameterization with Gumbel-Softmax, ICLR 2017, arXiv:1611.01144.

    Example:
        >>> one = torch.tensor(1.0)
        >>> soft_choice(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), one, one).tolist()
        [0.5, 0.5]
    """
    noise = noise.to(logits.dtype).view(logits.shape)
    return torch.softmax((logits * scale + noise) / temperature, dim=-1)


def soft_choice_gradient(
    choice: Tensor, grad: Tensor, scale: Tensor, temperature: Tensor
) -> Tensor:
    r"""Turn the gradient of :func:`soft_choice`'s result y into that of the logits.

    :math:`dL/d\pi_p = \kappa / \tau\; y_p\, (dL/dy_p - \sum_q y_q\, dL/dy_q)`.
    """
    mean = (choice * grad).sum(-1, keepdim=True)
    return choice * (grad - mean) * (scale / temperature)
