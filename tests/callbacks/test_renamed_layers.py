"""A module whose layers were renamed since the checkpoint was saved."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_nm import NMSparsifier, rename_layers
from tests.support.lightning_models import Data, Net, SaveAt, callback, make_trainer


class Parts(Net):
    """The layers of Net under two names; ``names`` says how the module calls them."""

    names = ("body", "out")

    def __init__(self):
        super().__init__(dropout=0.0)
        net = self.net
        del self.net
        body, out = self.names
        self.add_module(body, net[:8])
        self.add_module(out, net[8])

    def forward(self, x):
        body, out = self.names
        return self.get_submodule(out)(self.get_submodule(body)(x))


def renaming(old, new, *, state):
    """A class whose modules have new names, and that renames them in checkpoints."""
    names = dict(zip(old, new, strict=True))

    class Renamed(Parts):
        def on_load_checkpoint(self, checkpoint):
            for part in ("state_dict", "current_model_state"):
                weights = checkpoint.get(part, {})
                for key in list(weights):
                    first, rest = key.split(".", 1)
                    weights[f"{names[first]}.{rest}"] = weights.pop(key)
            if state:
                rename_layers(checkpoint["callbacks"]["NMSparsityCallback"], names)

    Renamed.names = new
    return Renamed


def fit(tmp_path, kind, averages, *callbacks, **options):
    pl.seed_everything(0, verbose=False)
    model = kind()
    first = [EMAWeightAveraging(decay=0.9)] if averages else []
    trainer = make_trainer(
        tmp_path, [*first, callback("sr-ste"), *callbacks], enable_checkpointing=False
    )
    trainer.fit(model, Data(), **options)
    return list(model.state_dict().values())


@pytest.mark.parametrize("averages", [False, True], ids=["plain", "averages"])
def test_a_run_resumes_after_its_layers_were_renamed(tmp_path, averages):
    path = tmp_path / "saved.ckpt"
    straight = fit(tmp_path, Parts, averages, SaveAt(path, 8))
    # The last layer is dense, and the state knows it by its name.
    cases = [(("body", "head"), False), (("encoder", "out"), True), (("encoder", "head"), True)]
    for names, state in cases:
        kind = renaming(("body", "out"), names, state=state)
        resumed = fit(tmp_path, kind, averages, ckpt_path=path)
        assert all(map(torch.equal, straight, resumed)), names
    text = (
        r"'body\..* is masked only in the checkpoint; .*'encoder\..* is masked only here"
        r".* by lightning_nm.rename_layers\(\)"
    )
    kind = renaming(("body", "out"), ("encoder", "out"), state=False)
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, kind, averages, ckpt_path=path)


def test_names_that_do_not_fit_change_nothing():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    state = NMSparsifier(model, "2:4", "asp").attach().state_dict()
    before = copy.deepcopy(list(state["layers"]))
    with pytest.raises(ValueError, match=r"no layer of the state is 'body' .* it has '0', '1'"):
        rename_layers(state, {"body": "encoder"})
    with pytest.raises(ValueError, match="two layers would have the same name"):
        rename_layers(state, {"0": "1"})
    with pytest.raises(ValueError, match="schema"):
        rename_layers({"layers": {}}, {"0": "1"})
    assert list(state["layers"]) == before
    rename_layers(state, {"0": "1", "1": "0"})
    assert list(state["layers"]) == ["1", "0"]


def test_prefixes_come_and_go():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    model[1].requires_grad_(False)
    state = NMSparsifier(model, "2:4", "asp").attach().state_dict()
    rename_layers(state, {"": "model", "2": "body"})
    assert (list(state["layers"]), state["waiting"]) == (["model.0", "body"], ["model.1"])
    rename_layers(state, {"model": ""})
    assert (list(state["layers"]), state["waiting"]) == (["0", "body"], ["1"])
    rename_layers(state, {"1": "frozen"})
    assert state["waiting"] == ["frozen"]
    for names in ({"body": ""}, {"body": "a."}, {"0": "frozen"}):
        with pytest.raises(ValueError, match="cannot be given to these layers"):
            rename_layers(state, names)
