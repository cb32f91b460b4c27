"""The command line: LightningCLI with the callback in YAML, and verify. tests/commands has the other commands."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import lightning_nm
from lightning_nm import NMLightningCLI, NMSparsityCallback, SparsityConfig
from lightning_nm import functional as nmf
from lightning_nm.commands.lightning_cli import hint
from lightning_nm.demo import Digits, ResidualCNN
from tests.support.command import refused, status_of
from tests.support.event_files import Events
from tests.support.lightning_models import Data, make_trainer, new_model

CONFIGS = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))
BASE = """
seed_everything: 0
model: {class_path: ResidualCNN, init_args: {width: 16}}
data: {class_path: Digits}
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  max_steps: 2
  limit_val_batches: 1
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args:
"""


@pytest.fixture
def fit(tmp_path):
    """Runs fit with these arguments of the callback, in YAML: its status."""

    def run(*lines, base=BASE, words=()):
        text = base + "".join(f"        {line}\n" for line in lines or ["pattern: 2:4"])
        (tmp_path / "config.yaml").write_text(text)
        folder = f"--trainer.default_root_dir={tmp_path}"
        return status_of("fit", "-c", tmp_path / "config.yaml", folder, *words)

    return run


def arguments_of(printed):
    """Of the callback, in what --print_config printed."""
    (callback,) = (
        each
        for each in yaml.safe_load(printed)["trainer"]["callbacks"]
        if each["class_path"] == "lightning_nm.NMSparsityCallback"
    )
    return callback["init_args"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_parse(path, capsys):
    assert status_of("fit", "-c", path, "--print_config") == 0
    assert arguments_of(capsys.readouterr().out)["method"]


PATTERNS = {
    "2:4": "2:4",
    "1:16": "1:16",
    "8:16": "8:16",
    "'2:4'": "2:4",
    "{n: 3, m: 8}": "3:8",
    "4:64": "4:64",
}
OF_GRADIENTS = {"pattern": "1:2", "dense_start": 0, "dense_end": 0.1}


@pytest.mark.parametrize(
    ("line", "place", "meant"),
    [
        *((f"pattern: {written}", "pattern", meant) for written, meant in PATTERNS.items()),
        *(
            (
                f"method: {{class_path: lightning_nm.BAME, init_args: {{stop: {stop}}}}}",
                "method.init_args.stop",
                stop,
            )
            for stop in (0, 0.66, 1, 1.0, 2000)
        ),
        *(
            (
                f"grad_estimator: {{class_path: lightning_nm.MVUE, init_args: {{pattern: {written}, dense_end: 0.1}}}}",
                "grad_estimator.init_args",
                OF_GRADIENTS,
            )
            for written in ("1:2", "'1:2'", "{n: 1, m: 2}")
        ),
        ("grad_estimator: dense", "grad_estimator", "dense"),
        ("preset: paper", "preset", "paper"),
        ("skip_first_last: first", "skip_first_last", "first"),
        (
            "rules: [{include: a, conv_layout: flat}]",
            "rules",
            [{"include": "a", "conv_layout": "flat"}],
        ),
    ],
)
def test_values_in_yaml_mean_what_they_say_and_round_trip(
    fit, tmp_path, capsys, line, place, meant
):
    assert fit(line, words=["--print_config"]) == 0
    printed = capsys.readouterr().out
    found = arguments_of(printed)
    for key in place.split("."):
        found = found[key]
    assert repr(found) == repr(meant)
    (tmp_path / "again.yaml").write_text(printed)
    assert status_of("fit", "-c", tmp_path / "again.yaml", "--print_config") == 0
    assert capsys.readouterr().out == printed


def test_a_schedule_in_yaml(fit, capsys):
    lines = (
        "pattern: 1:16",
        "method: asp",
        "schedule: {dense_start: 1, ramp: [8:16, '4:16'], ramp_ends: [2, 0.75], dense_end: 0.1}",
        "rules: [{include: 'stages.*', schedule: {ramp: [4:16]}}]",
    )
    assert fit(*lines, words=["--print_config"]) == 0
    printed = arguments_of(capsys.readouterr().out)
    names = ("pattern", "method", "schedule", "rules")
    rule, general = (
        NMSparsityCallback(**{name: printed[name] for name in names}).config.resolve().rules
    )
    assert [str(pattern) for pattern in general.schedule.ramp] == ["8:16", "4:16"]
    assert repr(general.schedule.dense_start) == "1"
    assert (general.schedule.dense_end, general.schedule.ramp_ends) == (0.1, (2, 0.75))
    assert [str(pattern) for pattern in rule.schedule.ramp] == ["4:16"]

    assert fit("pattern: 2:4", "method: sr-ste", "schedule: {dense_start: 1}") == 0
    said = capsys.readouterr().out
    assert "schedule: dense from training step 0, 2:4 from training step 1" in said


STARTS = "there is no 'dense_strat'; did you mean 'dense_start'"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "pattern: 5:4",
            "trainer.callbacks, NMSparsityCallback, pattern: .*5:4.*N must be smaller than M",
        ),
        ("pattern: 2:0", "2:0"),
        (
            "pattern: auto:0.5",
            r"lightning_nm.prune\(model, budget=0.5\).rules.*training these `rules`",
        ),
        ("pattern: 2-4", "2-4"),
        ("method: bi-msak", "method: 'bi-msak' is none of dense, ste, .*did you mean 'bi-mask'"),
        ("method: SR_STE", "method: 'SR_STE' is none of dense, ste, .*did you mean 'sr-ste'"),
        (
            "method: {class_path: lightning_nm.BiMsk}",
            "method, BiMsk: there is no 'BiMsk'; did you mean 'BiMask'",
        ),
        ("patern: 2:4", "NMSparsityCallback: there is no 'patern'; did you mean 'pattern'"),
        (
            "method: {class_path: lightning_nm.BiMask, init_args: {permute_evry: 3}}",
            "NMSparsityCallback, method, BiMask: there is no 'permute_evry'; did you mean 'permute_every'",
        ),
        (
            "rules: [{include: a, patern: 1:4}]",
            "rules: there is no 'patern'; did you mean 'pattern'",
        ),
        (
            "rules: [{include: a, conv_layot: flat}]",
            "rules: there is no 'conv_layot'; did you mean 'conv_layout'",
        ),
        ("conv_layout: hwc", "conv_layout: 'hwc' is none of channels, flat"),
        ("preset: papers", "preset: 'papers' is none of paper, fst; did you mean 'paper'"),
        ("method: bame\npreset: paper", "preset='paper' has no settings for method 'bame'"),
        (
            "method: {class_path: lightning_nm.BAME, init_args: {budget: 0}}",
            r"budget=0.*\(0, 1\]",
        ),
        (
            "method: {class_path: lightning_nm.BAME, init_args: {stop: 1.5}}",
            "stop=1.5.*an integer",
        ),
        (
            "method: {class_path: lightning_nm.SRSTE, init_args: {decay: relativ}}",
            "SRSTE, decay: 'relativ' is neither a number nor relative; did you mean 'relative'",
        ),
        ("grad_estimator: mvu", "mvu.*approx-mvue"),
        (
            "grad_estimator: {class_path: lightning_nm.MVUE, init_args: {pattern: 5:4}}",
            "5:4.*smaller than M",
        ),
        (
            "grad_estimator: {class_path: lightning_nm.MVUE, init_args: {dense_end: 1.5}}",
            "dense_end=1.5",
        ),
        ("schedule: {dense_strat: 0.1}", STARTS),
        ("rules: [{include: '*', schedule: {dense_strat: 1}}]", STARTS),
        ("shedule: {ramp: [3:4]}", "there is no 'shedule'; did you mean 'schedule'"),
        ("schedule: {ramp: [1:4]}", "the schedule's ramp goes from 1:4 to 2:4"),
    ],
)
def test_mistakes_are_named_in_the_first_line(fit, capsys, line, words):
    assert fit(*line.splitlines()) == 2
    said = capsys.readouterr().err
    assert re.match(f"hint: .*{words}", said)
    assert "usage:" not in said, "a page of all options would hide it"
    assert "\nerror: " in said, "the whole message follows"


def test_an_unknown_mistake_has_no_hint(fit, capsys):
    """Such as a bad argument of a method, which is not taken for its name."""
    assert hint("Subcommand 'fit' does not accept option 'trainr.accelerator'") == ""
    assert hint("") == ""
    assert fit("method: {class_path: lightning_nm.CAST, init_args: {decay: abc}}") == 2
    said = capsys.readouterr().err
    assert "Expected a <class 'float'>. Got value: abc" in said
    assert "hint:" not in said
    assert fit("schedule: {ramp: [3:4], dense_start: half}") == 2
    assert "dense_start" in capsys.readouterr().err


def test_two_callbacks_without_names_are_told_of_names(fit, capsys):
    again = "- {class_path: lightning_nm.NMSparsityCallback, init_args: {include: b}}"
    assert fit(base=BASE.replace("callbacks:\n", f"callbacks:\n    {again}\n")) == 2
    words = "two NMSparsityCallbacks with the same name: give each its own `name`"
    assert words in capsys.readouterr().err


def test_a_class_that_the_config_does_not_name(tmp_path, capsys):
    path = tmp_path / "own.yaml"
    path.write_text("model: {dim: 16, depth: 1}\n")
    words = "hint: model, LightningModule: no class is named: write `class_path"
    assert words in refused(capsys, "fit", "-c", path)
    for command in ("doctor", "flops"):
        words = "`model:` of the config names no class: give it by --model, such as --model"
        assert words in refused(capsys, command, "-c", path)


def test_a_command_line_of_ones_own_has_the_hints(capsys):
    def run(*args):
        return NMLightningCLI(ResidualCNN, Digits, args=args, save_config_callback=None, run=False)

    assert run("--model.lr=0.5").model.lr == 0.5
    with pytest.raises(SystemExit):
        run("--trainer.callbacks=NMSparsityCallback", "--trainer.callbacks.patern=2:4")
    assert "did you mean 'pattern'?" in capsys.readouterr().err


def test_the_class_is_imported_when_it_is_asked_for():
    code = "import sys, lightning_nm; print('lightning.pytorch.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
    with pytest.raises(AttributeError, match="has no attribute 'NMLightningCli'"):
        _ = lightning_nm.NMLightningCli


def test_help_is_complete(capsys):
    assert status_of("fit", "--trainer.callbacks.help=lightning_nm.NMSparsityCallback") == 0
    text = " ".join(capsys.readouterr().out.split())
    names = [field.name for field in dataclasses.fields(SparsityConfig)]
    for option in (*names, "log_layers", "show_tables", "monitor"):
        assert f".{option}" in text
    assert "sr-ste" in text
    assert "Globs over names of modules to mask" in text


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_lists_the_subcommands(capsys, words):
    """Without a warning of LightningCLI, which are errors here."""
    assert status_of(*words) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("verify", "study", "fit"))


@pytest.mark.parametrize(
    ("word", "meant"),
    [("frobnicate", "verify$"), ("docter", "did you mean 'doctor'"), ("fti", "'fit'")],
)
def test_an_unknown_subcommand_lists_all(capsys, word, meant):
    known = "fit, validate, test, predict, doctor, export, flops, study, verify"
    said = refused(capsys, word).strip()
    assert f"no subcommand '{word}', only {known}" in said
    assert re.search(meant, said)


def test_version(capsys):
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"lightning-nm {lightning_nm.__version__}\n"


@pytest.mark.parametrize("package", ["jsonargparse", "docstring_parser"])
def test_without_its_extra_the_commands_are_listed_and_fit_names_it(monkeypatch, capsys, package):
    """Lightning's module can be imported without these packages; its class cannot be used."""
    monkeypatch.setitem(sys.modules, package, None)
    assert status_of("--help") == 0
    out, err = capsys.readouterr()
    assert out.startswith("lightning-nm: N:M sparse training")
    for name in ("doctor", "verify", "study"):
        assert f"    {name} " in out
    assert err.startswith("The command line needs the extra `cli`: pip install -e '.[cli]'")
    monkeypatch.setattr("lightning.pytorch.cli._JSONARGPARSE_SIGNATURES_AVAILABLE", False)
    assert "pip install -e '.[cli]'" in refused(capsys, "fit")


