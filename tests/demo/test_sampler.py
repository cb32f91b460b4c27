import pytest
import torch

from lightning_nm.demo import ResumableSampler


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = ResumableSampler(100, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    orders = {tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16  # in particular (0, 1) and (1, 0) differ
    assert all(sorted(o) == list(range(100)) for o in orders)


def test_order_does_not_touch_the_global_random_state():
    before = torch.get_rng_state()
    list(ResumableSampler(100))
    assert torch.equal(before, torch.get_rng_state())


def test_without_shuffle_the_order_is_that_of_the_data():
    assert list(ResumableSampler(["a", "b", "c"], shuffle=False)) == [0, 1, 2]


@pytest.mark.parametrize("position", [0, 1, 6, 9, 10])
def test_resumes_at_a_position_once(position):
    whole = ResumableSampler(10, seed=3)
    whole.set_epoch(2)
    resumed = ResumableSampler(10, seed=3)
    resumed.load_state_dict({"epoch": 2, "position": position})
    resumed.set_epoch(2)
    assert list(resumed) == list(whole)[position:]
    assert list(resumed) == list(whole)
    assert len(resumed) == 10


def test_another_epoch_drops_the_position():
    sampler = ResumableSampler(10)
    sampler.load_state_dict({"epoch": 2, "position": 4})
    sampler.set_epoch(3)
    assert len(list(sampler)) == 10
    assert sampler.state_dict() == {"epoch": 3, "position": 0}


def test_position_counts_on_after_a_resume():
    sampler = ResumableSampler(10)
    sampler.load_state_dict({"epoch": 0, "position": 4})
    iter(sampler)
    sampler.advance(4)
    assert sampler.state_dict() == {"epoch": 0, "position": 8}
    sampler.advance(4)
    assert sampler.state_dict() == {"epoch": 0, "position": 10}


@pytest.mark.parametrize("size", [1, 10, 11])
def test_ranks_share_the_order(size):
    ranks = [list(ResumableSampler(size, seed=1, num_replicas=3, rank=rank)) for rank in range(3)]
    assert len({len(r) for r in ranks}) == 1
    assert {i for r in ranks for i in r} == set(range(size))
    together = [i for column in zip(*ranks, strict=True) for i in column]
    assert together[:size] == list(ResumableSampler(size, seed=1))


def test_refuses_no_data():
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        ResumableSampler(0)
