"""MaskLLM: masks of a trained model are learned by logits of the N:M patterns of each block, and weights stay."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_nm.functional import fold_seed, is_nm, pack_mask, unpack_mask
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.functional.soft import gumbel_noise, normal_noise
from lightning_nm.methods.base import (
    Gradients,
    MaskMethod,
    largest_entries,
    set_tensor,
    weighted_mean,
)
from lightning_nm.methods.checks import check_number, warn_of_late_stop
from lightning_nm.methods.pattern_scores import PATTERNS, begin_scores, sum_by_pattern
from lightning_nm.nn.layer import NMLayer, from_blocks_of
from lightning_nm.nn.weight import key_of_layer
from lightning_nm.schedule import Moment, check_moment
from lightning_nm.training.ranks import processes

LOGITS = "logits"
"""The layer's parameter: a logit for each pattern of each block, ``[out, blocks, C]``."""
WORDS = "words"
"""The layer's buffer: int64 [4], which the random numbers of the coming step follow from."""
ANNEALED = "annealed"
"""The layer's buffer ``[2]``: the scale of the logits and the temperature of the coming step."""

_NOTHING_TO_TRAIN = "it trains logits of the masks alone, so that a dense phase would train nothing"
_SPREAD = 0.01  # standard deviation of the first logits, as in the paper's code


