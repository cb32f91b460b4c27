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


def lightning_nm(*words, cwd):
    command = [sys.executable, "-W", "ignore", "-m", "lightning_nm", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_every_config_runs(config, tmp_path, monkeypatch, capsys):
    if "FashionMNIST" in yaml.safe_load(config.read_text())["data"]["class_path"] and not FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    assert main(["fit", "-c", str(config), "--trainer.fast_dev_run=2", "--trainer.accelerator=cpu"]) == 0
    assert "N:M summary" in capsys.readouterr().out


def test_the_demo_learns_and_its_checkpoint_is_sparse_and_resumes(tmp_path):
    config = ROOT / "configs" / "digits-bi-mask.yaml"
    result = lightning_nm("fit", "-c", config, "--trainer.max_epochs=5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    figures = dict(line.split()[:2] for line in result.stdout.splitlines() if line.split()[:1] == ["val_acc"])
    assert float(figures["val_acc"]) > 0.95
    (checkpoint,) = tmp_path.glob("runs/**/*.ckpt")
    assert str(checkpoint.relative_to(tmp_path)) in result.stdout
    assert list(tmp_path.glob("runs/**/events.out.tfevents.*"))
    verified = lightning_nm("verify", checkpoint, cwd=tmp_path)
    assert verified.returncode == 0
    assert "OK: 8 weights" in verified.stdout
    again = lightning_nm("fit", "-c", config, "--trainer.max_epochs=6", "--ckpt_path", checkpoint, cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
