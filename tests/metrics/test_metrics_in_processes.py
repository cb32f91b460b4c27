import pytest
import torch

from tests.support.metric_cases import CASES, in_a_process
from tests.support.processes import in_processes


@pytest.mark.slow
def test_two_processes_that_see_the_same_are_one(tmp_path):
    one, two = (in_processes(world, tmp_path / str(world), in_a_process, False) for world in (1, 2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(two[0], two[1])
    expected = torch.tensor([case.expected for case in CASES.values()], dtype=torch.float64)
    torch.testing.assert_close(one[0][:, 0], expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_gradients_that_differ_count_together(tmp_path):
    first, second = in_processes(2, tmp_path, in_a_process, True)
    assert torch.equal(first[:, 0], second[:, 0])
    for (name, case), (value, _, _) in zip(CASES.items(), first, strict=True):
        if name.startswith(("GradientSNR", "KeptMagnitude", "MaskDensity")):
            assert value.item() == pytest.approx(case.expected, rel=1e-6)
