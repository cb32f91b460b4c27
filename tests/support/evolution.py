"""Passes over a weight by the library of CPU kernels, next to the same arithmetic by torch."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import (
    SCALE,
    BlockGrid,
    as_blocks,
    best_swaps,
    evidence_scores,
    select_blocks,
)
from lightning_nm.kernels.cpu import mask_passes
from lightning_nm.methods.bame.exchange import Evidence

DTYPES = list(mask_passes.DTYPES)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ODD = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-42]


@dataclass
class Case:
    """A weight ``[out, in, *taps]`` or its transpose, row-major, and all that belongs to it."""

    rows: Tensor  # a view of `weight` whose blocks lie along dimension 1
    m: int
    mask: Tensor
    weight: Tensor
    grad: Tensor
    value: Tensor
    square: Tensor
    oscillation: Tensor
    exchanged: Tensor
    budget: int

    def in_rows(self, tensor):
        """A tensor like the weight, as the view whose blocks lie along dimension 1; and back."""
        is_view = (
            self.rows.shape == self.weight.shape and self.rows.stride() == self.weight.stride()
        )
        return tensor if is_view else tensor.t()

    @property
    def bits(self):
        # A second bit, as of a backward mask, which no pass may change.
        other = (torch.arange(self.mask.numel()) % 3 == 0).view(self.mask.shape)
        return self.mask.to(torch.uint8) + 2 * other.to(torch.uint8)


def case(
    out,
    blocks,
    m,
    taps=(),
    *,
    kept=1,
    dtype=torch.float32,
    transposed=False,
    ties=False,
    odd=0,
    share=0.3,
    seed=0,
):
    """Random tensors; with ``ties`` few different numbers, with ``odd`` so many infinities, NaN and other rare ones."""
    torch.manual_seed(seed)
    shape = (out, blocks * m, *taps)
    order = (1, 0) if transposed else tuple(range(len(shape)))
    in_memory = [shape[axis] for axis in order]

    def draw(dtype):
        numbers = torch.randn(in_memory)
        if ties:
            numbers = (2 * numbers).round() / 2
        for _ in range(odd):
            place = tuple(random.Random(seed + _).randrange(size) for size in in_memory)
            numbers[place] = ODD[(seed + _) % len(ODD)]
        return numbers.to(dtype)

    def rows_of(tensor):
        return tensor.t() if transposed else tensor

    weight = draw(dtype)
    rows_of_mask = nmf.nm_mask(torch.rand(shape), f"{kept}:{m}", dim=1)
    mask = rows_of(rows_of_mask).contiguous()
    number = out * blocks * max(1, torch.Size(taps).numel() if taps else 1)
    return Case(
        rows=rows_of(weight),
        m=m,
        mask=mask,
        weight=weight,
        grad=draw(dtype),
        value=draw(torch.float32),
        square=draw(torch.float32).square(),
        oscillation=torch.randint(0, 256, (number,), dtype=torch.uint8),
        exchanged=torch.rand(in_memory) < 0.3,
        budget=int(share * number),
    )


def same(a, b):
    """Whether two tensors have the same bits; any NaN is the same as any other."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    both_nan = a.isnan() & b.isnan()
    integers = INTEGERS[a.element_size()]
    return bool((both_nan | (a.view(integers) == b.view(integers))).all())


def compare(c):
    """Assert that each pass gives what torch does, which is all that there is to return."""
    assert mask_passes.runs(c.weight, c.grad, c.value, c.square, c.bits)
    compare_bame(c, mask_passes)
    _compare_mask(c)
    _compare_size(c)
    _compare_decay(c)
    _compare_largest(c)
    _compare_largest_of_columns(c)
    return []


def compare_bame(c, passes, cast=torch.Tensor.to):
    """Assert that the passes of a module which are BAME's give what torch does; ``cast`` rounds as they do."""
    _compare_evidence(c, passes)
    if passes is not mask_passes:  # the CPU's exchange finds its swaps itself
        _compare_best(c, passes)
    _compare_exchange(c, passes, cast)


