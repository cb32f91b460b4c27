"""A masked adapter that peft loads is masked where this package is imported, and an error elsewhere."""

import copy
import json
import subprocess
import sys

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
CONFIG = "adapter_config.json"


def base(make=Net, *, seed=0, dtype=torch.float64):
    """The model that ``adapted`` adapts."""
    torch.manual_seed(seed)
    return make().to(dtype).eval()


def saved(folder, make=Net, *, mask=True, pattern=None, exclude=(), **options):
    """An adapted model and its outputs; the adapter is in the folder."""
    model = adapted(make, **options).eval()
    if mask:
        mask_adapters(model, pattern, exclude=exclude)
    model.save_pretrained(folder)
    return model, values(model, x_of(make)).detach()


def x_of(make):
    torch.manual_seed(1)
    return INPUTS[make]()


def joined(sparse, folder):
    """The adapter as the second one of a masked model."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS[type(sparse)], init_lora_weights=False)
    model = peft.get_peft_model(sparse, config).double()
    mask_adapters(model)
    model.load_adapter(folder, "other")
    model.set_adapter("other")
    return model


def mixed(sparse, folder):
    return peft.PeftMixedModel.from_pretrained(sparse, folder)


WAYS = {
    "from_pretrained": peft.PeftModel.from_pretrained,
    "to train": lambda *a: peft.PeftModel.from_pretrained(*a, is_trainable=True),
    "low_cpu_mem_usage": lambda *a: peft.PeftModel.from_pretrained(*a, low_cpu_mem_usage=True),
    "load_adapter": joined,
    "mixed": mixed,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_peft_loads_it_with_its_masks_and_no_warning(tmp_path, way):
    model, expected = saved(tmp_path)
    loaded = WAYS[way](base(), tmp_path).eval()
    torch.testing.assert_close(values(loaded, x_of(Net)), expected)
    before = base_weights(loaded)
    owners = {name: layer.get_base_layer() for name, layer in layers(loaded).items()}
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(values(merged, x_of(Net)), expected)
    for name, weight in before.items():
        assert torch.equal(owners[name].weight.ne(0), weight.ne(0)), name
    # Without this package's type it would be another function.
    unmask_adapters(model)
    assert (values(model, x_of(Net)) - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("make", [Convs, tiny_llama])
def test_other_layers_and_scalings(tmp_path, make, rslora):
    _, expected = saved(tmp_path, make, use_rslora=rslora)
    loaded = peft.PeftModel.from_pretrained(base(make), tmp_path)
    torch.testing.assert_close(values(loaded, x_of(make)), expected)
    before = base_weights(loaded)
    loaded.merge_adapter(safe_merge=True)
    torch.testing.assert_close(values(loaded, x_of(make)), expected)
    for name, weight in base_weights(loaded).items():
        assert torch.equal(weight.ne(0), before[name].ne(0)), name


def test_transformers_loads_and_saves_it_without_a_peft_model(tmp_path):
    # Later versions of transformers import this of peft.
    pytest.importorskip("peft.utils.transformers_weight_conversion")
    _, expected = saved(tmp_path / "first", tiny_llama)
    model = base(tiny_llama)
    model.load_adapter(str(tmp_path / "first"))
    torch.testing.assert_close(values(model, x_of(tiny_llama)), expected)
    model.save_pretrained(tmp_path / "second")
    again = base(tiny_llama)
    again.load_adapter(str(tmp_path / "second"))
    torch.testing.assert_close(values(again, x_of(tiny_llama)), expected)


def test_a_loaded_adapter_is_saved_masked_and_trains_on(tmp_path):
    _, expected = saved(tmp_path / "first")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "first", is_trainable=True)
    assert mask_adapters(loaded) == list(layers(loaded))  # as 0.3 asked for; it changes nothing
    torch.testing.assert_close(loaded(x_of(Net)), expected)
    loaded(x_of(Net)).square().mean().backward()
    torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], 0.1).step()
    loaded.save_pretrained(tmp_path / "second")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "second")
    torch.testing.assert_close(again(x_of(Net)), loaded(x_of(Net)))
    assert not torch.allclose(again(x_of(Net)), expected)
    assert nmf.is_nm(again.merge_and_unload().first.weight, "2:4")


PLAIN = """
import sys
import torch, peft
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
folder = sys.argv[1]
other = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first"]))
for load in (
    lambda: peft.PeftModel.from_pretrained(Net(), folder),
    lambda: peft.PeftConfig.from_pretrained(folder),
    lambda: peft.LoraConfig.from_pretrained(folder),
    lambda: other.load_adapter(folder, "other"),
):
    try:
        load()
    except KeyError as error:
        print(error)
