import shutil

import pytest
import torch

from lightning_nm.functional import random
from lightning_nm.functional.random import counter_uniform, fold_seed

MASK = 2**32 - 1
COUNT = 10**6


def philox(counter, key):
    """Philox4x32-10 on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def correlation(u, v):
    return float(((u - u.mean()) * (v - v.mean())).mean() / (u.std() * v.std()))


@pytest.fixture(scope="module")
def numbers():
    return counter_uniform(COUNT, fold_seed(0, "layer", 1))


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
    """The vectors that Random123 publishes."""
    answer = random._philox(torch.tensor(counter).unbind(), torch.tensor(key).unbind())
    assert " ".join(f"{int(word):08x}" for word in answer) == expected
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == expected


def test_numbers_are_the_words_of_their_counter():
    seed = torch.tensor([MASK, 1, 2, MASK - 3])
    words = [word for index in range(3) for word in philox((index, 0, 2, MASK - 3), (MASK, 1))]
    assert counter_uniform(11, seed).tolist() == [(word >> 8) / 2**24 for word in words[:11]]
    index = 5 * 2**32 + 7
    words = philox((7, 5, 2, MASK - 3), (MASK, 1))
    assert random._uniform(torch.tensor([index]), seed)[0].tolist() == [
        (word >> 8) / 2**24 for word in words
    ]


def test_uniform(numbers):
    assert numbers.dtype == torch.float32
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) <= 1 - 2**-24
    cells = torch.bincount((numbers * 1000).long(), minlength=1000).double()
    chi_square = float(((cells - COUNT / 1000) ** 2 / (COUNT / 1000)).sum())
    assert abs(chi_square - 999) < 4.5 * (2 * 999) ** 0.5
    ordered = numbers.double().sort().values
    distance = (ordered - (torch.arange(COUNT) + 0.5) / COUNT).abs().max()
    assert 0.3 < float(distance) * COUNT**0.5 < 1.95  # Kolmogorov: both bounds hold with 99.9 %


def test_every_bit_is_a_fair_coin(numbers):
    bits = (numbers.double() * 2**24).long()
    for bit in range(24):
        assert abs(float((bits >> bit & 1).double().mean()) - 0.5) < 4.5 * 0.5 / COUNT**0.5, bit


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 1024, 4096])
def test_neighbours_are_independent(numbers, lag):
    u = numbers.double()
    assert abs(correlation(u[lag:], u[:-lag])) < 4.5 / COUNT**0.5
    pairs = torch.bincount(
        (u[lag:] * 16).long() * 16 + (u[:-lag] * 16).long(), minlength=256
    ).double()
    expected = (COUNT - lag) / 256
    assert abs(float(((pairs - expected) ** 2 / expected).sum()) - 255) < 4.5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("word", range(4))
def test_neighbouring_seeds_are_independent(word):
    count = 10**5
    seed = torch.zeros(4, dtype=torch.int64)
    other = seed.clone()
    other[word] = 1
    u, v = counter_uniform(count, seed).double(), counter_uniform(count, other).double()
    assert abs(correlation(u, v)) < 4.5 / count**0.5
    assert float((u == v).double().mean()) < 1e-4


def test_count_and_chunks_change_nothing(numbers, monkeypatch):
    seed = fold_seed(0, "layer", 1)
    for count in (0, 1, 2, 3, 4, 5, 4097):
        assert torch.equal(counter_uniform(count, seed), numbers[:count])
    monkeypatch.setattr(random, "_CHUNK", 7)
    assert torch.equal(counter_uniform(1001, seed), numbers[:1001])


def test_compiled_is_eager(numbers):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda seed: counter_uniform(COUNT, seed), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(fold_seed(0, "layer", 1)), numbers)
    other = fold_seed(0, "layer", 2)
    assert torch.equal(
        compiled(other), counter_uniform(COUNT, other)
    )  # the seed is an input, not a constant


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised inside torch
def test_inductor_is_eager(numbers):
    torch._dynamo.reset()
    compiled = torch.compile(lambda seed: counter_uniform(COUNT, seed), fullgraph=True)
    assert torch.equal(compiled(fold_seed(0, "layer", 1)), numbers)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers(numbers):
    assert torch.equal(
        counter_uniform(COUNT, fold_seed(0, "layer", 1), device="cuda").cpu(), numbers
    )


def test_without_values():
    assert counter_uniform(10, fold_seed(0), device="meta").shape == (10,)


def test_seeds_tell_words_apart():
    seeds = [
        (),
        (0,),
        (1,),
        (-1,),
        ("1",),
        (1, 23),
        (12, 3),
        (123,),
        (0, 0),
        (2**40,),
        ("a", 0),
        ("a", "0"),
        ("a, 0",),
    ]
    folded = {tuple(fold_seed(*words).tolist()) for words in seeds}
    assert len(folded) == len(seeds)
    assert all(0 <= word <= MASK for words in folded for word in words)
    assert fold_seed(True, 3).equal(fold_seed(1, 3))


def test_seeds_never_change():
    """Checkpoints hold counters only: another mixing would silently change a resumed run."""
    assert fold_seed(0, "encoder.fc1", 17).tolist() == [1796840563, 505822300, 241833861, 676724357]


def test_errors():
    with pytest.raises(ValueError, match="four words"):
        counter_uniform(3, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        counter_uniform(3, torch.zeros(4))
    with pytest.raises(ValueError, match="negative"):
        counter_uniform(-1, fold_seed(0))
