"""lightning-nm study, with trainings of a few steps."""

import csv
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lightning_nm import BAME, NMSparsityCallback
from lightning_nm.commands.from_config import QUIET
from lightning_nm.commands.study import runner
from lightning_nm.commands.study.runner import fit, train
from lightning_nm.commands.study.spec import Cell, read
from lightning_nm.demo import GPT, HelpTopics
from tests.support.command import status_of

FIXED = {"method": {"class_path": "lightning_nm.BAME", "init_args": {"start": 1.0, "stop": 1.0}}}
CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": "GPT", "init_args": {"dim": 16, "heads": 4, "depth": 1}},
    "data": {
        "class_path": "HelpTopics",
        "init_args": {"batch_size": 4, "train_size": 64, "val_fraction": 0.01},
    },
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 3,
        "limit_val_batches": 0,
        "limit_test_batches": 2,
    },
}
STUDY = {
    "config": "config.yaml",
    "metric": "test_bits_per_byte",
    "baselines": ["dense"],
    "variants": {"dense": {"method": "dense"}, "fixed": FIXED},
    "grid": {"pattern": ["1:16"]},
    "seeds": 2,
}


@pytest.fixture
def study(tmp_path):
    def write(config=CONFIG, **changes):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | changes))
        return tmp_path / "study.yaml"

    return write


def start(path, *words):
    return status_of("study", path, "--output", path.parent / "out", "--threads", 1, *words)


def results(path):
    with (path.parent / "out" / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_study_is_trained_once_and_reported(study, capsys):
    path = study()
    assert start(path) == 0
    out = capsys.readouterr().out
    assert out.count("test_bits_per_byte ") >= 4
    assert "fixed - dense" in out
    rows = results(path)
    assert [(row["variant"], row["pattern"], row["seed"], row["state"]) for row in rows] == [
        (variant, "1:16", seed, "complete") for seed in "01" for variant in ("dense", "fixed")
    ]
    assert {row["steps"] for row in rows} == {"3"}
    assert float(rows[1]["flops_paper"]) < float(rows[0]["flops_paper"]) == 1
    assert {row["torch"] for row in rows} == {torch.__version__}
    text = (path.parent / "out" / "report.md").read_text()
    assert "| fixed - dense | 2     |" in text
    assert text in out
    assert (path.parent / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert start(path, "--report-only") == 0
    assert start(path) == 0
    assert "(process" not in capsys.readouterr().out
    assert results(path) == rows


@pytest.fixture
def trained(monkeypatch):
    """The arguments of every training."""
    calls = []
    monkeypatch.setattr(runner, "train", lambda *given: calls.append(given) or train(*given))
    return calls


def test_a_diverged_training_fails_and_stops_nothing(study, capsys):
    variants = {"wild": {"model.init_args.lr": 1e30}, **STUDY["variants"]}
    path = study(variants=variants, seeds=1)
    assert start(path) == 1
    error = "ValueError: the training diverged: test_bits_per_byte is nan"
    failed = f"Failed: variant wild, pattern 1:16, seed 0, state failed, error {error}"
    assert failed in capsys.readouterr().out
    assert [row["state"] for row in results(path)] == ["complete", "complete", "failed"]


def test_a_metric_that_nobody_logs_stops_the_study_after_its_first_training(study, capsys, trained):
    path = study(metric="test_bits_per_bite")
    assert start(path) == 2
    told = capsys.readouterr().err
    assert "the test logs no 'test_bits_per_bite' but" in told
    assert "test_bits_per_byte; did you mean 'test_bits_per_byte'?" in told
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("variant", "expected"),
    [({"method": "dense"}, 1), ({"method": "dense", "grad_estimator": "mvue"}, 2)],
)
def test_a_dense_variant_without_estimator_is_trained_once_for_all_patterns(
    study, trained, variant, expected
):
    path = study(variants={"dense": variant}, grid={"pattern": ["1:2", "2:4"]}, seeds=1)
    assert start(path) == 0
    assert len(trained) == expected
    assert [(row["pattern"], row["state"]) for row in results(path)] == [
        ("1:2", "complete"),
        ("2:4", "complete"),
    ]


MODULE = """
from lightning_nm.demo import GPT, HelpTopics

class Net(GPT):
    pass

class Text(HelpTopics):
    pass
"""


def test_classes_that_the_config_does_not_name(study, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_classes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = CONFIG | {"model": CONFIG["model"]["init_args"], "data": CONFIG["data"]["init_args"]}
    path = study(config, seeds=1)
    assert start(path) == 2
    assert start(path, "--model", "own_classes.Net", "--data", "own_classes.Nothing") == 2
    assert "--data own_classes.Nothing" in capsys.readouterr().err
    assert start(path, "--model", "own_classes.Net", "--data", "own_classes.Text") == 0
    named = study(config, seeds=1, model="own_classes.Net", data="own_classes.Text")
    assert start(named) == 0, "the study file may name them, too"
    spec = read(named)
    (cell, *_), classes = spec.cells(), spec.classes
    assert runner.build(spec.trial_config(cell, {}), 5, classes).datamodule.seed == 5
    assert "(process" not in capsys.readouterr().out.split("Written")[-1]


def test_ctrl_c_leaves_a_state_that_goes_on(study, capsys, monkeypatch):
    path = study()
    trained = []

    def interrupted(config, seed, metric, classes):
        if len(trained) == 2:
            raise SystemExit(1)  # what Lightning makes of Ctrl-C
        trained.append(seed)
        return {
            metric: 1.0 + seed,
            "fit_seconds": 0.0,
            **dict.fromkeys(("torch", "lightning_nm", "threads", "device"), 1),
        }

    monkeypatch.setattr(runner, "train", interrupted)
    assert start(path) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert start(path, "--report-only") == 1
    assert [row["state"] for row in results(path)].count("complete") == 2
    assert "Not finished: 2 of 4 trainings" in capsys.readouterr().out
    trained[:] = [None, None, None]
    assert start(path) == 0
    assert len(trained) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": {"dense": {"metod": "a"}}}, "variant dense, pattern 1:16.*metod"),
        ({"variants": {"dense": {"method.init_args.every": 2}}}, "every"),
        ({"overrides": {"trainer.max_steps.a": 2}}, "max_steps.*{'a': 2}"),
        ({"grid": {"data.init_args.batch_size": [0]}}, "batch_size 0.*at least 1"),
        ({"sampler": "random", "trials": 1, "search": {"model.init_args.lrr": [1, 2]}}, "lrr"),
        ({"baselines": ["a"]}, "baselines: 'a' is no variant"),
    ],
)
def test_mistakes_are_named_before_any_training(study, capsys, changes, words):
    path = study(**changes)
    assert start(path) == 2
    assert re.search(words, capsys.readouterr().err, re.DOTALL)
    assert not (path.parent / "out").exists()


