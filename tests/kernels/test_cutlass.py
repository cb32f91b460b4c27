import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from lightning_nm.kernels import CutlassKernel, KernelRegistry
from lightning_nm.kernels.backends.cutlass import CAPABILITIES, parts
from tests.fake_cutlass import CutlassOnCpu, FakeOps
from tests.fake_kernels import gemm_key
from tests.trapping_cslt import assert_product, normal, two_four

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
KERNEL = CutlassOnCpu()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_products(dtype, rows, depth, tokens, bias, seed):
    matrix, x = two_four(64 * rows, 64 * depth, dtype, seed), normal(tokens, 64 * depth, dtype=dtype, seed=seed + 1)
    bias = normal(64 * rows, dtype=dtype, seed=seed + 2) if bias else None
    y = KERNEL.linear(KERNEL.pack(matrix), x, bias)
    assert y.is_contiguous()
    assert_product(y.t(), matrix, x.t(), bias)
    gradient, other = two_four(64 * rows, 4 * tokens, dtype, seed), normal(4 * tokens, 24, dtype=dtype, seed=seed + 1)
    assert_product(KERNEL.matmul(KERNEL.pack(gradient), other), gradient, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["2:4", "1:2", "1:4", "2:8"])
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_values_and_metadata_come_back_from_one_tensor_bit_for_bit(dtype, pattern, rows, depth, seed):
    matrix = two_four(64 * rows, 64 * depth, dtype, seed, pattern)
    matrix[0, :4] = torch.tensor([0, torch.nan, 0, torch.inf])
    packed = KERNEL.pack(matrix)
    values, metadata = sparse_semi_structured_from_dense_cutlass(matrix)
    again = parts(packed)
    assert torch.equal(again[0].view(torch.int16), values.view(torch.int16))
    assert torch.equal(again[1], metadata)
    back = sparse_semi_structured_to_dense_cutlass(*again)
    assert torch.equal(back.view(torch.int16), matrix.view(torch.int16))


def test_the_calls_copy_no_operand():
    kernel, x, other, bias = CutlassOnCpu(), normal(16, 64), normal(64, 24), normal(64)
    packed = kernel.pack(two_four(64, 64))
    kernel.ops.calls.clear()
    kernel.linear(packed, x)
    kernel.linear(packed, x, bias)
    kernel.matmul(packed, other)
    for shift, values, metadata, dense in kernel.ops.calls:
        assert values.data_ptr() == packed.data_ptr()
        assert metadata.data_ptr() == packed.data_ptr() + 64 * 32 * 2
        assert dense.data_ptr() in (x.data_ptr(), other.data_ptr())
        assert shift is None or shift is bias
    assert [call[3].stride() for call in kernel.ops.calls] == [(1, 64), (1, 64), (24, 1)]


def test_sizes():
    assert KERNEL.probe(CPU) == ""
    assert KERNEL.supports(gemm_key(rows=96, depth=64)) == "rows=96 is not a multiple of 64"
    assert KERNEL.supports(gemm_key(rows=64, depth=32)) == "depth=32 is not a multiple of 64"
    assert KERNEL.supports(gemm_key("wgrad", rows=64, depth=20, columns=16)) == ""
    assert KERNEL.supports(gemm_key("wgrad", rows=64, depth=64, columns=12)) == "columns=12 is not a multiple of 8"
    with pytest.raises(ValueError, match="its rows are not a multiple of 64"):
        KERNEL.pack(two_four(32, 64))


def test_multiples_of_128_where_those_of_64_fail():
    class Tiled(FakeOps):
        def _product(self, bias, values, metadata, dense):
            return super()._product(bias, values, metadata, dense) * (1 if len(values) % 128 == 0 else 2)

    assert CutlassOnCpu(Tiled()).multiple(CPU) == 128
    assert KERNEL.multiple(CPU) == 64


@pytest.mark.parametrize("spoiled", ["bias", "metadata"])
def test_what_the_operators_get_wrong_fails_the_probe(spoiled):
    class Wrong(FakeOps):
        def _product(self, bias, values, metadata, dense):
            if spoiled == "bias":
                return super()._product(None, values, metadata, dense)
            return super()._product(bias, values, metadata.flip(0), dense)

    assert "is wrong by up to" in CutlassOnCpu(Wrong()).probe(CPU)


def test_an_operator_that_refuses_is_a_reason():
    class Refusing(FakeOps):
        def _product(self, *operands):
            raise RuntimeError("Supported only on GPUs with compute capability 8.x")

    assert CutlassOnCpu(Refusing()).probe(CPU) == "RuntimeError: Supported only on GPUs with compute capability 8.x"
    assert CutlassOnCpu(object()).probe(CPU).startswith("AttributeError")


def test_a_torch_without_the_conversion_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.sparse._semi_structured_conversions", None)
    assert "Error: import of torch.sparse._semi_structured_conversions halted" in CutlassOnCpu().probe(CPU)


def test_a_crowded_matrix():
    with pytest.raises(ValueError, match="prune it by a select"):
        CutlassOnCpu(check=True).pack(normal(64, 64))


def test_an_error_in_use_falls_back():
    kernel, matrix, x = CutlassOnCpu(), two_four(64, 64), normal(16, 64)
    registry, key = KernelRegistry([kernel]), gemm_key(rows=64, depth=64, columns=16)
    assert registry.reason(kernel, key) == ""
    kernel.ops = object()
    with pytest.warns(RuntimeWarning, match="'cutlass' is switched off"):
        y = registry.linear(kernel, key, matrix, x)
    assert_product(y.t(), matrix, x.t())


class TestMachines:
    @pytest.fixture
    def a100(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        return monkeypatch

    def test_a_cpu(self):
        assert CutlassKernel().probe(CPU) == "torch's CUTLASS kernel needs a CUDA device, not cpu"
        assert CutlassKernel().remark(CPU) == ""

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_ampere_and_ada(self, a100, capability):
        a100.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert CutlassKernel().machine_reason(torch.device("cuda:0")) == ""
        assert "was not tested on hardware" in CutlassKernel().remark(torch.device("cuda:0"))

    @pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0), (12, 0)])
    def test_others(self, a100, capability):
        a100.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert "is not one that torch's CUTLASS kernel knows" in CutlassKernel().probe(torch.device("cuda:0"))

    def test_the_real_operators_have_the_parameters_of_the_software(self):
        meta = torch.device("meta")
        packed, x = torch.empty(64, 72, dtype=torch.float16, device=meta), normal(16, 128).half().to(meta)
        values, metadata = parts(packed)
        assert torch._sparse_semi_structured_mm(values, metadata, x.t()).shape == (64, 16)
        bias = torch.empty(64, dtype=torch.float16, device=meta)
        assert torch._sparse_semi_structured_addmm(bias, values, metadata, x.t()).shape == (64, 16)
