"""cusparselt: what a device must pass, machines where it does not run, versions."""

# ruff: noqa: F811

import copy
import ctypes
import pickle
from types import SimpleNamespace

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKey
from lightning_nm.kernels.gpu import cusparselt
from lightning_nm.kernels.gpu.cusparselt import CAPABILITIES, library_version
from lightning_nm.kernels.gpu.probe import DeviceProbe
from tests.kernels.test_cusparselt import CPU, DTYPES, h200, kernel, no_gpu  # noqa: F401 (fixtures)
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps, assert_product, normal, two_four


class TestProbe:
    def test_it_passes_once(self, kernel):
        assert kernel.probe(CPU) == ""
        made = len(kernel.ops.calls)
        assert made > 0
        assert kernel.probe(CPU) == ""
        assert len(kernel.ops.calls) == made

    def test_it_packs_groups_of_all_kinds_and_pruned_negative_weights(self, kernel):
        kernel.probe(CPU)
        matrices = [call[1] for call in kernel.ops.calls if call[0] == "compress"]
        assert {(tuple(matrix.shape), matrix.dtype) for matrix in matrices} == {
            (shape, dtype) for shape in ((256, 512), (192, 320), (144, 176)) for dtype in DTYPES
        }
        for matrix in matrices:
            assert set((matrix != 0).unflatten(1, (-1, 4)).sum(2).unique().tolist()) == {0, 1, 2}
            assert not bool(torch.signbit(matrix[matrix == 0]).any())

    @pytest.mark.parametrize("transposed", [True, False])
    def test_one_lost_value_fails_it(self, transposed):
        class Losing(TrappingOps):
            def _cslt_sparse_mm(self, packed, dense, **arguments):
                lossy = packed.clone()
                if arguments.get("transpose_result", False) == transposed:
                    lossy[10, 20] = 0
                return super()._cslt_sparse_mm(lossy, dense, **arguments)

        reason = KernelOnCpu(Losing()).probe(CPU)
        assert ("linear" if transposed else "matmul") in reason
        assert "is wrong by up to" in reason

    def test_a_bias_that_is_left_out_fails_it(self):
        class WithoutBias(TrappingOps):
            def _cslt_sparse_mm(self, packed, dense, bias=None, **arguments):
                return super()._cslt_sparse_mm(packed, dense, **arguments)

        assert "linear with bias" in KernelOnCpu(WithoutBias()).probe(CPU)

    def test_a_result_that_changes_fails_it(self):
        class Unsteady(TrappingOps):
            def _cslt_sparse_mm(self, *arguments, **keywords):
                result = super()._cslt_sparse_mm(*arguments, **keywords)
                calls = [call for call in self.calls if call[0] == "mm" and call[1] is arguments[0]]
                return result if len(calls) < 8 else result * torch.nan

        assert "is wrong by up to nan" in KernelOnCpu(Unsteady()).probe(CPU)

    def test_another_shape_fails_it(self):
        class Turned(TrappingOps):
            def _cslt_sparse_mm(self, *arguments, transpose_result=False, **keywords):
                return super()._cslt_sparse_mm(*arguments, **keywords).t()

        assert "returned shape (256, 256)" in KernelOnCpu(Turned()).probe(CPU)

    def test_another_packed_size_fails_it(self):
        class Padding(TrappingOps):
            def _cslt_compress(self, matrix):
                return torch.nn.functional.pad(super()._cslt_compress(matrix), (0, 8))

        assert "is packed into 75776 values, not 9/16" in KernelOnCpu(Padding()).probe(CPU)

    def test_another_packed_size_of_a_shape_that_was_not_probed(self, kernel):
        kernel.probe(CPU)
        kernel.ops._cslt_compress = lambda matrix: matrix.new_zeros(32 * 40)
        with pytest.raises(
            RuntimeError, match="has 1280 entries and not 32 x 36: the library pads this shape"
        ):
            kernel.pack(two_four(32, 64))

    def test_an_exception_is_a_reason_and_no_second_try(self):
        class Broken(TrappingOps):
            def _cslt_compress(self, matrix):
                self.calls.append(matrix)
                raise RuntimeError("architecture mismatch")

        kernel = KernelOnCpu(Broken())
        assert kernel.probe(CPU) == kernel.probe(CPU) == "RuntimeError: architecture mismatch"
        assert len(kernel.ops.calls) == 1

    def test_multiples_of_128_where_those_of_16_fail(self):
        class Tiled(TrappingOps):
            def _cslt_compress(self, matrix):
                if matrix.shape[0] % 128 or matrix.shape[1] % 128:
                    raise RuntimeError("not supported")
                return super()._cslt_compress(matrix)

        kernel = KernelOnCpu(Tiled())
        assert kernel.probe(CPU) == ""
        pattern = NMPattern(2, 4)
        key = GemmKey("forward", 144, 128, 16, torch.bfloat16, pattern, "cpu")
        assert kernel.supports(key) == "rows=144 is not a multiple of 128"
        assert kernel.supports(GemmKey("wgrad", 128, 144, 16, torch.bfloat16, pattern, "cpu")) == ""
        gradient, x = two_four(128, 144), normal(144, 16)
        assert_product(kernel.matmul(kernel.pack(gradient), x), gradient, x)

    @pytest.mark.parametrize(("works", "multiple"), [(128, 128), (64, 64), (32, 64), (16, 16)])
    def test_the_finest_rung_that_is_right_is_used(self, works, multiple):
        class Coarse(TrappingOps):
            def _cslt_sparse_mm(self, packed, dense, **keywords):
                right = len(packed) % works == dense.shape[0] % works == 0
                return super()._cslt_sparse_mm(packed, dense, **keywords) * (1 if right else 2)

        kernel = KernelOnCpu(Coarse())
        assert kernel.probe(CPU) == ""
        assert kernel.multiple(CPU) == multiple

    def test_ragged_shapes_that_are_wrong_are_not_used(self):
        class WrongIfRagged(TrappingOps):
            def _cslt_sparse_mm(self, packed, *arguments, **keywords):
                return super()._cslt_sparse_mm(packed, *arguments, **keywords) * (
                    1 if len(packed) % 128 == 0 else 2
                )

        kernel = KernelOnCpu(WrongIfRagged())
        assert kernel.probe(CPU) == ""
        assert kernel.multiple(CPU) == 128
        assert KernelOnCpu().multiple(CPU) == 16

    def test_autocast_of_the_caller_does_not_reach_it(self, kernel):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert kernel.probe(CPU) == ""
        assert all(call[1].dtype == call[2].dtype for call in kernel.ops.calls if call[0] == "mm")

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))]
    )
    def test_a_copy_has_to_pass_it_again(self, kernel, duplicate):
        kernel.probe(CPU)
        other = duplicate(kernel)
        other.ops.calls.clear()
        assert other.probe(CPU) == ""
        assert other.ops.calls
        assert duplicate(CuSparseLtKernel(algorithm=3)).algorithm == 3


