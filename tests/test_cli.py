"""The command line: LightningCLI with the callback in YAML, and verify."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import lightning_nm
from lightning_nm import NMLightningCLI, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.cli import main
from lightning_nm.commands.lightning_cli import hint
from lightning_nm.demo import Digits, ResidualCNN
from tests.support.event_files import Events
from tests.support.lightning_models import Data, make_trainer, new_model

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _no_words_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])


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


def config(tmp_path, *lines, base=BASE):
    path = tmp_path / "config.yaml"
    path.write_text(base + "".join(f"        {line}\n" for line in lines or ["pattern: 2:4"]))
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_parse(path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), "--print_config"])
    assert stop.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert any(
        c["class_path"] == "lightning_nm.NMSparsityCallback"
        for c in printed["trainer"]["callbacks"]
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2:4", "2:4"),
        ("1:16", "1:16"),
        ("8:16", "8:16"),
        ("'2:4'", "2:4"),
        ("{n: 3, m: 8}", "3:8"),
        ("4:64", "4:64"),
    ],
)
def test_patterns_in_yaml_mean_what_they_say_and_round_trip(tmp_path, capsys, written, meant):
    with pytest.raises(SystemExit):
        main(["fit", "-c", config(tmp_path, f"pattern: {written}"), "--print_config"])
    printed = capsys.readouterr().out
    callback = yaml.safe_load(printed)["trainer"]["callbacks"][0]["init_args"]
    assert callback["pattern"] == meant
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(again), "--print_config"])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["pattern: 5:4"],
            ["trainer.callbacks, NMSparsityCallback, pattern: ", "5:4", "N must be smaller than M"],
        ),
        (["pattern: 2:0"], ["2:0"]),
        (
            ["pattern: auto:0.5"],
            [
                "lightning_nm.prune(model, budget=0.5).rules",
                "give the training these `rules`",
            ],
        ),
        (["pattern: 2-4"], ["2-4"]),
        (
            ["method: bi-msak"],
            ["method: 'bi-msak' is none of dense, ste, sr-ste", "did you mean 'bi-mask'?"],
        ),
        (
            ["method: SR_STE"],
            ["method: 'SR_STE' is none of dense, ste, sr-ste", "did you mean 'sr-ste'?"],
        ),
        (
            ["method: {class_path: lightning_nm.BiMsk}"],
            ["method, BiMsk: there is no 'BiMsk'; did you mean 'BiMask'?"],
        ),
        (["patern: 2:4"], ["NMSparsityCallback: there is no 'patern'; did you mean 'pattern'?"]),
        (
            ["method: {class_path: lightning_nm.BiMask, init_args: {permute_evry: 3}}"],
            [
                "NMSparsityCallback, method, BiMask: there is no 'permute_evry'; did you mean 'permute_every'?"
            ],
        ),
        (
            ["rules: [{include: a, patern: 1:4}]"],
            ["rules: there is no 'patern'; did you mean 'pattern'?"],
        ),
        (["conv_layout: hwc"], ["conv_layout: 'hwc' is none of channels, flat"]),
        (
            ["method: {class_path: lightning_nm.BAME, init_args: {budget: 0}}"],
            ["budget=0", "(0, 1]"],
        ),
        (
            ["method: {class_path: lightning_nm.BAME, init_args: {stop: 1.5}}"],
            ["stop=1.5", "an integer"],
        ),
        (["grad_estimator: mvu"], ["mvu", "approx-mvue"]),
        (
            ["grad_estimator: {class_path: lightning_nm.MVUE, init_args: {pattern: 5:4}}"],
            ["5:4", "smaller than M"],
        ),
        (
            ["grad_estimator: {class_path: lightning_nm.MVUE, init_args: {dense_end: 1.5}}"],
            ["dense_end=1.5"],
        ),
        (
            ["method: {class_path: lightning_nm.TransposableMask, init_args: {dense_end: -1}}"],
            ["dense_end=-1"],
        ),
    ],
)
def test_typos_are_named_in_the_first_line(tmp_path, capsys, lines, words):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", config(tmp_path, *lines)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    first = said.splitlines()[0]
    assert first.startswith("hint: ")
    for word in words:
        assert word in first
    assert "usage:" not in said, "a page of all options would hide it"
    assert "\nerror: " in said, "the whole message follows"


def test_an_unknown_mistake_has_no_hint():
    assert hint("Subcommand 'fit' does not accept option 'trainr.accelerator'") == ""
    assert hint("") == ""


def test_a_bad_argument_of_a_method_is_not_taken_for_its_name(tmp_path, capsys):
    line = "method: {class_path: lightning_nm.SRSTE, init_args: {decay: abc}}"
    with pytest.raises(SystemExit):
        main(["fit", "-c", config(tmp_path, line)])
    said = capsys.readouterr().err
    assert "Expected a <class 'float'>. Got value: abc" in said
    assert "hint:" not in said


@pytest.mark.parametrize("written", ["0", "0.66", "1", "1.0", "2000"])
def test_steps_and_shares_stay_apart(tmp_path, capsys, written):
    method = f"method: {{class_path: lightning_nm.BAME, init_args: {{stop: {written}}}}}"
    with pytest.raises(SystemExit):
        main(["fit", "-c", config(tmp_path, method), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"][0]["init_args"][
        "method"
    ]["init_args"]
    assert repr(printed["stop"]) == written


@pytest.mark.parametrize("written", ["pattern: 1:2", "pattern: '1:2'", "pattern: {n: 1, m: 2}"])
def test_gradients_have_a_pattern_of_their_own(tmp_path, capsys, written):
    estimator = f"grad_estimator: {{class_path: lightning_nm.MVUE, init_args: {{{written}, dense_end: 0.1}}}}"
    with pytest.raises(SystemExit):
        main(["fit", "-c", config(tmp_path, estimator), "--print_config"])
    printed = capsys.readouterr().out
    arguments = yaml.safe_load(printed)["trainer"]["callbacks"][0]["init_args"]["grad_estimator"][
        "init_args"
    ]
    assert arguments == {"pattern": "1:2", "dense_start": 0, "dense_end": 0.1}
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(again), "--print_config"])
    assert capsys.readouterr().out == printed


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help=lightning_nm.NMSparsityCallback"])
    text = " ".join(capsys.readouterr().out.split())
    for option in (
        "pattern",
        "method",
        "grad_estimator",
        "include",
        "exclude",
        "rules",
        "preset",
        "skip_first_last",
        "conv_layout",
        "seed",
        "log_layers",
        "grad_snr_every",
        "direct_reads",
        "show_tables",
        "monitor",
    ):
        assert f".{option}" in text
    assert "sr-ste" in text
    assert "Globs over names of modules to mask" in text


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_help_lists_the_subcommands(capsys, monkeypatch, words):
    """Without a warning of LightningCLI, which are errors here."""
    monkeypatch.setattr(sys, "argv", ["lightning-nm", *words])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert "verify" in text
    assert "study" in text
    assert "fit" in text


@pytest.mark.parametrize(
    ("word", "hint"),
    [("frobnicate", r"verify$"), ("docter", "did you mean 'doctor'"), ("fti", "'fit'")],
)
def test_an_unknown_subcommand_lists_all(capsys, word, hint):
    assert main([word]) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(
        r"no subcommand '"
        + word
        + "', only fit, validate, test, predict, doctor, export, flops, study, verify",
        said,
    )
    assert re.search(hint, said)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-nm {lightning_nm.__version__}\n"


@pytest.mark.parametrize("package", ["jsonargparse", "docstring_parser"])
def test_without_its_extra_fit_names_it(monkeypatch, capsys, package):
    """Lightning's module can be imported without these packages; its class cannot be used."""
    monkeypatch.setattr("lightning.pytorch.cli._JSONARGPARSE_SIGNATURES_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["fit"]) == 2
    assert "pip install -e '.[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["jsonargparse", "docstring_parser"])
def test_help_without_its_extra_lists_the_commands_first(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("lightning-nm: N:M sparse training")
    for name in ("doctor", "verify", "study"):
        assert f"    {name} " in out
    assert err.startswith("The command line needs the extra `cli`: pip install -e '.[cli]'")


def test_two_callbacks_without_names_are_told_of_names(tmp_path, capsys):
    path = tmp_path / "two.yaml"
    callbacks = [
        {"class_path": "lightning_nm.NMSparsityCallback", "init_args": {"include": name}}
        for name in "ab"
    ]
    content = {
        "seed_everything": 0,
        "model": "ResidualCNN",
        "data": "Digits",
        "trainer": {"callbacks": callbacks},
    }
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(path)])
    assert (
        "two NMSparsityCallbacks with the same name: give each its own `name`"
        in capsys.readouterr().err
    )


