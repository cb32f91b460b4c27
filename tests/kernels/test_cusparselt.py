"""cusparselt over operators in software that answer wrongly in silence, as the real ones do, and on other machines."""

import copy
import ctypes
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm.kernels import CuSparseLtKernel, GemmKey
from lightning_nm.kernels.gpu import cusparselt
from lightning_nm.kernels.gpu.cusparselt import CAPABILITIES, _claim_thread, library_version
from lightning_nm.kernels.gpu.probe import DeviceProbe
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps, assert_product, normal, two_four

CPU, CUDA, FIRST = torch.device("cpu"), torch.device("cuda"), torch.device("cuda:0")
BF16, HALF = torch.bfloat16, torch.float16


@pytest.fixture
def kernel():
    return KernelOnCpu()


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
    assert forward[2].data_ptr() == x.data_ptr()
    assert (forward[2].shape, forward[2].stride()) == ((64, 16), (1, 64))
    assert forward[3:] == (bias, None, 0, True)
    assert wgrad[2] is other
    assert wgrad[3:] == (None, None, 0, False)


# ------------------------------------------------------------------------------------------------------------ traps


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        # What the operators would take, and answer wrongly in silence.
        ("pack", (two_four(64, 64).t(),), r"to pack of shape \(64, 64\) has strides \(1, 64\)"),
        ("pack", (two_four(32, 128)[:, :64],), "pass it contiguous"),
        ("linear", (normal(16, 128)[:, :64],), r"x of shape .* has strides"),
        ("linear", (normal(16, 128)[::2, :64],), r"x of shape .* has strides"),
        ("linear", (normal(16, 64, dtype=HALF),), "bring both to one dtype and device"),
        ("linear", (normal(16, 64), normal(64)[::2]), r"bias of shape .* has strides"),
        ("linear", (normal(16, 64), normal(32, dtype=HALF)), r"bias is torch.float16 .*bfloat16"),
        ("matmul", (normal(64, 32)[:, :16],), r"B of shape .* has strides"),
        ("matmul", (normal(64, 16, dtype=HALF),), "bring both to one dtype and device"),
        # In float32 the hardware's pattern is 1:2.
        ("pack", (torch.zeros(32, 64),), "torch.float32, not one of torch.bfloat16, torch.float16"),
        ("pack", (torch.zeros(32, 64).char(),), "torch.int8, not one of torch.bfloat16"),
        ("pack", (torch.zeros(24, 64, dtype=BF16),), "rows that are not a multiple of 16"),
        ("pack", (torch.zeros(64, dtype=BF16),), "a matrix that is not empty"),
        ("pack", (torch.zeros(0, 64, dtype=BF16),), "not empty"),
        ("linear", (normal(16, 48),), "does not fit a packed matrix"),
        ("linear", (normal(16, 65),), "does not fit a packed matrix"),
        ("linear", (normal(2, 16, 64),), "x must be a matrix"),
        ("linear", (normal(0, 64),), "not empty"),
        ("linear", (normal(16, 64), normal(1)), r"bias must be of shape \(32,\)"),
        ("linear", (normal(1025)[1:].view(16, 64),), "not a multiple of 16 bytes: pass a clone"),
        ("matmul", (normal(128, 16),), "does not fit a packed matrix"),
        ("matmul", (normal(64, 12),), "columns that are not a multiple of 8"),
    ],
)
def test_operands_that_are_refused(kernel, name, operands, message):
    packed = () if name == "pack" else (kernel.pack(two_four(32, 64)),)
    with pytest.raises(ValueError, match=message):
        getattr(kernel, name)(*packed, *operands)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: packed.repeat(1, 2)[:, :36], "of shape .* has strides"),
        (lambda packed: packed.view(-1), "must be a matrix"),
    ],
)
def test_packed_matrices_that_are_refused(kernel, change, message):
    packed = change(kernel.pack(two_four(32, 64)))
    for product, dense in ((kernel.matmul, normal(64, 16)), (kernel.linear, normal(16, 64))):
        with pytest.raises(ValueError, match=f"the packed matrix {message}"):
            product(packed, dense)


def test_a_checked_kernel_refuses_what_is_not_two_four():
    """It counts minus zeros, which do no harm where no group holds three entries that are not +0."""
    kernel, matrix, other = KernelOnCpu(check=True), -two_four(32, 64).abs(), normal(64, 16)
    with pytest.raises(ValueError, match=r"512 groups of four hold .* prune it by a select"):
        kernel.pack(normal(32, 64))
    with pytest.raises(ValueError, match=r"counting -0.0"):
        kernel.pack(matrix * (matrix != 0))
    clean = torch.where(matrix != 0, matrix, 0)
    clean[:, :4] = torch.tensor([-0.0, 0.0, 1.0, 0.0])
    assert_product(kernel.matmul(kernel.pack(clean), other), clean, other)


