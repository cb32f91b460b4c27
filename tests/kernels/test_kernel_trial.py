from types import SimpleNamespace

import pytest
import torch

from lightning_nm import functional as nmf
from lightning_nm.kernels import tuner as checks
from lightning_nm.kernels import tuner as timing
from lightning_nm.kernels.api import GemmKernel
from tests.support.fake_kernels import DENSE, FakeKernel, FakeTimer, Flickering, gemm_key

GEMMS = ["forward", "dgrad", "wgrad"]


class Recorder(FakeKernel):
    """Keeps what it is given."""

    def pack(self, matrix):
        self.matrix = matrix
        return super().pack(matrix)

    def linear(self, packed, x, bias=None):
        self.other = x
        return super().linear(packed, x, bias)

    def matmul(self, packed, matrix):
        self.other = matrix
        return super().matmul(packed, matrix)


@pytest.mark.parametrize("pattern", ["2:4", "1:12"])  # 12 does not divide 64
@pytest.mark.parametrize(
    ("gemm", "dtype"), list(zip(GEMMS, [torch.bfloat16, torch.float16, torch.float32], strict=True))
)
def test_the_operands_are_those_of_the_key(gemm, dtype, pattern):
    key = gemm_key(gemm, dtype=dtype, pattern=pattern)
    kernel = Recorder()
    assert checks.check(kernel, key) == ""
    assert (kernel.matrix.shape, kernel.matrix.dtype) == ((32, 64), dtype)
    assert nmf.is_nm(kernel.matrix[:, : 64 // key.pattern.m * key.pattern.m], key.pattern)
    assert kernel.matrix.count_nonzero() >= 32 * (64 // key.pattern.m) * key.pattern.n - 1
    assert kernel.other.shape == ((64, 128) if gemm == "wgrad" else (128, 64))
    assert kernel.other.is_contiguous()
    assert kernel.other.float().std().item() == pytest.approx(1, abs=0.1)


def nan(product):
    product[3, 5] = float("nan")
    return product


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (nan, "wrong by nan"),
        (lambda product: product * float("inf"), "wrong by"),
        (lambda product: product * 1.02, "wrong by 0.02 of"),
        (lambda product: -product, "wrong by 2 of"),
        (torch.zeros_like, "wrong by 1 of"),
        (lambda product: product[:1], "not (128, 32)"),
        (lambda product: product.float(), "not (128, 32) torch.bfloat16"),
    ],
)
def test_a_wrong_product_is_found(gemm, spoil, words):
    objection = checks.check(FakeKernel(spoil=spoil), gemm_key(gemm))
    assert words.replace("(128, 32)", "(32, 128)" if gemm == "wgrad" else "(128, 32)") in objection


def test_a_bias_that_is_left_out_is_found():
    class WithoutBias(GemmKernel):
        def linear(self, packed, x, bias=None):
            return super().linear(packed, x)

    assert "wrong by" in checks.check(WithoutBias(), gemm_key())
    assert checks.check(WithoutBias(), gemm_key("dgrad")) == ""


def test_a_bias_hides_no_error_of_the_product():
    """It is several times as large as the product of a sparse matrix."""

    class TooLarge(GemmKernel):
        def linear(self, packed, x, bias=None):
            product = super().linear(packed, x) * (1 + 2 * checks.TOLERANCE_FLOAT32)
            return product if bias is None else product + bias

    key = gemm_key(pattern="1:16", dtype=torch.float32)
    assert "wrong by 0.0002 of" in checks.check(TooLarge(), key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_are_rounded_on_the_way_are_no_error(dtype):
    class Halves(GemmKernel):
        def linear(self, packed, x, bias=None):
            parts = zip(packed.chunk(2, 1), x.chunk(2, 1), strict=True)
            total = sum(super(Halves, self).linear(a, b) for a, b in parts)
            return total if bias is None else total + bias

    assert checks.check(Halves(), gemm_key(depth=1024, dtype=dtype)) == ""


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("call", [0, 1, checks.REPEATS])
def test_a_product_that_changes_is_refused_where_deterministic_algorithms_are_asked_for(
    gemm, call, deterministic
):
    objection = checks.check(FakeKernel(spoil=Flickering(call)), gemm_key(gemm))
    assert (
        objection
        == "gives other bits when it is repeated, and deterministic algorithms are asked for"
    )


@pytest.mark.parametrize("call", range(checks.REPEATS + 1))
def test_a_last_digit_that_changes_is_no_error_else(call):
    assert checks.check(FakeKernel(spoil=Flickering(call)), gemm_key()) == ""


def test_a_pack_that_changes_is_refused_as_well(deterministic):
    class Packing(FakeKernel):
        def pack(self, matrix):
            return super().pack(matrix) * (1 if len(self.calls) < 3 else 1.01)

    assert "other bits" in checks.check(Packing(), gemm_key())


def test_a_result_that_stays_is_deterministic(deterministic):
    assert checks.check(FakeKernel(), gemm_key()) == ""


def test_training_goes_on_as_if_nothing_was_tried():
    weight = torch.randn(4, 4, requires_grad=True)
    state = torch.get_rng_state()
    seen = []

    def spoil(product):
        seen.append(torch.is_autocast_enabled("cpu") or (weight * weight).requires_grad)
        return product

    kernel = FakeKernel(spoil=spoil)
    timer = FakeTimer([kernel], dense=1, fast=(1, 1))
    key = gemm_key(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert checks.check(kernel, key) == ""
        checks.dense_ms(key, timer)
        checks.sparse_ms(kernel, key, timer)
    assert seen == [False] * 4
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("gemm", GEMMS)
def test_what_is_timed(gemm):
    kernel = FakeKernel()
    timer = FakeTimer([kernel], dense=7, fast=(4, 1.5))
    assert checks.dense_ms(gemm_key(gemm), timer) == pytest.approx(7)
    assert checks.sparse_ms(kernel, gemm_key(gemm), timer) == pytest.approx((4, 1.5))
    assert timer.timed == [
        DENSE,
        ("fast", "matmul" if gemm == "wgrad" else "linear"),
        ("fast", "pack"),
    ]


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_what_is_timed_copies_no_operand(gemm):
    """What makes the operands writes them in the order that products take: W and dY as they are, and transposed."""

    class Timer:
        def __init__(self):
            self.copies = []

        def time(self, function, device):
            with torch.profiler.profile() as profile:
                function()
            self.copies.append(
                sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
            )
            return 1.0

    class Alias(GemmKernel):
        pass

    timer = Timer()
    checks.dense_ms(gemm_key(gemm, dtype=torch.float32), timer)
    checks.sparse_ms(Alias(), gemm_key(gemm, dtype=torch.float32), timer)
    assert timer.copies == [0, 0, 0]


def test_operands_are_rotated_past_the_cache(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=3 * 4096)
    )
    on_cuda = timing.copies_past_cache
    monkeypatch.setattr(
        checks, "copies_past_cache", lambda size, device: on_cuda(size, torch.device("cuda"))
    )
    seen = []

    class Timer:
        def time(self, function, device):
            seen.append({function().data_ptr() for _ in range(20)})
            return 1.0

    class Alias(GemmKernel):
        def linear(self, packed, x, bias=None):
            return x

    checks.sparse_ms(Alias(), gemm_key(), Timer())  # 4096 bytes of A, 16384 of x
    assert [len(addresses) for addresses in seen] == [2, 7]


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_kernels_that_change_operands_or_share_results_are_refused(gemm):
    class Greedy(GemmKernel):
        def linear(self, packed, x, bias=None):
            y = super().linear(packed, x, bias)
            x.zero_()
            return y

        def matmul(self, packed, matrix):
            y = super().matmul(packed, matrix)
            matrix.zero_()
            return y

    class OneBuffer(GemmKernel):
        buffer = None

        def _kept(self, y):
            self.buffer = y if self.buffer is None else self.buffer.copy_(y)
            return self.buffer

        def linear(self, packed, x, bias=None):
            return self._kept(super().linear(packed, x, bias))

        def matmul(self, packed, matrix):
            return self._kept(super().matmul(packed, matrix))

    key = gemm_key(gemm, dtype=torch.float32)
    assert checks.check(Greedy(), key) == "changes its operands"
    assert checks.check(OneBuffer(), key) == "returns the same memory for two products"


def test_tokens_of_an_estimate_are_padded():
    class Strict(GemmKernel):
        def matmul(self, packed, matrix):
            return packed @ matrix

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        checks.check(Strict(), gemm_key("wgrad", depth=13, dtype=torch.float32))
    assert checks.check(GemmKernel(), gemm_key("wgrad", depth=13, dtype=torch.float32)) == ""
