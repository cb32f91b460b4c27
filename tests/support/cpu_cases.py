"""Random cases of all that the CPU library computes, and their comparisons: tests and ``make sanitize`` run them."""

import random
from functools import partial

import torch

from tests.support import evolution
from tests.support.cpu_int8 import compare_int8, compare_rows, random_int8, random_rows
from tests.support.cpu_products import (
    KERNELS,
    LEVELS,
    at_level,
    compare,
    compare_conv,
    has_kernel,
    random_case,
    random_conv,
)

PERMUTE, CSR = KERNELS
COMPARED = {
    "permute": (partial(random_case, kernel=PERMUTE), partial(compare, PERMUTE)),
    "csr": (partial(random_case, kernel=CSR), partial(compare, CSR)),
    "convolution": (random_conv, partial(compare_conv, CSR)),
    "int8": (random_int8, compare_int8),
    "int8 rows": (random_rows, compare_rows),
    "passes of bame": (evolution.random_case, evolution.compare),
}
"""What makes a case from a :class:`random.Random`, and what compares the library with float64, integers or torch."""

CELLS = [
    (kind, level)
    for kind in COMPARED
    for level in LEVELS
    if kind != "permute" or has_kernel(PERMUTE, level)
]


def check(kind, level, case, threads):
    """Compare a case at a level; its results have the same bits for every number of threads."""
    results = []
    with at_level(level):
        for number in threads:
            torch.set_num_threads(number)
            results.append(COMPARED[kind][1](case))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def check_random(kind, level, seed):
    """:func:`check` of a case that a seed names."""
    draw = random.Random(seed)
    threads = (1, 3) if draw.random() < 0.1 else (1,)
    check(kind, level, COMPARED[kind][0](draw), threads)
