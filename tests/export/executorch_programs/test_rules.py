"""Which weights an Ethos-U85 stores as 2:4, by value; test_ethos_u85.py asks the compiler."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.export.executorch.targets import reason_of_weight


@given(st.data())
def test_weights_by_counting(data):
    out, depth, taps = (data.draw(st.integers(1, top)) for top in (3, 9, 2))
    values = st.sampled_from([0, 0, 1, -127, 5])
    entries = data.draw(st.lists(values, min_size=out * depth * taps, max_size=out * depth * taps))
    weight = torch.tensor(entries, dtype=torch.int8).reshape(out, depth, taps)
    blocks = F.pad(weight.movedim(1, 2), (0, -depth % 4)).reshape(-1, 4)
    faults = sum(block.count(0) < 2 for block in blocks.tolist())
    reason = reason_of_weight(weight)
    assert bool(reason) == bool(faults)
    if faults:
        assert reason.startswith(f"{faults} of ")
        assert ("no multiple of 4" in reason) == (depth % 4 != 0)


def test_the_lowest_int8_value_is_not_sparse():
    weight = torch.tensor([[-128, 0, 0, 0]], dtype=torch.int8)
    assert "-128" in reason_of_weight(weight)
