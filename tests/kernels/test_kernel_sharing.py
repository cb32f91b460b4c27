import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_nm.kernels.cache import Decision, Decisions, Environment, share
from tests.fake_kernels import gemm_key

KEY = gemm_key(columns=1000)


def decided(kernel):
    decisions = Decisions(Environment(kernel, None, "2.13.0", None, None))
    decisions[KEY] = Decision(kernel, 1.0, 0.5, 0.1, "measured", "measured")
    return decisions


def test_a_single_process_keeps_its_decisions():
    decisions = decided("mine")
    assert share(decisions) is decisions


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=3)
    shared = share(decided(f"kernel of {rank}"))
    assert shared[KEY].kernel == shared.environment.device == "kernel of 0"
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_take_the_decisions_of_the_first(tmp_path):
    mp.spawn(run, (str(tmp_path),), nprocs=3)