def test_fit_trains_with_rules_and_nested_methods(fit, capsys):
    """A second run does not trip over the config of the first one."""
    lines = [
        "pattern: 2:4",
        "method: {class_path: lightning_nm.BiMask, init_args: {permute_every: 2, search: random}}",
        "rules: [{include: 'stages.2.*', pattern: 1:16, method: sr-ste}]",
    ]
    for _ in range(2):
        assert fit(*lines) == 0
        out = capsys.readouterr().out
        assert "1:16" in out
        assert "N:M summary" in out


def test_the_default_logger_has_no_placeholder_of_a_metric(fit, tmp_path):
    assert fit(base=BASE.replace("  logger: false\n", "")) == 0
    folder = tmp_path / "lightning_logs" / "version_0"
    assert {"config.yaml", "hparams.yaml"} <= {path.name for path in folder.iterdir()}
    scalars = Events(folder).scalars
    assert "nm/density" in scalars
    assert "hp_metric" not in scalars, "Lightning would log -1"


@pytest.mark.parametrize("command", ["fit", "flops"])
def test_modules_of_the_current_folder_are_seen(tmp_path, monkeypatch, command):
    """A console script has its own folder on the path instead."""
    name = f"train_{command}"
    source = "from lightning_nm.demo import ResidualCNN\n\nclass Net(ResidualCNN): pass\n"
    (tmp_path / f"{name}.py").write_text(source)
    config = BASE.replace("ResidualCNN", f"{name}.Net") + "        pattern: 2:4\n"
    (tmp_path / "config.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", ".")])
    assert status_of(command, "-c", "config.yaml") == 0
    assert "Net" in vars(sys.modules[name])