def test_a_class_that_the_config_does_not_name(tmp_path, capsys):
    path = tmp_path / "own.yaml"
    path.write_text("model: {dim: 16, depth: 1}\n")
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(path)])
    assert (
        "hint: model, LightningModule: no class is named: write `class_path"
        in capsys.readouterr().err
    )
    for command in (["doctor", "-c"], ["flops", "-c"]):
        assert main([*command, str(path)]) == 2
        assert (
            "`model:` of the config names no class: give it by --model, such as --model"
            in capsys.readouterr().err
        )


def test_a_command_line_of_ones_own_has_the_hints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = {"save_config_callback": None, "run": False}
    trained = NMLightningCLI(ResidualCNN, Digits, args=["--model.lr=0.5"], **options)
    assert trained.model.lr == 0.5
    with pytest.raises(SystemExit):
        NMLightningCLI(
            ResidualCNN,
            Digits,
            args=["--trainer.callbacks=NMSparsityCallback", "--trainer.callbacks.patern=2:4"],
            **options,
        )
    assert "did you mean 'pattern'?" in capsys.readouterr().err


def test_the_class_is_imported_when_it_is_asked_for():
    before = "import sys, lightning_nm; print('lightning.pytorch.cli' in sys.modules)"
    code = f"{before}; print(lightning_nm.NMLightningCLI.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["False", "NMLightningCLI"]
    with pytest.raises(AttributeError, match="has no attribute 'NMLightningCli'"):
        _ = lightning_nm.NMLightningCli


