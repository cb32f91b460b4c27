"""What layers hand to kernels: the weights and gradients of the dense GEMMs, packed as they lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import MVUE, NMPattern, NMSparsifier
from lightning_nm.kernels.api import GemmKey
from lightning_nm.nn.products import estimated, masked_matrix, packable
from tests.support.kinds import KINDS
from tests.support.routed import METHODS, masked


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("conv")])
@pytest.mark.parametrize("method", METHODS)
def test_operands_are_the_weights_that_the_dense_products_take(method, kind):
    module, _ = masked(kind, torch.float32, method=METHODS[method]())
    parts = [
        layer for part in module.modules() for layer in getattr(part, "nm_layers", {}).values()
    ]
    for layer in parts:
        weight = layer.weight.detach()
        expected = layer.view.matrix(layer.forward_weight())
        backward = layer.view.matrix(layer.backward_weight())
        if layer.masks.has_backward:
            backward = backward[layer.masks.permutation]
        for gemm, values in (("forward", expected), ("dgrad", backward.t())):
            operand = packable(layer, gemm, weight, torch.bfloat16)
            assert torch.equal(operand, values.bfloat16())
            assert operand.is_contiguous()
            if method not in ("dense", "scaled-mask"):
                assert not torch.signbit(operand[operand == 0]).any(), "-0.0 breaks compressors"
        if method not in ("dense", "soft-threshold"):
            sizes = (*expected.shape, 8, torch.float32)
            key = GemmKey("forward", *sizes, NMPattern(2, 4), "cpu", sparsity="masked")
            operand = masked_matrix(layer, "forward", weight, key)
            kept = (operand.bits & operand.bit).bool()
            for found in (torch.where(kept, operand.values, 0), operand.dense()):
                torch.testing.assert_close(found, expected)


def estimating(estimator):
    """A layer of 12 outputs."""
    sparsifier = NMSparsifier(nn.Linear(8, 12), "2:4", "dense", estimator, skip_first_last=False)
    (layer,) = sparsifier.attach().layers.values()
    layer.draw_noise(1)
    return layer


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    estimator=st.sampled_from(["mvue", "approx-mvue", "top-n", MVUE("1:2"), MVUE("3:5")]),
    gather=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_transposed_estimate_is_the_estimate(tokens, estimator, gather, seed):
    layer = estimating(estimator)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(tokens, 12, generator=generator)
    order = torch.randperm(12, generator=generator) if gather else None
    words = layer.noise.words
    found, gathered = layer.spec.estimator.estimate_transposed(layer, grad, words, order)
    assert found.is_contiguous()
    assert torch.equal(found[:, :tokens], estimated(layer, grad, words).t())
    assert not found[:, tokens:].any()
    assert gathered is None or torch.equal(gathered, grad[:, order])


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
def test_one_pass_draws_the_same_estimate(pattern, tokens, monkeypatch):
    layer, grad = estimating(MVUE(pattern)), torch.randn(12, tokens).t()
    expected = estimated(layer, grad, layer.noise.words)
    monkeypatch.setattr("lightning_nm.estimators.mvue.in_one_pass", lambda grad: True)
    found = estimated(layer, grad, layer.noise.words)
    assert torch.equal(found, expected)
    assert found.t().stride()[-1] == 1, "the GEMM takes it without a copy"


def test_a_subclass_is_drawn_by_the_kernel_only_if_it_draws_the_same(monkeypatch):
    class Doubled(MVUE):
        def prune(self, grad, pattern, uniform):
            return 2 * super().prune(grad, pattern, uniform)

    class Named(MVUE):
        pass

    class Halved(MVUE):
        def estimate(self, layer, grad, seed):
            return super().estimate(layer, grad, seed) / 2

    layer = estimating(None)
    kinds = (MVUE, Doubled, Named, Halved)
    assert [kind()._has_kernel(layer) for kind in kinds] == [True, False, True, False]
    monkeypatch.setattr("lightning_nm.estimators.mvue.in_one_pass", lambda grad: True)
    grad, found = torch.randn(16, 12), []
    for estimator in (MVUE(), Doubled()):
        layer = estimating(estimator)
        found.append(estimated(layer, grad, layer.noise.words))
        transposed, _ = estimator.estimate_transposed(layer, grad, layer.noise.words)
        assert torch.equal(transposed, found[-1].t())
    assert torch.equal(found[1], 2 * found[0])
