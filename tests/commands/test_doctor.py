"""``lightning-nm doctor`` on machines without a GPU: with CPU kernels of fixed times, and without them."""

import io
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from rich.console import Console

from lightning_nm.cli import main
from lightning_nm.commands.doctor import _StepClock, print_machine
from lightning_nm.commands.from_config import build
from lightning_nm.kernels import KernelRegistry, tuner
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.router import active
from tests.support.command import refused, status_of

NO_LIBRARY = "the library of CPU kernels was not built: install a compiler"
SMALL = """
seed_everything: 0
model: {class_path: GPT, init_args: {dim: 32, heads: 4, depth: 1, context: 16}}
data: {class_path: HelpTopics, init_args: {context: 16, batch_size: 8}}
trainer:
  max_steps: 100
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args: {pattern: 2:4, method: transposable, grad_estimator: mvue}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
"""
GEMMS = {"forward", "dgrad", "wgrad"}


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LIGHTNING_NM_ISA", raising=False)


@pytest.fixture
def no_library(monkeypatch):
    """The CPU kernels were not compiled."""

    def load():
        raise RuntimeError(NO_LIBRARY)

    monkeypatch.setattr(library, "load", load)
    library.level.cache_clear()
    yield
    library.level.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """The CPU kernels, each with its times, for a GEMM and a pack; skips where they do not work."""
    if reason := library.unavailable():
        pytest.skip(reason)
    times = {"cpu-permute": (6.0, 2.0), "cpu-csr": (7.0, 2.0)}
    monkeypatch.setattr(tuner, "dense_ms", lambda key, timer: 10.0)
    monkeypatch.setattr(tuner, "sparse_ms", lambda kernel, *_: times[kernel.name])
    return times