def _compare_best(c, passes):
    grid = BlockGrid.of(c.rows, c.m)
    assert grid is not None
    weight = c.weight.clone()
    pruned, regrown, gain = passes.best(grid, c.bits, weight, c.value)
    assert same(weight, torch.where(c.mask, c.weight, 0))
    value, kept = (as_blocks(c.in_rows(each), c.m) for each in (c.value, c.mask))
    scores = evidence_scores(as_blocks(c.rows.float(), c.m), value, kept)
    swaps = best_swaps(scores, kept)
    assert torch.equal(gain, swaps.gain)
    better = gain > 0
    assert torch.equal(pruned[better].long(), swaps.pruned[better])
    assert torch.equal(regrown[better].long(), swaps.regrown[better])


def _compare_decay(c):
    found = c.grad.clone()
    mask_passes.decay_(found, c.weight, c.bits, 0.1)
    expected = c.grad.double() + 0.1 * torch.where(c.mask, 0, c.weight.double())
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), expected.to(found.dtype).double(), rtol=eps, atol=eps, equal_nan=True
    )


def _compare_largest(c):
    bits = c.bits
    n = 1 + c.budget % (c.m - 1)
    grid = BlockGrid.of(c.rows, c.m)
    changed = mask_passes.keep_largest(grid, n, c.weight, bits)
    mask = c.in_rows(nmf.magnitude_mask(c.rows, f"{n}:{c.m}", dim=1))
    assert torch.equal(bits, mask.to(torch.uint8) + (c.bits & 2))
    assert changed == int((mask ^ c.mask).sum())


def _compare_largest_of_columns(c):
    m = min(c.m, len(c.weight))
    if m < 2:
        return
    weight = c.weight[: len(c.weight) // m * m]
    bits = c.bits[: len(weight)].clone()
    forward = bits & 1 == 1
    n = 1 + c.budget % (m - 1)
    order = torch.randperm(len(weight))
    assert mask_passes.has_whole_rows(weight, weight, m)
    mask_passes.keep_largest_of_columns(weight, order, n, m, weight, bits)
    expected = nmf.backward_mask(weight, forward, f"{n}:{m}", order)
    assert torch.equal(bits, forward.to(torch.uint8) + 2 * expected.to(torch.uint8))


def _compare_mask(c):
    found = c.weight.clone()
    if mask_passes.mask_(found, c.bits):
        assert same(found, torch.where(c.mask, c.weight, 0))


def _compare_size(c):
    kept, pruned = (c.weight.double()[part] for part in (c.mask, ~c.mask))
    sums = torch.tensor(mask_passes.squares(c.weight, c.bits), dtype=torch.float64)
    expected = torch.stack([kept.square().sum(), pruned.square().sum()])
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-30, equal_nan=True)
    expected = kept.square().mean().sqrt() if len(kept) else torch.zeros(())
    found = torch.tensor(mask_passes.size_of_kept(c.weight, c.bits), dtype=torch.float64)
    torch.testing.assert_close(found, expected.double(), rtol=1e-9, atol=1e-30, equal_nan=True)


