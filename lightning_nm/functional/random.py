"""Counter-based uniform random numbers: a pure function of a seed and an index, in integer arithmetic alone.

Philox4x32-10 turns a counter of four 32-bit words and a key of two into four random words. The same seed gives the same
numbers in eager mode, in a compiled graph and on every device; a run that resumes saves its counters only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

# A multiplier less 2^32. Its product with a 32-bit word x never leaves int64, has the same low half, and x is missing
# from its high half: that saves splitting a product that would need 64 unsigned bits.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
# The authors' Weyl constants: the golden ratio and sqrt(3) - 1.
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF  # the low 32 bits

# Counters handled at a time, per thread of a CPU: the temporaries of 8 bytes a counter fit its cache.
_CHUNK = 1 << 14


def fold_seed(*words: int | str) -> Tensor:
    """Mix integers and names into a seed for :func:`counter_uniform`.

    ``BLAKE2b(words)``, 128 bits cut into four words of 32: streams of different words do not meet; 1 and "1" differ. It
    runs in Python: call it outside a compiled graph, and pass the tensor in.

    Args:
        words: For example the run's seed, a layer's name, the step, the micro-batch and the rank.

    Returns:
        An int64 tensor [4] on the CPU, with values in [0, 2^32); the same in every process and on every platform.

    Example:
        >>> fold_seed(0, "encoder.fc1", 17).equal(fold_seed(0, "encoder.fc1", 17))
        True
    """
    # Booleans and the integers of other libraries have other representations.
    plain = tuple(word if isinstance(word, str) else int(word) for word in words)
    text = repr(plain)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    # Little-endian on every platform.
    seed = struct.unpack("<4I", digest)
    return torch.tensor(seed, dtype=torch.int64)


def counter_uniform(
    count: int,
    seed: Tensor,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw uniform random numbers in [0, 1) that depend on nothing but the seed and their index.

    ``u[i] = floor(w / 2^8) / 2^24`` with ``w`` word ``i % 4`` of ``Philox4x32-10(counter=(i // 4, s2, s3), key=(s0,
    s1))``, where ``i // 4`` takes 64 bits: multiples of 2^-24, each as likely, that float32 holds exactly.

    Args:
        count: How many numbers; the first ones are the same for every ``count``.
        seed: Four words in [0, 2^32) as an int64 tensor, from :func:`fold_seed` or of one's own, on any device.
        device: Where the numbers are made; where ``seed`` lies by default.

    Returns:
        A float32 tensor [count].

    Raises:
        ValueError: If ``seed`` is not an int64 tensor of four words, or ``count`` is negative.

    Example:
        >>> counter_uniform(6, fold_seed(0)).equal(counter_uniform(9, fold_seed(0))[:6])
        True

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, doi:10.1145/2063384.2063405.
    """
    if seed.dtype != torch.int64 or seed.shape != (4,):
        raise ValueError(
            f"a seed is four words of int64, see fold_seed; got {seed.dtype} {tuple(seed.shape)}"
        )
    if count < 0:
        raise ValueError(f"count={count} is negative")
    words = seed.to(device) & _WORD
    counters = (count + 3) // 4  # each gives four numbers; what is left of the last one is cut off
    if torch.compiler.is_compiling() or words.device.type != "cpu":
        index = torch.arange(counters, dtype=torch.int64, device=words.device)
        return _uniform(index, words).flatten()[:count]
    numbers = torch.empty(counters, 4, dtype=torch.float32)
    step = _CHUNK * torch.get_num_threads()
    for start in range(0, counters, step):
        part = numbers[start : start + step]
        index = torch.arange(start, start + len(part), dtype=torch.int64)
        part.copy_(_uniform(index, words))
    return numbers.flatten()[:count]


def _uniform(index: Tensor, seed: Tensor) -> Tensor:
    """Return the four numbers of each counter, as float32 ``[..., 4]``."""
    key0, key1, word2, word3 = seed.unbind()
    low = index & _WORD
    high = index >> 32
    words = _philox((low, high, word2, word3), (key0, key1))
    # The upper 24 bits of a word: a float32 holds no more.
    numbers = [(word >> 8).float() * 2.0**-24 for word in words]
    return torch.stack(numbers, -1)


def _philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the four words Philox4x32-10 makes of words in [0, 2^32), all int64."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    multiplier0, multiplier1 = _MULTIPLIERS
    key_step0, key_step1 = _KEY_STEPS
    for _ in range(_ROUNDS):
        product0 = c0 * multiplier0
        product1 = c2 * multiplier1
        # The high half of a product lacks its factor, see _MULTIPLIERS: `+ c2` and `+ c0` put it back.
        # c2 still needs the c0 of the round before.
        next0 = ((product1 >> 32) + c2) ^ c1 ^ key0
        c1 = product1 & _WORD
        c2 = ((product0 >> 32) + c0) ^ c3 ^ key1
        c3 = product0 & _WORD
        c0 = next0
        key0 = (key0 + key_step0) & _WORD
        key1 = (key1 + key_step1) & _WORD
    return c0, c1, c2, c3
