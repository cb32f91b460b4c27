"""The pages on other tools run as they stand: their code where it installs, and ours always."""

import copy
import importlib.util
import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_nm import NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.cli import main
from tests.docs.blocks import ROOT, blocks, section
from tests.support.lightning_models import Data, Net
from tests.test_card import QUIET

PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
TITLES = {
    "lightning-model-pruning": "Lightning's ModelPruning",
    "torch-prune": "torch.nn.utils.prune",
    "torch-ao-pruning": "torch.ao.pruning",
    "modelopt": "NVIDIA's Model Optimizer",
    "apex-asp": "apex ASP",
    "torchao": "torchao's removed 2:4",
}


def page(name):
    """The section on a tool."""
    return section(PAGE, f"From {TITLES[name]}")


def new_model():
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def a_loop():
    """Two equal models with an optimizer each, and what to train and calibrate them on."""
    torch.manual_seed(0)
    model = new_model()
    other = copy.deepcopy(model)
    names = {"model": model, "other": other, "new_model": new_model}
    for name, trained in (("optimizer", model), ("other_optimizer", other)):
        names[name] = torch.optim.AdamW(trained.parameters(), 1e-2, weight_decay=0.1)
    names["batches"] = [(torch.randn(16, 32), torch.randint(0, 4, (16,))) for _ in range(6)]
    names["calibration"] = [x for x, _ in names["batches"]]
    for title in ("The loop", "A checkpoint of another tool"):
        (code,) = blocks("python", section(PAGE, title))
        exec(code, names)
    return names


def before_training(code):
    """A block up to its training."""
    return re.split(r"^for x, y|^train\(", code, maxsplit=1, flags=re.MULTILINE)[0]


def run(name, names, upto=None):
    for code in blocks("python", page(name))[:upto]:
        exec(code, names)
    return names


@pytest.fixture
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _quiet_trainer(monkeypatch):
    class Trainer(pl.Trainer):
        def __init__(self, **options):
            super().__init__(**QUIET, logger=False, enable_checkpointing=False, **options)

    monkeypatch.setattr(pl, "Trainer", Trainer)


def assert_same(model, other):
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))


def is_sparse(model, *names):
    return all(nmf.is_nm(model.get_submodule(name).weight, "2:4", dim=1) for name in names)


@pytest.mark.usefixtures("_in_folder", "_quiet_trainer")
@pytest.mark.filterwarnings("ignore:.*`weights_only` was not set")
def test_model_pruning():
    names = run(
        "lightning-model-pruning", {**a_loop(), "model": Net(), "other": Net(), "data": Data()}
    )
    assert is_sparse(names["model"], "net.3", "net.6")
    assert is_sparse(names["other"], "net.3", "net.6")
    pruned = torch.load("pruned.ckpt", weights_only=True)["state_dict"]
    assert set(pruned) == set(Net().state_dict())
    share = sum(
        (value == 0).sum().item() for key, value in pruned.items() if key.endswith("weight")
    )
    assert share == pytest.approx(
        0.5 * sum(v.numel() for k, v in pruned.items() if k.endswith("weight")), abs=1
    )
    assert not nmf.is_nm(pruned["net.6.weight"], "2:4")
    assert main(["verify", "nm.ckpt"]) == 0


@pytest.mark.usefixtures("_in_folder", "_quiet_trainer")
def test_amounts_and_lottery_tickets_of_model_pruning():
    """What the page says of ModelPruning's defaults."""
    seen, resets = [], []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            layer = pl_module.net[6]
            seen.append((layer.weight == 0).float().mean().item())
            resets.append(torch.equal(layer.weight_orig, first))

    for options in ({"use_lottery_ticket_hypothesis": False}, {}):
        torch.manual_seed(0)
        model = Net()
        first = model.net[6].weight.detach().clone()
        only = {"parameters_to_prune": [(model.net[6], "weight")], "amount": 0.5}
        pruning = pl.callbacks.ModelPruning("l1_unstructured", **only, **options)
        pl.Trainer(max_epochs=3, callbacks=[pruning, Look()]).fit(model, Data())
    assert seen == pytest.approx([0.5, 0.75, 0.875] * 2, abs=1e-3)
    assert resets[:3] == [False] * 3
    assert resets[3]