def test_equal_seconds_are_measured_once_and_give_each_variant_its_steps(
    study, capsys, monkeypatch
):
    measured = []

    def timed(config, seed, classes, *callbacks):
        """A training's time by its method; those that count are real."""
        if callbacks:
            return fit(config, seed, classes, *callbacks)
        (masks,) = config["trainer"]["callbacks"]
        measured.append(masks["init_args"]["method"])
        warm_up = 10.0 * (len(measured) <= 4)
        step_seconds = {"dense": 0.5, "sr-ste": 0.2, "bi-mask": 5.0}[measured[-1]]
        return None, 3.0 + (warm_up + step_seconds) * config["trainer"]["max_steps"]

    monkeypatch.setattr(runner, "fit", timed)
    variants = {name: {"method": name} for name in ("dense", "sr-ste", "bi-mask")}
    limits = {"max_steps": 3, "min_steps": 7, "max_time": "00:00:00:01"}
    config = CONFIG | {"trainer": CONFIG["trainer"] | limits}
    changes = {"seconds": 2.1, "baselines": [], "seeds": [3]}
    path = study(config, variants={name: variants[name] for name in ("dense", "sr-ste")}, **changes)
    assert start(path) == 0
    assert "Measuring the steps of 2 settings" in capsys.readouterr().out
    assert measured[:4] == ["dense", "dense", "sr-ste", "sr-ste"]
    measured[:] = [""] * 4
    assert start(study(config, variants=variants, **changes)) == 0
    assert set(measured) == {"", "bi-mask"}
    steps = {row["variant"]: row["steps"] for row in results(path)}
    assert steps == {"dense": "4", "sr-ste": "10", "bi-mask": "1"}


def test_options_are_checked(study, capsys):
    path = study()
    assert start(path, "--workers", "0") == 2
    assert "--workers" in capsys.readouterr().err
    (path.parent / "out").mkdir()
    (path.parent / "out" / "journal.log").write_text("{}")
    assert start(path) == 2
    assert "lightning_nm 0.3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "importer"),
    [("optuna", "runner"), ("scipy.stats", "analysis"), ("matplotlib.figure", "analysis")],
)
def test_a_missing_extra_is_named(study, capsys, monkeypatch, missing, importer):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"lightning_nm.commands.study.{importer}")
    assert start(study()) == 2
    assert "pip install -e '.[study]'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:BAME never adapts")
def test_a_trial_is_the_plain_training_of_its_seed(study):
    """One without LightningCLI."""
    variants = {"it": {"method": FIXED["method"]}}
    spec = read(study(variants=variants, baselines=[]))
    trial = spec.trial_config(Cell("it", {"pattern": "1:16"}), {})
    found = train(trial, 3, spec.metric, (None, None))

    pl.seed_everything(3, verbose=False)
    method = BAME(start=1.0, stop=1.0)
    masks = NMSparsityCallback("1:16", method, show_tables=False, grad_snr_every=0)
    plain = pl.Trainer(callbacks=[masks], **CONFIG["trainer"], **QUIET)
    model, data = (CONFIG[name]["init_args"] for name in ("model", "data"))
    model, data = GPT(**model), HelpTopics(**data, seed=3)
    plain.fit(model, data)
    (expected,) = plain.test(model, data, verbose=False)
    assert {key: found[key] for key in expected} == expected


STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_can_be_built(path):
    if path.stem.startswith("smollm2"):
        pytest.skip("tests/docs/test_fine_tune.py builds it, with the models that its page makes")
    runner.check(read(path))
