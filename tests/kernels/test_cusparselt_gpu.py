"""The real operators: run with ``pytest -m gpu`` on a machine whose GPU has sparse tensor cores."""

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm.functional import nm_prune
from lightning_nm.kernels import CuSparseLtKernel, GemmKey, KernelRegistry
from lightning_nm.kernels.tuner import check
from tests.support.trapping_cslt import assert_product
from tests.support.triton_kernels import needs_compiler

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
of_each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def pruned(*shape, pattern="2:4", dim=1, **options):
    return nm_prune(random(*shape, **options), pattern, dim)


def key(rows, depth, columns, gemm="forward"):
    return GemmKey(gemm, rows, depth, columns, torch.bfloat16, NMPattern(2, 4), GPU)


@pytest.fixture
def kernel():
    (kernel,) = KernelRegistry().made_for("cuda")
    assert kernel.probe(torch.device("cuda")) == ""
    return kernel


def assert_linear(kernel, matrix, x, bias=None):
    assert_product(kernel.linear(kernel.pack(matrix), x, bias).t(), matrix, x.t(), bias)


@of_each_dtype
@pytest.mark.parametrize("tokens", [16, 50, 128, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_the_three_gemms(kernel, dtype, tokens, bias):
    x, dy = random(tokens, 512, dtype=dtype), random(tokens, 768, dtype=dtype)
    bias = random(768, dtype=dtype) if bias else None
    for pattern in ("2:4", "1:2", "1:4", "2:8", "1:16"):
        assert_linear(kernel, pruned(768, 512, pattern=pattern, dtype=dtype), x, bias)
    assert_linear(kernel, pruned(768, 512, dim=0, dtype=dtype).t().contiguous(), dy)
    padded = torch.nn.functional.pad(dy.t(), (0, -tokens % 4))
    estimate = nm_prune(padded, "2:4", dim=1)[:, :tokens].contiguous()
    assert_product(kernel.matmul(kernel.pack(estimate), x), estimate, x)


@of_each_dtype
@pytest.mark.parametrize("shape", [(128, 128), (768, 3072), (4096, 11008)])
def test_packed_size(kernel, dtype, shape):
    packed = kernel.pack(pruned(*shape, dtype=dtype))
    assert packed.shape == (shape[0], shape[1] * 9 // 16)


def test_multiples_of_16(kernel):
    """What the probe found is what `supports` says, and it is right."""
    matrix = pruned(144, 176)
    if kernel.supports(key(144, 176, 72)):
        multiple = kernel.multiple(torch.device(GPU))
        with pytest.raises(ValueError, match=f"not a multiple of {multiple}"):
            kernel.pack(matrix)
    else:
        assert_linear(kernel, matrix, random(72, 176))


def test_minus_zero_and_what_is_no_number(kernel):
    matrix, x = pruned(128, 128), random(16, 128)
    matrix[:, :4] = torch.tensor([-0.0, 0.0, 1.0, 0.0])
    assert_linear(kernel, matrix, x)
    matrix[3, 4:8] = torch.tensor([torch.nan, 0.0, torch.inf, 0.0])
    y = kernel.linear(kernel.pack(matrix), x)
    assert bool(y[:, 3].isnan().all())
    assert bool(y[:, :3].isfinite().all())


def test_results_do_not_change(kernel):
    matrix, x = pruned(512, 1024), random(256, 1024)
    first = kernel.linear(kernel.pack(matrix), x)
    assert all(torch.equal(kernel.linear(kernel.pack(matrix), x), first) for _ in range(10))


def test_another_thread_may_use_it(kernel):
    """The backward pass runs in a thread of its own (pytorch#113776)."""
    matrix, x = pruned(256, 256), random(64, 256).requires_grad_()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return kernel.linear(kernel.pack(matrix), x)

        @staticmethod
        def backward(ctx, dy):
            return kernel.matmul(kernel.pack(matrix), dy.t().contiguous()).t()

    y = Product.apply(x)
    y.backward(y.detach())
    assert_product(y.detach().t(), matrix, x.detach().t())
    assert_product(x.grad.t(), matrix, y.detach().t())


def test_an_algorithm_that_does_not_exist_is_refused():
    assert CuSparseLtKernel(algorithm=100_000).probe(torch.device("cuda")) != ""


@pytest.mark.parametrize("sizes", [(768, 512, 256), (512, 1024, 1000)])
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_the_algorithm_that_a_search_finds_is_right(kernel, gemm, sizes):
    product = key(*sizes, gemm)
    if kernel.supports(product):
        pytest.skip(kernel.supports(product))
    ways = KernelRegistry([kernel]).searched(kernel, product)
    assert ways[-1] is kernel
    assert [check(way, product) for way in ways] == [""] * len(ways)


@needs_compiler
@of_each_dtype
@pytest.mark.parametrize("shape", [(64, 64), (192, 320), (1024, 4096), (4096, 11008)])
def test_hopper_packs_in_one_pass_to_the_librarys_bits(kernel, dtype, shape):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the form is that of compute capability 9.0")
    assert kernel.device_probe.packs_alike(torch.device(GPU))
    matrix = pruned(*shape, dtype=dtype)
    matrix[::3, :8] = 0
    library = torch._cslt_compress(matrix).view(torch.int16).flatten()
    assert torch.equal(kernel.pack(matrix).view(torch.int16).flatten(), library)
