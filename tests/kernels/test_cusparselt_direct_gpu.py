"""The real library through nvmath: run with ``pytest -m gpu`` where nvmath-python is installed. Nobody has yet."""

import threading

import pytest
import torch

from lightning_nm.functional import nm_prune
from lightning_nm.kernels import CuSparseLtDirectKernel, CuSparseLtKernel
from tests.support.trapping_cslt import assert_product, normal

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("nvmath")
    kernel = CuSparseLtDirectKernel()
    assert kernel.probe(CUDA) == ""
    return kernel


@pytest.fixture(scope="module")
def stock():
    kernel = CuSparseLtKernel()
    assert kernel.probe(CUDA) == ""
    return kernel


def operands(rows=768, depth=512, tokens=50, dtype=torch.bfloat16):
    matrix = nm_prune(normal(rows, depth, dtype=dtype, seed=0).cuda(), "2:4")
    return (
        matrix,
        normal(tokens, depth, dtype=dtype).cuda(),
        normal(rows, dtype=dtype, seed=2).cuda(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [16, 50, 1000])
def test_products_are_those_of_torchs_operators(kernel, stock, dtype, tokens):
    matrix, x, bias = operands(tokens=tokens, dtype=dtype)
    packed, other = kernel.pack(matrix), normal(512, 128, dtype=dtype).cuda()
    assert torch.equal(packed, stock.pack(matrix))
    for shift in (None, bias, bias + 1):
        y = kernel.linear(packed, x, shift)
        assert_product(y.t(), matrix, x.t(), shift)
        torch.testing.assert_close(y, stock.linear(packed, x, shift))
    assert_product(kernel.matmul(packed, other), matrix, other)
    torch.testing.assert_close(kernel.matmul(packed, other), stock.matmul(packed, other))


@pytest.mark.parametrize("shape", [(128, 128), (768, 3072), (4096, 11008)])
def test_packed_size(kernel, shape):
    packed = kernel.pack(nm_prune(normal(*shape).cuda(), "2:4"))
    assert packed.shape == (shape[0], shape[1] * 9 // 16)


def test_many_shapes_evict_plans(kernel):
    matrix, _, bias = operands()
    packed = kernel.pack(matrix)
    for tokens in (*range(8, 8 * 300, 8), 8):
        x = normal(tokens, 512).cuda()
        assert_product(kernel.linear(packed, x, bias).t(), matrix, x.t(), bias)


def test_another_thread_and_another_stream(kernel):
    matrix, x, bias = operands()
    packed = kernel.pack(matrix)
    torch.cuda.synchronize()
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(kernel.linear(packed, x, bias))
            torch.cuda.current_stream().synchronize()

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for y in results:
        assert_product(y.t(), matrix, x.t(), bias)