@pytest.mark.usefixtures("_in_folder", "_quiet_trainer")
@pytest.mark.filterwarnings("ignore:.*`weights_only` was not set")
def test_model_pruning_without_permanent_zeros():
    """A checkpoint with masks does not load into a new model, unless the converter reads it."""
    once = {"amount": 0.5, "parameter_names": ["weight"], "use_lottery_ticket_hypothesis": False}
    pruning, again = (
        pl.callbacks.ModelPruning("l1_unstructured", make_pruning_permanent=False, **once)
        for _ in "ab"
    )
    trainer = pl.Trainer(max_epochs=1, callbacks=[pruning])
    trainer.fit(Net(), Data())
    trainer.save_checkpoint("masks.ckpt")
    with pytest.raises(RuntimeError, match="weight_orig"):
        pl.Trainer(max_epochs=2, callbacks=[again]).fit(Net(), Data(), ckpt_path="masks.ckpt")
    model = Net()
    model.load_state_dict(
        a_loop()["without_masks"](torch.load("masks.ckpt", weights_only=True)["state_dict"])
    )
    assert (model.net[6].weight == 0).float().mean() > 0.3


@pytest.mark.usefixtures("_in_folder")
def test_torch_prune():
    names = run("torch-prune", a_loop())
    assert_same(names["model"], names["other"])
    assert_same(names["model"], names["fresh"])
    assert is_sparse(names["fresh"], "0", "2")
    assert "weight_mask" in " ".join(torch.load("pruned.pt"))
    assert main(["verify", "nm.pt", "--pattern", "2:4", "--allow-dense"]) == 0


@pytest.mark.usefixtures("_in_folder")
def test_torch_ao_pruning():
    names = run("torch-ao-pruning", a_loop())
    assert_same(names["model"], names["other"])
    assert_same(names["model"], names["fresh"])
    keys = list(torch.load("pruned.pt", weights_only=False)["model"])
    assert "0.parametrizations.weight.original" in keys
    assert not any("mask" in key for key in keys)


@pytest.mark.parametrize(
    ("layer", "error"), [(nn.Conv2d(16, 16, 3), RuntimeError), (nn.Linear(30, 8), AssertionError)]
)
def test_what_torch_ao_pruning_does_not_take(layer, error):
    theirs = torch.ao.pruning.WeightNormSparsifier(1.0, (1, 4), 2)
    theirs.prepare(nn.Sequential(layer), [{"tensor_fqn": "0.weight"}])
    with pytest.raises(error):
        theirs.step() or layer.weight