assert "lightning_nm" not in sys.modules
"""


def test_peft_alone_refuses_it_and_says_what_to_import(tmp_path):
    saved(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message = "'MASKED_LORA: import lightning_nm.integrations.peft before loading it'"
    assert done.stdout.splitlines() == [message] * 4


def test_an_adapter_of_0_3_loads_as_it_did(tmp_path):
    _, expected = saved(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["peft_type"] = "LORA"
    del config["nm_patterns"]
    config["lightning_nm_mask_adapters_must_be_called"] = True
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="lightning_nm_mask_adapters_must_be_called"):
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert not torch.allclose(loaded(x_of(Net)), expected)
    mask_adapters(loaded)
    torch.testing.assert_close(loaded(x_of(Net)), expected)


def test_layers_that_were_excluded_stay_ordinary(tmp_path):
    _, expected = saved(tmp_path, exclude="*.first")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    torch.testing.assert_close(loaded(x_of(Net)), expected)
    merged = loaded.merge_and_unload()
    assert not nmf.is_nm(merged.first.weight, "2:4")
    assert nmf.is_nm(merged.head.weight, "2:4")


def test_the_pattern_is_that_of_the_training(tmp_path):
    """4:8 is not the default, and a dense weight is not 4:8."""

    def net():
        return Net("4:8")

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=TARGETS[Net], init_lora_weights=False)
    model = peft.get_peft_model(net(), config)
    mask_adapters(model, "4:8")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(net(), tmp_path)
    x = x_of(Net).float()
    torch.testing.assert_close(loaded(x), model(x))
    other = net()
    nn.init.normal_(other.head.weight)
    with pytest.raises(
        ValueError, match=r"1 of 3 .*'head': its base weight is not 4:8: .*that one"
    ):
        peft.PeftModel.from_pretrained(other, tmp_path)


def test_a_dense_model_is_refused_and_not_changed(tmp_path):
    saved(tmp_path)
    model = base()
    nn.init.normal_(model.first.weight)
    with pytest.raises(
        ValueError, match=r"'first': its base weight is not 2:4.*load it onto that one"
    ):
        peft.PeftModel.from_pretrained(model, tmp_path)
    assert type(model.first) is nn.Linear
    assert not layers(model)
    del model.first
    with pytest.raises(ValueError, match=r"'first': the model has no such layer"):
        peft.PeftModel.from_pretrained(model, tmp_path)


def test_it_cannot_join_adapters_that_are_not_masked(tmp_path):
    saved(tmp_path)
    model = adapted()
    x = x_of(Net)
    expected = model(x)
    with pytest.raises(
        ValueError, match=r"3 of 3.*'gpt': it has adapters that are not masked: call mask"
    ):
        model.load_adapter(tmp_path, "masked")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(model(x), expected)
    mask_adapters(model)
    model.load_adapter(tmp_path, "masked")
    assert nmf.is_nm(model.merge_and_unload().first.weight, "2:4")


def test_it_is_swapped_for_another_masked_adapter_alone(tmp_path):
    saved(tmp_path / "masked")
    saved(tmp_path / "ordinary", mask=False)
    model = adapted(seed=3, dtype=torch.float32)
    mask_adapters(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    with pytest.raises(ValueError, match="incompatible: for nm_patterns"):
        hotswap_adapter(model, tmp_path / "ordinary", "default")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    hotswap_adapter(model, tmp_path / "masked", "default")
    assert nmf.is_nm(model.merge_and_unload().first.weight, "2:4")
    with pytest.raises(ValueError, match="incompatible: for nm_patterns"):
        hotswap_adapter(adapted(), tmp_path / "masked", "default")


def test_an_adapter_that_joins_masked_layers_is_saved_as_masked(tmp_path):
    model = adapted()
    mask_adapters(model, exclude="*.head")
    options = {"r": 2, "init_lora_weights": False}
    model.add_adapter("both", peft.LoraConfig(target_modules=["first", "head"], **options))
    model.add_adapter("dense", peft.LoraConfig(target_modules=["head"], **options))
    model.double()
    model.save_pretrained(tmp_path)
    types = {}
    for name, folder in (("default", "."), ("both", "both"), ("dense", "dense")):
        config = json.loads((tmp_path / folder / CONFIG).read_text())
        types[name] = config["peft_type"][:6], config.get("nm_patterns")
    assert types == {
        "default": ("MASKED", {"first": "2:4", "gpt": "2:4"}),
        "both": ("MASKED", {"first": "2:4"}),
        "dense": ("LORA", None),
    }
    x = x_of(Net)
    for name in ("both", "dense"):
        model.set_adapter(name)
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path / name)
        torch.testing.assert_close(loaded(x), model(x))


def test_an_adapter_that_is_unmasked_is_saved_as_an_ordinary_one(tmp_path):
    model, _ = saved(tmp_path / "masked")
    copied = copy.deepcopy(model)
    unmask_adapters(model)
    model.save_pretrained(tmp_path / "ordinary")
    assert json.loads((tmp_path / "ordinary" / CONFIG).read_text())["peft_type"] == "LORA"
    assert type(model.peft_config["default"]) is peft.LoraConfig
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "ordinary")
    torch.testing.assert_close(loaded(x_of(Net)), model(x_of(Net)))
    # A copy does not share the configuration.
    copied.save_pretrained(tmp_path / "copied")
    assert json.loads((tmp_path / "copied" / CONFIG).read_text())["peft_type"].startswith("MASKED")


def test_the_users_configuration_may_be_used_for_other_models(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["first"])
    mask_adapters(peft.get_peft_model(Net(), config))
    assert type(config) is peft.LoraConfig
    dense = Net()
    nn.init.normal_(dense.first.weight)
    peft.get_peft_model(dense, config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["peft_type"] == "LORA"


class OwnConfig(peft.LoraConfig):
    pass


def test_what_could_not_be_saved_as_masked_is_refused():
    model = adapted()
    with pytest.raises(ValueError, match=r"a part of the one .*'0' is masked: pass all of it"):
        mask_adapters(nn.Sequential(model.base_model.model.first))
    config = OwnConfig(r=2, target_modules=["first"])
    with pytest.raises(ValueError, match=r"adapter 'default' is a OwnConfig, .* use a LoraConfig"):
        mask_adapters(peft.get_peft_model(Net(), config))
    assert not any("nm_mask" in vars(module) for module in model.modules())
    mask_adapters(model)
    with pytest.raises(ValueError, match="adapter 'own' is a OwnConfig"):
        model.add_adapter("own", config)
