"""Random generators keyed by a seed and a few integers."""

import hashlib

import torch


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A new CPU generator that is a pure function of `(seed, *key)`.

    `key` says what the numbers are for, for example `"order", epoch`. It is hashed, not added: `(seed=0, epoch=1)` and
    `(seed=1, epoch=0)` give unrelated streams.

    Example:
        >>> a, b = (torch.randperm(5, generator=keyed_generator(0, "order", 3)) for _ in range(2))
        >>> bool(torch.equal(a, b))
        True
    """
    text = repr((seed, *key))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    hashed_seed = int.from_bytes(digest, "little")
    return torch.Generator().manual_seed(hashed_seed)
