import pytest
import torch.distributed as dist

from lightning_nm.kernels.tuner import Decision, Decisions, Environment, share
from tests.support.fake_kernels import gemm_key
from tests.support.processes import in_processes

KEY = gemm_key(columns=1000)


def decided(kernel):
    decisions = Decisions(Environment(kernel, None, "2.13.0", None, None))
    decisions[KEY] = Decision(kernel, 1.0, 0.5, 0.1, "measured", "measured")
    return decisions


def test_a_single_process_keeps_its_decisions():
    decisions = decided("mine")
    assert share(decisions) is decisions


def run():
    shared = share(decided(f"kernel of {dist.get_rank()}"))
    return shared[KEY].kernel, shared.environment.device


@pytest.mark.slow
def test_processes_take_the_decisions_of_the_first(tmp_path):
    assert in_processes(3, tmp_path, run) == [("kernel of 0", "kernel of 0")] * 3
