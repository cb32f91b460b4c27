"""Checksums tell layers apart, and processes that disagree fail together."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.training.ranks import (
    _fingerprint,
    checksum,
    compare_ranks,
    mix,
    reduce_gradients,
)
from tests.support.outside import ScaledMask
from tests.support.processes import in_processes


def attached(method="bi-mask", seed=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
    return NMSparsifier(model, "2:4", method, skip_first_last=False, seed=seed).attach()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.data())
def test_one_changed_word_changes_the_sum(words, data):
    place = data.draw(st.integers(0, len(words) - 1))
    words = torch.tensor(words)
    other = words.clone()
    other[place] = data.draw(
        st.integers(-(2**63), 2**63 - 1).filter(lambda word: word != words[place])
    )
    assert mix(words).sum() != mix(other).sum()
    assert torch.equal(mix(words)[place:], mix(words[place:], place))


@given(st.permutations(range(12)))
def test_the_order_counts(order):
    words = torch.arange(12) % 3
    changed = not torch.equal(words[torch.tensor(order)], words)
    assert (mix(words[torch.tensor(order)]).sum() != mix(words).sum()) == changed


def test_equal_layers_have_equal_checksums():
    for one, other in zip(attached().layers.values(), attached().layers.values(), strict=True):
        assert torch.equal(checksum(one), checksum(other))
        assert checksum(one).dtype == torch.int64


@given(st.integers(0, 23), st.integers(0, 15), st.sampled_from([1, 2]))
def test_every_bit_of_the_masks_counts(row, column, bit):
    layer = attached().layers["0"]
    before = checksum(layer)
    layer.masks.bits[row, column] ^= bit
    assert (checksum(layer) != before).tolist() == [True, False, False]
    layer.masks.bits[row, column] ^= bit
    assert torch.equal(checksum(layer), before)


def assign(field, value):
    return lambda layer: setattr(layer.progress, field, value)


CHANGES = {
    "seed": lambda layer: layer.noise.reseed(1),
    "schedule": assign("schedule", (3, 9)),
    "estimator_schedule": assign("estimator_schedule", (3, 9)),
    "estimating": assign("estimating", True),
    "dense_gradient": lambda layer: assign("dense_gradient", not layer.progress.dense_gradient)(
        layer
    ),
    "gradient_at_pruned": lambda layer: setattr(
        layer, "spec", replace(layer.spec, method=_Other())
    ),
    "clock": assign("clock", 7),
    "step": assign("step", 7),
    "masks": lambda layer: layer.masks.bits[0].fill_(0),
    "permutation": lambda layer: layer.masks.permutation.copy_(layer.masks.permutation.flip(0)),
    "parameters": lambda layer: layer.parameters["scale"].data.fill_(1.25),
}


class _Other(ScaledMask):
    def gradient_at_pruned(self, layer):
        return False


_Other.__name__ = "ScaledMask"


def attached_for(aspect):
    """Layers that the change of this aspect can be made to."""
    own = aspect in ("parameters", "gradient_at_pruned")
    return attached(ScaledMask() if own else "bi-mask")


@pytest.mark.parametrize("aspect", CHANGES)
def test_each_aspect_counts(aspect):
    layer = attached_for(aspect).layers["0"]
    before = _fingerprint(layer), checksum(layer).tolist()
    with torch.no_grad():
        CHANGES[aspect](layer)
    assert (_fingerprint(layer), checksum(layer).tolist()) != before


def test_one_process_compares_nothing(monkeypatch):
    sparsifier = attached(ScaledMask())
    monkeypatch.setattr("lightning_nm.training.ranks.mix", None)
    monkeypatch.setattr(dist, "all_reduce", None)
    compare_ranks(sparsifier.layers.values())
    reduce_gradients(sparsifier.layers.values())


def disagreements():
    """What each process says after rank 1 alone changed something; two numbers each are all that is reduced."""
    rank, all_reduce, sizes, said = dist.get_rank(), dist.all_reduce, [], {}

    def spy(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def compare(name, sparsifier):
        try:
            compare_ranks(sparsifier.layers.values())
        except RuntimeError as error:
            said[name] = str(error)

    dist.all_reduce = spy
    for aspect, change in CHANGES.items():
        sparsifier = attached_for(aspect)
        compare_ranks(sparsifier.layers.values())
        compare_ranks(sparsifier.layers.values())
        with torch.no_grad():
            if rank:
                change(sparsifier.layers["1"])
        compare(aspect, sparsifier)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"exclude": "1" if rank else None, "skip_first_last": False}
    compare("layers", NMSparsifier(model, "2:4", "ste", **options).attach())
    dist.all_reduce = all_reduce
    assert sizes == [2] * len(sizes)
    return said


def averages():
    """Gradients of methods' parameters: on both ranks, on one, on none."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    sparsifier = NMSparsifier(model, "2:4", ScaledMask(), skip_first_last=False).attach()
    scales = [layer.parameters["scale"] for layer in sparsifier.layers.values()]
    scales[0].grad = torch.tensor(1.0 + dist.get_rank())
    scales[1].grad = torch.tensor(4.0) if dist.get_rank() == 1 else None
    found = []
    for _ in range(2):  # again changes nothing
        reduce_gradients(sparsifier.layers.values())
        found.append([None if scale.grad is None else float(scale.grad) for scale in scales])
    return found


def both():
    return disagreements(), averages()


@pytest.mark.slow
def test_processes_fail_together_and_average(tmp_path):
    (said, averaged), (other, other_averaged) = in_processes(2, tmp_path / "run", both)
    assert averaged == other_averaged == [[1.5, 2.0, None]] * 2
    assert said == other
    assert set(said) == {*CHANGES, "layers"}
    for aspect in CHANGES:
        assert f"layer '1': ranks [1] differ from rank 0 in {aspect}" in said[aspect]
        assert "layer '0'" not in said[aspect]
        assert "load the same checkpoint" in said[aspect]
    assert "layer '1' is not masked on ranks [1]" in said["layers"]
