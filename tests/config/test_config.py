"""SparsityConfig, and the constructors that take its fields. A change of the public arguments is a decision."""

import dataclasses
import inspect
import json

import pytest
from torch import nn

from lightning_nm import (
    ASP,
    BAME,
    MVUE,
    STE,
    MaskMonitor,
    NMPattern,
    NMSparsifier,
    NMSparsityCallback,
    SparsityConfig,
)

SHARED = {
    "pattern": "2:4",
    "method": "bame",
    "grad_estimator": None,
    "include": None,
    "exclude": None,
    "rules": None,
    "preset": None,
    "skip_first_last": None,
    "conv_layout": None,
    "seed": 0,
    "frozen": "dense",
    "grad_snr_every": 100,
    "scale": "auto",
    "dgrad": None,
    "schedule": None,
    "base_density": 1.0,
    "direct_reads": "error",
}
OWN = {
    NMSparsityCallback: {
        "log_layers": False,
        "compare_ranks_every": 1,
        "show_tables": True,
        "name": None,
        "monitor": True,
    },
    NMSparsifier: {
        "model": inspect.Parameter.empty,
        "planned_steps": None,
        "data_rank": None,
        "managed": False,
    },
}
POSITIONAL = ("pattern", "method", "grad_estimator")


def owners():
    yield from OWN.items()
    try:
        from lightning_nm.integrations import NMTrainerCallback
    except ImportError:
        return
    yield NMTrainerCallback, {"show_tables": True, "log_layers": False, "resume_from": None}


def test_the_settings_are_these():
    assert {field.name: field.default for field in dataclasses.fields(SparsityConfig)} == SHARED


@pytest.mark.parametrize(("owner", "own"), list(owners()))
def test_a_constructor_has_these_arguments(owner, own):
    parameters = dict(inspect.signature(owner).parameters)
    assert parameters.pop("options").kind is inspect.Parameter.VAR_KEYWORD
    expected = {name: SHARED[name] for name in POSITIONAL} | {"config": None} | own
    assert {name: parameter.default for name, parameter in parameters.items()} == expected


def made(owner, *args, **options):
    if owner is NMSparsifier:
        return owner(nn.Linear(8, 8), *args, **options)
    return owner(*args, **options)


@pytest.mark.parametrize("owner", [owner for owner, _ in owners()])
class TestOwners:
    def test_arguments_and_config_are_the_same(self, owner):
        config = SparsityConfig("1:4", "sr-ste", "mvue", exclude="head", seed=3, frozen="mask")
        assert (
            made(owner, "1:4", "sr-ste", "mvue", exclude="head", seed=3, frozen="mask").config
            == config
        )
        assert made(owner, config=config).config is config

    def test_both_are_refused(self, owner):
        with pytest.raises(ValueError, match="both config and pattern, seed are given"):
            made(owner, "1:4", seed=1, config=SparsityConfig())

    def test_a_mistyped_argument_is_named(self, owner):
        with pytest.raises(
            TypeError, match=f"{owner.__name__} has no argument 'exlude'; did you mean 'exclude'"
        ):
            made(owner, exlude="head")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"frozen": "masks"}, "frozen='masks' is unknown: use 'dense' or 'mask'"),
            ({"grad_snr_every": -1}, "grad_snr_every=-1 must be a number of training steps"),
            ({"method": "asb"}, "method 'asb' does not exist"),
        ],
    )
    def test_bad_values_are_refused_at_once(self, owner, options, message):
        with pytest.raises(ValueError, match=message):
            made(owner, **options)


@pytest.mark.parametrize("rules", [{"include": "a", "pattern": "1:4"}, ["a"], "a", 3])
def test_rules_are_a_list_of_mappings(rules):
    with pytest.raises(
        TypeError, match=r"`rules` takes a list of mappings, for example \[\{'include'"
    ):
        SparsityConfig(rules=rules)


CONFIGS = [
    SparsityConfig(),
    SparsityConfig(
        "1:8", "asp", include=["a.*", "b"], skip_first_last="first", conv_layout="flat", seed=7
    ),
    SparsityConfig("2:8", rules=[{"include": "a", "pattern": "1:4", "method": "ste"}], preset=None),
    SparsityConfig("1:16", "sr-ste", "mvue", preset="paper", frozen="mask", grad_snr_every=0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_dictionary_is_json_and_comes_back(config):
    settings = json.loads(json.dumps(config.to_dict()))
    assert SparsityConfig.from_dict(settings) == config


@pytest.mark.parametrize(
    "written", ["{exclude: head, skip_first_last: last}", "{config: {exclude: head, pattern: 1:4}}"]
)
def test_yaml_takes_the_settings_and_the_config(written):
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=NMSparsityCallback)
    node = f"{{class_path: lightning_nm.NMSparsityCallback, init_args: {written}}}"
    callback = parser.instantiate_classes(parser.parse_args([f"--callback={node}"])).callback
    assert callback.config.exclude == "head"
    assert callback.config.skip_first_last == ("last" if "last" in written else None)
    assert str(callback.config.pattern) == ("1:4" if "1:4" in written else "2:4")


def test_objects_become_their_class_and_arguments():
    config = SparsityConfig(
        NMPattern(1, 4), ASP(start=5), MVUE(dense_end=3), rules=[{"include": "a", "method": STE()}]
    )
    settings = json.loads(json.dumps(config.to_dict()))
    assert settings["pattern"] == "1:4"
    assert settings["method"]["init_args"]["start"] == 5
    again = SparsityConfig.from_dict(settings)
    assert (type(again.method), again.method.start) == (ASP, 5)
    assert (type(again.grad_estimator), again.grad_estimator.dense_end) == (MVUE, 3)
    assert type(again.rules[0]["method"]) is STE
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"method": BAME},
        {"method": BAME, "preset": "paper"},
        {"grad_estimator": MVUE},
        {"pattern": NMPattern},
        {"rules": [{"include": "*", "method": BAME}]},
        {"rules": [{"include": "*", "grad_estimator": MVUE}]},
        {"rules": [{"include": "*", "pattern": NMPattern}]},
        {"config": SparsityConfig},
        {"monitor": MaskMonitor},
    ],
    ids=str,
)
def test_a_class_in_the_place_of_an_object_tells_how_to_make_one(options):
    (given,) = options.get("rules", [options])
    (name,) = {"BAME", "MVUE", "NMPattern", "SparsityConfig", "MaskMonitor"} & {
        getattr(value, "__name__", "") for value in given.values()
    }
    with pytest.raises((TypeError, ValueError), match=rf"the class {name}.*: write {name}\("):
        NMSparsityCallback(**options)


def test_a_class_whose_module_lacks_a_package_is_refused_with_that_package(tmp_path, monkeypatch):
    package = tmp_path / "user_package_of_methods"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text("import package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    method = {"class_path": "user_package_of_methods.own.Method"}
    with pytest.raises(ModuleNotFoundError, match="package_that_is_missing"):
        SparsityConfig.from_dict({"method": method})


def test_two_sparsifiers_of_one_config_share_no_method_by_short_name():
    config = SparsityConfig(method="sr-ste")
    first, second = (NMSparsifier(nn.Linear(8, 8), config=config) for _ in range(2))
    assert first.settings.rules[-1].method is not second.settings.rules[-1].method
