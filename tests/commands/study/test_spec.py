"""Study files: what they mean, which are refused, and what they make of a config."""

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_nm.commands.from_config import QUIET, read_yaml
from lightning_nm.commands.study.spec import Cell, override, quiet, read

STUDY = """
config: config.yaml
metric: test_acc
direction: maximize
baselines: [dense]
variants: {dense: {}, masked: {method: sr-ste}}
grid: {pattern: [1:16, "2:4"], model.init_args.width: [16, 32]}
seeds: 3
"""
STUDIES = Path(__file__).parents[3] / "studies"
SHIPPED = sorted(STUDIES.rglob("*.yaml"))


@pytest.fixture
def study(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 1}\n")

    def write(text=STUDY):
        (tmp_path / "mine.yaml").write_text(text)
        return tmp_path / "mine.yaml"

    return write


def test_a_study(study):
    spec = read(study())
    assert (spec.name, spec.seeds, spec.baselines, spec.sampler) == (
        "mine",
        [0, 1, 2],
        ["dense"],
        "grid",
    )
    assert spec.grid == {"pattern": ["1:16", "2:4"], "model.init_args.width": [16, 32]}
    cells = list(spec.cells())
    assert len(cells) == 8
    assert cells[1] == Cell("masked", {"pattern": "1:16", "model.init_args.width": 16})
    assert cells[1].label == "masked, pattern 1:16, model.init_args.width 16"
    config = spec.trial_config(cells[1], {})
    assert config["trainer"]["max_epochs"] == 1
    assert config["model"] == {"init_args": {"width": 16}}
    assert config["trainer"]["callbacks"][0]["init_args"]["pattern"] == "1:16"
    assert "model" not in spec.config


def test_ranges(study):
    search = (
        "search: {lr: {low: 1e-4, high: 1e-1, log: true}, n: {low: 1, high: 9, step: 2}, c: [a, b]}"
    )
    spec = read(study(f"{STUDY}sampler: tpe\ntrials: 4\n{search}"))
    assert spec.search == {
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "n": IntDistribution(1, 9, step=2),
        "c": CategoricalDistribution(["a", "b"]),
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sead: 3", "'sead' is not accepted.*docs/studies.md lists the keys"),
        ("metric: 3", "metric.*str.*Got value: 3"),
        ("direction: down", "direction.*down"),
        ("sampler: bayes", "sampler.*bayes"),
        ("baselines: [dens]", "baselines: 'dens'.*variants: dense, masked"),
        ("seeds: 0", r"seeds: \[\]"),
        ("seeds: [a]", "seeds.*Got value: a"),
        ("variants: [a]", r"variants.*dict.*Got value: \['a'\]"),
        ("variants: {}", "'dense' is no variant"),
        ("grid: {pattern: 1:16}", "grid.*list.*Got value: 76"),
        ("grid: {pattern: [5:4]}", "5:4"),
        ("grid: {a: [{b: 1}]}", "grid.*{'b': 1}"),
        ("grid: {method: [sr-ste]}", "masked: method.*give it once"),
        ("trials: 3", "`trials`.*sampler: tpe"),
        ("sampler: tpe", "`search`.*sampler: tpe"),
        ("sampler: tpe\nsearch: {a: [1]}\ntrials: 0", "`trials`.*sampler: tpe"),
        ("sampler: tpe\nsearch: {method: [a]}\ntrials: 1", "masked: method.*give it once"),
        ("seconds: 0", "seconds: 0.*positive"),
        ("seconds: fast", "seconds.*float.*fast"),
        ("seconds: 9\nsampler: random\ntrials: 3\nsearch: {lr: [1, 2]}", "goes with a grid"),
    ],
)
def test_bad_values_are_named(study, line, words):
    key = line.split(":")[0]
    lines = [each for each in STUDY.splitlines() if not each.startswith(f"{key}:")]
    with pytest.raises(ValueError, match=rf"(?s)mine\.yaml.*{words}"):
        read(study("\n".join([*lines, line])))


@pytest.mark.parametrize(
    "bounds",
    [
        *("3", "{low: 1}", "{low: 2, high: 1}", "{low: 0, high: 1, log: true}"),
        *("{low: a, high: 1}", "{low: 0, high: 1, lgo: true}"),
    ],
)
def test_bad_ranges_are_named(study, bounds):
    path = study(f"{STUDY}sampler: random\ntrials: 3\nsearch: {{lr: {bounds}}}")
    with pytest.raises(ValueError, match=r"search\.lr: .*low"):
        read(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(STUDIES)))
def test_shipped_studies_can_be_read(path):
    spec = read(path)
    if path.parent == STUDIES:
        assert spec.name == path.stem
    for cell in spec.cells():
        assert "callbacks" in spec.trial_config(cell, {})["trainer"]


MASKS = {
    "class_path": "lightning_nm.NMSparsityCallback",
    "init_args": {"pattern": "2:4", "method": "bi-mask"},
}


def changed(changes, **config):
    override(config, changes)
    return config


@pytest.mark.parametrize(
    ("changes", "trainer"),
    [
        ({"trainer.max_epochs": 5}, {"max_epochs": 5, "devices": 1}),
        ({"trainer": {"max_epochs": 5}}, {"max_epochs": 5, "devices": 1}),
        ({"trainer.a": {"b.c": 1}}, {"max_epochs": 3, "devices": 1, "a": {"b.c": 1}}),
        ({"trainer.a.b": 1}, {"max_epochs": 3, "devices": 1, "a": {"b": 1}}),
        ({"trainer.devices.b": 1}, {"max_epochs": 3, "devices": {"b": 1}}),
        ({"trainer": {"class_path": "A"}}, {"class_path": "A"}),
        ({"trainer": {"method": 1}}, {"max_epochs": 3, "devices": 1, "method": 1}),
    ],
)
def test_dotted_keys_nested_mappings_and_class_paths(changes, trainer):
    config = changed(changes, trainer={"max_epochs": 3, "devices": 1})
    assert config == {"trainer": trainer}


def test_short_keys_reach_the_callback_which_is_added_if_missing():
    def masks(changes, trainer):
        config = changed(changes, trainer=trainer) if trainer is not False else changed(changes)
        return config["trainer"]["callbacks"][-1]["init_args"]

    other = {"class_path": "lightning.pytorch.callbacks.EarlyStopping"}
    short = {"pattern": "1:16", "method": "sr-ste"}
    assert masks(short, {"callbacks": [other, {**MASKS}]}) == short
    alone = {"callbacks": {"class_path": "NMSparsityCallback"}}
    found = masks({"method.init_args.every": 5}, alone)
    assert found["method"] == {"init_args": {"every": 5}}
    for trainer in (False, {}, {"callbacks": None}, {"callbacks": []}):
        assert masks({"pattern": "1:4"}, trainer)["pattern"] == "1:4"
    with pytest.raises(ValueError, match="several NMSparsityCallbacks"):
        changed({"pattern": "1:4"}, trainer={"callbacks": [MASKS, MASKS]})


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


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1", "must hold a mapping"), ("a: [", "no YAML")],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "x.yaml")
    with pytest.raises(FileNotFoundError, match=r"y\.yaml"):
        read_yaml(tmp_path / "y.yaml")
