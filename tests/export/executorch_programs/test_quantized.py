"""N:M through quantisation: what is checked of the int8 weights, and the dense twin. ExecuTorch is not needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_nm.export.executorch.program import _require_int8, _require_patterns
from lightning_nm.export.executorch.quantized import (
    QuantizedLayer,
    _check_kept,
    fill_zeros,
    first_cause,
)
from lightning_nm.export.patterns import Found
from lightning_nm.functional import nm_prune
from lightning_nm.pattern import NMPattern


def as_int8(weight):
    """Symmetric, one scale for each output channel."""
    scale = weight.flatten(1).abs().amax(1).clamp_min(1e-6) / 127
    scale = scale.reshape(-1, *[1] * (weight.dim() - 1))
    return (weight / scale).round().clamp(-127, 127).to(torch.int8)


@given(
    pattern=st.sampled_from(["2:4", "1:4", "1:8", "1:16"]),
    kernel=st.sampled_from([(), (3, 3)]),
    seed=st.integers(0, 2**20),
)
def test_rounding_keeps_the_pattern_that_was_found_or_known(pattern, kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = nm_prune(torch.randn(4, 16, *kernel, generator=generator), pattern, dim=1)
    factor = torch.randn(4, generator=generator).reshape(-1, *[1] * (1 + len(kernel)))
    # A folded batch norm scales filters.
    int8 = as_int8(weight * factor)
    assert str(_check_kept("w", weight, int8).pattern) == pattern
    known = Found(NMPattern.parse(pattern), "plain")
    assert _check_kept("w", weight, int8, known) == known
    dense = Found(None, reason="not masked in training")
    assert _check_kept("w", weight, int8, dense) == dense


def test_what_loses_a_pattern():
    weight = nm_prune(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), "2:4")
    int8 = as_int8(weight)
    row, column = (weight == 0).nonzero()[0].tolist()
    broken = int8.clone()
    broken[row, column] = 1
    with pytest.raises(ValueError, match=r"made 1 of 32 zeros of 'w' nonzero"):
        _check_kept("w", weight, broken)
    with pytest.raises(ValueError, match=r"'w' is not 1:4: .* blocks hold more than 1 of 4"):
        _check_kept("w", weight, int8, Found(NMPattern(1, 4), "plain"))
    with pytest.raises(ValueError, match=r"shape of 'w' from \[8, 8\] to \[64\]"):
        _check_kept("w", weight, int8.flatten())


@given(seed=st.integers(0, 2**20), empty=st.booleans())
def test_the_dense_twin_has_no_zeros_and_the_same_values_elsewhere(seed, empty):
    generator = torch.Generator().manual_seed(seed)
    weight = as_int8(nm_prune(torch.randn(4, 8, generator=generator), "2:4"))
    if empty:
        weight.zero_()
    graph = nn.Module()
    graph.register_buffer("w", weight.clone())
    layer = QuantizedLayer("fc.weight", "fc", "linear", "2:4", "", weight, "w", 0.5)
    fill_zeros(graph, [layer])
    assert torch.count_nonzero(graph.w) == weight.numel()
    kept = weight != 0
    assert torch.equal(graph.w[kept], weight[kept])
    assert set(graph.w.flatten().tolist()) <= set(weight[kept].tolist()) or empty


def test_a_model_without_patterns_and_layers_in_float():
    weight = torch.ones(4, 4, dtype=torch.int8)
    reason = "4 of 4 blocks hold more than 2 of 4"
    dense = QuantizedLayer("fc.weight", "fc", "linear", "", reason, weight, "w", 1.0)
    with pytest.raises(ValueError, match=r"no weight of Net is N:M sparse: 'fc.weight': 4 of 4"):
        _require_patterns([dense], "Net")
    with pytest.raises(ValueError, match="no GEMMs with weights"):
        _require_patterns([], "Net")
    with pytest.raises(ValueError, match=r"'lstm': there is no int8 form.*--allow-float"):
        _require_int8({"lstm": "there is no int8 form of lstm"}, "cpu", allow_float=False)
    _require_int8({"lstm": "there is no int8 form of lstm"}, "cpu", allow_float=True)


def test_the_cause_of_wrapped_errors():
    inner = KeyError("not there")
    outer = RuntimeError("a pass failed")
    outer.__cause__ = inner
    assert first_cause(outer) == "KeyError: 'not there'"
    assert first_cause(ValueError("one\ntwo")) == "ValueError: one"
    assert first_cause(ValueError()) == "ValueError"
