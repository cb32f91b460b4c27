"""``lightning-nm doctor`` on machines without a GPU: with CPU kernels, and without them. No test measures kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_nm.cli import main
from lightning_nm.kernels import KernelRegistry
from lightning_nm.kernels.cpu import library
from tests.commands.doctor.runs import NO_LIBRARY, SMALL, document, write

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("parallel", [True, False])
def test_without_a_config(capsys, monkeypatch, parallel):
    monkeypatch.setattr(library, "cpu_name", lambda: "Abacus 9000")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    if not parallel:
        monkeypatch.setattr(library, "parallel", lambda: None)
    elif library.parallel() is None:
        pytest.skip("this torch has no function that runs a loop on its threads")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    threads = (
        "4, for dense products and kernels"
        if parallel
        else "the kernels use one: more need torch 2.10"
    )
    for words in (
        "CPU, Abacus 9000",
        library.LEVELS[library.level()],
        "that this process may use",
        threads,
    ):
        assert words in out
    for words in (
        torch.__version__,
        "reference",
        "cusparselt",
        "needs a CUDA device",
        "cpu-permute",
        "cpu-csr",
    ):
        assert words in out
    assert "nothing is measured" not in out
    assert "LIGHTNING_NM_ISA" not in out
    machine = document(capsys)["machine"]
    assert (machine["capability"], machine["torch"]) == (None, torch.__version__)
    cpu = machine["cpu"]
    assert (cpu["model"], cpu["threads"], cpu["parallel"], cpu["asked"]) == (
        "Abacus 9000",
        4,
        parallel,
        None,
    )
    assert cpu["instructions"] in library.LEVELS
    assert cpu["cores"] >= 1


@pytest.mark.parametrize("amx", [True, False])
def test_amx_is_named(capsys, monkeypatch, amx):
    monkeypatch.setattr(library, "has_amx", lambda: amx)
    assert main(["doctor"]) == 0
    assert ("N:M ones cannot use it" in capsys.readouterr().out) == amx
    assert document(capsys)["machine"]["cpu"]["amx"] == amx


@pytest.mark.usefixtures("no_library")
def test_without_a_library(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in (
        "none, the kernels do not work",
        "was not built",
        "nothing is measured",
        "runs every product dense",
    ):
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
        content = document(capsys)["machine"]
        main(["doctor"])
    finally:
        monkeypatch.delenv("LIGHTNING_NM_ISA")
        library.level.cache_clear()
    assert (content["cpu"]["asked"], content["cpu"]["instructions"]) == (
        asked,
        asked if works else None,
    )
    found = {kernel["name"]: kernel for kernel in content["kernels"]}
    assert found["cpu-csr"]["works"] == works
    assert not found["cpu-permute"]["works"]
    assert "baseline" in found["cpu-permute"]["reason"]
    assert f"(LIGHTNING_NM_ISA={asked})" in capsys.readouterr().out


@pytest.mark.usefixtures("no_library")
def test_the_demo(capsys):
    assert main(["doctor", "-c", str(CONFIGS / "digits-bi-mask.yaml")]) == 0
    out = capsys.readouterr().out
    for words in (
        "stages.2.0.conv2",
        "takes no convolutions",
        "stem.0",
        "first convolution",
        "0 of 24 products could",
    ):
        assert words in out
    assert "Seed set" not in out


def test_a_transformer_on_a_cpu(tmp_path, capsys, kernels):
    path = write(tmp_path, SMALL + "  accumulate_grad_batches: 2\n")
    (report,) = document(capsys, "-c", path)["reports"]
    assert report["kernels"] == "auto"
    assert [row["gemm"] for row in report["rows"]] == ["forward", "dgrad", "wgrad"] * 4
    assert {row["dtype"] for row in report["rows"]} == {"float32"}
    weights, gradients = (
        [row for row in report["rows"] if (row["gemm"] == "wgrad") == wgrad]
        for wgrad in (False, True)
    )
    names = {"cpu-permute", "cpu-csr"} if library.load().nm_lanes(library.level()) else {"cpu-csr"}
    best = min(names, key=kernels.get)
    assert {(row["kernel"], row["chosen_ms"], row["calls"]) for row in weights} == {
        (best, kernels[best][0] + 2, 2)
    }
    assert {(row["kernel"], row["chosen_ms"], row["calls"]) for row in gradients} == {
        ("cpu-csr", 9.0, 2)
    }
    assert not any("CUDA" in row["why"] for row in report["rows"]), (
        "what is said of other devices is said once"
    )
    assert report["on_gpu"] == 12
    assert report["dense_ms"] == pytest.approx(2 * 12 * 10)
    assert report["chosen_ms"] == pytest.approx(2 * (8 * (kernels[best][0] + 2) + 4 * 9))
    assert report["step_ms"] > 0
    saved = report["dense_ms"] - report["chosen_ms"]
    assert report["predicted_step_ms"] == pytest.approx(report["step_ms"] - saved)
    assert report["plain_step_ms"] > 0
    assert not (tmp_path / "home").exists()
    assert main(["doctor", "-c", path]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "products, measured",
        "cpu-csr",
        "12 of 12 products run sparse",
        "plain dense training, measured",
    ):
        assert words in out
    assert (
        "on a GPU with sparse tensor cores, not measured here: 12 of 12 products could run sparse"
        in out
    )


@pytest.mark.usefixtures("kernels")
def test_products_that_are_sparse_otherwise(tmp_path, capsys):
    text = SMALL.replace("2:4", "1:16").replace("transposable, grad_estimator: mvue", "asp")
    path = write(tmp_path, text)
    (report,) = document(capsys, "-c", path, "--kernels", "sparse")["reports"]
    assert report["kernels"] == "sparse"
    sparsity = {row["gemm"]: row["sparsity"] for row in report["rows"]}
    assert sparsity == {"forward": "n:m", "dgrad": "masked", "wgrad": "outputs"}
    assert all(row["sparse_ms"] and row["kernel"].startswith("cpu-") for row in report["rows"])
    assert report["on_gpu"] == 4
    main(["doctor", "-c", path])
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "masked: an operand has pruned entries",
        "outputs: the result is needed at kept entries alone",
    ):
        assert words in out


@pytest.mark.usefixtures("kernels")
def test_a_plugin_keeps_what_the_doctor_measured(tmp_path, capsys):
    plugin = "  plugins: [{class_path: lightning_nm.NMPrecision}]\n"
    (report,) = document(capsys, "-c", write(tmp_path, SMALL + plugin))["reports"]
    kept = json.loads((tmp_path / "home/.cache/lightning_nm/kernels.json").read_text())
    ((environment, entries),) = kept["environments"].items()
    assert library.cpu_name() in environment
    assert {entry["kernel"] for entry in entries.values()} == {
        row["kernel"] for row in report["rows"]
    }


@pytest.mark.usefixtures("no_library")
def test_a_transformer_without_kernels(tmp_path, capsys):
    path = write(tmp_path, SMALL)
    (report,) = document(capsys, "-c", path)["reports"]
    assert (
        report["kernels"]
        is report["step_ms"]
        is report["predicted_step_ms"]
        is report["dense_ms"]
        is None
    )
    assert [row["gemm"] for row in report["rows"]] == ["forward", "dgrad", "wgrad"] * 4
    assert all(row["eligible"] and row["dtype"] == "bfloat16" for row in report["rows"])
    assert all(row["could"] == ["cusparselt"] for row in report["rows"])
    assert {
        (row["kernel"], row["why"], row["dense_ms"], row["gain"]) for row in report["rows"]
    } == {("reference", "", None, None)}
    assert {row["layer"] for row in report["rows"]} == {
        f"blocks.0.{name}" for name in ("qkv", "proj", "fc1", "fc2")
    }
    assert report["rows"][0]["columns"] == 16 * 8
    assert report["skipped"]["head"] == "last linear layer"
    assert report["on_gpu"] is None
    assert not any((tmp_path / "here").iterdir()), "no log, no checkpoint"
    assert main(["doctor", "-c", path]) == 0
    out = capsys.readouterr().out
    for words in (
        "not measured",
        "blocks.0.qkv",
        "cusparselt",
        "12 of 12 products could run",
    ):
        assert words in out
    assert "ms" not in out.replace("items", "")


@pytest.mark.usefixtures("no_library")
def test_a_product_that_no_kernel_takes_says_why(tmp_path, capsys):
    (report,) = document(capsys, "-c", write(tmp_path, SMALL.replace("2:4", "4:8")))["reports"]
    assert not any(row["eligible"] or row["could"] for row in report["rows"])
    reasons = {row["why"] for row in report["rows"] if row["gemm"] == "forward"}
    assert all("cusparselt: 4:8 may put more than two" in why for why in reasons)


@pytest.mark.usefixtures("no_library")
def test_later_configs_override_and_tokens_are_asked_for(tmp_path, capsys):
    wide = write(tmp_path, "model: {init_args: {dim: 64}}", "wide.yaml")
    content = document(capsys, "-c", write(tmp_path, SMALL), "-c", wide, "--tokens", "64", "4096")
    assert [report["tokens"] for report in content["reports"]] == [64, 4096]
    first = [report["rows"][0] for report in content["reports"]]
    assert [(row["depth"], row["columns"]) for row in first] == [(64, 64), (64, 4096)]


@pytest.mark.usefixtures("no_library")
def test_configs_that_fit_has_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    with pytest.raises(SystemExit):
        main(["fit", "-c", write(tmp_path, SMALL), "--print_config"])
    printed = write(tmp_path, capsys.readouterr().out, "printed.yaml")
    assert len(document(capsys, "-c", printed)["reports"][0]["rows"]) == 12


@pytest.mark.usefixtures("no_library")
def test_a_plugin_of_the_config_is_no_obstacle(tmp_path, capsys):
    plugin = (
        "  plugins: [{class_path: lightning_nm.NMMixedPrecision}]\n  accumulate_grad_batches: 4\n"
    )
    (report,) = document(capsys, "-c", write(tmp_path, SMALL + plugin))["reports"]
    assert {(row["gemm"], row["pack_uses"]) for row in report["rows"]} == {
        ("forward", 4),
        ("dgrad", 4),
        ("wgrad", 1),
    }
    assert {row["calls"] for row in report["rows"]} == {4.0}


@pytest.mark.usefixtures("no_library")
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
    (report,) = document(capsys, "-c", write(tmp_path, SMALL + more), "--tokens", "65536")[
        "reports"
    ]
    assert len(report["rows"]) == 12
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_stdout_of_a_process_is_the_document(tmp_path):
    command = [
        sys.executable,
        "-m",
        "lightning_nm",
        "doctor",
        "--json",
        "-c",
        write(tmp_path, SMALL),
    ]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert len(json.loads(result.stdout)["reports"]) == 1
    assert "LightningCLI's args parameter" not in result.stderr
