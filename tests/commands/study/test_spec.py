"""Study files: what they mean, and which are refused."""

from pathlib import Path

import pytest

from lightning_nm.commands.study.spec import Cell, read

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
SHIPPED = sorted([*STUDIES.glob("*.yaml"), *STUDIES.glob("cycles/*.yaml")])


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
        (0, 1, 2),
        ("dense",),
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
    assert spec.search["lr"] == {"low": 1e-4, "high": 1e-1, "log": True}
    assert spec.search["n"] == {"low": 1, "high": 9, "step": 2, "log": False}
    assert spec.search["c"] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sead: 3", ["unknown key 'sead'", "did you mean 'seeds'"]),
        ("metric: 3", ["metric: 3", "text"]),
        ("direction: down", ["direction: 'down'", "minimize or maximize"]),
        ("sampler: bayes", ["sampler: 'bayes'", "grid or tpe or random"]),
        ("baselines: [dens]", ["baselines: 'dens'", "variants: dense, masked"]),
        ("seeds: 0", ["seeds: 0"]),
        ("seeds: [1, 1]", ["seeds: [1, 1]", "each once"]),
        ("seeds: [a]", ["seeds: ['a']"]),
        ("seeds: true", ["seeds: True"]),
        ("variants: [a]", ["variants: ['a']", "mapping"]),
        ("variants: {}", ["'variants' is missing"]),
        ("variants: {dense: sr-ste}", ["variants.dense: 'sr-ste'", "mapping"]),
        ("grid: {pattern: 1:16}", ["grid.pattern: 76", "list"]),
        ("grid: {pattern: [5:4]}", ["5:4"]),
        ("grid: {a: [1, 1]}", ["grid.a: [1, 1]", "twice"]),
        ("grid: {a: [{b: 1}]}", ["grid.a: {'b': 1}", "variants"]),
        ("grid: {method: [sr-ste]}", ["variants.masked.method", "give it once"]),
        ("trials: 3", ["trials: goes with"]),
        ("sampler: tpe", ["search: goes with"]),
        ("config: none.yaml", ["none.yaml", "cannot be read"]),
        ("name: a/b", ["name: 'a/b'", "slash"]),
        ("seconds: 0", ["seconds: 0", "positive"]),
        ("seconds: fast", ["seconds: 'fast'", "positive"]),
        ("seconds: true", ["seconds: True", "positive"]),
        (
            "seconds: 9\noverrides: {trainer.max_steps: 3}",
            ["overrides.trainer.max_steps", "leave out one"],
        ),
        (
            "seconds: 9\noverrides: {trainer: {max_epochs: 3}}",
            ["overrides.trainer.max_epochs", "leave out one"],
        ),
        (
            "seconds: 9\nsampler: random\ntrials: 3\nsearch: {lr: [1, 2]}",
            ["seconds: goes with a grid"],
        ),
    ],
)
def test_bad_values_are_named(study, line, words):
    key = line.split(":")[0]
    text = (
        "".join(f"{each}\n" for each in STUDY.splitlines() if not each.startswith(f"{key}:")) + line
    )
    path = study(text)
    with pytest.raises(ValueError, match=r"mine\.yaml") as error:
        read(path)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "bounds",
    ["3", "{low: 1}", "{low: 2, high: 1}", "{low: 0, high: 1, log: true}", "{low: a, high: 1}"],
)
def test_bad_ranges_are_named(study, bounds):
    path = study(f"{STUDY}sampler: random\ntrials: 3\nsearch: {{lr: {bounds}}}")
    with pytest.raises(ValueError, match=r"search\.lr: .*low"):
        read(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_can_be_read(path):
    spec = read(path)
    folder = path.parent.name
    assert spec.name == (path.stem if folder == "studies" else f"{folder}-{path.stem}")
    for cell in spec.cells():
        assert "callbacks" in spec.trial_config(cell, {})["trainer"]
