"""Overrides of nested configs, and the short keys of the callback."""

import pytest

from lightning_nm.commands.study.config import QUIET, flat, override, quiet, read_yaml

MASKS = {
    "class_path": "lightning_nm.NMSparsityCallback",
    "init_args": {"pattern": "2:4", "method": "bi-mask"},
}


def changed(changes, **config):
    override(config, changes)
    return config


def test_dotted_keys_and_nested_mappings_are_the_same():
    config = {"trainer": {"max_epochs": 3, "devices": 1}}
    dotted = changed(
        {"trainer.max_epochs": 5, "data.init_args.seed": 2}, **{"trainer": dict(config["trainer"])}
    )
    nested = changed({"trainer": {"max_epochs": 5}, "data": {"init_args": {"seed": 2}}}, **config)
    assert (
        dotted
        == nested
        == {"trainer": {"max_epochs": 5, "devices": 1}, "data": {"init_args": {"seed": 2}}}
    )


def test_a_class_path_replaces():
    new = {"class_path": "B", "init_args": {"b": 1}}
    assert changed({"model": new}, model={"class_path": "A", "init_args": {"a": 1}})["model"] == new


def test_short_keys_reach_the_callback():
    other = {"class_path": "lightning.pytorch.callbacks.EarlyStopping"}
    config = changed(
        {"method": "sr-ste", "pattern": "1:16"}, trainer={"callbacks": [other, {**MASKS}]}
    )
    assert config["trainer"]["callbacks"][1]["init_args"] == {"pattern": "1:16", "method": "sr-ste"}
    config = changed(
        {"method.init_args.every": 5}, trainer={"callbacks": {"class_path": "NMSparsityCallback"}}
    )
    assert config["trainer"]["callbacks"][0]["init_args"]["method"] == {"init_args": {"every": 5}}


@pytest.mark.parametrize("trainer", [None, {}, {"callbacks": None}, {"callbacks": []}])
def test_a_missing_callback_is_added(trainer):
    config = {} if trainer is None else {"trainer": trainer}
    (entry,) = changed({"pattern": "1:4"}, **config)["trainer"]["callbacks"]
    assert entry["class_path"] == "lightning_nm.NMSparsityCallback"
    assert entry["init_args"]["pattern"] == "1:4"


def test_nested_keys_are_no_short_keys():
    assert changed({"model": {"method": 1}}, model={"method": 0}) == {"model": {"method": 1}}


def test_several_callbacks_cannot_be_short():
    with pytest.raises(ValueError, match="several NMSparsityCallbacks"):
        changed({"pattern": "1:4"}, trainer={"callbacks": [MASKS, MASKS]})


def test_keys_of_a_value_are_refused():
    with pytest.raises(
        ValueError, match=r"trainer\.max_epochs\.x: trainer\.max_epochs is 3, which has no keys"
    ):
        changed({"trainer.max_epochs.x": 1}, trainer={"max_epochs": 3})


def test_quiet_leaves_out_what_watches_and_changes_nothing_given():
    watchers = [
        {"class_path": f"lightning.pytorch.callbacks.{name}"}
        for name in ("ModelCheckpoint", "ModelSummary")
    ]
    given = {
        "ckpt_path": None,
        "trainer": {"max_epochs": 2, "logger": True, "callbacks": [*watchers, MASKS]},
    }
    config = quiet(given)
    (entry,) = config["trainer"].pop("callbacks")
    assert config == {"trainer": {"max_epochs": 2, **QUIET}}
    assert entry["init_args"] == {**MASKS["init_args"], "show_tables": False, "grad_snr_every": 0}
    assert len(given["trainer"]["callbacks"]) == 3
    assert "show_tables" not in MASKS["init_args"]


def test_flat():
    assert dict(flat({"a": {"b": 1, "c": [{"d": 2}]}, "e": {}})) == {
        "a.b": 1,
        "a.c": [{"d": 2}],
        "e": {},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: 1\na: 2", "'a' is given twice"), ("- 1", "must hold a mapping"), ("a: [", "no YAML")],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        read_yaml(tmp_path / "y.yaml")