def test_an_algorithm_that_is_wrong():
    """pytorch#155333."""
    kernel = KernelOnCpu(TrappingOps(wrong_algorithms=[20]), algorithm=20)
    assert "is wrong by up to 1" in kernel.probe(CPU)
    with pytest.raises(RuntimeError, match=r"cusparselt:20 does not work on cpu: .* is wrong"):
        kernel.pack(two_four(32, 64))
    assert KernelOnCpu(TrappingOps(wrong_algorithms=[20]), algorithm=7).probe(CPU) == ""


def test_a_second_device_in_a_thread():
    caught = []

    def use():
        for device in (FIRST, CPU, FIRST):
            _claim_thread(device)
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


def key(gemm="forward", rows=32, depth=64, dtype=BF16, device="cpu"):
    return GemmKey(gemm, rows, depth, 16, dtype, NMPattern(2, 4), device)


def test_names_algorithms_and_dtypes(kernel):
    assert CuSparseLtKernel().name == "cusparselt"
    assert CuSparseLtKernel(algorithm=7).name == "cusparselt:7"
    with pytest.raises(ValueError, match="algorithm=-1"):
        CuSparseLtKernel(algorithm=-1)
    for dtype in (torch.float32, torch.int8):
        assert f"{dtype} is not one of its dtypes" in kernel.supports(key(dtype=dtype))


# ------------------------------------------------------------------------------------------------------------ probe


def spoiled(mm=None, compress=None):
    """A kernel whose operators are functions of the right ones."""
    ops = TrappingOps()
    for name, spoil in (("_cslt_sparse_mm", mm), ("_cslt_compress", compress)):
        if spoil is not None:
            right = getattr(ops, name)
            setattr(ops, name, lambda *a, right=right, spoil=spoil, **k: spoil(right, *a, **k))
    return KernelOnCpu(ops)


def losing(transposed):
    def mm(right, packed, dense, transpose_result=False, **options):
        packed = packed.clone()
        if transpose_result == transposed:
            packed[10, 20] = 0
        return right(packed, dense, transpose_result=transpose_result, **options)

    return mm


def without_bias(right, packed, dense, bias=None, **options):
    return right(packed, dense, **options)


def turned(right, *operands, transpose_result=False, **options):
    return right(*operands, **options).t()


class Unsteady:
    """Wrong from the eighth GEMM on."""

    calls = 0

    def __call__(self, right, *operands, **options):
        self.calls += 1
        return right(*operands, **options) * (1 if self.calls < 8 else torch.nan)


def right_for(multiple):
    """Wrong for other sizes than multiples of a number."""

    def mm(right, packed, dense, **options):
        fits = len(packed) % multiple == dense.shape[0] % multiple == 0
        return right(packed, dense, **options) * (1 if fits else 2)

    return mm


def padding(right, matrix):
    return torch.nn.functional.pad(right(matrix), (0, 8))


@pytest.mark.parametrize(
    ("spoils", "words"),
    [
        ({"mm": losing(True)}, ["linear", "is wrong by up to"]),
        ({"mm": losing(False)}, ["matmul", "is wrong by up to"]),
        ({"mm": without_bias}, ["linear with bias"]),
        ({"mm": Unsteady()}, ["is wrong by up to nan"]),
        ({"mm": turned}, ["returned shape (256, 256)"]),
        ({"compress": padding}, ["is packed into 75776 values, not 9/16"]),
        ({"compress": lambda right, matrix: 1 // 0}, ["ZeroDivisionError: "]),
    ],
)
def test_what_fails_the_probe(spoils, words):
    kernel = spoiled(**spoils)
    reason = kernel.probe(CPU)
    assert all(word in reason for word in words)
    made = len(kernel.ops.calls)
    assert kernel.probe(CPU) == reason
    assert len(kernel.ops.calls) == made, "no second try"


@pytest.mark.parametrize(("works", "multiple"), [(128, 128), (64, 64), (32, 64), (16, 16)])
def test_the_finest_rung_that_is_right_is_used(works, multiple):
    kernel = spoiled(mm=right_for(works))
    assert kernel.probe(CPU) == ""
    assert kernel.multiple(CPU) == multiple


def test_multiples_of_128_where_those_of_16_fail():
    def tiled(right, matrix):
        if matrix.shape[0] % 128 or matrix.shape[1] % 128:
            raise RuntimeError("not supported")
        return right(matrix)

    kernel = spoiled(compress=tiled)
    assert kernel.probe(CPU) == ""
    assert kernel.supports(key(rows=144, depth=128)) == "rows=144 is not a multiple of 128"
    assert kernel.supports(key("wgrad", 128, 144)) == ""
    gradient, x = two_four(128, 144), normal(144, 16)
    assert_product(kernel.matmul(kernel.pack(gradient), x), gradient, x)


def test_it_packs_groups_of_all_kinds_and_pruned_negative_weights_once(kernel):
    with torch.autocast("cpu", dtype=BF16):  # of the caller
        assert kernel.probe(CPU) == ""
    made = len(kernel.ops.calls)
    assert kernel.probe(CPU) == ""
    assert len(kernel.ops.calls) == made
    assert all(call[1].dtype == call[2].dtype for call in kernel.ops.calls if call[0] == "mm")
    matrices = [call[1] for call in kernel.ops.calls if call[0] == "compress"]
    assert {(tuple(matrix.shape), matrix.dtype) for matrix in matrices} == {
        (shape, dtype) for shape in ((256, 512), (192, 320), (144, 176)) for dtype in (BF16, HALF)
    }
    for matrix in matrices:
        assert set((matrix != 0).unflatten(1, (-1, 4)).sum(2).unique().tolist()) == {0, 1, 2}
        assert not bool(torch.signbit(matrix[matrix == 0]).any())


def test_another_packed_size_of_a_shape_that_was_not_probed(kernel):
    kernel.probe(CPU)
    kernel.ops._cslt_compress = lambda matrix: matrix.new_zeros(32 * 40)
    message = "has 1280 entries and not 32 x 36: the library pads this shape"
    with pytest.raises(RuntimeError, match=message):
        kernel.pack(two_four(32, 64))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))]
)
def test_a_copy_has_to_pass_it_again(kernel, duplicate):
    kernel.probe(CPU)
    other = duplicate(kernel)
    other.ops.calls.clear()
    assert other.probe(CPU) == ""
    assert other.ops.calls
    assert duplicate(CuSparseLtKernel(algorithm=3)).algorithm == 3


