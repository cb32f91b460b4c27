import pytest
from torch.utils.data import SequentialSampler

from lightning_nm.demo import ResumableLoader


class Recorder(list):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def loader(num_workers=0, **kwargs):
    return ResumableLoader.over(
        Recorder(range(22)), **{"batch_size": 4, "seed": 1, "num_workers": num_workers, **kwargs}
    )


def batches(loader):
    return [batch.tolist() for batch in loader]


def test_continues_after_the_batches_that_were_handed_out():
    whole = loader()
    whole.sampler.set_epoch(3)
    expected = batches(whole)
    assert [len(b) for b in expected] == [4, 4, 4, 4, 4, 2]
    for taken in range(7):
        first = loader()
        first.sampler.set_epoch(3)
        iterator = iter(first)
        assert [next(iterator).tolist() for _ in range(taken)] == expected[:taken]
        second = loader()
        second.load_state_dict(first.state_dict())
        assert len(second) == 6
        assert batches(second) == expected[taken:]
        assert batches(second) == expected


def test_workers_change_nothing_and_their_prefetching_is_not_counted():
    expected = batches(loader())
    first = loader(num_workers=2)
    iterator = iter(first)
    assert [next(iterator).tolist() for _ in range(2)] == expected[:2]
    assert first.state_dict()["position"] == 8
    second = loader(num_workers=2)
    second.load_state_dict(first.state_dict())
    assert batches(second) == expected[2:]


def test_the_epoch_is_read_at_the_first_batch_and_told_to_the_dataset():
    expected = loader()
    expected.sampler.set_epoch(5)
    late = loader()
    iterator = iter(late)
    late.sampler.set_epoch(5)
    assert next(iterator).tolist() == batches(expected)[0]
    assert late.dataset.epoch == 5


@pytest.mark.parametrize(("name", "value"), [("batch_size", 5), ("seed", 2), ("num_replicas", 2)])
def test_refuses_a_position_that_belongs_to_other_settings(name, value):
    state = {**loader().state_dict(), "position": 8}
    other = loader(**{name: value})
    with pytest.raises(ValueError, match=rf"middle of epoch 0: {name} was \d and is {value}"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "position": 22})  # the end of an epoch fits any settings


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_the_end_of_an_epoch_fits_any_number_of_replicas(before, after):
    ended = loader(num_replicas=before)
    assert len(batches(ended)) == len(ended)
    other = loader(num_replicas=after)
    other.load_state_dict(ended.state_dict())
    assert batches(other) == []  # nothing is left of that epoch
    other.sampler.set_epoch(1)
    fresh = loader(num_replicas=after)
    fresh.sampler.set_epoch(1)
    assert batches(other) == batches(fresh) != []


def test_with_a_foreign_sampler_it_is_an_ordinary_loader():
    plain = ResumableLoader(list(range(5)), batch_size=2, sampler=SequentialSampler(range(5)))
    assert plain.state_dict() == {}
    plain.load_state_dict({"epoch": 1, "position": 2})
    assert batches(plain) == [[0, 1], [2, 3], [4]]
