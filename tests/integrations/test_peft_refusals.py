"""Adapters that cannot train a masked delta are refused, and what would break the pattern is named."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from lightning_nm import NMSparsifier, pack  # noqa: E402
from lightning_nm import functional as nmf  # noqa: E402
from lightning_nm.integrations.peft import mask_adapters  # noqa: E402
from tests.support.adapted import QUIET, TARGETS, Net, adapted  # noqa: E402

pytestmark = QUIET


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "DoraLinearVariant is not LoRA's plain sum"),
        ({"init_lora_weights": "pissa"}, r"not 2:4: \d+ of 128 blocks hold more"),
    ],
)
def test_other_adapters_are_refused_by_name(options, message):
    model = adapted(dtype=torch.float32, target_modules=["first"], **options)
    with pytest.raises(ValueError, match=rf"'base_model.model.first'.*{message}"):
        mask_adapters(model)
    assert type(model.base_model.model.first) is peft.tuners.lora.Linear


def test_dense_layers_are_named_and_may_be_excluded():
    torch.manual_seed(0)
    net = Net()
    net.first.weight.data[0, :4] = 1
    nn.init.normal_(net.head.weight)
    config = peft.LoraConfig(r=2, target_modules=TARGETS[Net])
    model = peft.get_peft_model(net, config)
    with pytest.raises(
        ValueError, match=r"2 of 3 .*first.*not 2:4: 1 of 128 .*head.*48 of 48"
    ) as raised:
        mask_adapters(model)
    assert "gpt" not in str(raised.value)
    assert mask_adapters(model, exclude=["*.first", "*.head"]) == ["base_model.model.gpt"]
    with pytest.raises(ValueError, match="leaves no adapted layer"):
        mask_adapters(model, exclude="*")


def test_other_faults_are_named():
    with pytest.raises(ValueError, match="no adapter of peft"):
        mask_adapters(Net())
    model = adapted()
    with pytest.raises(ValueError, match="not 1:4"):
        mask_adapters(model, "1:4")
    with pytest.raises(ValueError, match="has no blocks of 3:5"):
        mask_adapters(model, "3:5")
    model.base_model.model.first.base_layer.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="its base weight is trained"):
        mask_adapters(model)
    model.base_model.model.first.base_layer.weight.requires_grad_(False)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its base weight: call unmerge_adapter\(\)"):
        mask_adapters(model)
    model.unmerge_adapter()
    grouped = nn.Sequential(nn.Conv1d(8, 8, 3, groups=2), nn.Embedding(8, 8))
    with pytest.warns(UserWarning, match="groups > 1"):
        model = peft.get_peft_model(grouped, peft.LoraConfig(r=2, target_modules=["0", "1"]))
    with pytest.raises(
        ValueError, match=r"grouped convolutions.*lora.layer.Embedding is no LoRA of a linear"
    ):
        mask_adapters(model)


def test_an_adapter_of_another_kind_cannot_join_masked_ones():
    model = adapted()
    mask_adapters(model)
    with pytest.raises(ValueError, match="DoraLinearVariant"):
        model.add_adapter("dora", peft.LoraConfig(r=2, target_modules=["first"], use_dora=True))


def test_weights_loaded_since_then_are_noticed():
    model = adapted()
    mask_adapters(model)
    with torch.no_grad():
        model.base_model.model.first.base_layer.weight.copy_(
            nmf.nm_prune(torch.randn(32, 16), "2:4")
        )
    with pytest.raises(ValueError, match="other nonzeros than when its adapters were masked"):
        model.merge_and_unload()


def in_a_model(masks):
    """An adapted N:M layer in a model whose other layers a sparsifier masks."""
    model = nn.Sequential(adapted(dtype=torch.float32), nn.Linear(8, 8), nn.Linear(8, 8))
    if masks:
        mask_adapters(model)
    return model


def test_a_sparsifier_warns_of_adapters_that_would_break_its_pattern():
    with pytest.warns(
        UserWarning, match=r"base_model\.model\.first; .*gpt; .*head.*mask_adapters\(model\) before"
    ):
        sparsifier = NMSparsifier(in_a_model(False), "2:4", "ste").attach()
    assert "mask_adapters keeps it so" in sparsifier.skipped["0.base_model.model.gpt.base_layer"]
    sparsifier = NMSparsifier(in_a_model(True), "2:4", "ste").attach()
    assert list(sparsifier.layers) == ["1"]
    assert "keeps the zeros" in sparsifier.skipped["0.base_model.model.gpt.base_layer"]
    NMSparsifier(in_a_model(False), "1:4", "ste").attach()  # dense for this pattern


def test_merging_into_a_packed_base_is_refused():
    adapted = peft.get_peft_model(pack(Net()), peft.LoraConfig(r=2, target_modules=["first"]))
    message = r"'first.weight' is packed, for inference, and cannot be changed in place, as merging an adapter does"
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(RuntimeError, match=message):
            merge()


def test_a_packed_base_is_refused():
    adapted = peft.get_peft_model(pack(Net()), peft.LoraConfig(r=2, target_modules=["first"]))
    with pytest.raises(
        ValueError, match=r"'base_model.model.first': its base weight is packed, for inference"
    ):
        mask_adapters(adapted)
