import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKey
from lightning_nm.kernels.gpu.cusparselt import _claim_thread
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps, assert_product, normal, two_four

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def kernel():
    return KernelOnCpu()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def h200(monkeypatch):
    """A machine as torch describes one; each test changes what it is about."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 801)
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_products(dtype, rows, depth, tokens, bias, seed):
    kernel = KernelOnCpu()
    matrix, x = (
        two_four(16 * rows, 16 * depth, dtype, seed),
        normal(tokens, 16 * depth, dtype=dtype, seed=seed + 1),
    )
    bias = normal(16 * rows, dtype=dtype, seed=seed + 2) if bias else None
    y = kernel.linear(kernel.pack(matrix), x, bias)
    assert_product(y.t(), matrix, x.t(), bias)
    gradient, other = (
        two_four(16 * rows, 4 * tokens, dtype, seed),
        normal(4 * tokens, 24, dtype=dtype, seed=seed + 1),
    )
    assert_product(kernel.matmul(kernel.pack(gradient), other), gradient, other)


def test_the_calls(kernel):
    """As the operators want them: no copy of an operand, the transpose as a view, no alpha."""
    matrix, x, other, bias = two_four(32, 64), normal(16, 64), normal(64, 24), normal(32)
    kernel.probe(CPU)
    kernel.ops.calls.clear()
    packed = kernel.pack(matrix)
    kernel.linear(packed, x, bias)
    kernel.matmul(packed, other)
    (_, compressed), forward, wgrad = kernel.ops.calls
    assert compressed is matrix
    assert packed.shape == (32, 64 * 9 // 16)
    assert forward[1].data_ptr() == packed.data_ptr() == wgrad[1].data_ptr()
    assert (forward[2].data_ptr(), forward[2].shape, forward[2].stride()) == (
        x.data_ptr(),
        (64, 16),
        (1, 64),
    )
    assert forward[3:] == (bias, None, 0, True)
    assert wgrad[2] is other
    assert wgrad[3:] == (None, None, 0, False)


class TestTraps:
    """Each shows first that the operator answers wrongly and in silence, and then that the kernel does not let it."""

    def wrong(self, result, matrix, other, bias=None):
        with pytest.raises(AssertionError):
            assert_product(result, matrix, other, bias)

    def test_packing_a_transposed_view(self, kernel):
        ops, view = kernel.ops, two_four(64, 64).t()
        other = normal(64, 16)
        self.wrong(ops._cslt_sparse_mm(ops._cslt_compress(view), other), view, other)
        with pytest.raises(
            ValueError, match=r"the matrix to pack of shape \(64, 64\) has strides \(1, 64\)"
        ):
            kernel.pack(view)

    def test_packing_a_slice(self, kernel):
        ops, part, other = kernel.ops, two_four(32, 128)[:, :64], normal(64, 16)
        self.wrong(ops._cslt_sparse_mm(ops._cslt_compress(part), other), part, other)
        with pytest.raises(ValueError, match="pass it contiguous"):
            kernel.pack(part)

    def test_a_packed_matrix_with_strides(self, kernel):
        matrix, other, x = two_four(32, 64), normal(64, 16), normal(16, 64)
        packed = kernel.pack(matrix).repeat(1, 2)[:, :36]
        self.wrong(kernel.ops._cslt_sparse_mm(packed, other), matrix, other)
        for product in (lambda: kernel.matmul(packed, other), lambda: kernel.linear(packed, x)):
            with pytest.raises(ValueError, match=r"the packed matrix of shape .* has strides"):
                product()

    @pytest.mark.parametrize(
        "part", [lambda wide: wide[:, :64], lambda wide: wide[::2, :64], lambda wide: wide[:1, :64]]
    )
    def test_a_dense_operand_with_strides(self, kernel, part):
        matrix, x = two_four(32, 64), part(normal(16, 128))
        packed = kernel.pack(matrix)
        if len(x) > 1:  # a single row is contiguous
            self.wrong(kernel.ops._cslt_sparse_mm(packed, x.t()), matrix, x.t())
            with pytest.raises(ValueError, match=r"x of shape .* has strides"):
                kernel.linear(packed, x)
        else:
            assert_product(kernel.linear(packed, x).t(), matrix, x.t())

    def test_columns_of_a_dense_operand(self, kernel):
        matrix, other = two_four(32, 64), normal(64, 32)[:, :16]
        packed = kernel.pack(matrix)
        self.wrong(kernel.ops._cslt_sparse_mm(packed, other), matrix, other)
        with pytest.raises(ValueError, match=r"B of shape .* has strides"):
            kernel.matmul(packed, other)

    def test_a_bias_with_strides(self, kernel):
        matrix, x, bias = two_four(32, 64), normal(16, 64), normal(64)[::2]
        packed = kernel.pack(matrix)
        self.wrong(kernel.ops._cslt_sparse_mm(packed, x.t(), bias=bias), matrix, x.t(), bias)
        with pytest.raises(ValueError, match=r"bias of shape .* has strides"):
            kernel.linear(packed, x, bias)

    def test_a_bias_of_another_dtype(self, kernel):
        matrix, x, bias = two_four(32, 64), normal(16, 64), normal(32, dtype=torch.float16)
        packed = kernel.pack(matrix)
        self.wrong(kernel.ops._cslt_sparse_mm(packed, x.t(), bias=bias), matrix, x.t(), bias)
        with pytest.raises(
            ValueError, match=r"bias is torch.float16 .* packed matrix is torch.bfloat16"
        ):
            kernel.linear(packed, x, bias)

    def test_a_dense_operand_of_another_dtype(self, kernel):
        matrix, x, other = (
            two_four(32, 64),
            normal(16, 64, dtype=torch.float16),
            normal(64, 16, dtype=torch.float16),
        )
        packed = kernel.pack(matrix)
        self.wrong(kernel.ops._cslt_sparse_mm(packed, x.t()), matrix, x.t())
        self.wrong(kernel.ops._cslt_sparse_mm(packed, other), matrix, other)
        for product in (lambda: kernel.matmul(packed, other), lambda: kernel.linear(packed, x)):
            with pytest.raises(ValueError, match="bring both to one dtype and device"):
                product()

    def test_a_matrix_that_is_not_pruned(self, kernel):
        matrix, other = normal(32, 64), normal(64, 16)
        self.wrong(kernel.matmul(kernel.pack(matrix), other), matrix, other)
        with pytest.raises(ValueError, match=r"512 groups of four hold .* prune it by a select"):
            KernelOnCpu(check=True).pack(matrix)

    def test_minus_zeros_that_a_compressor_might_take_for_values(self):
        """The check counts them; where no group holds three entries that are not +0 they do no harm."""
        kernel, matrix, other = KernelOnCpu(check=True), -two_four(32, 64).abs(), normal(64, 16)
        with pytest.raises(ValueError, match=r"counting -0.0"):
            kernel.pack(matrix * (matrix != 0))
        clean = torch.where(matrix != 0, matrix, 0)
        clean[:, :4] = torch.tensor([-0.0, 0.0, 1.0, 0.0])
        assert_product(kernel.matmul(kernel.pack(clean), other), clean, other)

    def test_an_algorithm_that_is_wrong(self):
        """pytorch#155333."""
        kernel = KernelOnCpu(TrappingOps(wrong_algorithms=[20]), algorithm=20)
        assert "is wrong by up to 1" in kernel.probe(CPU)
        with pytest.raises(RuntimeError, match=r"cusparselt:20 does not work on cpu: .* is wrong"):
            kernel.pack(two_four(32, 64))
        assert KernelOnCpu(TrappingOps(wrong_algorithms=[20]), algorithm=7).probe(CPU) == ""

    def test_addresses_that_the_library_takes_for_aligned(self, kernel):
        packed, memory = kernel.pack(two_four(32, 64)), normal(16 * 64 + 1)
        with pytest.raises(ValueError, match="not a multiple of 16 bytes: pass a clone"):
            kernel.linear(packed, memory[1:].view(16, 64))

    def test_a_second_device_in_a_thread(self):
        caught = []

        def use():
            _claim_thread(torch.device("cuda:0"))
            _claim_thread(CPU)
            _claim_thread(torch.device("cuda:0"))
            try:
                _claim_thread(torch.device("cuda:1"))
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert caught == [
            "this thread used cuSPARSELt on cuda:0 and cannot use it on cuda:1: one thread or process a device"
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_other_dtypes_are_refused(kernel, dtype):
    """In float32 the hardware's pattern is 1:2."""
    key = GemmKey("forward", 32, 64, 16, dtype, NMPattern(2, 4), "cpu")
    assert f"{dtype} is not one of its dtypes" in kernel.supports(key)
    with pytest.raises(ValueError, match=f"{dtype}, not one of torch.bfloat16, torch.float16"):
        kernel.pack(torch.zeros(32, 64, dtype=dtype))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ((24, 64), "rows that are not a multiple of 16"),
        ((64,), "a matrix that is not empty"),
        ((0, 64), "not empty"),
    ],
)
def test_shapes_to_pack(kernel, matrix, message):
    with pytest.raises(ValueError, match=message):
        kernel.pack(torch.zeros(matrix, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (
            lambda kernel, packed: kernel.linear(packed, normal(16, 48)),
            "does not fit a packed matrix",
        ),
        (
            lambda kernel, packed: kernel.linear(packed, normal(16, 65)),
            "does not fit a packed matrix",
        ),
        (lambda kernel, packed: kernel.linear(packed, normal(2, 16, 64)), "x must be a matrix"),
        (lambda kernel, packed: kernel.linear(packed, normal(0, 64)), "not empty"),
        (
            lambda kernel, packed: kernel.linear(packed, normal(16, 64), normal(1)),
            r"bias must be of shape \(32,\)",
        ),
        (
            lambda kernel, packed: kernel.matmul(packed, normal(128, 16)),
            "does not fit a packed matrix",
        ),
        (
            lambda kernel, packed: kernel.matmul(packed, normal(64, 12)),
            "columns that are not a multiple of 8",
        ),
        (
            lambda kernel, packed: kernel.matmul(packed.view(-1), normal(64, 16)),
            "the packed matrix must be a matrix",
        ),
    ],
)
def test_shapes_of_products(kernel, product, message):
    with pytest.raises(ValueError, match=message):
        product(kernel, kernel.pack(two_four(32, 64)))


def test_an_algorithm_is_not_negative():
    with pytest.raises(ValueError, match="algorithm=-1"):
        CuSparseLtKernel(algorithm=-1)
    assert CuSparseLtKernel().name == "cusparselt"
    assert CuSparseLtKernel(algorithm=7).name == "cusparselt:7"