# --------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(h200, capability):
    h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert CuSparseLtKernel().machine_reason(FIRST) == ""


@pytest.mark.parametrize(
    ("owner", "name", "value", "device", "reason"),
    [
        (torch.version, "hip", None, CPU, "cuSPARSELt needs a CUDA device, not cpu"),
        *(
            (torch.cuda, "is_available", lambda: False, device, "torch finds no CUDA device")
            for device in (CUDA, FIRST, torch.device("cuda:7"))
        ),
        *(
            (
                torch.cuda,
                "get_device_capability",
                lambda device, capability=capability: capability,
                FIRST,
                f"{capability[0]}.{capability[1]} is not one",
            )
            for capability in ((7, 5), (9, 5), (10, 3), (13, 0))
        ),
        (
            torch.backends.cusparselt,
            "is_available",
            lambda: False,
            FIRST,
            "was built without cuSPARSELt",
        ),
        (torch.version, "hip", "7.0", FIRST, "ROCm"),
    ],
)
def test_machines_where_it_does_not_run(h200, owner, name, value, device, reason):
    h200.setattr(owner, name, value)
    kernel = CuSparseLtKernel()
    assert reason in kernel.probe(device)
    assert reason in kernel.supports(key(device=str(device)))
    assert kernel.remark(device) == ""


def test_it_packs_nothing_where_it_does_not_run():
    with pytest.raises(RuntimeError, match="cusparselt does not work on cpu: cuSPARSELt needs"):
        CuSparseLtKernel().pack(two_four(32, 64))


def test_a_device_without_index_is_the_current_one(h200):
    tried = []
    h200.setattr(DeviceProbe, "_compare", lambda probe, device, *sizes: tried.append(device) or "")
    kernel = CuSparseLtKernel()
    assert kernel.probe(CUDA) == kernel.probe(FIRST) == ""
    assert tried == [FIRST] * 3


@pytest.mark.parametrize(
    ("version", "capability", "warns"),
    [(800, (9, 0), True), (801, (9, 0), False), (800, (8, 0), False), (None, (9, 0), False)],
)
def test_a_slow_version_is_remarked(h200, version, capability, warns):
    h200.setattr(cusparselt, "library_version", lambda: version)
    h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    remark = CuSparseLtKernel().remark(FIRST)
    assert ("install a torch that brings 0.8.1" in remark) == warns


def loaded(status, parts):
    """The library, as it answers for its parts of the version."""

    def get(part, value):
        value._obj.value = parts[part]
        return status

    return SimpleNamespace(cusparseLtGetProperty=get)


def missing():
    raise OSError


@pytest.mark.parametrize(
    ("load", "version"),
    [
        (lambda: loaded(0, (0, 8, 1)), 801),
        (lambda: loaded(0, (0, 10, 0)), 1000),
        (lambda: loaded(0, (1, 2, 3)), 1203),
        # torch's own where the library does not answer.
        (lambda: loaded(7, (0, 8, 1)), 555),
        (missing, 555),
        (object, 555),
    ],
)
def test_the_version_is_that_of_the_loaded_library(h200, load, version):
    """Not that of the header that torch was compiled with."""
    h200.setattr(torch.backends.cusparselt, "version", lambda: 555)
    h200.setattr(ctypes, "CDLL", lambda name: load())
    assert library_version() == version
    h200.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert library_version() is None
