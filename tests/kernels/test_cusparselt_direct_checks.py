"""cusparselt-direct: what a device must pass, and machines where it does not run."""

# ruff: noqa: F811

import copy
import importlib.util
import inspect
import pickle
import subprocess
import sys

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtDirectKernel, CuSparseLtKernel, GemmKey, KernelRegistry
from tests.kernels.test_cusparselt_direct import (  # noqa: F401 (fixtures)
    CPU,
    DTYPES,
    KERNELS,
    fake,
    library,
    multiply,
    probed,
)
from tests.support.fake_cusparselt import DirectOnCpu, FakeCuSparseLt
from tests.support.trapping_cslt import assert_product, normal, two_four


class TestProbe:
    def test_a_plan_that_keeps_its_first_bias_fails_it(self):
        assert "linear with bias" in DirectOnCpu(FakeCuSparseLt(plan_keeps_bias=True)).probe(CPU)

    def test_another_packed_size_fails_it(self):
        fake = FakeCuSparseLt(padding=2)
        assert "values, not 9/16 of its own" in DirectOnCpu(fake).probe(CPU)
        fake.padding = -2
        assert DirectOnCpu(fake).probe(CPU) == ""  # a last row that is not full, as torch has it

    def test_another_packed_size_of_a_shape_that_was_not_probed(self, probed, fake):
        fake.padding = 64
        with pytest.raises(RuntimeError, match="the library pads this shape"):
            probed.pack(two_four(32, 64))

    @pytest.mark.parametrize("step", ["sp_mma_compress2", "matmul_plan_init", "matmul"])
    def test_an_error_is_a_reason(self, step):
        reason = DirectOnCpu(FakeCuSparseLt(broken=[step])).probe(CPU)
        assert reason == "FakeError: CUSPARSE_STATUS_NOT_SUPPORTED"

    @pytest.mark.parametrize("step", ["init", "get_property"])
    def test_a_library_that_does_not_start_is_a_reason(self, step):
        kernel = DirectOnCpu(FakeCuSparseLt(broken=[step]))
        assert (
            kernel.probe(CPU)
            == "cuSPARSELt does not start: FakeError: CUSPARSE_STATUS_NOT_SUPPORTED"
        )

    def test_an_algorithm_that_is_wrong_fails_it(self):
        assert "is wrong by up to 1" in DirectOnCpu(algorithm=20).probe(CPU)
        assert DirectOnCpu(algorithm=7).probe(CPU) == ""
        assert DirectOnCpu(algorithm=7).name == "cusparselt-direct:7"

    @pytest.mark.parametrize(
        ("version", "known"), [(800, True), (801, True), (711, False), (900, False), (1000, False)]
    )
    def test_versions(self, version, known):
        reason = DirectOnCpu(FakeCuSparseLt(version)).probe(CPU)
        words = f"cuSPARSELt {version // 1000}.{version // 100 % 10}.{version % 100} is not one of"
        assert reason.startswith(words) != known
        assert known or reason.endswith("0.8.0, 0.8.1: any_version=True tries it")
        assert DirectOnCpu(FakeCuSparseLt(version), any_version=True).probe(CPU) == ""

    def test_an_error_in_use_falls_back(self, probed, fake):
        registry = KernelRegistry([probed])
        key = GemmKey("forward", 32, 64, 16, torch.bfloat16, NMPattern(2, 4), "cpu")
        matrix, x = two_four(32, 64), normal(16, 64)
        fake.broken = {"matmul"}
        with pytest.warns(
            RuntimeWarning, match=r"'cusparselt-direct' is switched off .*STATUS_NOT_SUPP"
        ):
            y = registry.attempt(
                probed, key, lambda: probed.linear(probed.pack(matrix), x), lambda: x @ matrix.t()
            )
        assert_product(y.t(), matrix, x.t())

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))]
    )
    def test_a_copy_shares_nothing(self, duplicate):
        other = duplicate(CuSparseLtDirectKernel(algorithm=3, any_version=True))
        assert (other.name, other.any_version) == ("cusparselt-direct:3", True)
        assert other.probe(CPU) == "cuSPARSELt needs a CUDA device, not cpu"

    def test_a_crowded_matrix(self):
        with pytest.raises(ValueError, match="prune it by a select"):
            DirectOnCpu(check=True).pack(normal(32, 64))


class TestMachines:
    @pytest.fixture
    def h200(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(CuSparseLtDirectKernel, "stream", DirectOnCpu.stream)
        return monkeypatch

    def test_without_nvmath(self, h200):
        h200.setitem(sys.modules, "nvmath.bindings.cusparseLt", None)
        h200.setitem(sys.modules, "nvmath.bindings", None)
        h200.setitem(sys.modules, "nvmath", None)
        reason = CuSparseLtDirectKernel().probe(torch.device("cuda:0"))
        assert reason.startswith("nvmath-python cannot be imported (")
        assert reason.endswith("pip install -e '.[cuda]' in a checkout of lightning_nm")
        assert CuSparseLtDirectKernel().remark(torch.device("cuda:0")) == ""

    @pytest.mark.parametrize(("version", "slow"), [(800, True), (801, False)])
    def test_with_nvmath(self, h200, version, slow):
        h200.setitem(sys.modules, "nvmath", object())
        h200.setitem(sys.modules, "nvmath.bindings", object())
        h200.setitem(sys.modules, "nvmath.bindings.cusparseLt", FakeCuSparseLt(version))
        kernel = CuSparseLtDirectKernel()
        assert kernel.machine_reason(torch.device("cuda:0")) == ""
        assert ("performance regression" in kernel.remark(torch.device("cuda:0"))) == slow

    def test_unknown_machines(self, h200):
        h200.setattr(torch.cuda, "get_device_capability", lambda device: (13, 0))
        assert "13.0 is not one" in CuSparseLtDirectKernel().probe(torch.device("cuda:0"))
        assert CuSparseLtDirectKernel().probe(CPU) == CuSparseLtKernel().probe(CPU)

    @pytest.mark.slow
    def test_importing_the_package_does_not_import_nvmath(self):
        code = "import sys, lightning_nm.kernels; print([name for name in sys.modules if name.startswith('nvmath')])"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == "[]"


@pytest.mark.skipif(not importlib.util.find_spec("nvmath"), reason="nvmath-python is not installed")
def test_the_fake_has_the_real_parameters():
    import nvmath.bindings.cusparseLt as real

    for name, function in vars(FakeCuSparseLt).items():
        if isinstance(function, enum := type(FakeCuSparseLt.MatmulAlg)):
            assert {member.name: member.value for member in function}.items() <= {
                member.name: member.value for member in getattr(real, name)
            }.items(), enum
        elif not name.startswith("_") and name != "names":
            parameters = list(inspect.signature(function).parameters)[1:]
            assert parameters == list(inspect.signature(getattr(real, name)).parameters), name
