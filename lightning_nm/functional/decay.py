"""The first moment that AdamS steps with: an L1 decay takes the place of the gradient at entries that are to go."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.functional.select import merged


def decayed_moment(
    moment: Tensor, weight: Tensor, kept: Tensor, ramp: float, decay: float
) -> Tensor:
    r"""Return :math:`\tilde\mu`, the moment with an L1 decay at the entries that a mask does not keep.

    .. math:: \tilde\mu = \mu \text{ where kept}, \quad
              \tilde\mu = (1 - \alpha) \mu + \alpha \lambda \, \mathrm{sign}(W) \text{ elsewhere}.

    Adam divides it by the root of its own mean square. At a large :math:`\alpha` an entry that is not kept therefore
    moves by about the learning rate towards zero, whatever its gradient's size is: the decay adapts to it.

    Args:
        moment: :math:`\mu`, the running mean of gradients.
        weight: W, of that shape. A weight of exactly 0 is not decayed.
        kept: The entries without a decay, bool.
        ramp: :math:`\alpha`, from 0 at the beginning to 1.
        decay: :math:`\lambda`.

    Source: CAST (Huang et al., arXiv 2509.25996), algorithm 1.

    Example:
        >>> import torch
        >>> moment = torch.tensor([0.5, 0.5, -0.5])
        >>> kept = torch.tensor([True, False, False])
        >>> decayed_moment(moment, torch.tensor([1.0, -1.0, 0.0]), kept, ramp=0.5, decay=0.25).tolist()
        [0.5, 0.125, -0.25]
    """
    decayed = moment * (1 - ramp) + (ramp * decay) * weight.sign()
    return merged(kept, moment, decayed)
