"""A masked adapter that peft loads is masked where this package is imported, and an error elsewhere."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft.utils.hotswap import hotswap_adapter  # noqa: E402

from lightning_nm import functional as nmf  # noqa: E402
from lightning_nm.integrations.peft import mask_adapters, unmask_adapters  # noqa: E402
from tests.support.adapted import (  # noqa: E402
    INPUTS,
    QUIET,
    TARGETS,
    Convs,
    Net,
    adapted,
    base_weights,
    layers,
    tiny_llama,
    values,
)

pytestmark = [
    *QUIET,
    # peft 0.18, of a model that was not made from a folder.
    pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume"),
]


def base(make=Net):
    """The model that ``adapted`` adapts."""
    torch.manual_seed(0)
    return make().double().eval()


def x_of(make=Net):
    torch.manual_seed(1)
    return INPUTS[make]()


def output(model, make=Net):
    return values(model, x_of(make)).detach()


def saved(make=Net, *, folder="a", mask=True, exclude=(), **options):
    """An adapted model, whose adapter is in the folder, and its outputs."""
    model = adapted(make, **options).eval()
    if mask:
        mask_adapters(model, exclude=exclude)
    model.save_pretrained(folder)
    return model, output(model, make)


def load(model=None, folder="a", **options):
    return peft.PeftModel.from_pretrained(model or base(), folder, **options)


def config_of(folder="a"):
    return json.loads(Path(folder, "adapter_config.json").read_text())


def joined(model, folder):
    """The adapter as the second one of a masked model."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS[type(model)], init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    mask_adapters(model)
    model.load_adapter(folder, "other")
    model.set_adapter("other")
    return model


WAYS = {
    "from_pretrained": load,
    "to train": partial(load, is_trainable=True),
    "low_cpu_mem_usage": partial(load, low_cpu_mem_usage=True),
    "load_adapter": joined,
    "mixed": peft.PeftMixedModel.from_pretrained,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("way", "make", "options"),
    [
        *((way, Net, {}) for way in WAYS),
        ("from_pretrained", Convs, {"use_rslora": True}),
        ("from_pretrained", tiny_llama, {"use_rslora": True}),
    ],
)
def test_every_way_of_peft_loads_it_with_its_masks_and_no_warning(way, make, options):
    model, expected = saved(make, **options)
    loaded = WAYS[way](base(make), "a").eval()
    torch.testing.assert_close(output(loaded, make), expected)
    before = base_weights(loaded)
    owners = {name: layer.get_base_layer() for name, layer in layers(loaded).items()}
    merged = loaded.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(output(merged, make), expected)
    for name, weight in before.items():
        assert torch.equal(owners[name].weight.ne(0), weight.ne(0)), name
    if make is Net:  # without this package's type it would be another function
        unmask_adapters(model)
        assert not torch.allclose(output(model), expected, rtol=1e-3)


def test_transformers_loads_and_saves_it_without_a_peft_model():
    # Later versions of transformers import this of peft.
    pytest.importorskip("peft.utils.transformers_weight_conversion")
    _, expected = saved(tiny_llama)
    for folder in ("a", "again"):
        model = base(tiny_llama)
        model.load_adapter(folder)
        torch.testing.assert_close(output(model, tiny_llama), expected)
        model.save_pretrained("again")


def test_a_loaded_adapter_is_saved_masked_and_trains_on():
    _, expected = saved()
    loaded = load(is_trainable=True)
    assert mask_adapters(loaded) == list(layers(loaded))  # as 0.3 asked for; it changes nothing
    torch.testing.assert_close(output(loaded), expected)
    loaded(x_of()).square().mean().backward()
    torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], 0.1).step()
    loaded.save_pretrained("again")
    again = load(folder="again")
    torch.testing.assert_close(output(again), output(loaded))
    assert not torch.allclose(output(again), expected)
    assert nmf.is_nm(again.merge_and_unload().first.weight, "2:4")


@pytest.mark.parametrize(
    "load_it",
    [
        load,
        lambda: peft.PeftConfig.from_pretrained("a"),
        lambda: peft.LoraConfig.from_pretrained("a"),
        lambda: adapted().load_adapter("a", "other"),
    ],
)
def test_peft_alone_refuses_it_and_says_what_to_import(monkeypatch, load_it):
    """Its table of types then has none of this package's."""
    saved()
    monkeypatch.delitem(peft.PEFT_TYPE_TO_CONFIG_MAPPING, config_of()["peft_type"])
    message = "'MASKED_LORA: import lightning_nm.integrations.peft before loading it'"
    with pytest.raises(KeyError, match=message):
        load_it()