def document(capsys, *words):
    assert main(["doctor", "--json", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content.pop("schema"), content.pop("command")) == (1, "doctor")
    assert set(content) == {"machine", "training"}
    return content


def said(capsys, *words):
    assert main(["doctor", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


# -------------------------------------------------------------------------------------------------------- the machine


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("amx", [True, False])
def test_without_a_config(capsys, monkeypatch, parallel, amx):
    monkeypatch.setattr(library, "cpu_name", lambda: "Abacus 9000")
    monkeypatch.setattr(library, "has_amx", lambda: amx)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    if not parallel:
        monkeypatch.setattr(library, "parallel", lambda: None)
    elif library.parallel() is None:
        pytest.skip("this torch has no function that runs a loop on its threads")
    out = said(capsys)
    threads = "the kernels use one: more need torch 2.10"
    if parallel:
        threads = "4, for dense GEMMs and kernels"
    for words in (
        *("CPU, Abacus 9000", library.LEVELS[library.level()], "that this process may use"),
        *(threads, torch.__version__, "reference", "cusparselt", "needs a CUDA device"),
        *("cpu-permute", "cpu-csr"),
    ):
        assert words in out
    assert ("N:M ones cannot use it" in out) == amx
    assert "No sparse kernel works here" not in out
    assert "LIGHTNING_NM_ISA" not in out
    content = document(capsys)
    assert content["training"] is None
    machine = content["machine"]
    assert (machine["capability"], machine["torch"]) == (None, torch.__version__)
    cpu = machine["cpu"]
    assert (cpu["model"], cpu["threads"], cpu["asked"]) == ("Abacus 9000", 4, None)
    assert (cpu["parallel"], cpu["amx"]) == (parallel, amx)
    assert cpu["instructions"] in library.LEVELS
    assert cpu["cores"] >= 1


@pytest.mark.usefixtures("no_library")
def test_without_a_library(capsys):
    out = said(capsys)
    for words in ("none, the kernels do not work", "was not built", "runs every GEMM dense"):
        assert words in out
    machine = document(capsys)["machine"]
    assert (machine["cpu"]["instructions"], machine["cpu"]["parallel"]) == (None, False)
    assert [(kernel["name"], kernel["works"]) for kernel in machine["kernels"]] == [
        (name, name == "reference") for name in KernelRegistry().kernels
    ]
    assert [kernel["reason"] for kernel in machine["kernels"]][-2:] == [NO_LIBRARY] * 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("asked", "works"), [("baseline", True), ("avx7", False)])
def test_an_instruction_set_that_was_asked_for(capsys, monkeypatch, asked, works):
    monkeypatch.setenv("LIGHTNING_NM_ISA", asked)
    library.level.cache_clear()
    try:
        machine, out = document(capsys)["machine"], said(capsys)
    finally:
        monkeypatch.delenv("LIGHTNING_NM_ISA")
        library.level.cache_clear()
    cpu = machine["cpu"]
    assert (cpu["asked"], cpu["instructions"]) == (asked, asked if works else None)
    found = {kernel["name"]: kernel for kernel in machine["kernels"]}
    assert found["cpu-csr"]["works"] == works
    assert not found["cpu-permute"]["works"]
    assert "baseline" in found["cpu-permute"]["reason"]
    assert f"(LIGHTNING_NM_ISA={asked})" in out


@pytest.mark.parametrize(
    ("triton", "words"),
    [
        ("", "its kernels prepare operands"),
        ("switched off by LIGHTNING_NM_TRITON=0", "LIGHTNING_NM_TRITON=0: torch prepares operands"),
    ],
)
def test_a_machine_with_a_gpu(triton, words):
    versions = {"driver": "580.65", "torch": "2.13.0", "cuda": "13.0", "cusparselt": "800"}
    kernels = [
        {"name": "reference", "works": True, "reason": "", "remark": ""},
        {"name": "cusparselt", "works": True, "reason": "", "remark": "slower than 0.8.1"},
    ]
    machine = {"device": "NVIDIA H200", **versions, "capability": "9.0", "cpu": None}
    console = Console(record=True, width=200, file=io.StringIO())
    print_machine({**machine, "triton": triton, "kernels": kernels}, console)
    text = console.export_text()
    for shown in (
        *("NVIDIA H200, compute capability 9.0", "580.65", "13.0", "800", "slower than 0.8.1"),
        words,
    ):
        assert shown in text
    assert "No sparse kernel works" not in text


# -------------------------------------------------------------------------------------------------------- a training


def test_a_transformer_on_a_cpu(tmp_path, write, capsys, kernels):
    path = write(SMALL + "  accumulate_grad_batches: 2\n")
    training = document(capsys, "-c", path)["training"]
    assert (training["kernels"], training["unavailable"]) == ("auto", "")
    rows = training["products"]
    assert {row["product"].split()[0] for row in rows} == GEMMS
    names = {"cpu-permute", "cpu-csr"} if library.load().nm_lanes(library.level()) else {"cpu-csr"}
    best = min(names, key=kernels.get)
    for row in rows:
        is_wgrad = row["product"].startswith("wgrad")
        kernel = "cpu-csr" if is_wgrad else best
        assert (row["kernel"], row["dense_ms"], row["pack_uses"]) == (kernel, 10, 1)
        assert row["gain"] == pytest.approx(10 / (kernels[kernel][0] + 2))
        assert row["calls"] == 2 * 8, "three steps of warm-up and five that are measured"
    assert training["sparse_share"] > 0.9
    assert training["sparse_share_by"] == "measured times"
    assert training["speedup"] == pytest.approx(training["plain_step_ms"] / training["step_ms"])
    assert training["step_ms"] > 0
    assert not (tmp_path / "home").exists()
    assert not any((tmp_path / "here").iterdir()), "no log, no checkpoint"
    assert active() is None

    out = said(capsys, "-c", path)
    for words in (
        *("N:M kernels", "cpu-csr", "GEMM time on sparse kernels", "ms in plain dense training: "),
        "ms under masks by the kernels above",
    ):
        assert words in out
    assert "Seed set" not in out


@pytest.mark.usefixtures("no_library")
def test_a_transformer_without_kernels(write, capsys):
    path = write(SMALL)
    training = document(capsys, "-c", path)["training"]
    assert NO_LIBRARY in training["unavailable"]
    assert {row["kernel"] for row in training["products"]} == {"reference"}
    assert training["sparse_share"] == 0
    assert training["step_ms"] > 0, "what the masks cost"
    words = "every GEMM was dense, no sparse kernel works here"
    assert words in said(capsys, "-c", path)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(
    "more",
    [
        "plugins: [{class_path: lightning_nm.NMFSDPPrecision}]\n  strategy: fsdp",
        "precision: bf16-mixed",
    ],
)
def test_configs_for_a_cluster_are_read_here(tmp_path, write, capsys, more):
    more = f"""  accelerator: gpu
  devices: 4
  num_nodes: 2
  profiler: simple
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}/logs}}}}
  {more}
"""
    training = document(capsys, "-c", write(SMALL + more))["training"]
    assert training["step_ms"] > 0
    assert training["plain_step_ms"] > 0
    assert not (tmp_path / "logs").exists()


@pytest.mark.usefixtures("no_library")
def test_a_config_that_fit_has_printed_and_one_that_overrides_it(write, capsys):
    assert status_of("fit", "-c", write(SMALL), "--print_config") == 0
    printed = write(capsys.readouterr().out, "printed.yaml")
    wide = write("model: {init_args: {dim: 64}}", "wide.yaml")
    rows = document(capsys, "-c", printed, "-c", wide)["training"]["products"]
    assert "forward 192x64x128" in {row["product"] for row in rows}


@pytest.mark.usefixtures("no_library")
def test_a_short_training_has_no_step_time(write, capsys):
    path = write(SMALL.replace("100", "2"))
    training = document(capsys, "-c", path)["training"]
    assert training["step_ms"] is training["speedup"] is None
    assert len(training["products"]) == 12
    assert "a step: not measured with and without masks" in said(capsys, "-c", path)


@pytest.mark.parametrize(
    ("plugin", "twin"),
    [("NMPrecision", Precision), ("NMMixedPrecision", MixedPrecision)],
    ids=["32", "bf16-mixed"],
)
def test_plain_training_has_the_configs_precision_and_no_masks(write, plugin, twin):
    path = write(f"{SMALL}  plugins: [{{class_path: lightning_nm.{plugin}}}]\n")
    trainer = build(Namespace(config=[path], model=None, data=None), masks=False).trainer
    assert type(trainer.precision_plugin) is twin
    assert trainer.callbacks == []


NEEDY = """
import lightning.pytorch as pl
from lightning_nm import NMSparsityCallback

class Needy(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        if not any(isinstance(callback, NMSparsityCallback) for callback in trainer.callbacks):
            raise RuntimeError("where are the masks?")
"""


@pytest.mark.usefixtures("kernels")
def test_a_training_that_needs_its_masks_has_no_plain_time(tmp_path, write, capsys, monkeypatch):
    (tmp_path / "needy.py").write_text(NEEDY)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(SMALL.replace("callbacks:", "callbacks:\n    - class_path: needy.Needy"))
    assert main(["doctor", "--json", "-c", path]) == 0
    out, err = capsys.readouterr()
    training = json.loads(out)["training"]
    assert training["plain_step_ms"] is training["speedup"] is None
    assert training["step_ms"] > 0
    assert "plain dense training was not measured: where are the masks?" in err


@pytest.mark.parametrize(("slowest", "is_told"), [(0.005, False), (0.021, True)])
def test_steps_that_other_work_disturbs_are_told(capsys, slowest, is_told):
    clock = _StepClock(batches_in_step=1)
    clock.seconds = [9.0, 9.0, 9.0, 0.004, 0.004, 0.005, slowest, 0.004]
    assert clock.step_ms() == pytest.approx(4)
    assert ("equal steps took 4.0 to 21.0 ms" in capsys.readouterr().err) == is_told


# ------------------------------------------------------------------------------------------------------------ mistakes


MASKS = "- class_path: lightning_nm.NMSparsityCallback\n      init_args:"
METHOD = "2:4, method: transposable, grad_estimator: mvue"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MASKS, "- class_path: LambdaCallback\n    #", "no NMSparsityCallback"),
        (METHOD, "1:3, method: sr-ste", "no layer can"),
        ("2:4", "5:4", "smaller than M"),
        ("max_steps: 100", "max_stepz: 3", "max_stepz"),
        ("max_steps: 100", "max_steps: 0", "the training ended before its first batch"),
    ],
)
def test_bad_configs(write, capsys, old, new, message):
    assert message in refused(capsys, "doctor", "-c", write(SMALL.replace(old, new)), "--json")


