"""Packed N:M matrices: a round trip for every pattern, dtype and shape, and a plain twin that reads bit by bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import nm_format, nm_mask, nm_prune, pack_nm, unpack_nm

DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
SPECIAL = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 1.0]).double()


def bits(tensor):
    return tensor.contiguous().view(DTYPES[tensor.dtype])


@st.composite
def matrices(draw):
    """An N:M matrix of any bits, some of whose blocks hold fewer nonzeros, and its pattern."""
    m = draw(st.sampled_from([2, 3, 4, 5, 8, 9, 16, 31, 32, 64, 128, 256]))
    pattern = NMPattern(draw(st.integers(1, m - 1)), m)
    shape = (*draw(st.lists(st.integers(1, 4), max_size=2)), m * draw(st.integers(1, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    values = torch.randn(shape, generator=generator).double()
    special = SPECIAL[torch.randint(len(SPECIAL), shape, generator=generator)]
    is_special = torch.rand(shape, generator=generator) < draw(st.sampled_from([0, 0.3, 1]))
    values = torch.where(is_special, special, values).to(draw(st.sampled_from(list(DTYPES))))
    mask = nm_mask(torch.rand(shape, generator=generator), pattern)
    return torch.where(mask, values, 0), pattern


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


@given(matrices(), st.sampled_from([8, 64]))
def test_round_trip(drawn, chunk):
    """Also in chunks, which change nothing."""
    matrix, pattern = drawn
    values, positions = pack_nm(matrix, pattern)
    found = unpack_nm(values, positions, pattern, matrix.shape)
    for other in (found, twin(values, positions, pattern, matrix.shape)):
        assert torch.equal(bits(other), bits(matrix))
    assert torch.equal(pack_nm(found, pattern)[1], positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nm_format, "_CHUNK", chunk)
        assert torch.equal(pack_nm(matrix, pattern)[1], positions)
        found = unpack_nm(*pack_nm(matrix, pattern), pattern, matrix.shape)
        assert torch.equal(bits(found), bits(matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["1:4", "4:8"])
def test_bits_of_nan_are_kept(dtype, pattern):
    """All bits of a NaN, whatever torch makes of it in a copy."""
    ones = torch.finfo(dtype).bits - 2
    matrix = torch.zeros(4, 16, dtype=DTYPES[dtype])
    matrix[:, 3] = torch.tensor([(1 << ones + 1) - 1, (1 << ones + 1) - 2, -1, -2])
    matrix = matrix.view(dtype)
    assert matrix[:, 3].isnan().all()
    found = unpack_nm(*pack_nm(matrix, pattern), pattern, matrix.shape)
    assert torch.equal(bits(found), bits(matrix))


def test_negative_zeros_are_stored_where_there_is_room():
    matrix = torch.tensor([[-0.0, 1.0, -0.0, 0.0], [1.0, 2.0, -0.0, 0.0]])
    found = unpack_nm(*pack_nm(matrix, "2:4"), "2:4", matrix.shape)
    assert torch.equal(found, matrix)
    assert found.signbit().tolist() == [[True, False, False, False], [False, False, False, False]]


@pytest.mark.parametrize(
    ("pattern", "most"),
    [("2:4", 0.57), ("1:4", 0.30), ("1:16", 0.10), ("1:8", 0.16), ("1:256", 0.006)],
)
def test_sizes(pattern, most):
    matrix = nm_prune(torch.randn(32, 256), pattern).bfloat16()
    assert sum(tensor.nbytes for tensor in pack_nm(matrix, pattern)) <= most * matrix.nbytes


@pytest.mark.parametrize(
    ("matrix", "pattern", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), "2:4", TypeError, "not torch"),
        (torch.zeros(4, 6), "2:4", ValueError, "M=4 does not divide size 6 of dim=-1"),
        (
            torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0]),
            "2:4",
            ValueError,
            "1 or more of 2 blocks hold more than 2 nonzeros",
        ),
        (torch.zeros(4, 512), "1:512", ValueError, "more than 256"),
    ],
)
def test_what_is_not_packed(matrix, pattern, error, message):
    with pytest.raises(error, match=message):
        pack_nm(matrix, pattern)


@pytest.mark.parametrize(
    ("values", "positions", "pattern", "message"),
    [
        (
            (1, 4, 1),
            [0b1100],
            "1:3",
            "block 1 does not have 1 different ascending positions below 3",
        ),
        ((1, 1, 2), [0b0101], "2:4", "block 0 does not have 2 different ascending"),
        ((1, 1, 2), [0b11001100], "2:4", "bits after the positions"),
        ((1, 1, 7), [255], "7:8", "block 0 does not have 7"),
        ((1, 4), [0], "1:3", r"has values of \(1, 4, 1\), not \(1, 4\)"),
        ((1, 4, 1), [0, 0], "1:3", r"has positions of \(1,\), not \(2,\)"),
    ],
)
def test_what_is_not_unpacked(values, positions, pattern, message):
    positions = torch.tensor(positions, dtype=torch.uint8)
    shape = (1, NMPattern.parse(pattern).m * values[1])
    with pytest.raises(ValueError, match=message):
        unpack_nm(torch.zeros(values), positions, pattern, shape)


def test_dtypes_of_packed_tensors():
    values, positions = pack_nm(torch.zeros(1, 12), "1:3")
    with pytest.raises(TypeError, match="packed positions"):
        unpack_nm(values, positions.int(), "1:3", (1, 12))
    with pytest.raises(TypeError, match="packed values"):
        unpack_nm(values.int(), positions, "1:3", (1, 12))