def hidden_weight_moves(model, hidden):
    """Whether the weight behind a mask changes in a step, of which no gradient is left."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    before, pruned = hidden().detach().clone(), model[0].weight.detach() == 0
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return bool((hidden().detach() != before)[pruned].any())


def test_weights_behind_masks():
    """What the pages say of them: theirs move, that of asp is zero."""
    models = [nn.Sequential(nn.Linear(32, 8)) for _ in range(3)]
    prune.l1_unstructured(models[0][0], "weight", 0.5)
    assert hidden_weight_moves(models[0], lambda: models[0][0].weight_orig)
    theirs = torch.ao.pruning.WeightNormSparsifier(1.0, (1, 4), 2)
    theirs.prepare(models[1], [{"tensor_fqn": "0.weight"}])
    theirs.step()
    assert hidden_weight_moves(models[1], lambda: models[1][0].parametrizations.weight.original)
    sparsifier = NMSparsifier(models[2], "2:4", "asp", skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(models[2].parameters(), 0.1, weight_decay=0.1)
    sparsifier.register(optimizer)
    models[2](torch.randn(4, 32)).sum().backward()
    optimizer.step()
    assert (models[2][0].weight == 0).sum() == 32 * 8 / 2


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed"
)
@pytest.mark.usefixtures("_in_folder")
@pytest.mark.filterwarnings("ignore")  # of its own
def test_modelopt():
    names = a_loop()
    before = names["model"][2].weight.detach().clone()
    code, *_ = blocks("python", page("modelopt"))
    exec(before_training(code), names)
    kept = names["model"][2].weight.detach()
    assert torch.equal(kept, torch.where(kept != 0, before, 0)), "SparseGPT changed kept weights"
    assert list(names["model"][2].state_dict()) == ["weight", "bias", "_weight_mask"]
    assert torch.equal(names["model"][2].state_dict()["weight"], before), (
        "the state dict was masked"
    )
    assert hidden_weight_moves(names["model"], lambda: names["model"].state_dict()["0.weight"])
    names = run("modelopt", a_loop())
    assert is_sparse(names["model"], "0", "2")
    assert is_sparse(names["other"], "0", "2")
    assert_same(names["model"], names["fresh"])


@pytest.mark.usefixtures("_in_folder")
def test_a_checkpoint_with_the_keys_of_modelopt():
    """The converter, without the tool: its keys are a weight that is not masked and a mask."""
    *_, code = blocks("python", page("modelopt"))
    model = new_model()
    masks = {
        name: nmf.nm_mask(model.get_submodule(name).weight.detach().abs(), "2:4")
        for name in ("0", "2")
    }
    state = {**model.state_dict(), **{f"{name}._weight_mask": mask for name, mask in masks.items()}}
    torch.save({"model_state_dict": state, "modelopt_state": {}}, "modelopt.pt")
    names = {**a_loop(), "result": type("Pruned", (), {"layers": ["0", "2"]})}
    exec(code, names)
    assert all(
        torch.equal(names["sparsifier"].layers[name].forward_mask, mask)
        for name, mask in masks.items()
    )


def test_buffers_whose_names_end_like_masks_stay():
    state = {
        "weight": torch.ones(4),
        "attention_mask": torch.zeros(4),
        "cached_mask": torch.ones(2),
    }
    assert a_loop()["without_masks"](state).keys() == state.keys()


@pytest.mark.usefixtures("_in_folder")
def test_apex_asp():
    """Ours, and the converter on a state dict with the buffers that ASP registers."""
    model = new_model()
    for module in model:
        if isinstance(module, nn.Linear):
            mask = nmf.nm_mask(module.weight.detach().abs(), "2:4")
            module.weight.data *= mask
            module.register_buffer("__weight_mma_mask", mask)
            module.register_buffer("__weight_mma_pruned_p", torch.zeros_like(module.weight))
    torch.save(model.state_dict(), "asp.pt")
    names = run("apex-asp", a_loop())
    assert is_sparse(names["model"], "0", "2", "4")
    assert all(torch.equal(names["fresh"][at].weight, model[at].weight) for at in (0, 2, 4))


@pytest.mark.usefixtures("_quiet_trainer")
def test_torchao_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where the choices of kernels are kept
    names = {**a_loop(), "module": Net(), "data": Data()}
    for code in blocks("python", page("torchao"))[1:]:  # the first is theirs
        exec(code, names)
    assert is_sparse(names["other"], "0", "2", "4")
    assert is_sparse(names["module"].float(), "net.3", "net.6")
    assert nmf.is_nm(names["module"].net[6].weight, "2:4", dim=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")  # of its own
def test_torchao():
    names = run("torchao", a_loop(), upto=2)
    assert_same(names["model"], names["other"])


@pytest.mark.parametrize("name", ["torch-prune", "torch-ao-pruning"])
@pytest.mark.usefixtures("_in_folder")
def test_the_order_of_parameters(name):
    """What the index says of optimizers: these tools move weights behind biases, ours do not."""
    names = a_loop()
    before = [tuple(parameter.shape) for parameter in names["model"].parameters()]
    optimized = names["optimizer"].param_groups[0]["params"]
    theirs, ours, *_ = blocks("python", page(name))
    exec(before_training(theirs), names)
    assert [tuple(parameter.shape) for parameter in names["model"].parameters()] != before
    assert [tuple(parameter.shape) for parameter in optimized] == before
    assert before_training(ours) != ours
    exec(before_training(ours), names)
    names["sparsifier"].register(names["other_optimizer"])
    assert [tuple(parameter.shape) for parameter in names["other"].parameters()] == before


def test_every_tool_has_its_section():
    listed = re.findall(r"^\| \[([^\]]+)\]\(#(from-[\w-]+)\)", PAGE, re.MULTILINE)
    sections = re.findall(r"^## From (.*)$", PAGE, re.MULTILINE)
    anchors = [
        f"from-{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')}" for title in sections
    ]
    assert sorted(anchor for _, anchor in listed) == sorted(anchors)
    assert sorted(sections) == sorted(TITLES.values())