# --------------------------------------------------------------------------------------------------------- verify


def verified(capsys, *words):
    """The status of verify, and what it says."""
    return status_of("verify", *words), capsys.readouterr().out


def test_the_module_runs(tmp_path):
    command = [sys.executable, "-m", "lightning_nm", "verify", tmp_path / "none"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "neither a file nor" in result.stdout


def test_verify_checks_the_masked_weights_of_a_checkpoint(tmp_path, capsys):
    path = tmp_path / "model.ckpt"
    rules = [{"include": "net.3", "pattern": "1:4", "method": "sr-ste"}]
    nm = NMSparsityCallback("2:4", rules=rules, show_tables=False)
    trainer = make_trainer(tmp_path, [nm], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(path)
    status, said = verified(capsys, path)
    assert status == 0
    assert all(words in said for words in ("net.3.weight", "net.6.weight", "1:4", "OK: 2 weights"))
    assert verified(capsys, path, "--include", "net.6")[0] == 0
    assert verified(capsys, path, "--include", "net.8*")[0] == 1

    content = torch.load(path, weights_only=True)
    content["state_dict"]["net.6.weight"][3, 8:12] = 1.0
    torch.save(content, path)
    status, said = verified(capsys, path)
    assert status == 1
    assert "'net.6.weight' is not 2:4: 1 of 2048 blocks" in said
    del content["state_dict"]["net.3.weight"]
    torch.save(content, path)
    status, said = verified(capsys, path)
    assert status == 2
    assert "masks for 'net.3' but no weight" in said


def test_verify_prints_json(tmp_path, capsys):
    path = str(tmp_path / "weights.pt")
    sparse = nmf.nm_prune(torch.randn(4, 8), "2:4")
    torch.save({"a.weight": sparse, "b.weight": torch.randn(4, 8)}, path)
    status, said = verified(capsys, path, "--pattern", "2:4", "--include", "b", "--json")
    assert status == 1
    document = json.loads(said)
    assert (document["schema"], document["command"], document["ok"]) == (1, "verify", False)
    (found,) = document["checkpoints"]
    assert (found["checkpoint"], found["ok"]) == (path, False)
    assert found["problems"] == ["'b.weight' is named by `include` but is dense"]
    weights = [(each["key"], each["verdict"], each["blocks"]) for each in found["weights"]]
    assert weights == [("a.weight", "N:M", 8), ("b.weight", "dense", 8)]
    assert status_of("verify", path, "--json") == 2
    out, err = capsys.readouterr()
    assert "give a pattern" in json.loads(out)["checkpoints"][0]["error"]
    assert "give a pattern" in err


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("content", [b"no checkpoint", b""])
def test_verify_refuses_what_it_cannot_read(tmp_path, capsys, content, suffix):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    status, said = verified(capsys, path)
    assert status == 2
    assert "cannot read" in said
