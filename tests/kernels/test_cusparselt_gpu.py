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

DTYPES = [torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.fixture
def kernel():
    kernel = CuSparseLtKernel()
    assert kernel.probe(torch.device("cuda")) == ""
    return kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [16, 50, 128, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_the_three_gemms(kernel, dtype, tokens, bias):
    weight, x, dy = (
        random(*shape, dtype=dtype) for shape in ((768, 512), (tokens, 512), (tokens, 768))
    )
    bias = random(768, dtype=dtype) if bias else None
    forward = nm_prune(weight, "2:4", dim=1)
    assert_product(kernel.linear(kernel.pack(forward), x, bias).t(), forward, x.t(), bias)
    backward = nm_prune(weight, "2:4", dim=0).t().contiguous()
    assert_product(kernel.linear(kernel.pack(backward), dy).t(), backward, dy.t())
    padded = torch.nn.functional.pad(dy.t(), (0, -tokens % 4))
    estimate = nm_prune(padded, "2:4", dim=1)[:, :tokens].contiguous()
    assert_product(kernel.matmul(kernel.pack(estimate), x), estimate, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["1:2", "1:4", "2:8", "1:16"])
def test_patterns(kernel, dtype, pattern):
    matrix, x = nm_prune(random(256, 512, dtype=dtype), pattern), random(64, 512, dtype=dtype)
    assert_product(kernel.linear(kernel.pack(matrix), x).t(), matrix, x.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (768, 3072), (4096, 11008)])
def test_packed_size(kernel, dtype, shape):
    packed = kernel.pack(nm_prune(random(*shape, dtype=dtype), "2:4"))
    assert packed.shape == (shape[0], shape[1] * 9 // 16)


def test_multiples_of_16(kernel):
    """What the probe found is what `supports` says, and it is right."""
    matrix, x = nm_prune(random(144, 176), "2:4"), random(72, 176)
    if kernel.supports(GemmKey("forward", 144, 176, 72, torch.bfloat16, NMPattern(2, 4), "cuda:0")):
        multiple = kernel.multiple(torch.device("cuda", 0))
        with pytest.raises(ValueError, match=f"not a multiple of {multiple}"):
            kernel.pack(matrix)
    else:
        assert_product(kernel.linear(kernel.pack(matrix), x).t(), matrix, x.t())


def test_minus_zero_and_what_is_no_number(kernel):
    weight, x = random(128, 128), random(16, 128)
    mask = nm_prune(weight, "2:4") != 0
    matrix = torch.where(mask, weight, 0)
    matrix[:, :4] = torch.tensor([-0.0, 0.0, 1.0, 0.0])
    assert_product(kernel.linear(kernel.pack(matrix), x).t(), matrix, x.t())
    matrix[3, 4:8] = torch.tensor([torch.nan, 0.0, torch.inf, 0.0])
    y = kernel.linear(kernel.pack(matrix), x)
    assert bool(y[:, 3].isnan().all())
    assert bool(y[:, :3].isfinite().all())


def test_results_do_not_change(kernel):
    matrix, x = nm_prune(random(512, 1024), "2:4"), random(256, 1024)
    first = kernel.linear(kernel.pack(matrix), x)
    assert all(torch.equal(kernel.linear(kernel.pack(matrix), x), first) for _ in range(10))


def test_guards(kernel):
    matrix = nm_prune(random(256, 256), "2:4")
    packed = kernel.pack(matrix)
    with pytest.raises(ValueError, match=r"the matrix to pack .* has strides"):
        kernel.pack(matrix.t())
    with pytest.raises(ValueError, match=r"x of shape .* has strides"):
        kernel.linear(packed, random(64, 512)[:, :256])
    with pytest.raises(ValueError, match=r"B of shape .* has strides"):
        kernel.matmul(packed, random(64, 256).t())
    with pytest.raises(ValueError, match=r"bias of shape .* has strides"):
        kernel.linear(packed, random(64, 256), random(512)[::2])
    with pytest.raises(ValueError, match="bring both to one dtype and device"):
        kernel.linear(packed, random(64, 256, dtype=torch.float16))
    with pytest.raises(ValueError, match="prune it by a select"):
        CuSparseLtKernel(check=True).pack(random(256, 256))


def test_another_thread_may_use_it(kernel):
    """The backward pass runs in a thread of its own (pytorch#113776)."""
    matrix, x = nm_prune(random(256, 256), "2:4"), random(64, 256).requires_grad_()

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


def test_the_registry_lists_it():
    key = GemmKey("forward", 256, 512, 128, torch.bfloat16, NMPattern(2, 4), "cuda:0")
    registry = KernelRegistry()
    reasons = {name: registry.reason(kernel, key) for name, kernel in registry.kernels.items()}
    assert reasons["reference"] == reasons["cusparselt"] == ""


@pytest.mark.parametrize("sizes", [(768, 512, 256), (512, 1024, 1000)])
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_the_algorithm_that_a_search_finds_is_right(kernel, gemm, sizes):
    rows, depth, columns = sizes
    key = GemmKey(gemm, rows, depth, columns, torch.bfloat16, NMPattern(2, 4), "cuda:0")
    if kernel.supports(key):
        pytest.skip(kernel.supports(key))
    registry = KernelRegistry([kernel])
    ways = registry.searched(kernel, key)
    assert ways[-1] is kernel
    assert [check(way, key) for way in ways] == [""] * len(ways)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (192, 320), (1024, 4096), (4096, 11008)])
def test_hopper_packs_in_one_pass_to_the_librarys_bits(kernel, dtype, shape):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the form is that of compute capability 9.0")
    assert kernel.device_probe.packs_alike(torch.device("cuda", 0))
    matrix = nm_prune(random(*shape, dtype=dtype), "2:4")
    matrix[::3, :8] = 0
    library = torch._cslt_compress(matrix).view(torch.int16).flatten()
    assert torch.equal(kernel.pack(matrix).view(torch.int16).flatten(), library)