def test_fit_trains_with_rules_and_nested_methods(tmp_path, capsys):
    lines = [
        "pattern: 2:4",
        "method: {class_path: lightning_nm.BiMask, init_args: {permute_every: 2, search: random}}",
        "rules: [{include: 'stages.2.*', pattern: 1:16, method: sr-ste}]",
    ]
    assert (
        main(["fit", "-c", config(tmp_path, *lines), f"--trainer.default_root_dir={tmp_path}"]) == 0
    )
    out = capsys.readouterr().out
    assert "1:16" in out
    assert "N:M summary" in out


def test_the_default_logger_has_no_placeholder_of_a_metric(tmp_path):
    arguments = ["fit", "-c", config(tmp_path, base=BASE.replace("  logger: false\n", ""))]
    for version in range(2):
        assert main([*arguments, f"--trainer.default_root_dir={tmp_path}"]) == 0
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        assert {"config.yaml", "hparams.yaml"} <= {path.name for path in folder.iterdir()}
        scalars = Events(folder).scalars
        assert "nm/density" in scalars
        assert "hp_metric" not in scalars, "Lightning would log -1"


def test_a_second_run_does_not_trip_over_the_first_ones_config(tmp_path):
    arguments = [
        "fit",
        "-c",
        config(tmp_path),
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={tmp_path}",
    ]
    assert main(arguments) == 0
    assert main(arguments) == 0


