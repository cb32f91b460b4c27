"""Counter-based numbers: the words of Philox4x32-10, and the normal and Gumbel numbers made of them."""

import math
import shutil

import pytest
import torch

from lightning_nm.functional import random
from lightning_nm.functional.random import counter_uniform, fold_seed
from lightning_nm.functional.soft import gumbel_noise, normal_noise

MASK = 2**32 - 1
SEED = fold_seed(0, "layer", 1)


def philox(counter, key):
    """Philox4x32-10 on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK] * 4, [MASK] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, expected):
    """The vectors that Random123 publishes: the statistics of these numbers are known."""
    answer = random._philox(torch.tensor(counter).unbind(), torch.tensor(key).unbind())
    assert " ".join(f"{int(word):08x}" for word in answer) == expected
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == expected


def test_numbers_are_the_words_of_their_counter():
    """In [0, 1), a multiple of 2**-24, each from a word of its own; also of counters beyond 32 bits."""
    seed = torch.tensor([MASK, 1, 2, MASK - 3])

    def numbers(low, high):
        return [(word >> 8) / 2**24 for word in philox((low, high, 2, MASK - 3), (MASK, 1))]

    found = counter_uniform(11, seed)
    assert found.dtype == torch.float32
    assert found.tolist() == [*numbers(0, 0), *numbers(1, 0), *numbers(2, 0)][:11]
    index = torch.tensor([5 * 2**32 + 7])
    assert random._uniform(index, seed)[0].tolist() == numbers(7, 5)


def test_count_and_chunks_change_nothing(monkeypatch):
    numbers = counter_uniform(5000, SEED)
    for count in (0, 1, 2, 3, 4, 5, 4097):
        assert torch.equal(counter_uniform(count, SEED), numbers[:count])
    monkeypatch.setattr(random, "_CHUNK", 7)
    assert torch.equal(counter_uniform(1001, SEED), numbers[:1001])
    assert counter_uniform(10, SEED, device="meta").shape == (10,)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised inside torch
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
            ],
        ),
    ],
)
def test_compiled_is_eager(backend):
    torch._dynamo.reset()
    compiled = torch.compile(counter_uniform, fullgraph=True, backend=backend)
    for seed in (SEED, fold_seed(0, "layer", 2)):  # an input of the graph, not a constant
        assert torch.equal(compiled(10**4, seed), counter_uniform(10**4, seed))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers():
    there = counter_uniform(10**6, SEED, device="cuda")
    assert torch.equal(there.cpu(), counter_uniform(10**6, SEED))


def test_seeds_tell_words_apart():
    seeds = [(), (0,), (1,), (-1,), ("1",), (1, 23), (12, 3), (123,), (0, 0), (2**40,)]
    seeds += [("a", 0), ("a", "0"), ("a, 0",)]
    folded = {tuple(fold_seed(*words).tolist()) for words in seeds}
    assert len(folded) == len(seeds)
    assert all(0 <= word <= MASK for words in folded for word in words)
    assert fold_seed(True, 3).equal(fold_seed(1, 3))


def test_seeds_never_change():
    """Checkpoints hold counters only: another mixing would silently change a resumed run."""
    assert fold_seed(0, "encoder.fc1", 17).tolist() == [1796840563, 505822300, 241833861, 676724357]


@pytest.mark.parametrize(
    ("count", "seed", "message"),
    [
        (3, torch.zeros(3, dtype=torch.int64), "four words"),
        (3, torch.zeros(4), "float32"),
        (-1, SEED, "negative"),
    ],
)
def test_errors(count, seed, message):
    with pytest.raises(ValueError, match=message):
        counter_uniform(count, seed)


@pytest.mark.parametrize(
    ("noise", "probability"),
    [
        (gumbel_noise, lambda x: torch.exp(-torch.exp(-x))),
        (normal_noise, torch.special.ndtr),
    ],
)
def test_noise_has_its_distribution(noise, probability):
    """The numbers' probabilities are uniform: Kolmogorov's bound holds with 99.9 %."""
    count = 100_000
    numbers = noise(count, SEED)
    assert numbers.dtype == torch.float32
    assert torch.equal(numbers, noise(count, SEED))
    assert not torch.equal(numbers, noise(count, fold_seed(1)))
    ordered = probability(numbers.double()).sort().values
    distance = (ordered - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)


def test_extreme_noise_stays_finite(monkeypatch):
    ends = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24])
    monkeypatch.setattr(
        "lightning_nm.functional.soft.counter_uniform", lambda count, seed: ends.repeat(2)
    )
    assert gumbel_noise(6, SEED).isfinite().all()
    assert normal_noise(3, SEED).isfinite().all()
