"""Packed N:M matrices: a round trip for every pattern, dtype and shape, and a plain twin that reads bit by bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import nm_format, nm_mask, nm_prune, pack_nm, unpack_nm

DTYPES = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
DTYPES[torch.bfloat16] = torch.int16
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 1.0)


def bits(tensor):
    return tensor.contiguous().view(DTYPES[tensor.dtype])


@st.composite
def matrices(draw):
    """An N:M matrix of any bits, some of whose blocks hold fewer nonzeros, and its pattern."""
    m = draw(st.sampled_from([2, 3, 4, 5, 8, 9, 16, 31, 32, 64, 128, 256]))
    pattern = NMPattern(draw(st.integers(1, m - 1)), m)
    shape = (*draw(st.lists(st.integers(1, 4), max_size=2)), m * draw(st.integers(1, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    some = torch.tensor(SPECIAL, dtype=torch.float64)[
        torch.randint(len(SPECIAL), shape, generator=generator)
    ]
    values = torch.where(
        torch.rand(shape, generator=generator) < draw(st.sampled_from([0, 0.3, 1])), some, values
    )
    mask = nm_mask(torch.rand(shape, generator=generator), pattern)
    return torch.where(mask, values.to(dtype), 0), pattern


def twin(values, positions, pattern, shape):
    """Reads positions bit by bit, as docs/format.md says."""
    stream = [byte >> bit & 1 for byte in positions.tolist() for bit in range(8)]
    width = math.ceil(math.log2(pattern.m))
    found = torch.zeros(math.prod(shape) // pattern.m, pattern.m, dtype=DTYPES[values.dtype])
    rows = bits(values).reshape(-1, pattern.n)
    for block, row in enumerate(rows):
        if pattern.m < pattern.n * width:
            own = stream[block * pattern.m : (block + 1) * pattern.m]
            places = [place for place, bit in enumerate(own) if bit]
        else:
            starts = [(block * pattern.n + k) * width for k in range(pattern.n)]
            places = [sum(stream[start + bit] << bit for bit in range(width)) for start in starts]
        assert places == sorted(set(places))
        assert len(places) == pattern.n
        found[block, places] = row
    return found.view(values.dtype).view(shape)


@given(matrices())
def test_round_trip(drawn):
    matrix, pattern = drawn
    values, positions = pack_nm(matrix, pattern)
    assert torch.equal(bits(unpack_nm(values, positions, pattern, matrix.shape)), bits(matrix))
    assert torch.equal(bits(twin(values, positions, pattern, matrix.shape)), bits(matrix))
    again = pack_nm(unpack_nm(values, positions, pattern, matrix.shape), pattern)
    assert torch.equal(again[1], positions)


@given(matrices(), st.sampled_from([8, 64]))
def test_chunks_change_nothing(drawn, chunk):
    matrix, pattern = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nm_format, "_CHUNK", chunk)
        values, positions = pack_nm(matrix, pattern)
        assert torch.equal(bits(unpack_nm(values, positions, pattern, matrix.shape)), bits(matrix))
    assert torch.equal(positions, pack_nm(matrix, pattern)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["1:4", "4:8"])
def test_bits_of_nan_are_kept(dtype, pattern):
    """All bits of a NaN, whatever torch makes of it in a copy."""
    integers = DTYPES[dtype]
    ones = torch.finfo(dtype).bits - 2
    matrix = torch.zeros(4, 16, dtype=integers)
    matrix[:, 3] = torch.tensor([(1 << ones + 1) - 1, (1 << ones + 1) - 2, -1, -2])
    matrix = matrix.view(dtype)
    assert matrix[:, 3].isnan().all()
    assert torch.equal(
        bits(unpack_nm(*pack_nm(matrix, pattern), pattern, matrix.shape)), bits(matrix)
    )


def test_negative_zeros_are_stored_where_there_is_room():
    matrix = torch.tensor([[-0.0, 1.0, -0.0, 0.0], [1.0, 2.0, -0.0, 0.0]])
    found = unpack_nm(*pack_nm(matrix, "2:4"), "2:4", matrix.shape)
    assert torch.equal(found, matrix)
    assert found.signbit().tolist() == [[True, False, False, False], [False, False, False, False]]


@pytest.mark.parametrize(
    ("pattern", "dtype", "most"),
    [
        ("2:4", torch.bfloat16, 0.57),
        ("1:4", torch.bfloat16, 0.30),
        ("1:16", torch.bfloat16, 0.10),
        ("1:8", torch.bfloat16, 0.16),
        ("4:8", torch.bfloat16, 0.57),
        ("2:4", torch.float32, 0.54),
    ],
)
def test_sizes(pattern, dtype, most):
    matrix = nm_prune(torch.randn(64, 128), pattern).to(dtype)
    assert sum(tensor.nbytes for tensor in pack_nm(matrix, pattern)) <= most * matrix.nbytes


def test_what_is_refused():
    with pytest.raises(TypeError, match="not torch"):
        pack_nm(torch.zeros(4, dtype=torch.int64), "2:4")
    with pytest.raises(ValueError, match="M=4 does not divide size 6 of dim=-1"):
        pack_nm(torch.zeros(4, 6), "2:4")
    with pytest.raises(ValueError, match="1 or more of 2 blocks hold more than 2 nonzeros"):
        pack_nm(torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0]), "2:4")
    with pytest.raises(ValueError, match="more than 256"):
        pack_nm(torch.zeros(4, 512), "1:512")
    values, positions = pack_nm(torch.zeros(1, 12), "1:3")
    with pytest.raises(
        ValueError, match="block 1 does not have 1 different ascending positions below 3"
    ):
        unpack_nm(values, torch.tensor([0b1100], dtype=torch.uint8), "1:3", (1, 12))
    with pytest.raises(ValueError, match="block 0 does not have 2 different ascending"):
        unpack_nm(torch.zeros(1, 1, 2), torch.tensor([0b0101], dtype=torch.uint8), "2:4", (1, 4))
    with pytest.raises(ValueError, match="bits after the positions"):
        unpack_nm(
            torch.zeros(1, 1, 2), torch.tensor([0b11001100], dtype=torch.uint8), "2:4", (1, 4)
        )
    with pytest.raises(ValueError, match="block 0 does not have 7"):
        unpack_nm(torch.zeros(1, 1, 7), torch.tensor([255], dtype=torch.uint8), "7:8", (1, 8))
    with pytest.raises(ValueError, match=r"has values of \(1, 4, 1\), not \(1, 4\)"):
        unpack_nm(values[..., 0], positions, "1:3", (1, 12))
    with pytest.raises(ValueError, match=r"has positions of \(1,\), not \(2,\)"):
        unpack_nm(values, positions.repeat(2), "1:3", (1, 12))
    with pytest.raises(TypeError, match="packed positions"):
        unpack_nm(values, positions.int(), "1:3", (1, 12))
    with pytest.raises(TypeError, match="packed values"):
        unpack_nm(values.int(), positions, "1:3", (1, 12))
