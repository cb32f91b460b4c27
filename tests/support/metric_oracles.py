"""The statistics of masks and gradients in numpy, entry by entry: lists hold one array for each layer."""

from itertools import groupby, pairwise

import numpy as np


def _ratio(part, whole, empty):
    return empty if whole == 0 else part / whole


def density(arrays):
    return _ratio(
        sum(1 for array in arrays for x in array.flat if x),
        sum(array.size for array in arrays),
        np.nan,
    )


def violations(arrays, n, m):
    """Blocks along the last axis that hold more than n nonzeros."""
    return sum(int((block != 0).sum() > n) for array in arrays for block in array.reshape(-1, m))


def flip_rate(histories):
    """Each history is the list of a layer's masks in the order of time."""
    flips = 0
    for history in histories:
        for before, after in pairwise(history):
            flips += sum(int(x != y) for x, y in zip(before.flat, after.flat, strict=True))
    return _ratio(flips, _seen(histories), 0.0)


def oscillation(histories):
    """Of the runs of equal values that an entry goes through, the second is its first flip; later ones are returns."""
    returns = 0
    for history in histories:
        for values in zip(*(mask.flat for mask in history), strict=True):
            returns += max(len(list(groupby(values))) - 2, 0)
    return _ratio(returns, _seen(histories), 0.0)


def _seen(histories):
    return sum(mask.size for history in histories for mask in history[1:])


def overlap(forward, backward):
    pairs = [
        (x, y)
        for f, b in zip(forward, backward, strict=True)
        for x, y in zip(f.flat, b.flat, strict=True)
    ]
    return _ratio(sum(int(x and y) for x, y in pairs), sum(int(x) for x, _ in pairs), 1.0)


def kept_magnitude(weights, masks):
    pairs = [
        (abs(w), m)
        for a, b in zip(weights, masks, strict=True)
        for w, m in zip(a.flat, b.flat, strict=True)
    ]
    return _ratio(sum(w for w, m in pairs if m), sum(w for w, _ in pairs), 1.0)


def snr(exact, estimates):
    signal = sum((g**2).sum() for g in exact)
    error = sum(((e - g) ** 2).sum() for g, e in zip(exact, estimates, strict=True))
    return _ratio(signal, error, np.inf) ** 0.5