class MaskLogits(MaskMethod):
    r"""Learn the masks of a trained model, whose weights stay (MaskLLM; Fang et al., NeurIPS 2024, arXiv 2409.17481).

    Each block has a logit :math:`\pi_p` for each of its C(M, N) patterns :math:`P_p`. In training mode a layer uses

    .. math:: W \odot \sum_p y_p P_p, \quad y = \mathrm{softmax}((\kappa\, \pi + g) / \tau)

    with Gumbel noise g (Jang et al., ICLR 2017, arXiv 1611.01144). The scale :math:`\kappa` and the temperature
    :math:`\tau` go from their first to their last values, so that random soft masks become nearly hard ones. **The
    model is N:M at any time**: evaluation, state dicts and files use the pattern of the largest logit. While it trains,
    GEMMs are dense, and count as dense.

    The loss gets :math:`-\lambda (1 - t / T) \sum (W \odot \sum_p y_p P_p)^2`, for which weights of large magnitude are
    kept. The first logits are normal with deviation 0.01, plus the prior: ``prior_strength * 0.01`` for each entry that
    a pattern shares with the prior mask. The noise of a step follows from the seed, the layer's name and the step: it
    is equal in all micro-batches and processes, and after a resume.

    **Weights get no gradient.** Give them to the optimizer all the same: it takes the logits into their group, and
    leaves alone what has no gradient. Freeze what else must not be trained. Weights may be frozen themselves, and must
    be in distributed training. The logits take C / M numbers of at least 32 bits for each weight, and the optimizer's
    state for them: 1.5 at 2:4, 1 at 1:16, 8.75 at 4:8. They need large learning rates: the paper's is 5e-4.

    Args:
        temperature: :math:`\tau`, first and last.
        scale: :math:`\kappa`, first and last.
        prior: Weights by their keys in the state dict, whose nonzeros are the prior masks: the state dict of a copy of
            the model after :func:`~lightning_nm.prune`. By default the prior keeps the largest magnitudes.
        prior_strength: Of the prior; 0 for none.
        weight_reg: :math:`\lambda`.
        stop: When the last values are reached: an integer counts training steps, a float in [0, 1] is a fraction of the
            planned ones.

    Raises:
        TypeError: If ``stop`` is neither an integer nor a float.
        ValueError: For a setting out of its range; when training starts, if a fraction is given but no number of steps,
            or, naming the layer, if the pattern has more than 256 combinations, the prior lacks the weight or is not
            N:M, the weight is not frozen in distributed training, or tensor parallelism cuts it.

    Example:
        >>> MaskLogits(stop=2000).schedule(planned_steps=None)
        (2000,)
    """

    short_name = "mask-logits"
    trains_weight = False
    _scheduled = ("stop",)
    _refused = {
        "dense_start": _NOTHING_TO_TRAIN,
        "ramp": "its logits are of the combinations of one pattern",
        "dense_end": _NOTHING_TO_TRAIN,
    }

    def __init__(
        self,
        temperature: tuple[float, float] = (4.0, 0.05),
        scale: tuple[float, float] = (1e2, 5e2),
        prior: Mapping[str, Any] | None = None,
        prior_strength: float = 3.0,
        weight_reg: float = 1e-5,
        stop: Moment = 1.0,
    ) -> None:
        for name, pair in (("temperature", temperature), ("scale", scale)):
            # [None] fails the next check, so that all faults have one message.
            values = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else [None]
            if not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in values):
                raise ValueError(
                    f"{name}={pair!r} must be two positive numbers, the first and the last"
                )
        for name, value in (("prior_strength", prior_strength), ("weight_reg", weight_reg)):
            check_number(name, value, "0 leaves it out", zero=True)
        check_moment("stop", stop)
        self.temperature = tuple(temperature)
        self.scale = tuple(scale)
        self.prior_strength = prior_strength
        self.weight_reg = weight_reg
        self.stop = stop
        # One bit for each weight is all that is needed of it.
        self._prior: dict[str, tuple[Tensor, torch.Size]] | None = None
        if prior is not None:
            if not isinstance(prior, Mapping):
                raise TypeError(
                    f"prior={prior!r} must be the state dict of a pruned copy of the model, such as pruned.state_dict()"
                )
            self._prior = {
                name: (pack_mask(value.detach() != 0), value.shape) for name, value in prior.items()
            }

    def check(self, planned_steps: int | None) -> None:
        """Warn of a stop that the training does not reach."""
        warn_of_late_stop(self, planned_steps, "MaskLogits' masks stay soft")

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse a weight that several processes would wait for the gradient of."""
        if processes() > 1 and layer.param.requires_grad:
            raise ValueError(
                f"the weight of layer '{layer.name}' gets no gradient from MaskLogits, but the other processes wait "
                "for one: freeze it by requires_grad_(False) before the model is distributed, and leave it in the "
                "optimizer"
            )

    def init_masks(self, layer: NMLayer) -> None:
        """Draw the first logits around the prior."""
        shape = begin_scores(layer, "logits")
        if shape is None:
            return
        weight = layer.weight
        dtype = wide_dtype(weight)
        # A word of its own: no step draws the same numbers.
        noise = normal_noise(math.prod(shape), self._words(layer, "first"))
        logits = _SPREAD * noise.to(weight.device, dtype).view(shape)
        if self.prior_strength:
            shared = sum_by_pattern(layer, self._prior_of(layer), logits)
            # The constant changes no choice.
            logits += self.prior_strength * _SPREAD * (shared - 1)
        set_tensor(layer.parameters, LOGITS, nn.Parameter(logits))
        layer.buffers[WORDS] = torch.zeros(4, dtype=torch.int64, device=weight.device)
        layer.buffers[ANNEALED] = torch.zeros(2, dtype=dtype, device=weight.device)
        self.update(layer)

    def _prior_of(self, layer: NMLayer) -> Tensor:
        """The prior mask, bool of the weight's shape."""
        if self._prior is None:
            return largest_entries(layer)
        key = key_of_layer(layer.name, layer.spec.parameter)
        if key not in self._prior:
            raise ValueError(
                f"`prior` has no '{key}', the weight of layer '{layer.name}': give the state dict of a pruned copy of "
                "the model, with the names of the LightningModule"
            )
        packed, shape = self._prior[key]
        if shape != layer.view.shape:
            raise ValueError(
                f"'{key}' in `prior` has the shape {tuple(shape)}, and the weight of layer '{layer.name}' "
                f"{tuple(layer.view.shape)}: give the state dict of a pruned copy of this model"
            )
        prior = unpack_mask(packed.to(layer.weight.device), tuple(shape))
        if not is_nm(layer.view.rows(prior), layer.pattern, dim=1):
            raise ValueError(
                f"'{key}' in `prior` is not {layer.pattern}, so it is no mask of layer '{layer.name}': prune the copy "
                f"to {layer.pattern}, with the same layers and `conv_layout`"
            )
        return prior

    @staticmethod
    def _words(layer: NMLayer, step: int | str) -> Tensor:
        """The words that the random numbers of a layer in a step follow from; equal in all processes."""
        return fold_seed(layer.noise.seed, layer.name, "mask-logits", step)

    def update(self, layer: NMLayer) -> None:
        """Mask by the largest logits, and prepare the noise, the scale and the temperature of the next step."""
        logits = layer.parameters.get(LOGITS)
        if logits is None:
            return
        # Weights that were loaded by the first step are those that training began with.
        if layer.step == 1 and is_nm(layer.view.rows(layer.weight), layer.pattern, dim=1):
            warnings.warn(
                f"the weight of layer '{layer.name}' is {layer.pattern} already, so that other masks would keep zeros: "
                "begin with the dense weights, and give the pruned ones as `prior`",
                stacklevel=2,
            )
        patterns = layer.buffers[PATTERNS]
        best = logits.argmax(-1).flatten()  # [blocks]
        kept_blocks = patterns[best].bool()  # [blocks, M]
        layer.set_masks(from_blocks_of(layer, kept_blocks))
        progress = _progress(layer)
        annealed = [
            first + (last - first) * progress for first, last in (self.scale, self.temperature)
        ]
        # In place: compiled graphs read these tensors.
        layer.buffers[WORDS].copy_(self._words(layer, layer.step))
        layer.buffers[ANNEALED].copy_(torch.tensor(annealed, dtype=torch.float64))

    def _choice(self, layer: NMLayer, logits: Tensor) -> Tensor:
        """The weights y of the patterns in this step, ``[out, blocks, C]``."""
        scale, temperature = layer.buffers[ANNEALED].unbind()
        noise = gumbel_noise(logits.numel(), layer.buffers[WORDS])
        noise = noise.to(logits.dtype).view(logits.shape)
        return torch.softmax((logits * scale + noise) / temperature, dim=-1)

    def _soft_mask(self, layer: NMLayer, logits: Tensor) -> Tensor:
        """The soft mask of this step, of the weight's shape."""
        choice = self._choice(layer, logits).flatten(0, 1)  # [blocks, C]
        mask_blocks = choice @ layer.buffers[PATTERNS].to(choice.dtype)
        return from_blocks_of(layer, mask_blocks)

    def training_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W times the soft mask."""
        if LOGITS not in layer.parameters:
            return weight
        # Detached: weight_gradient() makes the gradient of the logits.
        mask = self._soft_mask(layer, layer.parameters[LOGITS].detach())
        # The soft mask is at least float32.
        return (weight * mask).to(weight.dtype)

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> Gradients:
        """No gradient of the weight, and that of the logits."""
        logits = layer.parameters.get(LOGITS)
        if logits is None:
            return (None,)
        # dL/dy_p: the gradient of the soft mask is W times that of the weight in use, summed here over the entries that
        # each pattern keeps.
        of_choice = sum_by_pattern(layer, grad * weight, logits)
        scale, temperature = layer.buffers[ANNEALED].unbind()
        # With the noise of the forward pass, which follows from the same words.
        choice = self._choice(layer, logits.detach())
        # dL/dpi_p = kappa / tau y_p (dL/dy_p - sum_q y_q dL/dy_q)
        mean = (choice * of_choice).sum(-1, keepdim=True)
        return None, choice * (of_choice - mean) * (scale / temperature)

    def penalty(self, layer: NMLayer) -> Tensor | None:
        """The negative square of the weights under the soft mask, which fades with the training."""
        strength = self.weight_reg * (1 - _progress(layer))
        if not strength or LOGITS not in layer.parameters:
            return None
        # Here the logits are not detached: autograd takes the penalty's gradient by them.
        kept = layer.weight.detach() * self._soft_mask(layer, layer.parameters[LOGITS])
        return -strength * kept.square().sum()

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """``mask_confidence``: the largest weight of a pattern in a block without noise, on average; 1 is certain."""
        parts = []
        for layer in layers:
            if LOGITS in layer.parameters:
                scale, _ = layer.buffers[ANNEALED].unbind()
                logits = layer.parameters[LOGITS].detach()
                largest = torch.softmax(logits * scale, dim=-1).amax(-1)
                parts.append((float(largest.sum(dtype=torch.float64)), largest.numel()))
        return weighted_mean("mask_confidence", parts)


def _progress(layer: NMLayer) -> float:
    """How far the annealing is, from 0 to 1."""
    (stop,) = layer.progress.schedule
    return min(layer.progress.clock / stop, 1.0) if stop else 1.0
