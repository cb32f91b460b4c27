"""The first convolution and the last linear layer stay dense: by the order of registration, always."""

import pytest
from torch import nn

from lightning_nm import NMSparsifier


def parts(**layers):
    return nn.ModuleDict(layers)


def head_first():
    """The head is declared before the body."""
    return parts(head=nn.Linear(32, 4), body=nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)))


def head_last():
    return parts(body=nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)), head=nn.Linear(32, 4))


def convolutions_backwards():
    """Convolutions are declared in the reverse of their order; the one that is called first has one input channel."""
    return parts(
        second=nn.Conv2d(16, 16, 3),
        first=nn.Conv2d(1, 16, 3),
        middle=nn.Linear(16, 16),
        head=nn.Linear(16, 4),
    )


def with_teacher():
    """Frozen layers are neither the first nor the last."""
    teacher = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Linear(8, 8)).requires_grad_(False)
    student = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 8), nn.Linear(8, 8)
    )
    return parts(before=teacher, student=student, after=teacher)


def attention():
    """The output projection of attention is not the last layer."""
    return parts(head=nn.Linear(16, 16), mha=nn.MultiheadAttention(16, 2))


@pytest.mark.parametrize(
    ("model", "skips", "masked", "dense"),
    [
        (head_first, True, {"head", "body.0"}, {"body.1"}),
        (head_first, "first", {"head", "body.0", "body.1"}, set()),
        (head_last, True, {"body.0", "body.1"}, {"head"}),
        (head_last, None, {"body.0", "body.1"}, {"head"}),
        (convolutions_backwards, True, {"middle"}, {"second", "head"}),
        (convolutions_backwards, "first", {"middle", "head"}, {"second"}),
        (convolutions_backwards, "last", {"second", "middle"}, {"head"}),
        (convolutions_backwards, False, {"second", "middle", "head"}, set()),
        (with_teacher, True, {"student.1", "student.2"}, {"student.0", "student.3"}),
        (attention, True, {"mha.in_proj_weight", "mha.out_proj"}, {"head"}),
    ],
)
def test_registration_and_the_setting_decide(model, skips, masked, dense):
    sparsifier = NMSparsifier(model(), "2:4", "asp", skip_first_last=skips).attach()
    assert set(sparsifier.layers) == masked
    assert set(sparsifier.state_dict()["ends"]) == dense


@pytest.mark.parametrize("value", ["both", 1, ("first", "last")])
def test_an_unknown_value_is_refused_at_once(value):
    with pytest.raises(
        ValueError, match=r"skip_first_last=.* is unknown: use True, False, 'first' or 'last'"
    ):
        NMSparsifier(head_last(), skip_first_last=value)


@pytest.mark.parametrize(
    ("ends", "masked"),
    [({}, ["head", "body.0", "body.1"]), ({"body.1": "another reason"}, ["head", "body.0"])],
)
def test_a_state_brings_its_first_and_last_layers(ends, masked):
    state = NMSparsifier(head_first(), "2:4", "asp").attach().state_dict()
    state["ends"] = ends
    assert list(NMSparsifier(head_first(), "2:4", "asp").attach(state).layers) == masked
