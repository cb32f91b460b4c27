"""``lightning-nm doctor`` on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_nm.cli import main
from lightning_nm.doctor.command import measuring_router
from lightning_nm.doctor.training import Observation
from lightning_nm.kernels import KernelRegistry, Router

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SMALL = """
seed_everything: 0
model: {class_path: TinyTransformer, init_args: {dim: 32, depth: 1, context: 16}}
data: {class_path: HelpTopics, init_args: {context: 16, batch_size: 8}}
trainer:
  max_steps: 100
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args: {pattern: 2:4, method: transposable, grad_estimator: mvue}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
"""


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["lightning-nm", "doctor"])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def write(tmp_path, text, name="config.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def document(capsys, *words):
    assert main(["doctor", "--json", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 2
    assert set(content) == {"schema", "machine", "reports"}
    return content


def test_without_a_config(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("cpu", torch.__version__, "reference", "cusparselt", "needs a CUDA device", "nothing is measured"):
        assert words in out
    machine = document(capsys)["machine"]
    assert (machine["device"], machine["capability"], machine["torch"]) == ("cpu", None, torch.__version__)
    assert [(kernel["name"], kernel["works"]) for kernel in machine["kernels"]] == [
        (name, name == "reference") for name in KernelRegistry().kernels
    ]


def test_the_removed_option_names_what_replaces_it(capsys):
    assert main(["doctor", "--gpu", "H200"]) == 2
    assert "--gpu was removed" in (error := capsys.readouterr().err)
    assert "run this command on the GPU" in error


def test_the_demo(capsys):
    assert main(["doctor", "-c", str(CONFIGS / "digits-bi-mask.yaml")]) == 0
    out = capsys.readouterr().out
    for words in ("stages.2.0.conv2", "left to cuDNN", "stem.0", "first convolution", "0 of 24 products could"):
        assert words in out
    assert "Seed set" not in out


def test_a_transformer_without_a_gpu(tmp_path, capsys):
    path = write(tmp_path, SMALL)
    (report,) = document(capsys, "-c", path)["reports"]
    assert report["kernels"] is report["step_ms"] is report["predicted_step_ms"] is report["dense_ms"] is None
    assert [row["gemm"] for row in report["rows"]] == ["forward", "dgrad", "wgrad"] * 4
    assert all(row["eligible"] and row["dtype"] == "bfloat16" for row in report["rows"])
    assert all(row["could"] == ["cusparselt-direct", "cusparselt"] for row in report["rows"])
    assert {(row["kernel"], row["why"], row["dense_ms"], row["gain"]) for row in report["rows"]} == {
        ("reference", "", None, None)
    }
    assert {row["layer"] for row in report["rows"]} == {f"blocks.0.{name}" for name in ("qkv", "proj", "fc1", "fc2")}
    assert report["rows"][0]["columns"] == 16 * 8
    assert report["skipped"]["head"] == "last linear layer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]  # no log, no checkpoint
    assert main(["doctor", "-c", path]) == 0
    out = capsys.readouterr().out
    for words in ("not measured", "blocks.0.qkv", "cusparselt-direct, cusparselt", "12 of 12 products could run"):
        assert words in out
    assert "ms" not in out.replace("items", "")


def test_a_product_that_no_kernel_takes_says_why(tmp_path, capsys):
    (report,) = document(capsys, "-c", write(tmp_path, SMALL.replace("2:4", "4:8")))["reports"]
    assert not any(row["eligible"] or row["could"] for row in report["rows"])
    reasons = {row["why"] for row in report["rows"] if row["gemm"] == "forward"}
    assert all(f"{name}: 4:8 may put more than two" in why for why in reasons for name in ("direct", "cusparselt"))


def test_later_configs_override_and_tokens_are_asked_for(tmp_path, capsys):
    wide = write(tmp_path, "model: {init_args: {dim: 64}}", "wide.yaml")
    content = document(capsys, "-c", write(tmp_path, SMALL), "-c", wide, "--tokens", "64", "4096")
    assert [report["tokens"] for report in content["reports"]] == [64, 4096]
    first = [report["rows"][0] for report in content["reports"]]
    assert [(row["depth"], row["columns"]) for row in first] == [(64, 64), (64, 4096)]


def test_configs_that_fit_has_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    with pytest.raises(SystemExit):
        main(["fit", "-c", write(tmp_path, SMALL), "--print_config"])
    printed = write(tmp_path, capsys.readouterr().out, "printed.yaml")
    assert len(document(capsys, "-c", printed)["reports"][0]["rows"]) == 12


def test_a_plugin_of_the_config_is_no_obstacle(tmp_path, capsys):
    plugin = "  plugins: [{class_path: lightning_nm.NMMixedPrecision}]\n  accumulate_grad_batches: 4\n"
    (report,) = document(capsys, "-c", write(tmp_path, SMALL + plugin))["reports"]
    assert {(row["gemm"], row["pack_uses"]) for row in report["rows"]} == {("forward", 4), ("dgrad", 4), ("wgrad", 1)}
    assert {row["calls"] for row in report["rows"]} == {4.0}


@pytest.mark.parametrize(
    "precision", ["plugins: [{class_path: lightning_nm.NMFSDPPrecision}]", "precision: bf16-mixed"]
)
def test_configs_for_a_cluster_are_read_here(tmp_path, capsys, precision):
    more = f"""  accelerator: gpu
  devices: 4
  num_nodes: 2
  strategy: fsdp
  profiler: simple
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}/logs}}}}
  {precision}