class TestMachines:
    def test_a_cpu(self):
        reason = "cuSPARSELt needs a CUDA device, not cpu"
        assert CuSparseLtKernel().probe(CPU) == reason
        assert CuSparseLtKernel().remark(CPU) == ""
        key = GemmKey("forward", 32, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")
        assert CuSparseLtKernel().supports(key) == reason
        with pytest.raises(RuntimeError, match=f"cusparselt does not work on cpu: {reason}"):
            CuSparseLtKernel().pack(two_four(32, 64))

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
    def test_without_a_gpu(self, no_gpu, device):
        kernel = CuSparseLtKernel()
        assert kernel.probe(torch.device(device)) == "torch finds no CUDA device"
        assert kernel.remark(torch.device(device)) == ""

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_capabilities(self, h200, capability):
        h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert CuSparseLtKernel().machine_reason(torch.device("cuda:0")) == ""

    @pytest.mark.parametrize("capability", [(7, 5), (9, 5), (10, 3), (13, 0)])
    def test_other_capabilities(self, h200, capability):
        h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert f"{capability[0]}.{capability[1]} is not one" in CuSparseLtKernel().probe(
            torch.device("cuda:0")
        )

    def test_a_torch_without_the_library(self, h200):
        h200.setattr(torch.backends.cusparselt, "is_available", lambda: False)
        assert "was built without cuSPARSELt" in CuSparseLtKernel().probe(torch.device("cuda:0"))

    def test_rocm(self, h200):
        h200.setattr(torch.version, "hip", "7.0")
        assert "ROCm" in CuSparseLtKernel().probe(torch.device("cuda:0"))

    def test_a_device_without_index_is_the_current_one(self, h200):
        tried = []
        h200.setattr(
            DeviceProbe, "_compare", lambda probe, device, *sizes: tried.append(device) or ""
        )
        kernel = CuSparseLtKernel()
        assert kernel.probe(torch.device("cuda")) == kernel.probe(torch.device("cuda:0")) == ""
        assert tried == [torch.device("cuda:0")] * 3

    @pytest.mark.parametrize(
        ("version", "capability", "warns"),
        [(800, (9, 0), True), (801, (9, 0), False), (800, (8, 0), False), (None, (9, 0), False)],
    )
    def test_a_slow_version_is_remarked(self, h200, version, capability, warns):
        h200.setattr(cusparselt, "library_version", lambda: version)
        h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert (
            "install a torch that brings 0.8.1" in CuSparseLtKernel().remark(torch.device("cuda:0"))
        ) == warns


class TestVersion:
    """The library that is loaded is asked, not the header that torch was compiled with."""

    @pytest.fixture
    def loaded(self, h200):
        def load(status=0, parts=(0, 8, 1)):
            def get(part, value):
                value._obj.value = parts[part]
                return status

            h200.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cusparseLtGetProperty=get))

        h200.setattr(torch.backends.cusparselt, "version", lambda: 800)
        return load

    @pytest.mark.parametrize(
        ("parts", "version"), [((0, 8, 1), 801), ((0, 10, 0), 1000), ((1, 2, 3), 1203)]
    )
    def test_it_is_the_librarys(self, loaded, parts, version):
        loaded(parts=parts)
        assert library_version() == version

    def test_torchs_where_the_library_does_not_answer(self, loaded, h200):
        loaded(status=7)
        assert library_version() == 800

        def missing(name):
            raise OSError(name)

        for library in (missing, lambda name: object()):
            h200.setattr(ctypes, "CDLL", library)
            assert library_version() == 800

    def test_none_without_it(self, h200):
        h200.setattr(torch.backends.cusparselt, "is_available", lambda: False)
        assert library_version() is None
