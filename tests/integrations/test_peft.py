"""LoRA adapters on N:M weights train the masked delta, and merging them keeps every zero."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from lightning_nm import NMSparsifier, pack  # noqa: E402
from lightning_nm import functional as nmf  # noqa: E402
from lightning_nm.export import verify  # noqa: E402
from lightning_nm.integrations.peft import mask_adapters, masked_delta, unmask_adapters  # noqa: E402
from tests.docs.blocks import ShortTrainer, blocks, read, section  # noqa: E402
from tests.support.adapted import (  # noqa: E402
    INPUTS,
    QUIET,
    TARGETS,
    Conv1D,
    Convs,
    Net,
    adapted,
    base_weights,
    layers,
    tiny_llama,
    values,
)
from tests.support.lightning_models import Data  # noqa: E402

pytestmark = QUIET


def masked(make=Net, **options):
    """An adapted model whose adapters are masked, and inputs."""
    model = adapted(make, **options)
    assert mask_adapters(model) == list(layers(model))
    return model, INPUTS[make]()


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("make", [Net, Convs, tiny_llama])
def test_the_merged_weight_is_n_m_and_the_function_that_was_trained(make, options):
    """Merged, with peft's check of it, the weight has the same zeros; unmerged it is the base weight again."""
    model, x = masked(make, **options)
    before, trained = base_weights(model), values(model, x)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    model.merge_adapter(safe_merge=True)
    for name, weight in base_weights(model).items():
        assert torch.equal(weight.ne(0), before[name].ne(0)), name
        assert not torch.equal(weight, before[name]), name
    torch.testing.assert_close(values(model, x), trained, **exact)
    model.unmerge_adapter()
    for name, weight in base_weights(model).items():
        torch.testing.assert_close(weight, before[name])
        assert not weight[before[name] == 0].any()
    torch.testing.assert_close(values(model, x), trained, **exact)
    torch.testing.assert_close(values(model.merge_and_unload(), x), trained, **exact)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradients_are_those_of_the_formula(transposed, bias):
    torch.manual_seed(0)
    base = (Conv1D(24, 16) if transposed else nn.Linear(16, 24)).double()
    with torch.no_grad():
        base.weight.copy_(
            nmf.nm_prune(torch.randn_like(base.weight), "2:4", dim=0 if transposed else 1)
        )
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["0"], init_lora_weights=False, lora_bias=bias
    )
    model = peft.get_peft_model(nn.Sequential(base), config)
    mask_adapters(model)
    (layer,) = layers(model).values()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    a, b, c = (
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.lora_B["default"].bias,
    )
    weight = base.weight.t() if transposed else base.weight
    total = weight + 5 / 3 * weight.ne(0) * (b @ a)
    expected = F.linear(x, total, base.bias) + (0 if c is None else 5 / 3 * c)
    found = model(x)
    torch.testing.assert_close(found, expected)
    by = [x, a, b, *([] if c is None else [c])]
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, by, grad), torch.autograd.grad(expected, by, grad)
    )


def test_second_derivatives():
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 8), (2, 8), (4, 2))
    ]
    mask = nmf.nm_mask(torch.randn(4, 8), "2:4")
    assert torch.autograd.gradgradcheck(lambda *t: masked_delta(*t, mask, 0.7), inputs)


def test_no_tensor_of_the_weights_shape_is_kept_for_backward():
    model, x = masked(r=2)
    (layer, *_) = layers(model).values()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    large = [t for t in kept if t.numel() == 32 * 16]
    assert {t.data_ptr() for t in large} <= {
        layer.base_layer.weight.data_ptr(),
        layer.nm_mask.data_ptr(),
    }


def test_without_masks_a_merge_would_not_be_n_m():
    model, _ = masked()
    unmask_adapters(model)
    assert {type(layer) for layer in layers(model).values()} == {peft.tuners.lora.Linear}
    assert not any("nm_mask" in vars(module) for module in model.modules())
    assert not nmf.is_nm(model.merge_and_unload().first.weight, "2:4")


def test_several_adapters_and_those_that_come_later():
    model, x = masked()
    config = peft.LoraConfig(r=2, target_modules=["first", "gpt"], init_lora_weights=False)
    model.add_adapter("other", config)
    model.double().eval()
    one = model(x)
    model.set_adapter("other")
    two = model(x)
    with model.disable_adapter():
        base = model(x)
    mixed = model(x, adapter_names=["other", "default", "__base__"] * 2)
    expected = [two[0], one[1], base[2], two[3], one[4], base[5]]
    torch.testing.assert_close(mixed, torch.stack(expected))
    model.base_model.set_adapter(["default", "other"])
    both = model(x)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), both)
    assert nmf.is_nm(merged.first.weight, "2:4")
    assert nmf.is_nm(merged.gpt.weight, "2:4", dim=0)


def test_convolutions_take_the_adapter_of_each_sample():
    model, x = masked(Convs)
    model.eval()
    with model.disable_adapter():
        base = model(x)
    found = model(x, adapter_names=["__base__", "default"])
    torch.testing.assert_close(found, torch.stack([base[0], model(x)[1]]))


