"""The rows of a summary for weights that no packed layer holds."""

import pytest
from torch import nn

from lightning_nm import NMSparsifier, pack, packed_summary
from lightning_nm.functional import nm_prune
from tests.support.packed_models import prune


def rows(model):
    return dict(packed_summary(model).not_packed)


def linear():
    return prune(nn.Linear(64, 96), "1:16")


class Own(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_every_reason():
    names = ("packed", "dense", "excluded", "a", "b", "masked")
    model = nn.ModuleDict({name: linear() for name in names})
    model["own"] = prune(Own(64, 32), "1:16")
    model["norm"] = nn.LayerNorm(96)
    model["dense"].reset_parameters()
    model["b"].weight = model["a"].weight
    pack(model, exclude=["excluded", "masked"], kernels="reference")
    NMSparsifier(model, "2:4", include="masked", skip_first_last=False).attach()
    found = rows(model)
    own = f"{__name__}.Own has a forward of its own"
    assert f"own  not packed: {own}" in str(packed_summary(model)).splitlines()
    assert "blocks hold more than 2 of 4" in found.pop("dense.weight")
    excluded = found.pop("excluded.weight")
    assert excluded.startswith("it is 1:16, but was left dense by `exclude`")
    shared = "its weight is shared with another module"
    assert found == {
        "own": own,
        "a.weight": shared,
        "b.weight": shared,
        "masked.weight": "masked by a sparsifier",
    }


def test_a_layer_of_which_one_weight_is_packed():
    attention = nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, add_bias_kv=True)
    attention.q_proj_weight.data = nm_prune(attention.q_proj_weight.data, "1:8")
    pack(attention, exclude="out_proj.weight", kernels="reference")
    assert [each.name for each in packed_summary(attention).weights] == ["q_proj_weight"]
    found = rows(attention)
    assert set(found) == {"k_proj_weight", "v_proj_weight", "out_proj.weight"}
    assert all("blocks hold more than" in reason for reason in found.values())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_on_the_meta_device(kernels):
    model = pack(nn.Sequential(linear(), nn.Linear(96, 4)), kernels=kernels).to("meta")
    assert rows(model) == {"1.weight": "it has no values, it is on the meta device"}
