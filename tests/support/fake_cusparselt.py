"""cuSPARSELt as nvmath binds it, in software, on real pointers: it knows what was made and what is destroyed.

The functions have the real ones' parameters. Whatever the real library would take for granted is checked.
"""

import ctypes
import enum
import inspect
import math
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from lightning_nm.kernels import CuSparseLtDirectKernel
from lightning_nm.kernels.gpu.simulated import compress, expand
from lightning_nm.kernels.gpu.two_four import packed_width

STREAM = 0x57EA
ROW, COLUMN = 2, 1
DTYPES = {2: torch.float16, 14: torch.bfloat16}


class DirectOnCpu(CuSparseLtDirectKernel):
    """The kernel as it runs on a GPU, with the library in software."""

    device_type = "cpu"

    def __init__(self, library=None, **arguments):
        super().__init__(**arguments)
        self.library = library or FakeCuSparseLt()

    def binding(self):
        return self.library

    def machine_reason(self, device):
        return self.library_reason(device)

    @contextmanager
    def stream(self, device):
        yield 0, STREAM


class FakeError(Exception):
    pass


def memory(pointer, shape, dtype):
    assert pointer % 16 == 0
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype).view(shape)


def logged(function):
    signature = inspect.signature(function)

    def call(self, *arguments):
        named = dict(list(signature.bind(self, *arguments).arguments.items())[1:])
        self.calls.append((function.__name__, named))
        if function.__name__ in self.broken:
            raise FakeError("CUSPARSE_STATUS_NOT_SUPPORTED")
        if "handle" in named:
            assert self.alive[named["handle"]].thread == threading.get_ident(), (
                "a handle belongs to a thread"
            )
        return function(self, *arguments)

    call.__signature__, call.__wrapped__ = signature, function
    return call