def test_the_module_runs(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lightning_nm", "verify", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "neither a file nor" in result.stdout


# --------------------------------------------------------------------------------------------------------- verify


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "model.ckpt"
    nm = NMSparsityCallback(
        "2:4", rules=[{"include": "net.3", "pattern": "1:4", "method": "sr-ste"}], show_tables=False
    )
    trainer = make_trainer(path.parent, [nm], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(path)
    return path


def edit(checkpoint, tmp_path, change):
    content = torch.load(checkpoint, weights_only=True)
    change(content["state_dict"])
    torch.save(content, tmp_path / "edited.ckpt")
    return str(tmp_path / "edited.ckpt")


def test_verify_a_good_checkpoint(checkpoint, capsys):
    assert main(["verify", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "net.3.weight" in out
    assert "net.6.weight" in out
    assert "1:4" in out
    assert "OK: 2 weights" in out
    assert main(["verify", str(checkpoint), "--include", "net.6"]) == 0
    assert main(["verify", str(checkpoint), "--include", "net.8*"]) == 1


def test_verify_finds_one_wrong_entry(checkpoint, tmp_path, capsys):
    def revive(weights):
        weights["net.6.weight"][3, 8:12] = 1.0

    assert main(["verify", edit(checkpoint, tmp_path, revive)]) == 1
    assert "'net.6.weight' is not 2:4: 1 of 2048 blocks" in capsys.readouterr().out


def test_verify_misses_no_missing_weight(checkpoint, tmp_path, capsys):
    assert (
        main(["verify", edit(checkpoint, tmp_path, lambda weights: weights.pop("net.3.weight"))])
        == 2
    )
    assert "masks for 'net.3' but no weight" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["state-dict", "safetensors", "nested"])
def test_verify_plain_weights(tmp_path, capsys, form):
    torch.manual_seed(0)
    weights = {
        "a.weight": nmf.nm_prune(torch.randn(16, 32), "2:4"),
        "in_out.weight": nmf.nm_prune(torch.randn(30, 32).t(), "2:4", dim=0).contiguous(),
        "conv.weight": nmf.nm_prune(torch.randn(8, 16, 3, 3), "2:4", dim=1),
        "flat.weight": nmf.nm_prune(torch.randn(8, 144), "2:4").view(8, 16, 3, 3),
        "head.weight": torch.randn(10, 32),
        "head.bias": torch.randn(10),
        "odd.weight": torch.randn(3, 5),
    }

    def write():
        path = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pt'}"
        if form == "safetensors":
            save_file(weights, path)
        else:
            torch.save({"model": weights} if form == "nested" else weights, path)
        return str(path)

    assert main(["verify", write()]) == 2
    assert "give a pattern, for example --pattern 2:4" in capsys.readouterr().out
    assert main(["verify", write(), "--pattern", "2:4"]) == 1
    assert "2 of 6 matrices are dense: 'head.weight', 'odd.weight'" in capsys.readouterr().out
    assert main(["verify", write(), "--pattern", "2:4", "--allow-dense"]) == 0
    assert "OK: 4 weights" in capsys.readouterr().out
    assert main(["verify", write(), "--pattern", "2:4", "--include", "head"]) == 1
    assert "named by `include` but is dense" in capsys.readouterr().out
    assert main(["verify", write(), "--pattern", "2:4", "--include", "tail"]) == 1
    assert main(["verify", write(), "--pattern", "5:4"]) == 2
    assert main(["verify", write(), "--pattern", "1:8"]) == 1
    weights["a.weight"][0, :4] = 1.0
    capsys.readouterr()
    assert main(["verify", write(), "--pattern", "2:4"]) == 1
    assert "'a.weight' is not 2:4: 1 of 128 blocks" in capsys.readouterr().out
    for key in weights:
        weights[key] = torch.randn_like(weights[key])
    assert main(["verify", write(), "--pattern", "2:4"]) == 1
    assert "no weight is N:M sparse" in capsys.readouterr().out


def test_verify_prints_json(tmp_path, capsys):
    path = str(tmp_path / "weights.pt")
    torch.save(
        {"a.weight": nmf.nm_prune(torch.randn(4, 8), "2:4"), "b.weight": torch.randn(4, 8)}, path
    )
    assert main(["verify", path, "--pattern", "2:4", "--include", "b", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["ok"]) == (1, "verify", False)
    (found,) = document["checkpoints"]
    assert (found["checkpoint"], found["ok"]) == (path, False)
    assert found["problems"] == ["'b.weight' is named by `include` but is dense"]
    assert [(w["key"], w["verdict"], w["blocks"]) for w in found["weights"]] == [
        ("a.weight", "N:M", 8),
        ("b.weight", "dense", 8),
    ]
    assert main(["verify", path, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "give a pattern" in json.loads(out)["checkpoints"][0]["error"]
    assert "give a pattern" in err


@pytest.mark.parametrize("content", [b"no checkpoint", b""])
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_verify_refuses_what_it_cannot_read(tmp_path, capsys, content, suffix):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    assert main(["verify", str(path)]) == 2
    assert "cannot read" in capsys.readouterr().out


def test_verify_refuses_a_file_without_weights(tmp_path, capsys):
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    assert main(["verify", str(tmp_path / "x.pt")]) == 2
    assert "holds no state dict" in capsys.readouterr().out


CONFIG_OF_ONES_OWN = """
seed_everything: 0
model: {class_path: train.Net}
data: {class_path: lightning_nm.demo.Digits}
trainer:
  max_steps: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  limit_val_batches: 0
  callbacks: [{class_path: lightning_nm.NMSparsityCallback, init_args: {pattern: 2:4, show_tables: false}}]
"""


@pytest.mark.parametrize("words", [("fit", "-c", "config.yaml"), ("flops", "-c", "config.yaml")])
def test_modules_of_the_current_folder_are_seen(tmp_path, monkeypatch, words, capsys):
    """A console script has its own folder on the path instead."""
    name = f"train_{words[0]}"
    (tmp_path / f"{name}.py").write_text(
        "from lightning_nm.demo import ResidualCNN\n\nclass Net(ResidualCNN): pass\n"
    )
    (tmp_path / "config.yaml").write_text(CONFIG_OF_ONES_OWN.replace("train.Net", f"{name}.Net"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", ".")])
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    assert main(list(words)) == 0
    assert "Net" in sys.modules[name].__dict__


def test_a_schedule_in_yaml(tmp_path, capsys):
    lines = (
        "pattern: 1:16",
        "method: asp",
        "schedule: {dense_start: 1, ramp: [8:16, '4:16'], ramp_ends: [2, 0.75], dense_end: 0.1}",
        "rules: [{include: 'stages.*', schedule: {ramp: [4:16]}}]",
    )
    with pytest.raises(SystemExit):
        main(["fit", "-c", config(tmp_path, *lines), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"][0]["init_args"]
    made = NMSparsityCallback(
        **{name: printed[name] for name in ("pattern", "method", "schedule", "rules")}
    )
    rule, general = made.config.resolve().rules
    assert [str(pattern) for pattern in general.schedule.ramp] == ["8:16", "4:16"]
    assert (general.schedule.dense_start, general.schedule.dense_end) == (1, 0.1)
    assert general.schedule.ramp_ends == (2, 0.75)
    assert isinstance(general.schedule.dense_start, int)
    assert [str(pattern) for pattern in rule.schedule.ramp] == ["4:16"]

    lines = ("pattern: 2:4", "method: sr-ste", "schedule: {dense_start: 1}")
    assert main(["fit", "-c", config(tmp_path, *lines)]) == 0
    assert (
        "schedule: dense from training step 0, 2:4 from training step 1" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("schedule: {dense_strat: 0.1}", "there is no 'dense_strat'; did you mean 'dense_start'?"),
        ("schedule: {ramp: [3:4], dense_start: half}", "dense_start"),
        ("schedule: {ramp: [1:4]}", "the schedule's ramp goes from 1:4 to 2:4"),
        ("shedule: {ramp: [3:4]}", "there is no 'shedule'; did you mean 'schedule'?"),
        (
            "rules: [{include: '*', schedule: {dense_strat: 1}}]",
            "there is no 'dense_strat'; did you mean 'dense_start'?",
        ),
        (
            "rules: [{include: '*', shedule: {dense_start: 1}}]",
            "there is no 'shedule'; did you mean 'schedule'?",
        ),
    ],
)
def test_mistakes_in_a_schedule(tmp_path, capsys, line, words):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", config(tmp_path, "pattern: 2:4", "method: ste", line)])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
