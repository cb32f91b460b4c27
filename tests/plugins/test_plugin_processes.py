"""Two processes whose devices disagree on what is fastest: the first decides for both."""

import pytest
import torch
import torch.distributed as dist

from tests.support.mlp import fit, mlp, plugin, sparse_callback
from tests.support.processes import in_processes


class Opinion:
    """The first process finds the sparse kernel faster, the other slower: dense, sparse and pack are timed in turn."""

    def __init__(self):
        self.timed = 0

    def time(self, function, device):
        self.timed += 1
        return ((1.0, 9.0, 1.0) if dist.get_rank() == 0 else (9.0, 1.0, 9.0))[self.timed % 3]


def run(decisions):
    """What the GEMMs of a training used, and its weights."""
    made, model = plugin(kernels="auto"), mlp()
    made.router.timer, made.router.file = Opinion(), decisions
    masks = sparse_callback(grad_estimator=None, include="net.0")
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "limit_val_batches": 0}
    fit(".", [made], [masks], model, **options)
    used = made.router.used()
    return [(u.product.key.gemm, u.kernel, u.calls, u.product.reason) for u in used], list(
        model.state_dict().values()
    )


@pytest.mark.slow
def test_the_first_process_decides(tmp_path):
    decisions = tmp_path / "kernels.json"
    (first, weights), (second, others) = in_processes(2, tmp_path / "run", run, decisions)
    assert first == second
    assert ("forward", "simulated") in {use[:2] for use in first}
    assert all(map(torch.equal, weights, others))
    assert decisions.exists()