"""
    (report,) = document(capsys, "-c", write(tmp_path, SMALL + more), "--tokens", "65536")["reports"]
    assert len(report["rows"]) == 12
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "64"], ["--config"]),
        (["--kernels", "auto"], ["--config"]),
        (["--kernels", "fastest"], ["fastest", "auto"]),
        (["-c", "CONFIG", "--kernels", "heuristic"], ["was removed", "'auto' (measured)"]),
        (["-c", "CONFIG", "--tokens", "0"], ["--tokens 0", "at least 1"]),
        (["-c", "CONFIG", "--kernels", "auto"], ["--kernels auto", "CUDA"]),
    ],
)
def test_impossible_options(tmp_path, capsys, words, says):
    path = write(tmp_path, SMALL)
    assert main(["doctor", *(path if word == "CONFIG" else word for word in words), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in says:
        assert word in captured.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("lightning_nm.NMSparsityCallback", "lightning.pytorch.callbacks.LambdaCallback"), "NMSparsityCallback"),
        (("2:4", "1:3"), "no layer can be masked"),
    ],
)
def test_trainings_that_are_not_sparse(tmp_path, capsys, change, says):
    text = SMALL.replace(*change)
    if "Lambda" in change[1]:
        text = text.replace("init_args: {pattern: 2:4, method: transposable, grad_estimator: mvue}", "init_args: {}")
    else:
        text = text.replace("transposable, grad_estimator: mvue", "sr-ste")
    assert main(["doctor", "-c", write(tmp_path, text)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"), [("trainer: {max_stepz: 3}", "max_stepz"), (SMALL.replace("2:4", "5:4"), "smaller than M")]
)
def test_bad_configs(tmp_path, capsys, text, says):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "-c", write(tmp_path, text), "--json"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_a_config_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "-c", "none.yaml"])
    assert stop.value.code == 2
    assert "none.yaml" in capsys.readouterr().err


def test_the_plugins_mode_holds():
    own, bare = (Observation({}, 4, (), router, None) for router in (Router("sparse"), None))
    assert measuring_router(own, None) is measuring_router(own, "sparse") is own.router
    with pytest.raises(ValueError, match=r"--kernels auto contradicts .* kernels='sparse'"):
        measuring_router(own, "auto")
    assert (measuring_router(bare, None).kernels, measuring_router(bare, None).reuse) == ("auto", 4)
    assert measuring_router(bare, "sparse").kernels == "sparse"


@pytest.mark.slow
def test_stdout_of_a_process_is_the_document(tmp_path):
    command = [sys.executable, "-m", "lightning_nm", "doctor", "--json", "-c", write(tmp_path, SMALL)]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert len(json.loads(result.stdout)["reports"]) == 1
    assert "LightningCLI's args parameter" not in result.stderr
