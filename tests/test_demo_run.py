"""The shipped configurations, run as a user runs them; slow."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_nm.cli import main

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_every_config_runs(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(config.read_text())
    if "FashionMNIST" in content["data"]["class_path"] and not FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    if config.stem.startswith("smollm2"):
        pytest.skip("tests/docs/test_fine_tune.py trains it, with the model that its page makes")
    smaller = ["--trainer.fast_dev_run=2", "--data.init_args.batch_size=4"]
    if content["model"]["class_path"].endswith(".GPT"):
        smaller.append("--model.init_args.dim=96")
    assert main(["fit", "-c", str(config), *smaller, "--trainer.accelerator=cpu"]) == 0
    assert "N:M summary" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_the_demo_learns_and_its_checkpoint_is_sparse_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit = ["fit", "-c", str(ROOT / "configs" / "digits.yaml")]
    command = [sys.executable, "-W", "ignore", "-m", "lightning_nm", *fit, "--trainer.max_epochs=4"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    figures = dict(
        line.split()[:2] for line in result.stdout.splitlines() if line.split()[:1] == ["val_acc"]
    )
    assert float(figures["val_acc"]) > 0.95
    (checkpoint,) = tmp_path.glob("runs/**/*.ckpt")
    assert str(checkpoint.relative_to(tmp_path)) in result.stdout
    assert list(tmp_path.glob("runs/**/events.out.tfevents.*"))
    assert main(["verify", str(checkpoint)]) == 0
    assert "OK: 8 weights" in capsys.readouterr().out
    assert main([*fit, "--trainer.max_epochs=5", "--ckpt_path", str(checkpoint)]) == 0
