"""torch's two operators for CUTLASS in software: torch's own way back from the packed form, then a dense product."""

import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from lightning_nm.kernels import CutlassKernel
from tests.trapping_cslt import row_major


class FakeOps:
    def __init__(self):
        self.calls = []

    def _sparse_semi_structured_mm(self, mat1, mat1_meta, mat2):
        return self._product(None, mat1, mat1_meta, mat2)

    def _sparse_semi_structured_addmm(self, input, mat1, mat1_meta, mat2):
        assert input.shape == mat1.shape[:1]
        assert input.dtype == mat1.dtype
        return self._product(input, mat1, mat1_meta, mat2)

    def _product(self, bias, values, metadata, dense):
        """Values and dense matrix may be of either layout; metadata and bias are read by sizes alone."""
        self.calls.append((bias, values, metadata, dense))
        (rows, half), (depth, columns) = values.shape, dense.shape
        assert (half, metadata.shape, metadata.dtype) == (depth // 2, (rows, depth // 16), torch.int16)
        assert (rows % 32, depth % 64, columns % 8) == (0, 0, 0)
        assert values.dtype == dense.dtype
        assert 1 in values.stride()
        assert 1 in dense.stride()
        assert values.data_ptr() % 16 == metadata.data_ptr() % 16 == dense.data_ptr() % 16 == 0
        matrix = sparse_semi_structured_to_dense_cutlass(values.contiguous(), row_major(metadata))
        result = matrix.float() @ dense.float()
        if bias is not None:
            result += row_major(bias)[:, None]
        return result.to(dense.dtype)


class CutlassOnCpu(CutlassKernel):
    """The kernel as it runs on a GPU, with the operators in software."""

    def __init__(self, ops=None, **arguments):
        super().__init__(**arguments)
        self.ops = ops or FakeOps()

    def machine_reason(self, device):
        return ""
