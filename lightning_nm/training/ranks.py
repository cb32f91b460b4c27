"""Compare the masks of all processes, and average the gradients of parameters that methods own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nm.functional.random import fold_seed
from lightning_nm.nn.layer import NMLayer
from lightning_nm.spelling import some_of

_CHUNK = 1 << 20
"""Words that are mixed at a time, which limits the memory for temporaries."""

# Odd 64-bit constants. A product with one is one-to-one, and its high bits depend on all bits of the factor.
# They are 2^64 over the golden ratio, both factors of SplitMix64 and the prime of FNV-1a, as signed numbers: torch has
# little arithmetic for uint64, and that of int64 wraps around alike.
_PLACE_FACTOR = -0x61C8864680B583EB
_FIRST_FACTOR = -0x40A7B892E31B1A47
_SECOND_FACTOR = -0x6B2FB644ECCEEE15
_LENGTH_FACTOR = 0x100000001B3


def _fingerprint(layer: NMLayer) -> dict[str, Any]:
    """What decides on masks and messages besides tensors, and must be equal in all processes."""
    return {
        "name": layer.name,
        "shape": tuple(layer.view.shape),
        "layout": str(layer.spec.layout),
        "pattern": str(layer.pattern),
        "method": type(layer.spec.method).__name__,
        "estimator": type(layer.spec.estimator).__name__,
        "dgrad": type(layer.spec.dgrad).__name__,
        "seed": layer.noise.seed,
        "schedule": layer.progress.schedule,
        "stages": layer.progress.stages,
        "estimator_schedule": layer.progress.estimator_schedule,
        "estimating": layer.progress.estimating,
        "dense_gradient": layer.progress.dense_gradient,
        "gradient_at_pruned": layer.spec.method.gradient_at_pruned(layer),
        "has_forward": layer.masks.has_forward,
        "own_backward": layer.masks.has_backward,
        "clock": layer.progress.clock,
        "step": layer.step,
        "updated_at": layer.progress.updated_at,
    }


# The words of a layer's masks, and the state of the masks that they belong to.
_WORDS: WeakKeyDictionary[NMLayer, tuple[Hashable, Tensor]] = WeakKeyDictionary()


def checksum(layer: NMLayer) -> Tensor:
    """Return a checksum of the tensors that must be equal in all processes, int64 [3].

    Unchanged masks are not read again. The words are of both masks, the permutation, and the parameters that the method
    owns. A change of up to eight neighbouring bytes always changes the word, any other one almost certainly.
    """
    state = layer.masks.cache_key
    if layer not in _WORDS or _WORDS[layer][0] != state:
        tensors = (layer.masks.bits, layer.masks.permutation)
        words = [_sum(layer, [] if tensor is None else [tensor]) for tensor in tensors]
        _WORDS[layer] = state, torch.stack(words)
    return torch.cat([_WORDS[layer][1], _sum(layer, layer.parameters.values())[None]])


def _sum(layer: NMLayer, tensors: Iterable[Tensor]) -> Tensor:
    """The word of some tensors of a layer."""
    total = torch.zeros((), dtype=torch.int64, device=layer.param.device)
    for tensor in tensors:
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        # Zeros up to whole words of 8 bytes; the length, which counts below, tells them from real ones.
        words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
        # The order and the lengths of the tensors count, too.
        total = total * _LENGTH_FACTOR + len(data)
        for start in range(0, len(words), _CHUNK):
            total = total + mix(words[start : start + _CHUNK], start).sum()
    return total


def mix(words: Tensor, start: int = 0) -> Tensor:
    """Hash int64 words ``[n]``, each depending on its place from ``start`` on; one-to-one for a given place."""
    place = torch.arange(start, start + len(words), dtype=torch.int64, device=words.device)
    mixed = words ^ place.mul_(_PLACE_FACTOR)
    mixed *= _FIRST_FACTOR
    mixed ^= _shifted(mixed, 29)
    mixed *= _SECOND_FACTOR
    return mixed ^ _shifted(mixed, 32)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's own keeps the sign of int64, and would not be one-to-one here."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def compare_ranks(layers: Iterable[NMLayer]) -> None:
    """Compare the masks of layers, and what decides on them, in all processes; call it in all of them.

    This takes one all-reduce of two numbers, and nothing in a single process. Unchanged masks are not read again.

    Args:
        layers: The layers, as ``sparsifier.layers.values()``.

    Raises:
        RuntimeError: In every process, if any two differ: naming the layers and what differs.
    """
    if processes() == 1:
        return
    layers = list(layers)
    # Where the weights are: NCCL takes no tensors of the CPU.
    device = layers[0].param.device if layers else torch.device("cpu")
    settings = fold_seed(repr([_fingerprint(layer) for layer in layers]))
    words = [checksum(layer).to(device) for layer in layers]
    total = mix(torch.cat([settings.to(device, non_blocking=True), *words])).sum()
    # ~x falls as x rises, so one maximum gives the largest and the smallest.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes.tolist()
    if largest == ~smallest:
        return
    # Every process gathers all words and settings, and names the differences.
    own = {}
    for layer in layers:
        tensors = zip(("masks", "permutation", "parameters"), checksum(layer).tolist(), strict=True)
        own[layer.name] = _fingerprint(layer) | dict(tensors)
    # All processes have seen the same two numbers: all of them come here, or none.
    everyone: list[Any] = [None] * processes()
    dist.all_gather_object(everyone, own)
    differences = _differences(everyone) or ["their layers come in another order"]
    raise RuntimeError(
        f"processes that train one model disagree: {some_of(differences)}. Masks follow the weights, the seed and the "
        "settings, and are never sent: begin with equal weights and settings on all ranks, load the same checkpoint, "
        "change masks and weights on all ranks alike, and let random choices depend on layer.generator()"
    )


def _differences(everyone: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """What differs between the layers of processes, as sentences; by rank and layer name, what each has."""
    found = []
    for name in dict.fromkeys(chain.from_iterable(everyone)):  # in the order in which they occur
        missing = [rank for rank, layers in enumerate(everyone) if name not in layers]
        if missing:
            found.append(f"layer '{name}' is not masked on ranks {missing}")
            continue
        of_layer = [layers[name] for layers in everyone]
        for key, value in of_layer[0].items():
            others = [rank for rank, values in enumerate(of_layer) if values[key] != value]
            if others:
                found.append(f"layer '{name}': ranks {others} differ from rank 0 in {key}")
    return found


@torch.no_grad()
def reduce_gradients(layers: Iterable[NMLayer]) -> None:
    """Average the gradients of the parameters that methods own over all processes, in one collective per dtype.

    It may be called after each of several micro-batches, because averaging equal values changes nothing. A parameter
    without a gradient in any process gets none.
    """
    world = processes()
    if world == 1:
        return
    owned = [p for layer in layers for p in layer.parameters.values() if p.requires_grad]
    # In the order of the layers, which all processes share: collectives must follow one order.
    for dtype in dict.fromkeys(p.dtype for p in owned):
        parameters = [p for p in owned if p.dtype == dtype]
        # One flag a parameter travels with the gradients: whether any process has a gradient for it.
        flags = [float(p.grad is not None) for p in parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor(flags, dtype=dtype).to(grads[0].device)
        # Divided here: gloo has no ReduceOp.AVG.
        message = torch.cat([*map(torch.flatten, grads), present]).div_(world)
        dist.all_reduce(message)
        sizes = [p.numel() for p in parameters]
        *means, present_anywhere = message.split([*sizes, len(parameters)])
        for p, mean, is_present in zip(parameters, means, present_anywhere, strict=True):
            if p.grad is not None:
                # In place: others may hold this tensor.
                p.grad.copy_(mean.view_as(p))
            elif bool(is_present):
                p.grad = mean.view_as(p).clone()  # the parts share the memory of the message


def processes() -> int:
    """Return the number of processes; 1 outside distributed training."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()
