"""Which kernels there are, what speaks against them, and what happens when one fails; keys of GEMMs."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKernel, GemmKey, KernelRegistry
from lightning_nm.kernels.api import attempt, bucketed, multiply_adds, token_bucket
from tests.support.fake_kernels import FakeKernel, gemm_key
from tests.support.trapping_cslt import KernelOnCpu, assert_product, normal, two_four

KEY = GemmKey("forward", 32, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")
OTHER_KEY = replace(KEY, gemm="wgrad")
MATRIX, X, BIAS = two_four(32, 64), normal(16, 64), normal(32)


class Failing(GemmKernel):
    def __init__(self, where="linear", name="failing"):
        self.where, self.name, self.calls = where, name, 0

    def _fail(self, where):
        if where == self.where:
            self.calls += 1
            raise RuntimeError("no such luck")

    def probe(self, device):
        self._fail("probe")
        return ""

    def pack(self, matrix):
        self._fail("pack")
        return super().pack(matrix)

    def linear(self, packed, x, bias=None):
        self._fail("linear")
        return super().linear(packed, x, bias)

    def matmul(self, packed, matrix):
        self._fail("matmul")
        return super().matmul(packed, matrix)


def product(registry, kernel, key=KEY, x=X):
    """The GEMM of a key, by a kernel or the dense one."""
    if key.gemm == "wgrad":
        compute = lambda kernel: kernel.matmul(kernel.pack(MATRIX), x.t().contiguous())  # noqa: E731
    else:
        compute = lambda kernel: kernel.linear(kernel.pack(MATRIX), x, BIAS)  # noqa: E731
    dense = lambda: compute(registry.reference)  # noqa: E731
    return attempt(kernel, key, registry.failures, lambda: compute(kernel), dense)


def test_kernels_are_listed_in_order_with_reasons():
    registry = KernelRegistry([CuSparseLtKernel(), SimulatedSparseKernel(), Failing("probe")])
    reasons = {name: registry.reason(kernel, KEY) for name, kernel in registry.kernels.items()}
    assert list(reasons.items()) == [
        ("reference", ""),
        ("cusparselt", "cuSPARSELt needs a CUDA device, not cpu"),
        ("simulated", ""),
        ("failing", "RuntimeError: no such luck"),
    ]
    assert [kernel.name for kernel in registry.backends] == list(reasons)[1:]
    wide = registry.reason(registry.kernels["simulated"], replace(KEY, rows=24))
    assert wide == "rows=24 is not a multiple of 16"
    with pytest.raises(ValueError, match="two kernels are named 'cusparselt'"):
        KernelRegistry([CuSparseLtKernel(), KernelOnCpu()])


class MadeFor(FakeKernel):
    """A kernel for one type of device, with what its GEMMs may have sparse."""

    def __init__(self, name, device_type="", takes=("n:m",), **options):
        super().__init__(name, **options)
        self.device_type = device_type
        self.takes = frozenset(takes)


def test_kernels_for_other_devices_are_passed_over():
    gpu, everywhere, cpu = MadeFor("gpu", "cuda"), MadeFor("everywhere"), MadeFor("cpu", "cpu")
    registry, own = KernelRegistry([gpu, everywhere, cpu]), KernelRegistry()
    assert registry.made_for("cpu") == [everywhere, cpu]
    assert registry.made_for("cuda:1") == [gpu, everywhere]
    # Where there is no other, its reason is the only one.
    assert KernelRegistry([gpu]).made_for("cpu") == [gpu]
    assert [kernel.name for kernel in own.made_for("cpu")] == ["cpu-permute", "cpu-csr"]
    assert [kernel.name for kernel in own.made_for("cuda")] == ["cusparselt"]


def test_what_no_kernel_can_use_is_a_reason():
    operands, outputs = MadeFor("operands"), MadeFor("outputs", takes=("outputs",))
    broken = MadeFor("broken", takes=("masked",), probe="broken")
    registry = KernelRegistry([operands, outputs, broken])
    for kernel, sparsity, words in (
        (operands, "n:m", ""),
        (operands, "masked", "must be N:M along the contraction axis"),
        (operands, "outputs", "computes all outputs"),
        (outputs, "outputs", ""),
        (outputs, "n:m", "no operand that is N:M"),
        (registry.reference, "masked", ""),
        (registry.reference, "outputs", ""),
    ):
        reason = registry.reason(kernel, replace(OTHER_KEY, sparsity=sparsity))
        assert words in reason
        assert bool(words) == bool(reason)
    assert registry.takes("cpu") == {"n:m", "outputs"}


def test_kernels_with_one_reason_share_it():
    gpu = MadeFor("gpu", "cuda", probe="no GPU")
    broken = [MadeFor(name, "cpu", probe="no library") for name in ("one", "two")]
    registry = KernelRegistry([gpu, *broken])
    assert registry.unavailable_reason("cpu") == "one, two: no library"
    assert registry.unavailable_reason("cuda") == "gpu: no GPU"
    assert KernelRegistry([gpu, *broken, MadeFor("works", "cpu")]).unavailable_reason("cpu") == ""
    assert KernelRegistry([]).unavailable_reason("cpu") == "there is no sparse kernel"


@pytest.mark.parametrize(("key", "where"), [(KEY, "pack"), (KEY, "linear"), (OTHER_KEY, "matmul")])
def test_a_failure_is_told_once_and_the_dense_product_takes_its_place(key, where):
    kernel, second = Failing(where), Failing(where, "second")
    registry = KernelRegistry([kernel, second])
    expected = product(registry, registry.reference, key)
    with pytest.warns(RuntimeWarning) as caught:
        assert torch.equal(product(registry, kernel, key), expected)
    assert [str(warning.message) for warning in caught] == [
        f"kernel 'failing' is switched off for {key}: it failed, "
        "RuntimeError: no such luck. The dense GEMM replaces it."
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(product(registry, kernel, key), expected)
    assert kernel.calls == 1
    assert registry.reason(kernel, key) == "it failed, RuntimeError: no such luck"
    # Another GEMM and another kernel are tried still.
    assert registry.reason(kernel, replace(key, rows=7)) == registry.reason(second, key) == ""
    with pytest.warns(RuntimeWarning, match="kernel 'second' is switched off"):
        product(registry, second, key)


def test_what_the_hardware_would_get_wrong_runs_dense():
    wide = X.repeat(1, 2)[:, :64]
    match = r"ValueError: cusparselt: x of shape \(16, 64\) has strides \(128, 1\)"
    with pytest.warns(RuntimeWarning, match=match):
        y = product(KernelRegistry(), KernelOnCpu(), x=wide)
    assert_product(y.t(), MATRIX, X.t(), BIAS)


def test_operands_that_fit_no_product_leave_the_kernel_on():
    registry, kernel = KernelRegistry(), SimulatedSparseKernel()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        product(registry, kernel, x=X[:, :48].contiguous())
    assert registry.reason(kernel, KEY) == ""


def test_a_failing_reference_raises():
    registry = KernelRegistry()
    tries = []

    def fails():
        tries.append(1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        attempt(registry.reference, KEY, registry.failures, fails, lambda: MATRIX @ X.t())
    assert len(tries) == 1
    assert registry.reason(registry.reference, KEY) == ""


# ---------------------------------------------------------------------------------------------------- keys, buckets


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_buckets_spread_by_less_than_a_quarter(tokens, others):
    bucket = token_bucket(tokens)
    assert tokens <= bucket < 1.25 * tokens
    assert token_bucket(bucket) == bucket
    assert bucket <= token_bucket(others) or tokens > others


@given(st.integers(0, 1 << 20), st.integers(0, 10))
def test_buckets_of_aligned_numbers_are_aligned(multiple, power):
    assert token_bucket(multiple << power) % (1 << power) == 0


def test_a_bucket_is_a_quarter_of_a_power_of_two():
    quarters = {quarter << power for quarter in (4, 5, 6, 7) for power in range(6)}
    assert {token_bucket(tokens) for tokens in range(1, 129)} == {1, 2, 3, 128} | {
        bucket for bucket in quarters if bucket < 128
    }


def test_only_tokens_fall_into_buckets():
    odd = {"rows": 1001, "depth": 1002, "columns": 1003}
    for gemm, changed in (
        ("forward", {"columns": 1024}),
        ("dgrad", {"columns": 1024}),
        ("wgrad", {"depth": 1024}),
    ):
        assert bucketed(gemm_key(gemm, **odd)) == gemm_key(gemm, **odd | changed)
    assert multiply_adds(gemm_key(rows=2, depth=3, columns=5)) == 30
