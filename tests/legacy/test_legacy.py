"""The checkpoints of every released version load and go on; `make_checkpoints.py` made them."""

from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import NMSparsityCallback, load_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, verify
from lightning_nm.functional import is_nm
from lightning_nm.nn.state import layer_state
from tests.legacy.make_checkpoints import EPOCHS, PACKED, SAVED_AFTER, PackedNet, fit

# The lowest supported Lightning reads what a later one wrote.
pytestmark = pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning")

FILES = sorted(Path(__file__).parent.glob("*.ckpt"))
PACKED_FILES = sorted(Path(__file__).parent.glob("*.safetensors"))


class Look(pl.Callback):
    """The state of the sparsifier when the resumed training begins."""

    def on_train_start(self, trainer, pl_module):
        nm = next(c for c in trainer.callbacks if isinstance(c, NMSparsityCallback))
        self.layers = {name: layer_state(layer) for name, layer in nm.sparsifier.layers.items()}
        self.step = trainer.global_step


def test_each_kind_of_state_is_kept_of_this_version_too():
    kinds = {"bi-mask", "bame", "three-gemms"}
    assert {path.stem for path in FILES} >= {f"{version('lightning-nm')}-{kind}" for kind in kinds}
    assert {path.stem for path in PACKED_FILES} >= {
        f"{version('lightning-nm')}-{kind}" for kind in PACKED
    }
    assert all(path.stat().st_size < 20_000 for path in [*FILES, *PACKED_FILES])


def _same(here, saved):
    if isinstance(saved, torch.Tensor):
        return torch.equal(here, saved)
    if isinstance(saved, dict):
        return saved.keys() <= here.keys() and all(
            _same(here[key], value) for key, value in saved.items()
        )
    return here == saved


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_checkpoint_of_an_older_version_goes_on(path):
    saved = torch.load(path, weights_only=True)
    look = Look()
    model = fit(path.stem.split("-", 1)[1], look, ckpt_path=path)

    assert look.step == SAVED_AFTER < EPOCHS
    layers = saved["callbacks"]["NMSparsityCallback"]["layers"]
    assert look.layers.keys() == layers.keys() == {"net.0", "net.2"}
    for name, state in layers.items():
        for key in state.keys() - {"checksum"}:  # sums may round differently elsewhere
            assert _same(look.layers[name][key], state[key]), (name, key)
    for key, value in saved["expected"].items():  # another machine may round differently
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert any(
        not torch.equal(saved["state_dict"][key], value)
        for key, value in model.state_dict().items()
    )
    assert all(is_nm(model.net[k].weight, "2:4", dim=1) for k in (0, 2))
    assert [verdict.verdict for verdict in verify(path).verdicts] == ["N:M", "N:M"]


@pytest.mark.filterwarnings("ignore:.*written by lightning_nm 0.3 or older and has no checksums")
@pytest.mark.parametrize("path", PACKED_FILES, ids=lambda path: path.stem)
def test_packed_files_of_an_older_version_load_with_the_same_bits(path):
    expected = torch.load(path.with_suffix(".pt"), weights_only=True)
    found = unpacked_state_dict(load_packed(PackedNet(), path, kernels="reference"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
    result = verify(path)
    assert [v.pattern for v in result.verdicts] == ["2:4", "2:4", "1:16", "1:8"]
    assert result.ok
    has_none = path.stem.startswith("0.3.0")
    assert (PackedFile(path).checksums is None) == bool(result.warnings) == has_none


def other_schema(state):
    state["schema"] = 2


def no_scale(state):
    """As of a version before 0.3."""
    for key in ("scale", "base_density", "auto"):
        del state[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_schema,
            "schema 2, but this version reads schema 1: use the version of lightning_nm that wrote it",
        ),
        (no_scale, r"resume with lightning_nm 0\.3, and save it there once"),
    ],
)
def test_other_states_are_refused_with_the_way_out(tmp_path, change, message):
    checkpoint = torch.load(FILES[0], weights_only=True)
    change(checkpoint["callbacks"]["NMSparsityCallback"])
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=message):
        fit(FILES[0].stem.split("-", 1)[1], ckpt_path=tmp_path / "other.ckpt")
