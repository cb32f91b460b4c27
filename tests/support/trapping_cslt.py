"""torch's two cuSPARSELt operators in software, with every trap that the real ones set in silence.

Memory is read by sizes alone: A and what is packed are row-major, B is row-major if it is contiguous and else the
transpose of a row-major matrix, a bias is dense, and bits are taken for numbers of A's dtype. A group's third nonzero
is dropped.
"""

from types import SimpleNamespace

import torch

from benchmarks.gpu.simulated import compress, expand
from lightning_nm.functional import nm_prune
from lightning_nm.kernels.gpu.cusparselt import CuSparseLtKernel


class TrappingOps:
    def __init__(self, wrong_algorithms=(), found=0):
        self.wrong_algorithms = wrong_algorithms
        self.found = found  # by the library's search
        self.calls = []
        self._C = SimpleNamespace(_cusparselt=self)

    def mm_search(self, packed, dense, bias, alpha, dtype, transpose_result):
        self._cslt_sparse_mm(packed, dense, transpose_result=transpose_result)
        return self.found, -1, 2, 21

    def _cslt_compress(self, matrix):
        self.calls.append(("compress", matrix))
        return compress(row_major(matrix))

    def _cslt_sparse_mm(
        self, packed, dense, bias=None, alpha=None, alg_id=0, transpose_result=False
    ):
        self.calls.append(("mm", packed, dense, bias, alpha, alg_id, transpose_result))
        depth, columns = dense.shape
        matrix = expand(row_major(packed), depth)
        if dense.is_contiguous():
            other = dense.view(packed.dtype)
        else:
            other = dense.as_strided((columns, depth), (depth, 1)).view(packed.dtype).t()
        result = matrix.float() @ other.float()
        if bias is not None:
            result += row_major(bias.view(packed.dtype)).unsqueeze(1)
        result = result.to(dense.dtype)
        if alg_id in self.wrong_algorithms:
            result[0] += 1
        return result.t().contiguous() if transpose_result else result


class KernelOnCpu(CuSparseLtKernel):
    """The kernel as it runs on a GPU, with the operators in software."""

    device_type = "cpu"

    def __init__(self, ops=None, **arguments):
        super().__init__(**arguments)
        self.ops = ops or TrappingOps()

    def machine_reason(self, device):
        return ""


def row_major(tensor):
    """The memory of a tensor, read without its strides."""
    strides = [tensor.shape[axis + 1 :].numel() for axis in range(tensor.dim())]
    return tensor.as_strided(tensor.shape, strides)


def two_four(rows, depth, dtype=torch.bfloat16, seed=0, pattern="2:4"):
    """Random values, N:M along the depth."""
    return nm_prune(normal(rows, depth, dtype=dtype, seed=seed), pattern)


def normal(*shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(result, matrix, other, bias=None):
    """``result`` is ``matrix @ other + bias``, summed in float32 and rounded to its dtype before and after the bias."""
    exact, size = matrix.double() @ other.double(), matrix.double().abs() @ other.double().abs()
    rounded = exact.abs()
    if bias is not None:
        exact, rounded = exact + bias.double()[:, None], rounded + bias.double().abs()[:, None]
    sums = torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps * matrix.shape[1]
    assert result.shape == exact.shape
    assert result.is_contiguous() or result.t().is_contiguous()
    error = (result.double() - exact).abs()
    assert bool((error <= torch.finfo(result.dtype).eps * rounded + sums * size).all())