def test_dropout_acts_on_the_input_of_the_adapter():
    model, x = masked(lora_dropout=0.5)
    (layer, *_) = layers(model).values()
    delta = layer.get_delta_weight("default").t()
    torch.manual_seed(1)
    found = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, layer.base_layer(x) + F.dropout(x, 0.5) @ delta)
    model.eval()
    torch.testing.assert_close(layer(x), layer.base_layer(x) + x @ delta)


@pytest.mark.parametrize("make", [Net, Convs])
def test_autocast_and_half_precision(make):
    model, x = masked(make, dtype=torch.float32)
    exact = model(x := x.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    found.float().square().sum().backward()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.float(), exact, rtol=0.1, atol=0.1 * float(exact.detach().abs().max())
    )
    # Weights of half precision under adapters of single precision.
    for layer in layers(model).values():
        layer.get_base_layer().to(torch.bfloat16)
    assert model(x.bfloat16()).dtype is torch.bfloat16
    before = base_weights(model)
    model.merge_adapter()
    assert all(not w[before[n] == 0].any() for n, w in base_weights(model).items())


def test_copies_pickles_and_state_dicts():
    model, x = adapted(), INPUTS[Net]()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    mask_adapters(model)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert nmf.is_nm(other.merge_and_unload().first.weight, "2:4")
    mask_adapters(model)  # a second call changes nothing
    assert torch.equal(model(x), expected)
    assert all(layer.nm_mask.is_meta for layer in layers(copy.deepcopy(model).to("meta")).values())


def test_a_base_that_a_sparsifier_masks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    net.requires_grad_(False)
    sparsifier = NMSparsifier(net, "1:4", "ste", frozen="mask", skip_first_last=False).attach()
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(net, config).double()
    mask_adapters(model)  # by the layer's own pattern
    x = torch.randn(5, 16, dtype=torch.float64)
    trained = model(x)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), trained)
    sparsifier.bake()
    sparsifier.detach()
    torch.testing.assert_close(merged(x), trained)
    assert all(nmf.is_nm(layer.weight, "1:4") for layer in (merged[0], merged[2]))


@pytest.mark.parametrize("masks", [False, True])
def test_verify_reads_adapted_and_merged_weights(masks):
    model = adapted(dtype=torch.float32)
    if masks:
        mask_adapters(model)
    torch.save(model.state_dict(), "adapted.pt")
    result = verify("adapted.pt", "2:4", include="*.first.base_layer", allow_dense=True)
    assert result.ok
    notes = {verdict.key: verdict.note for verdict in result.verdicts}
    assert "N:M only if mask_adapters() masked" in notes["base_model.model.first.base_layer.weight"]
    torch.save(model.merge_and_unload().state_dict(), "merged.pt")
    assert verify("merged.pt", "2:4", include=["first", "gpt", "head"]).ok is masks


# ----------------------------------------------------------------------------------------------------- what is refused


def refused(model, message, *args):
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        mask_adapters(model, *args)
    assert [type(module) for module in model.modules()] == kinds


def with_dense_layers():
    torch.manual_seed(0)
    net = Net()
    net.first.weight.data[0, :4] = 1
    nn.init.normal_(net.head.weight)
    return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=TARGETS[Net]))


def trained_base():
    model = adapted()
    model.base_model.model.first.base_layer.weight.requires_grad_(True)
    return model


def merged():
    model, _ = masked()
    model.merge_adapter()
    return model


def grouped():
    net = nn.Sequential(nn.Conv1d(8, 8, 3, groups=2), nn.Embedding(8, 8))
    with pytest.warns(UserWarning, match="groups > 1"):
        return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "1"]))


def packed():
    return peft.get_peft_model(pack(Net()), peft.LoraConfig(r=2, target_modules=["first"]))


class OwnConfig(peft.LoraConfig):
    pass


FIRST = "'base_model.model.first'"


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (Net, [], "no adapter of peft"),
        (lambda: adapted(use_dora=True), [], f"{FIRST}.*DoraLinearVariant is not LoRA's plain sum"),
        (
            lambda: adapted(dtype=torch.float32, init_lora_weights="pissa"),
            [],
            rf"{FIRST}.*not 2:4: \d+ of 128 blocks hold more",
        ),
        (
            with_dense_layers,
            [],
            "^2 of 3 [^']*'base_model.model.first': .*not 2:4: 1 of 128 [^']*'base_model.model.head'",
        ),
        (adapted, ["1:4"], "not 1:4"),
        (adapted, ["3:5"], "has no blocks of 3:5"),
        (trained_base, [], "its base weight is trained"),
        (merged, [], r"merged into its base weight: call unmerge_adapter\(\)"),
        (grouped, [], "grouped convolutions.*lora.layer.Embedding is no LoRA of a linear"),
        (packed, [], f"{FIRST}: its base weight is packed, for inference"),
        (
            lambda: nn.Sequential(adapted().base_model.model.first),
            [],
            "a part of the one .*'0' is masked: pass all of it",
        ),
        (
            lambda: peft.get_peft_model(Net(), OwnConfig(r=2, target_modules=["first"])),
            [],
            "adapter 'default' is a OwnConfig, .* use a LoraConfig",
        ),
    ],
)
def test_adapters_that_cannot_be_masked_are_named(make, args, message):
    refused(make(), message, *args)