def _compare_evidence(c, passes):
    count = torch.tensor(4.0)
    own_ratio = 0.7
    limit = 2.0
    # As the optimizer's state holds it: momentum at kept entries, U / SCALE at the others.
    old_value = torch.where(c.mask, c.value, c.value / SCALE)
    for grad, size, fraction in ((None, 0.0, 1.0), (c.grad, 0.3, 0.7)):
        left = c.value / SCALE * (SCALE * fraction)
        evidence = Evidence(
            value=torch.where(c.mask | (left.abs() > limit), 0, left),
            square=torch.where(c.mask, c.square * own_ratio, c.square),
            count=count,
        )
        if grad is not None:
            evidence.add(grad, c.mask, torch.tensor(size))
        found_grad = None if grad is None else grad.clone()
        value, square = passes.gather_evidence(
            c.bits,
            found_grad,
            old_value,
            c.square,
            fraction=fraction,
            own_ratio=own_ratio,
            limit=torch.tensor(limit),
            correction=evidence.correction(),
            size=torch.tensor(size),
        )
        if grad is not None:
            assert same(found_grad, torch.where(c.mask, grad, 0))
        torch.testing.assert_close(value, evidence.value, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(square, evidence.square, rtol=1e-6, atol=0, equal_nan=True)
        assert not value[c.mask].any()
    for whole in (False, True):
        kept_value, kept_square = old_value.clone(), c.square.clone()
        passes.keep_evidence(
            c.bits,
            value,
            square,
            kept_value,
            kept_square,
            whole_value=whole,
            whole_square=whole,
        )
        written = torch.ones_like(c.mask) if whole else ~c.mask
        assert same(kept_value, torch.where(written, value / SCALE, old_value))
        assert same(kept_square, torch.where(written, square, c.square))


def _compare_exchange(c, passes, cast):
    def blocks_of(tensor):
        return as_blocks(c.in_rows(tensor), c.m)

    value = torch.where(c.mask, 0, c.value)
    keep = blocks_of(c.mask)
    swaps = best_swaps(evidence_scores(blocks_of(c.weight).float(), blocks_of(value), keep), keep)
    chosen = select_blocks(swaps.gain, c.oscillation, c.budget)

    numbers = torch.arange(c.weight.numel()).view(c.weight.shape)
    block_numbers = blocks_of(numbers)

    def index_of(entry):
        return torch.unravel_index(block_numbers[chosen, entry[chosen]], c.weight.shape)

    pruned, regrown = index_of(swaps.pruned), index_of(swaps.regrown)
    weight = torch.where(c.mask, c.weight, 0)
    weight[pruned] = 0
    weight[regrown] = cast(value[regrown], weight.dtype)
    grad = c.grad.clone()
    grad[pruned] = 0
    mask = c.mask.clone()
    mask[pruned] = False
    mask[regrown] = True
    oscillation = c.oscillation.clone()
    again = chosen[c.exchanged[pruned] | c.exchanged[regrown]]
    oscillation[again] = oscillation[again].clamp(max=254) + 1
    exchanged = c.exchanged.clone()
    exchanged[pruned] = True
    exchanged[regrown] = True
    correction, moment = 0.25, 0.5
    momentum, second = c.grad.clone(), c.square.clone()
    momentum[pruned] = 0
    momentum[regrown] = 0
    second[pruned] = 0
    second[regrown] = c.square[regrown] / correction * moment
    rest = value.clone()
    rest[regrown] = 0

    bits = c.bits
    found = {
        "bits": bits,
        "weight": c.weight.clone(),
        "grad": c.grad.clone(),
        "value": value.clone(),
        "oscillation": c.oscillation.clone(),
        "exchanged": nmf.pack_mask(c.exchanged),
    }
    states = [c.grad.clone(), c.square.clone()]
    grid = BlockGrid.of(c.rows, c.m)
    assert grid is not None
    changed, held = passes.exchange(
        grid,
        square=c.square,
        states=states,
        are_squares=[False, True],
        budget=c.budget,
        correction=torch.tensor(correction),
        moment=moment,
        **found,
    )
    assert changed == len(chosen)
    assert held == int((swaps.gain > 0).sum()) - len(chosen)
    expected = {
        "bits": mask.to(torch.uint8) + (c.bits & 2),
        "weight": weight,
        "grad": grad,
        "value": rest,
        "oscillation": oscillation,
        "exchanged": nmf.pack_mask(exchanged),
    }
    for name, tensor in expected.items():
        assert same(found[name], tensor), name
    assert same(states[0], momentum)
    assert same(states[1], second)


def random_case(draw, most=(2, 9, 40, 130)):
    """A case of any size and layout."""
    size = draw.choice(most)
    m = draw.choice([2, 3, 4, 5, 8, 16, 31, 32])
    taps = draw.choice([(), (), (3,), (3, 3), (1, 2, 3)])
    return case(
        draw.randint(1, size),
        draw.randint(1, max(1, size // m)),
        m,
        taps,
        kept=draw.randint(1, m - 1),
        dtype=draw.choice(DTYPES),
        transposed=not taps and draw.random() < 0.3,
        ties=draw.random() < 0.4,
        odd=draw.choice([0, 0, 3, 20]),
        share=draw.choice([0, 0.01, 0.3, 1.0]),
        seed=draw.randrange(1000),
    )
