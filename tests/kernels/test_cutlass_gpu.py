"""torch's CUTLASS kernels: run with ``pytest -m gpu`` on compute capability 8.x. Nobody has yet."""

import pytest
import torch

from lightning_nm.functional import nm_prune
from lightning_nm.kernels import CutlassKernel
from lightning_nm.kernels.backends.cutlass import CAPABILITIES
from tests.trapping_cslt import assert_product, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [16, 50, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_the_three_gemms(dtype, tokens, bias):
    kernel = CutlassKernel()
    if torch.cuda.get_device_capability() not in CAPABILITIES:
        assert "is not one that torch's CUTLASS kernel knows" in kernel.probe(torch.device("cuda"))
        return
    assert kernel.probe(torch.device("cuda")) == ""
    weight, x, dy = (normal(*shape, dtype=dtype).cuda() for shape in ((768, 512), (tokens, 512), (tokens, 768)))
    bias = normal(768, dtype=dtype).cuda() if bias else None
    forward = nm_prune(weight, "2:4", dim=1)
    assert_product(kernel.linear(kernel.pack(forward), x, bias).t(), forward, x.t(), bias)
    backward = nm_prune(weight, "2:4", dim=0).t().contiguous()
    assert_product(kernel.linear(kernel.pack(backward), dy).t(), backward, dy.t())
    padded = torch.nn.functional.pad(dy.t(), (0, -tokens % 4))
    estimate = nm_prune(padded, "2:4", dim=1)[:, :tokens].contiguous()
    assert_product(kernel.matmul(kernel.pack(estimate), x), estimate, x)
