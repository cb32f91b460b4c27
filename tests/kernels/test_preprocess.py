"""What operands are brought to by torch operations, and what their Triton kernels share with them."""

import sys

import pytest
import torch
from torch import nn

from lightning_nm import MVUE, NMSparsifier
from lightning_nm.functional import fold_seed, is_nm, mask_storage
from lightning_nm.kernels import operands as preprocess
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.operands import (
    masked_operand,
    mvue_transposed,
    permuted_columns,
)
from tests.support.triton_kernels import masked_backward

SEED = fold_seed(0, "preprocess")


def masked_pair(weight, marks, dtype, permutation=None, *, own_backward):
    return (
        masked_operand(weight, marks, dtype),
        masked_backward(weight, marks, dtype, permutation, own_backward=own_backward),
    )


@pytest.fixture(autouse=True)
def _torch_operations(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def bi_mask_layer(out=24, columns=16):
    """A trained layer's weight, masks and permutation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, out, bias=False))
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    return next(iter(sparsifier.layers.values()))


def test_marks_are_the_layers():
    assert (mask_storage.FORWARD_BIT, mask_storage.BACKWARD_BIT) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pair_is_the_layers_two_weights(dtype):
    layer = bi_mask_layer()
    permutation = torch.randperm(24)
    forward, backward = masked_pair(
        layer.weight, layer.masks.bits, dtype, permutation, own_backward=True
    )
    assert torch.equal(forward, layer.forward_weight().to(dtype))
    assert torch.equal(backward, layer.backward_weight()[permutation].t().to(dtype))
    for result in (forward, backward):
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert not result.requires_grad
        assert not (result.eq(0) & result.signbit()).any()


def test_a_pair_in_the_layers_order_is_sparse_along_rows():
    layer = bi_mask_layer()
    forward, backward = masked_pair(
        layer.weight,
        layer.masks.bits,
        torch.bfloat16,
        layer.masks.permutation,
        own_backward=layer.masks.has_backward,
    )
    assert layer.masks.has_backward
    assert is_nm(forward, "2:4", -1)
    assert is_nm(backward, "2:4", -1)
    assert backward.count_nonzero() > 0


def test_without_a_backward_mask_both_are_the_forward_weight():
    layer = bi_mask_layer()
    forward, backward = masked_pair(
        layer.weight, layer.masks.bits, torch.float32, own_backward=False
    )
    assert torch.equal(forward, layer.forward_weight())
    assert torch.equal(backward, forward.t())


@pytest.mark.parametrize(
    ("dtype", "own_backward", "permuted", "transposed"),
    [
        (torch.float64, False, False, False),
        (torch.float64, True, True, True),
        (torch.float32, True, False, True),
        (torch.float32, False, True, False),
        (torch.bfloat16, True, True, False),
        (torch.bfloat16, False, False, True),
    ],
)
def test_strides(dtype, own_backward, permuted, transposed):
    """A weight that lies as [in, out] gives what a copy of it gives."""
    layer = bi_mask_layer()
    weight, marks = layer.weight.detach(), layer.masks.bits
    permutation = torch.randperm(24) if permuted else None
    expected = masked_pair(weight, marks, dtype, permutation, own_backward=own_backward)
    if transposed:
        weight, marks = (x.t().contiguous().t() for x in (weight, marks))
    pair = masked_pair(weight, marks, dtype, permutation, own_backward=own_backward)
    for found, wanted in zip(pair, expected, strict=True):
        assert found.is_contiguous()
        assert found.dtype == dtype
        assert torch.equal(found, wanted)


def test_a_single_row_may_be_strided_as_it_likes():
    weight, marks = torch.randn(1, 4), torch.full((4, 1), 3, dtype=torch.uint8).t()
    assert weight.stride() != marks.stride()
    assert torch.equal(masked_operand(weight, marks, torch.float32), weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_permuted_columns_keep_the_product(dtype):
    """dX from the permuted operands is dX from the plain ones, with the layer's own permutation."""
    layer = bi_mask_layer()
    grad = torch.randint(-4, 5, (7, 24)).to(dtype)
    weight = torch.randint(-4, 5, layer.weight.shape).to(dtype)
    backward = masked_backward(
        weight, layer.masks.bits, dtype, layer.masks.permutation, own_backward=True
    )
    permuted = permuted_columns(grad.requires_grad_(), layer.masks.permutation)
    assert permuted.is_contiguous()
    assert not permuted.requires_grad
    assert torch.equal(permuted, grad[:, layer.masks.permutation])
    plain = masked_backward(weight, layer.masks.bits, dtype, own_backward=True)
    assert torch.equal(permuted @ backward.t(), grad @ plain.t())


def test_an_estimate_may_bring_the_permuted_columns():
    grad, gather = torch.randn(37, 8), torch.randperm(8)
    estimate, permuted = mvue_transposed(grad, SEED, "2:4", gather=gather)
    assert torch.equal(estimate, mvue_transposed(grad, SEED, "2:4")[0])
    assert torch.equal(permuted, grad[:, gather])


@pytest.mark.parametrize(
    ("tokens", "pattern", "dtype"),
    [
        (16, "2:4", torch.float64),
        (37, "2:4", torch.bfloat16),
        (2, "2:4", torch.float16),
        (37, "1:2", torch.float32),
        (2, "1:4", torch.bfloat16),
        (16, "2:16", torch.float16),
        (37, "2:16", torch.float64),
        (2, "3:8", torch.float32),
        (37, "3:8", torch.float16),
    ],
)
def test_the_estimate_is_the_estimators(tokens, pattern, dtype):
    torch.manual_seed(tokens)
    grad = torch.randn(tokens, 5, dtype=dtype)
    grad[torch.rand(grad.shape) < 0.3] = 0
    grad[0, 0], grad[-1, 1] = float("nan"), float("-inf")
    estimate = MVUE(pattern).estimate(None, grad, SEED)
    result, _ = mvue_transposed(grad, SEED, pattern)
    padded = -(-tokens // 16) * 16
    assert result.shape == (5, padded)
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert torch.equal(result[:, :tokens].nan_to_num(7), estimate.t().nan_to_num(7))
    rest = result[:, tokens:]
    assert not rest[2:].any()
    assert not (rest.eq(0) & rest.signbit()).any()
    assert is_nm(result[2:], pattern, -1)


def test_results_have_no_history():
    grad = torch.randn(8, 4, requires_grad=True)
    assert not mvue_transposed(grad, SEED)[0].requires_grad


def test_nothing_in_nothing_out():
    marks = torch.zeros(0, 4, dtype=torch.uint8)
    forward, backward = masked_pair(torch.zeros(0, 4), marks, torch.float16, own_backward=True)
    assert (forward.shape, backward.shape) == ((0, 4), (4, 0))
    assert mvue_transposed(torch.zeros(0, 4), SEED)[0].shape == (4, 0)
    assert mvue_transposed(torch.zeros(3, 0), SEED)[0].shape == (0, 16)
    assert permuted_columns(torch.zeros(0, 4), torch.arange(4)).shape == (0, 4)


def test_without_triton_the_torch_operations_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_use.is_installed.cache_clear()
    assert preprocess.triton_kernels() is None
    grad = torch.randn(8, 4)
    assert torch.equal(
        mvue_transposed(grad, SEED)[0][:, :8], MVUE("2:4").estimate(None, grad, SEED).t()
    )
    triton_use.is_installed.cache_clear()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"weight": torch.zeros(4, 8, dtype=torch.int32)},
            TypeError,
            "weight must be of a floating",
        ),
        (
            {"weight": torch.zeros(8, 4).t()},
            ValueError,
            r"marks.*strides \(1, 4\).*strides \(8, 1\): transpose",
        ),
        ({"weight": torch.zeros(4, 2, 4)}, ValueError, "weight must be a matrix"),
        ({"dtype": torch.int8}, TypeError, "int8 cannot hold"),
        (
            {"marks": torch.zeros(4, 8, dtype=torch.bool)},
            TypeError,
            "bytes of two bits; got torch.bool",
        ),
        (
            {"marks": torch.zeros(8, 4, dtype=torch.uint8)},
            ValueError,
            r"\(4, 8\) on cpu.*got \(8, 4\)",
        ),
        (
            {"marks": torch.zeros(8, 4, dtype=torch.uint8).t()},
            ValueError,
            r"marks must have.*got.*strides \(1, 4\)",
        ),
        (
            {"permutation": torch.zeros(4)},
            TypeError,
            "permutation must be int64; got torch.float32",
        ),
        ({"permutation": torch.arange(8)}, ValueError, r"4 indices on cpu; got \(8,\)"),
        ({"permutation": torch.arange(8)[::2]}, ValueError, "strides"),
    ],
)
def test_errors_of_a_weight(change, error, match):
    arguments = {
        "weight": torch.zeros(4, 8),
        "marks": torch.zeros(4, 8, dtype=torch.uint8),
        "dtype": torch.float32,
        "own_backward": True,
    }
    masked_backward(**arguments)
    arguments |= change
    with pytest.raises(error, match=match):
        masked_backward(**arguments)
    if "permutation" not in change:
        del arguments["own_backward"]
        with pytest.raises(error, match=match):
            masked_operand(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grad": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "grad must be of a floating"),
        ({"grad": torch.zeros(8, 4).t()}, ValueError, "grad must be contiguous"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, ValueError, "four words"),
        ({"seed": torch.zeros(4)}, ValueError, "float32"),
        ({"pattern": "2:3"}, ValueError, "multiple of 16, which blocks of 2:3"),
        ({"gather": torch.arange(4)}, ValueError, "gather must .* 8 indices"),
        ({"gather": torch.arange(8.0)}, TypeError, "gather must be int64"),
    ],
)
def test_errors_of_an_estimate(change, error, match):
    arguments = {"grad": torch.zeros(4, 8), "seed": SEED}
    mvue_transposed(**arguments)
    with pytest.raises(error, match=match):
        mvue_transposed(**arguments | change)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grad": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "grad must be of a floating"),
        ({"grad": torch.zeros(8, 4).t()}, ValueError, r"grad must be contiguous.*\.contiguous"),
        ({"permutation": torch.arange(4)}, ValueError, "8 indices"),
        ({"permutation": torch.arange(8).int()}, TypeError, "int64; got torch.int32"),
    ],
)
def test_errors_of_permuted_columns(change, error, match):
    arguments = {"grad": torch.zeros(4, 8), "permutation": torch.arange(8)}
    permuted_columns(**arguments)
    with pytest.raises(error, match=match):
        permuted_columns(**arguments | change)
