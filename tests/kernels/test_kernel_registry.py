import warnings

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKernel, GemmKey, KernelRegistry, SimulatedSparseKernel
from tests.trapping_cslt import KernelOnCpu, assert_product, normal, two_four

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
    return registry.attempt(
        kernel,
        key,
        lambda: kernel.linear(kernel.pack(matrix), x, bias),
        lambda: registry.reference.linear(matrix, x, bias),
    )


def matmul(registry, kernel, key, matrix, other):
    return registry.attempt(
        kernel,
        key,
        lambda: kernel.matmul(kernel.pack(matrix), other),
        lambda: registry.reference.matmul(matrix, other),
    )


@pytest.fixture
def operands():
    return two_four(32, 64), normal(16, 64), normal(32)


def test_kernels_are_listed_in_order_with_reasons():
    registry = KernelRegistry([CuSparseLtKernel(), SimulatedSparseKernel()])
    assert [(name, bool(registry.reason(kernel, KEY))) for name, kernel in registry.kernels.items()] == [
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
    assert list(KernelRegistry().kernels) == ["reference", "cusparselt-direct", "cusparselt"]


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
        with pytest.warns(RuntimeWarning, match=f"kernel '{kernel.name}' is switched off for {key.gemm}"):
            linear(registry, kernel, key, matrix, x)
    assert (first.calls, second.calls) == (2, 1)


def test_what_the_hardware_would_get_wrong_runs_dense(operands):
    matrix, x, _ = operands
    registry, kernel, wide = KernelRegistry(), KernelOnCpu(), x.repeat(1, 2)[:, :64]
    with pytest.warns(RuntimeWarning, match=r"ValueError: cusparselt: x of shape \(16, 64\) has strides \(128, 1\)"):
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
        registry.attempt(registry.reference, KEY, product, lambda: matrix @ x.t())
    assert len(tries) == 1
    assert registry.reason(registry.reference, KEY) == ""
