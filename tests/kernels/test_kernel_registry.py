import warnings
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKernel, GemmKey, KernelRegistry
from lightning_nm.kernels.api import attempt
from tests.support.fake_kernels import FakeKernel
from tests.support.trapping_cslt import KernelOnCpu, assert_product, normal, two_four

KEY = GemmKey("forward", 32, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")
OTHER_KEY = GemmKey("wgrad", 32, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")


class Failing(GemmKernel):
    name = "failing"

    def __init__(self, where="linear"):
        self.where, self.calls = where, 0

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


def linear(registry, kernel, key, matrix, x, bias=None):
    return attempt(
        kernel,
        key,
        registry.failures,
        lambda: kernel.linear(kernel.pack(matrix), x, bias),
        lambda: registry.reference.linear(matrix, x, bias),
    )


def matmul(registry, kernel, key, matrix, other):
    return attempt(
        kernel,
        key,
        registry.failures,
        lambda: kernel.matmul(kernel.pack(matrix), other),
        lambda: registry.reference.matmul(matrix, other),
    )


@pytest.fixture
def operands():
    return two_four(32, 64), normal(16, 64), normal(32)


def test_kernels_are_listed_in_order_with_reasons():
    registry = KernelRegistry([CuSparseLtKernel(), SimulatedSparseKernel()])
    assert [
        (name, bool(registry.reason(kernel, KEY))) for name, kernel in registry.kernels.items()
    ] == [
        ("reference", False),
        ("cusparselt", True),
        ("simulated", False),
    ]
    assert [kernel.name for kernel in registry.backends] == ["cusparselt", "simulated"]
    wide = GemmKey("forward", 24, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")
    assert registry.reason(registry.backends[1], wide) == "rows=24 is not a multiple of 16"


def test_a_probe_that_raises_is_a_reason():
    registry = KernelRegistry([Failing("probe")])
    assert registry.reason(registry.backends[0], KEY) == "RuntimeError: no such luck"


def test_names_are_unique():
    with pytest.raises(ValueError, match="two kernels are named 'cusparselt'"):
        KernelRegistry([CuSparseLtKernel(), KernelOnCpu()])
    assert list(KernelRegistry().kernels) == [
        "reference",
        "cusparselt",
        "cpu-permute",
        "cpu-csr",
    ]


class MadeFor(FakeKernel):
    """A kernel for one type of device, with what its products may have sparse."""

    def __init__(self, name, device_type, takes=("n:m",), **options):
        super().__init__(name, **options)
        self.device_type = device_type
        self.takes = frozenset(takes)


def test_kernels_for_other_devices_are_passed_over():
    gpu, everywhere, cpu = MadeFor("gpu", "cuda"), MadeFor("everywhere", ""), MadeFor("cpu", "cpu")
    registry = KernelRegistry([gpu, everywhere, cpu])
    assert registry.made_for("cpu") == [everywhere, cpu]
    assert registry.made_for("cuda:1") == [gpu, everywhere]
    assert KernelRegistry([gpu]).made_for("cpu") == [gpu], (
        "where there is no other, its reason is the only one"
    )
    assert [kernel.name for kernel in KernelRegistry().made_for("cpu")] == [
        "cpu-permute",
        "cpu-csr",
    ]
    assert [kernel.name for kernel in KernelRegistry().made_for("cuda")] == ["cusparselt"]


def test_what_no_kernel_can_use_is_a_reason():
    operands, outputs = MadeFor("operands", ""), MadeFor("outputs", "", takes=("outputs",))
    registry = KernelRegistry([operands, outputs])
    n_m, masked, sampled = (
        replace(OTHER_KEY, sparsity=sparsity) for sparsity in ("n:m", "masked", "outputs")
    )
    assert registry.reason(operands, n_m) == registry.reason(outputs, sampled) == ""
    assert "must be N:M along the contraction axis" in registry.reason(operands, masked)
    assert "computes all outputs" in registry.reason(operands, sampled)
    assert "no operand that is N:M" in registry.reason(outputs, n_m)
    assert not any(registry.reason(registry.reference, key) for key in (n_m, masked, sampled))
    assert registry.takes("cpu") == {"n:m", "outputs"}
    assert (
        KernelRegistry([MadeFor("broken", "", takes=("masked",), probe="broken")]).takes("cpu")
        == set()
    )


def test_kernels_with_one_reason_share_it():
    gpu = MadeFor("gpu", "cuda", probe="no GPU")
    broken = [MadeFor(name, "cpu", probe="no library") for name in ("one", "two")]
    registry = KernelRegistry([gpu, *broken])
    assert registry.unavailable_reason("cpu") == "one, two: no library"
    assert registry.unavailable_reason("cuda") == "gpu: no GPU"
    assert KernelRegistry([gpu, *broken, MadeFor("works", "cpu")]).unavailable_reason("cpu") == ""
    assert KernelRegistry([]).unavailable_reason("cpu") == "there is no sparse kernel"


@pytest.mark.parametrize("kind", [GemmKernel, SimulatedSparseKernel, KernelOnCpu])
def test_products(kind, operands):
    kernel, registry, (matrix, x, bias) = kind(), KernelRegistry(), operands
    y = linear(registry, kernel, KEY, matrix, x, bias)
    assert_product(y.t(), matrix, x.t(), bias)
    assert_product(matmul(registry, kernel, OTHER_KEY, matrix, x.t().contiguous()), matrix, x.t())


@pytest.mark.parametrize("where", ["pack", "linear", "matmul"])
def test_a_failure_is_told_once_and_the_dense_product_takes_its_place(where, operands):
    matrix, x, bias = operands
    kernel, other = Failing(where), x.t().contiguous()
    registry = KernelRegistry([kernel])

    def product():
        if where == "matmul":
            return matmul(registry, kernel, KEY, matrix, other)
        return linear(registry, kernel, KEY, matrix, x, bias)

    expected = matrix @ other if where == "matmul" else torch.nn.functional.linear(x, matrix, bias)
    with pytest.warns(RuntimeWarning) as caught:
        assert torch.equal(product(), expected)
    assert [str(warning.message) for warning in caught] == [
        "kernel 'failing' is switched off for forward 32x64x16 bfloat16 2:4 cpu: it failed, "
        "RuntimeError: no such luck. The dense product replaces it."
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(product(), expected)
    assert kernel.calls == 1
    assert registry.reason(kernel, KEY) == "it failed, RuntimeError: no such luck"
    assert registry.reason(kernel, OTHER_KEY) == ""


def test_another_product_and_another_kernel_are_tried_still(operands):
    matrix, x, _ = operands
    first, second = Failing(), Failing()
    second.name = "second"
    registry = KernelRegistry([first, second])
    for kernel, key in ((first, KEY), (first, OTHER_KEY), (second, KEY)):
        with pytest.warns(
            RuntimeWarning, match=f"kernel '{kernel.name}' is switched off for {key.gemm}"
        ):
            linear(registry, kernel, key, matrix, x)
    assert (first.calls, second.calls) == (2, 1)


def test_what_the_hardware_would_get_wrong_runs_dense(operands):
    matrix, x, _ = operands
    registry, kernel, wide = KernelRegistry(), KernelOnCpu(), x.repeat(1, 2)[:, :64]
    with pytest.warns(
        RuntimeWarning,
        match=r"ValueError: cusparselt: x of shape \(16, 64\) has strides \(128, 1\)",
    ):
        y = linear(registry, kernel, KEY, matrix, wide)
    assert_product(y.t(), matrix, x.t())


def test_operands_that_fit_no_product_leave_the_kernel_on(operands):
    matrix, x, _ = operands
    registry, kernel = KernelRegistry(), SimulatedSparseKernel()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(registry, kernel, KEY, matrix, x[:, :48].contiguous())
    assert registry.reason(kernel, KEY) == ""


def test_a_failing_reference_raises(operands):
    registry, (matrix, x, _) = KernelRegistry(), operands
    tries = []

    def product():
        tries.append(1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        attempt(registry.reference, KEY, registry.failures, product, lambda: matrix @ x.t())
    assert len(tries) == 1
    assert registry.reason(registry.reference, KEY) == ""
