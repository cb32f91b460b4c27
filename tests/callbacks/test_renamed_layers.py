"""A module whose layers were renamed since the checkpoint was saved."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_nm import NMSparsifier, rename_layers
from tests.support.lightning_models import Net, SaveAt, callback, fit, new_model


class Parts(Net):
    """The layers of Net under two names, which may be renamed in checkpoints: of weights, and of the state."""

    def __init__(self, body="body", out="out", state=True):
        super().__init__(dropout=0.0)
        net = self.net
        del self.net
        self.new, self.state = {"body": body, "out": out}, state
        self.add_module(body, net[:8])
        self.add_module(out, net[8])

    def forward(self, x):
        body, out = self.new.values()
        return self.get_submodule(out)(self.get_submodule(body)(x))

    def on_load_checkpoint(self, checkpoint):
        for part in ("state_dict", "current_model_state"):
            weights = checkpoint.get(part, {})
            for key in list(weights):
                first, rest = key.split(".", 1)
                weights[f"{self.new[first]}.{rest}"] = weights.pop(key)
        if self.state:
            rename_layers(checkpoint["callbacks"]["NMSparsityCallback"], self.new)


@pytest.mark.parametrize("averages", [False, True], ids=["plain", "averages"])
def test_a_run_resumes_after_its_layers_were_renamed(tmp_path, averages):
    path = tmp_path / "saved.ckpt"

    def run(*callbacks, ckpt_path=None, **names):
        own = [EMAWeightAveraging(decay=0.9)] if averages else []
        own += [callback("sr-ste"), *callbacks]
        model = new_model(of=Parts, **names)
        fit(tmp_path, own, model, ckpt_path=ckpt_path, enable_checkpointing=False)
        return list(model.state_dict().values())

    straight = run(SaveAt(path, 8))
    # The last layer is dense, and the state knows it by its name.
    for names in (
        {"body": "body", "out": "head", "state": False},
        {"body": "encoder", "out": "out"},
        {"body": "encoder", "out": "head"},
    ):
        assert all(map(torch.equal, straight, run(ckpt_path=path, **names))), names
    text = (
        r"'body\..* is masked only in the checkpoint; .*'encoder\..* is masked only here"
        r".* by lightning_nm.rename_layers\(\)"
    )
    with pytest.raises(ValueError, match=text):
        run(ckpt_path=path, body="encoder", state=False)


def state_of(count, frozen=()):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(count)])
    for index in frozen:
        model[index].requires_grad_(False)
    return NMSparsifier(model, "2:4", "asp").attach().state_dict()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"body": "encoder"}, r"no layer of the state is 'body' .* it has '0', '2'"),
        ({"0": "2"}, "two layers would have the same name"),
        ({"2": ""}, "cannot be given to these layers"),
        ({"2": "a."}, "cannot be given to these layers"),
        ({"0": "1"}, "cannot be given to these layers"),
    ],
)
def test_names_that_do_not_fit_change_nothing(names, error):
    state = state_of(4, frozen=[1])
    with pytest.raises(ValueError, match=error):
        rename_layers(state, names)
    assert (list(state["layers"]), state["waiting"]) == (["0", "2"], ["1"])


def test_a_state_of_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema"):
        rename_layers({"layers": {}}, {"0": "1"})


def test_names_are_exchanged_and_prefixes_come_and_go():
    state = state_of(4, frozen=[1])
    for names, layers, waiting in (
        ({"": "model", "2": "body"}, ["model.0", "body"], "model.1"),
        ({"model": ""}, ["0", "body"], "1"),
        ({"1": "frozen"}, ["0", "body"], "frozen"),
        ({"0": "body", "body": "0"}, ["body", "0"], "frozen"),
    ):
        rename_layers(state, names)
        assert (list(state["layers"]), state["waiting"]) == (layers, [waiting])