def test_a_config_that_is_not_there(capsys):
    assert "none.yaml" in refused(capsys, "doctor", "-c", "none.yaml")


def test_errors_of_the_training_pass_and_leave_nothing_active(write, monkeypatch):
    def fail(*_):
        raise KeyError("mine")

    monkeypatch.setattr(pl.callbacks.LambdaCallback, "on_before_backward", fail)
    path = write(SMALL.replace("callbacks:", "callbacks:\n    - class_path: LambdaCallback"))
    with pytest.raises(KeyError, match="mine"):
        main(["doctor", "-c", path])
    assert active() is None


OWN = """
from lightning_nm.demo import GPT, HelpTopics

class OwnNet(GPT):
    pass

class OwnData(HelpTopics):
    pass
"""
OWN_CONFIG = re.sub(r"{class_path: \w+, init_args: (.*)}", r"\1", SMALL)


@pytest.fixture
def own(monkeypatch):
    """A project with a LightningCLI(OwnNet, OwnData), in the working folder: words for its config."""
    Path("own_train.py").write_text(OWN)
    Path("own.yaml").write_text(OWN_CONFIG)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield ["-c", "own.yaml"]
    sys.modules.pop("own_train", None)


@pytest.mark.usefixtures("no_library")
def test_a_config_of_ones_own_cli(capsys, own):
    words = [*own, "--model", "own_train.OwnNet", "--data", "own_train.OwnData"]
    assert len(document(capsys, *words)["training"]["products"]) == 12


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--model", "own_train.Net", "module 'own_train' has no attribute"),
        ("--model", "nowhere.Net", "No module named 'nowhere'; give a class as module.Class"),
        ("--model", "Net", "Empty module name; give a class as module.Class"),
        ("--data", "own_train.OwnNet", "is no LightningDataModule"),
    ],
)
def test_wrong_classes_are_named(capsys, own, option, name, message):
    assert f"{option} {name}: {message}" in refused(capsys, "doctor", *own, option, name)


def test_a_class_needs_a_config(capsys):
    words = "--model and --data are about a training: give its --config"
    assert words in refused(capsys, "doctor", "--model", "own_train.OwnNet")
