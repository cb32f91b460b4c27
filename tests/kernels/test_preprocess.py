"""What operands are brought to by torch operations, and what their Triton kernels share with them."""

import sys

import pytest
import torch
from torch import nn

from lightning_nm import MVUE, NMSparsifier
from lightning_nm.functional import fold_seed, is_nm
from lightning_nm.kernels import preprocess
from lightning_nm.kernels.preprocess import masked_pair, mvue_transposed
from lightning_nm.nn import layer as nn_layer

SEED = fold_seed(0, "preprocess")


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
    assert (preprocess.FORWARD, preprocess.BACKWARD) == (nn_layer.FORWARD, nn_layer.BACKWARD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pair_is_the_layers_two_weights(dtype):
    layer = bi_mask_layer()
    permutation = torch.randperm(24)
    forward, backward = masked_pair(layer.weight, layer.marks, dtype, permutation, own_backward=True)
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
        layer.weight, layer.marks, torch.bfloat16, layer.permutation, own_backward=layer.own_backward
    )
    assert layer.own_backward
    assert is_nm(forward, "2:4", -1)
    assert is_nm(backward, "2:4", -1)
    assert backward.count_nonzero() > 0


def test_without_a_backward_mask_both_are_the_forward_weight():
    layer = bi_mask_layer()
    forward, backward = masked_pair(layer.weight, layer.marks, torch.float32, own_backward=False)
    assert torch.equal(forward, layer.forward_weight())
    assert torch.equal(backward, forward.t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", ["2:4", "1:2", "1:4", "2:16", "3:8"])
@pytest.mark.parametrize("tokens", [16, 37, 2])
def test_the_estimate_is_the_estimators(tokens, pattern, dtype):
    torch.manual_seed(tokens)
    grad = torch.randn(tokens, 5, dtype=dtype)
    grad[torch.rand(grad.shape) < 0.3] = 0
    grad[0, 0], grad[-1, 1] = float("nan"), float("-inf")
    estimate = MVUE(pattern).estimate(None, grad, SEED)
    result = mvue_transposed(grad, SEED, pattern)
    padded = -(-tokens // 16) * 16
    assert result.shape == (5, padded)
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert torch.equal(result[:, :tokens].nan_to_num(7), estimate.t().nan_to_num(7))
    rest = result[:, tokens:]
    assert not rest[2:].any()
    assert not (rest.eq(0) & rest.signbit()).any()
    assert is_nm(result[2:], pattern, -1)
    permutation = torch.tensor([4, 2, 0, 1, 3])
    permuted = mvue_transposed(grad, SEED, pattern, permutation)
    assert permuted.is_contiguous()
    assert torch.equal(permuted.nan_to_num(7), result[permutation].nan_to_num(7))


def test_results_have_no_history():
    grad = torch.randn(8, 4, requires_grad=True)
    assert not mvue_transposed(grad, SEED).requires_grad


def test_nothing_in_nothing_out():
    marks = torch.zeros(0, 4, dtype=torch.uint8)
    forward, backward = masked_pair(torch.zeros(0, 4), marks, torch.float16, own_backward=True)
    assert (forward.shape, backward.shape) == ((0, 4), (4, 0))
    assert mvue_transposed(torch.zeros(0, 4), SEED).shape == (4, 0)
    assert mvue_transposed(torch.zeros(3, 0), SEED).shape == (0, 16)


def test_without_triton_the_torch_operations_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    preprocess.triton_kernels.cache_clear()
    assert preprocess.triton_kernels() is None
    grad = torch.randn(8, 4)
    assert torch.equal(mvue_transposed(grad, SEED)[:, :8], MVUE("2:4").estimate(None, grad, SEED).t())
    preprocess.triton_kernels.cache_clear()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"weight": torch.zeros(4, 8, dtype=torch.int32)}, TypeError, "weight must be of a floating"),
        ({"weight": torch.zeros(8, 4).t()}, ValueError, r"weight must be a contiguous.*\(1, 4\).*\.contiguous"),
        ({"weight": torch.zeros(4, 2, 4)}, ValueError, "weight must be a contiguous matrix"),
        ({"dtype": torch.int8}, TypeError, "int8 cannot hold"),
        ({"marks": torch.zeros(4, 8, dtype=torch.bool)}, TypeError, "bytes of two bits; got torch.bool"),
        ({"marks": torch.zeros(8, 4, dtype=torch.uint8)}, ValueError, r"\(4, 8\) on cpu; got \(8, 4\)"),
        ({"marks": torch.zeros(8, 4, dtype=torch.uint8).t()}, ValueError, "marks must be contiguous"),
        ({"permutation": torch.zeros(4)}, TypeError, "int64; got torch.float32"),
        ({"permutation": torch.arange(8)}, ValueError, r"of 4 rows on cpu.*got \(8,\)"),
        ({"permutation": torch.arange(8)[::2]}, ValueError, "strides"),
    ],
)
def test_errors_of_a_pair(change, error, match):
    arguments = {
        "weight": torch.zeros(4, 8),
        "marks": torch.zeros(4, 8, dtype=torch.uint8),
        "dtype": torch.float32,
        "own_backward": True,
    }
    masked_pair(**arguments)
    with pytest.raises(error, match=match):
        masked_pair(**arguments | change)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grad": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "grad must be of a floating"),
        ({"grad": torch.zeros(8, 4).t()}, ValueError, "grad must be a contiguous"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, ValueError, "four words"),
        ({"seed": torch.zeros(4)}, ValueError, "float32"),
        ({"pattern": "2:3"}, ValueError, "multiple of 16, which blocks of 2:3"),
        ({"permutation": torch.arange(4)}, ValueError, "of 8 rows"),
    ],
)
def test_errors_of_an_estimate(change, error, match):
    arguments = {"grad": torch.zeros(4, 8), "seed": SEED}
    mvue_transposed(**arguments)
    with pytest.raises(error, match=match):
        mvue_transposed(**arguments | change)