def test_dense_layers_may_be_excluded():
    model = with_dense_layers()
    assert mask_adapters(model, exclude=["*.first", "*.head"]) == ["base_model.model.gpt"]
    with pytest.raises(ValueError, match="leaves no adapted layer"):
        mask_adapters(model, exclude="*")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(r=2, target_modules=["first"], use_dora=True), "DoraLinearVariant"),
        (OwnConfig(r=2, target_modules=["first"]), "adapter 'new' is a OwnConfig"),
    ],
)
def test_an_adapter_of_another_kind_cannot_join_masked_ones(config, message):
    model, _ = masked()
    with pytest.raises(ValueError, match=message):
        model.add_adapter("new", config)


def test_weights_loaded_since_then_are_noticed():
    model, _ = masked()
    weight = model.base_model.model.first.base_layer.weight
    weight.data = nmf.nm_prune(torch.randn_like(weight), "2:4")
    with pytest.raises(ValueError, match="other nonzeros than when its adapters were masked"):
        model.merge_and_unload()


def in_a_model(masks):
    """An adapted N:M layer in a model whose other layers a sparsifier masks."""
    model = nn.Sequential(adapted(dtype=torch.float32), nn.Linear(8, 8), nn.Linear(8, 8))
    if masks:
        mask_adapters(model)
    return model


def test_a_sparsifier_warns_of_adapters_that_would_break_its_pattern():
    message = r"base_model\.model\.first; .*gpt; .*head.*mask_adapters\(model\) before"
    with pytest.warns(UserWarning, match=message):
        sparsifier = NMSparsifier(in_a_model(False), "2:4", "ste").attach()
    assert "mask_adapters keeps it so" in sparsifier.skipped["0.base_model.model.gpt.base_layer"]
    sparsifier = NMSparsifier(in_a_model(True), "2:4", "ste").attach()
    assert list(sparsifier.layers) == ["1"]
    assert "keeps the zeros" in sparsifier.skipped["0.base_model.model.gpt.base_layer"]
    NMSparsifier(in_a_model(False), "1:4", "ste").attach()  # dense for this pattern


def test_merging_into_a_packed_base_is_refused():
    message = "'first.weight' is packed, for inference, and cannot be changed in place, as merging"
    for merge in ("merge_adapter", "merge_and_unload"):
        with pytest.raises(RuntimeError, match=message):
            getattr(packed(), merge)()


# ------------------------------------------------------------------------------------------------------------ the page


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        for layer in (self.q_proj, self.v_proj):
            layer.weight.data = nmf.nm_prune(layer.weight.data, "2:4")

    def forward(self, x):
        return self.head(torch.relu(self.v_proj(torch.relu(self.q_proj(x.flatten(1))))))


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode at the start of training")
def test_the_page(monkeypatch):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    train, load, _ = blocks("python", section(read("huggingface.md"), "LoRA on an N:M model"))
    torch.manual_seed(0)
    names = {"sparse": Projections(), "data": Data()}
    sparse = copy.deepcopy(names["sparse"])
    exec(train, names)
    weight = names["merged"].v_proj.weight
    assert torch.equal(weight.ne(0), sparse.v_proj.weight.ne(0))
    assert not torch.equal(weight, sparse.v_proj.weight)
    loaded = {"sparse": copy.deepcopy(sparse)}
    exec(load, loaded)
    again = loaded["model"].merge_and_unload().v_proj.weight
    torch.testing.assert_close(again, weight)
    assert torch.equal(again.ne(0), sparse.v_proj.weight.ne(0))


class Pretraining(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Projections()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode at the start of training")
def test_the_last_per_cent_of_slope(monkeypatch):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    train, _, last = blocks("python", section(read("huggingface.md"), "LoRA on an N:M model"))
    torch.manual_seed(0)
    pretraining = Pretraining()
    names = {"pretraining": pretraining, "data": Data()}
    exec(train.partition("class FineTuning")[0], names)  # its imports
    sparse = []

    def get_peft_model(model, config):
        sparse.append(copy.deepcopy(model))
        return peft.get_peft_model(model, config)

    exec(last, {**names, "get_peft_model": get_peft_model})
    inside = pretraining.model.base_model.model
    for name in ("q_proj", "v_proj"):
        adapted = inside.get_submodule(name)
        weight = sparse[0].get_submodule(name).weight
        assert nmf.is_nm(weight, "2:4")
        assert torch.equal(adapted.base_layer.weight, weight)
        assert bool(adapted.lora_B["default"].weight.any())
    x = torch.randn(4, 64)
    for base in (pack(copy.deepcopy(sparse[0])), sparse[0]):
        loaded = peft.PeftModel.from_pretrained(base, "adapter")
        torch.testing.assert_close(loaded(x), pretraining.model(x))