def test_an_adapter_of_0_3_loads_as_it_did():
    _, expected = saved()
    config = config_of() | {"peft_type": "LORA", "lightning_nm_mask_adapters_must_be_called": True}
    del config["nm_patterns"]
    Path("a/adapter_config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="lightning_nm_mask_adapters_must_be_called"):
        loaded = load()
    assert not torch.allclose(output(loaded), expected)
    mask_adapters(loaded)
    torch.testing.assert_close(output(loaded), expected)


def test_layers_that_were_excluded_stay_ordinary():
    _, expected = saved(exclude="*.first")
    loaded = load()
    torch.testing.assert_close(output(loaded), expected)
    merged = loaded.merge_and_unload()
    assert not nmf.is_nm(merged.first.weight, "2:4")
    assert nmf.is_nm(merged.head.weight, "2:4")


def four_eight():
    torch.manual_seed(0)
    return Net("4:8").double().eval()


def test_the_pattern_is_that_of_the_training():
    """4:8 is not the default, and a dense weight is not 4:8."""
    config = peft.LoraConfig(r=4, target_modules=TARGETS[Net], init_lora_weights=False)
    model = peft.get_peft_model(four_eight(), config).double()
    mask_adapters(model, "4:8")
    model.save_pretrained("a")
    torch.testing.assert_close(output(load(four_eight())), output(model.eval()))
    other = four_eight()
    nn.init.normal_(other.head.weight)
    with pytest.raises(
        ValueError, match=r"1 of 3 .*'head': its base weight is not 4:8: .*that one"
    ):
        load(other)


def test_a_dense_model_is_refused_and_not_changed():
    saved()
    model = base()
    nn.init.normal_(model.first.weight)
    message = "'first': its base weight is not 2:4.*load it onto that one"
    with pytest.raises(ValueError, match=message):
        load(model)
    assert type(model.first) is nn.Linear
    assert not layers(model)
    del model.first
    with pytest.raises(ValueError, match="'first': the model has no such layer"):
        load(model)


def test_it_cannot_join_adapters_that_are_not_masked():
    saved()
    model = adapted()
    expected = output(model)
    message = "3 of 3.*'gpt': it has adapters that are not masked: call mask"
    with pytest.raises(ValueError, match=message):
        model.load_adapter("a", "masked")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(output(model), expected)
    mask_adapters(model)
    model.load_adapter("a", "masked")
    assert nmf.is_nm(model.merge_and_unload().first.weight, "2:4")


def test_it_is_swapped_for_another_masked_adapter_alone():
    saved(folder="masked")
    saved(folder="ordinary", mask=False)
    model = adapted(seed=3, dtype=torch.float32)
    mask_adapters(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    for each, folder in ((model, "ordinary"), (adapted(), "masked")):
        with pytest.raises(ValueError, match="incompatible: for nm_patterns"):
            hotswap_adapter(each, folder, "default")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    hotswap_adapter(model, "masked", "default")
    assert nmf.is_nm(model.merge_and_unload().first.weight, "2:4")


def test_an_adapter_that_joins_masked_layers_is_saved_as_masked():
    model = adapted()
    mask_adapters(model, exclude="*.head")
    for name, targets in (("both", ["first", "head"]), ("dense", ["head"])):
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model.add_adapter(name, config)
    model.double().eval()
    model.save_pretrained("a")
    for name, folder, patterns in (
        ("default", "a", {"first": "2:4", "gpt": "2:4"}),
        ("both", "a/both", {"first": "2:4"}),
        ("dense", "a/dense", None),
    ):
        config = config_of(folder)
        assert config.get("nm_patterns") == patterns
        assert config["peft_type"].startswith("MASKED" if patterns else "LORA")
        model.set_adapter(name)
        torch.testing.assert_close(output(load(folder=folder)), output(model))


def test_an_adapter_that_is_unmasked_is_saved_as_an_ordinary_one():
    model, _ = saved()
    copied = copy.deepcopy(model)
    unmask_adapters(model)
    model.save_pretrained("ordinary")
    assert config_of("ordinary")["peft_type"] == "LORA"
    assert type(model.peft_config["default"]) is peft.LoraConfig
    torch.testing.assert_close(output(load(folder="ordinary")), output(model))
    # A copy does not share the configuration.
    copied.save_pretrained("copied")
    assert config_of("copied")["peft_type"].startswith("MASKED")


def test_the_users_configuration_may_be_used_for_other_models():
    config = peft.LoraConfig(r=2, target_modules=["first"])
    mask_adapters(peft.get_peft_model(Net(), config))
    assert type(config) is peft.LoraConfig
    dense = Net()
    nn.init.normal_(dense.first.weight)
    peft.get_peft_model(dense, config).save_pretrained("a")
    assert config_of()["peft_type"] == "LORA"