class FakeCuSparseLt:
    Sparsity = enum.IntEnum("Sparsity", {"SPARSITY_50_PERCENT": 0})
    ComputeType = enum.IntEnum("ComputeType", {"COMPUTE_32F": 2})
    MatmulAlg = enum.IntEnum("MatmulAlg", {"DEFAULT": 0})
    MatmulAlgAttribute = enum.IntEnum(
        "MatmulAlgAttribute", {"CONFIG_ID": 0, "SPLIT_K": 3, "SPLIT_K_MODE": 4}
    )
    MatmulDescAttribute = enum.IntEnum("MatmulDescAttribute", {"BIAS_POINTER": 8})

    def __init__(
        self,
        version=801,
        padding=0,
        workspace=4096,
        broken=(),
        plan_keeps_bias=False,
        fastest=(0, 1, -1),
    ):
        self.installed = version
        self.padding = padding
        self.workspace = workspace
        self.broken = set(broken)
        self.plan_keeps_bias = plan_keeps_bias
        self.fastest = fastest
        self.calls = []
        self.alive = {}
        self.made = 0

    def names(self):
        return [name for name, _ in self.calls]

    def _make(self, kind, **facts):
        self.made += 1
        self.alive[1024 * self.made] = SimpleNamespace(kind=kind, **facts)
        return 1024 * self.made

    def _destroy(self, pointer, *kinds):
        assert self.alive.pop(pointer).kind in kinds

    @logged
    def init(self):
        return self._make("handle", thread=threading.get_ident())

    @logged
    def destroy(self, handle_ptr):
        self._destroy(handle_ptr, "handle")

    @logged
    def get_property(self, property_type):
        return (self.installed // 1000, self.installed // 100 % 10, self.installed % 100)[
            property_type
        ]

    @logged
    def dense_descriptor_init(self, handle, rows, cols, ld, alignment, value_type, order):
        assert (alignment, ld) == (16, cols if order == ROW else rows)
        return self._make("dense", rows=rows, cols=cols, dtype=DTYPES[value_type], order=order)

    @logged
    def structured_descriptor_init(
        self, handle, rows, cols, ld, alignment, value_type, order, sparsity
    ):
        assert (ld, alignment, order, sparsity) == (cols, 16, ROW, 0)
        return self._make("sparse", rows=rows, cols=cols, dtype=DTYPES[value_type])

    @logged
    def mat_descriptor_destroy(self, mat_descr_ptr):
        self._destroy(mat_descr_ptr, "dense", "sparse")

    @logged
    def matmul_descriptor_init(self, handle, op_a, op_b, mat_a, mat_b, mat_c, mat_d, compute_type):
        a, b, c = (self.alive[pointer] for pointer in (mat_a, mat_b, mat_c))
        k, n = (b.cols, b.rows) if op_b else (b.rows, b.cols)
        assert (op_a, compute_type, mat_c, a.kind) == (0, 2, mat_d, "sparse")
        assert (a.cols, a.rows, n) == (k, c.rows, c.cols)
        assert a.dtype == b.dtype == c.dtype
        return self._make("matmul", parts=(mat_a, mat_b, mat_c), transposed=bool(op_b), bias=0)

    @logged
    def matmul_desc_set_attribute(self, handle, matmul_descr, matmul_attribute, data, data_size):
        assert (matmul_attribute, data_size) == (8, 8)
        self.alive[matmul_descr].bias = ctypes.c_void_p.from_address(data).value

    @logged
    def matmul_descriptor_destroy(self, matmul_descr_ptr):
        self._destroy(matmul_descr_ptr, "matmul")

    @logged
    def matmul_alg_selection_init(self, handle, matmul_descr, alg):
        assert alg == 0
        return self._make("selection", matmul=matmul_descr, attributes={}, at_plan=None)

    @logged
    def matmul_alg_set_attribute(self, handle, alg_selection, attribute, data, data_size):
        assert data_size == 4
        self.alive[alg_selection].attributes[int(attribute)] = ctypes.c_int32.from_address(
            data
        ).value

    @logged
    def matmul_alg_get_attribute(self, handle, alg_selection, attribute, data, data_size):
        assert data_size == 4
        ctypes.c_int32.from_address(data).value = self.alive[alg_selection].attributes[
            int(attribute)
        ]

    @logged
    def matmul_alg_selection_destroy(self, alg_selection_ptr):
        self._destroy(alg_selection_ptr, "selection")

    @logged
    def matmul_plan_init(self, handle, matmul_descr, alg_selection):
        assert self.alive[alg_selection].matmul == matmul_descr
        self.alive[alg_selection].at_plan = dict(self.alive[alg_selection].attributes)
        bias = self.alive[matmul_descr].bias
        return self._make("plan", matmul=matmul_descr, selection=alg_selection, bias=bias)

    @logged
    def matmul_plan_destroy(self, plan_ptr):
        self._destroy(plan_ptr, "plan")

    @logged
    def matmul_get_workspace(self, handle, plan):
        assert self.alive[plan].kind == "plan"
        return self.workspace

    @logged
    def sp_mma_compressed_size2(self, handle, sparse_mat_descr):
        a = self.alive[sparse_mat_descr]
        return a.rows * packed_width(
            a.cols, a.dtype
        ) * a.dtype.itemsize + self.padding, self.workspace

    @logged
    def sp_mma_compress2(
        self,
        handle,
        sparse_mat_descr,
        is_sparse_a,
        op,
        d_dense,
        d_compressed,
        d_compressed_buffer,
        stream,
    ):
        a = self.alive[sparse_mat_descr]
        assert (is_sparse_a, op, stream) == (1, 0, STREAM)
        self._poison(d_compressed_buffer)
        packed = compress(memory(d_dense, (a.rows, a.cols), a.dtype))
        memory(d_compressed, packed.shape, a.dtype).copy_(packed)

    @logged
    def matmul(
        self, handle, plan, alpha, d_a, d_b, beta, d_c, d_d, workspace, streams, num_streams
    ):
        plan = self.alive[plan]
        descriptor, selection = self.alive[plan.matmul], self.alive[plan.selection]
        a, b, c = (self.alive[part] for part in descriptor.parts)
        assert (ctypes.c_void_p.from_address(streams).value, num_streams) == (STREAM, 1)
        assert d_c == d_d
        alpha, beta = (ctypes.c_float.from_address(pointer).value for pointer in (alpha, beta))
        assert (alpha, beta) == (1, 0)
        self._poison(workspace)
        matrix = expand(
            memory(d_a, (a.rows, packed_width(a.cols, a.dtype)), a.dtype), a.cols
        ).float()
        dense = memory(d_b, (b.rows, b.cols), b.dtype).float()
        result = matrix @ (dense.t() if descriptor.transposed else dense)
        if pointer := plan.bias if self.plan_keeps_bias else descriptor.bias:
            result += memory(pointer, (a.rows,), a.dtype).float()[:, None]
        if selection.attributes[0] == 20 or (selection.attributes[0] == 21 and pointer):
            result[0] += 1
        if c.order == COLUMN:
            memory(d_d, (c.cols, c.rows), c.dtype).copy_(result.t())
        else:
            memory(d_d, (c.rows, c.cols), c.dtype).copy_(result)

    @logged
    def matmul_search(
        self, handle, plan, alpha, d_a, d_b, beta, d_c, d_d, workspace, streams, num_streams
    ):
        type(self).matmul.__wrapped__(
            self, handle, plan, alpha, d_a, d_b, beta, d_c, d_d, workspace, streams, num_streams
        )
        selection = self.alive[self.alive[plan].selection]
        selection.attributes = dict(zip((0, 3, 4), self.fastest, strict=True))

    def _poison(self, pointer):
        """Whatever lies where the workspace should be is lost."""
        if self.workspace:
            memory(pointer, (self.workspace,), torch.uint8).fill_(255)
