from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.kernels.api import bucketed, multiply_adds, token_bucket
from tests.support.fake_kernels import gemm_key

SIZES = st.integers(1, 1 << 40)


@given(SIZES)
def test_buckets_spread_by_less_than_a_quarter(tokens):
    bucket = token_bucket(tokens)
    assert tokens <= bucket < 1.25 * tokens
    assert token_bucket(bucket) == bucket


@given(SIZES, SIZES)
def test_buckets_are_ranges(tokens, others):
    assert (token_bucket(tokens) <= token_bucket(others)) or tokens > others


@given(st.integers(0, 1 << 20), st.integers(0, 10))
def test_buckets_of_aligned_numbers_are_aligned(multiple, power):
    assert token_bucket(multiple << power) % (1 << power) == 0


def test_a_bucket_is_a_quarter_of_a_power_of_two():
    assert sorted({token_bucket(tokens) for tokens in range(130)}) == [
        *(
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            10,
            12,
            14,
            16,
            20,
            24,
            28,
            32,
            40,
            48,
            56,
            64,
            80,
            96,
            112,
            128,
            160,
        )
    ]


def test_only_tokens_fall_into_buckets():
    odd = {"rows": 1001, "depth": 1002, "columns": 1003}
    assert bucketed(gemm_key("forward", **odd)) == gemm_key("forward", 1001, 1002, 1024)
    assert bucketed(gemm_key("dgrad", **odd)) == gemm_key("dgrad", 1001, 1002, 1024)
    assert bucketed(gemm_key("wgrad", **odd)) == gemm_key("wgrad", 1001, 1024, 1003)


def test_multiply_adds():
    assert multiply_adds(gemm_key(rows=2, depth=3, columns=5)) == 30
