import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.functional.soft import decayed_moment


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 10))
def test_the_decayed_moment_is_what_is_written(seed, ramp, decay):
    generator = torch.Generator().manual_seed(seed)
    moment, weight = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    weight[0, 0] = 0
    kept = torch.rand(3, 4, generator=generator) < 0.5
    found = decayed_moment(moment, weight, kept, ramp, decay)
    for place in kept.nonzero().tolist():
        assert found[tuple(place)] == moment[tuple(place)]
    for i, j in (~kept).nonzero().tolist():
        sign = (weight[i, j].item() > 0) - (weight[i, j].item() < 0)
        expected = (1 - ramp) * moment[i, j] + ramp * decay * sign
        torch.testing.assert_close(found[i, j], expected)
