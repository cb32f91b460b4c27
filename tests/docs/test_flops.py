"""The output of the command in docs/flops.md; of configs/imagenet/README.md the papers' table and the two configs."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_nm.cli import main
from tests.docs.blocks import section

ROOT = Path(__file__).parent.parent.parent
PAGE = section((ROOT / "docs" / "flops.md").read_text(encoding="utf-8"), "Counting FLOPs")
README = (ROOT / "configs" / "imagenet" / "README.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs" / "imagenet").glob("*.yaml"))
PUBLISHED = re.findall(
    r"^\| (SR-STE|Bi-Mask|BAME) (\d+:\d+) \| ([\d.]+)x, recalled \| (.*) \|$", README, re.MULTILINE
)


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-nm", "flops"])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)


def counted(capsys, config, *words):
    assert main(["flops", "--json", "-c", config, *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_output_is_as_shown(capsys):
    command, shown = re.search(
        r"^```\n(lightning-nm flops .*)\n```\n\n.*?\n\n```text\n(.*?)^```$", PAGE, re.M | re.S
    ).groups()
    program, *words = shlex.split(command)
    assert program == "lightning-nm"
    assert main(words) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = shown.splitlines()
    assert len(lines) > 10
    for line in lines:
        assert line in printed


@pytest.mark.slow
@pytest.mark.parametrize("method", ["SR-STE", "Bi-Mask"])
def test_the_factors_of_the_papers(capsys, method):
    rows = {
        pattern: (float(value), cells)
        for name, pattern, value, cells in PUBLISHED
        if name == method
    }
    config = f"configs/imagenet/resnet50-{method.lower()}.yaml"
    for pattern, (published, shown) in rows.items():
        report = counted(capsys, config, "--pattern", pattern)
        n, m = map(int, pattern.split(":"))
        alone, whole = (report[kind]["paper"] for kind in ("masked_ratios", "ratios"))
        assert alone == pytest.approx(
            (n / m + 2) / 3 if method == "SR-STE" else (2 * n / m + 1) / 3
        )
        # Two digits, rounded or cut.
        assert published in (
            round(alone, 2),
            math.floor(100 * alone) / 100,
            math.ceil(100 * alone) / 100 - 0.01,
        )
        cells = (
            f"{share:.4f} | {share / published - 1:+.1%}".replace("%", " %")
            for share in (alone, whole)
        )
        assert shown == " | ".join(cells)
        # The first convolution and the last layer.
        assert 1 - report["masked_macs"] / report["macs"] == pytest.approx(0.0294, abs=5e-4)


@pytest.mark.slow
def test_bame_against_sr_ste(capsys, tmp_path):
    bame = tmp_path / "bame.yaml"
    callback = (
        "{class_path: lightning_nm.NMSparsityCallback, init_args: {pattern: 1:16, method: bame}}"
    )
    bame.write_text(f"trainer: {{callbacks: [{callback}]}}")
    config = "configs/imagenet/resnet50-sr-ste.yaml"
    evolved = counted(capsys, config, "-c", str(bame), "--steps", "10000")
    ste = counted(capsys, config, "--pattern", "1:16")
    whole = [report["ratios"]["paper"] for report in (ste, evolved)]
    stem_macs = 112**2 * 64 * 3 * 49
    with_masked_stem = whole[0] - (1 - 1 / 16) / 3 * stem_macs / ste["macs"]
    alone = [report["masked_ratios"]["paper"] for report in (ste, evolved)]
    for there, here in (whole, (with_masked_stem, whole[1]), alone):
        assert f"{there / here:.2f}" in README
        assert f"({there:.4f} / {here:.4f}" in README


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_run_on_random_images(capsys, monkeypatch, config, tmp_path):
    (command,) = re.findall(r"^```\n(lightning-nm fit .*?)^```$", README, re.M | re.S)
    program, fit, flag, shown, *words = shlex.split(command.replace("\\\n", ""))
    assert (program, fit, flag, ROOT / shown in CONFIGS) == ("lightning-nm", "fit", "-c", True)
    small = [
        "--data.init_args.image_size=32",
        "--data.init_args.num_workers=0",
        "--trainer.accelerator=cpu",
    ]
    small += [
        "--data.init_args.synthetic=12",
        "--data.init_args.batch_size=4",
        "--trainer.fast_dev_run=2",
    ]
    monkeypatch.chdir(tmp_path)
    assert main([fit, flag, str(config), *words, *small]) == 0
    out = capsys.readouterr().out
    assert "N:M summary" in out
    assert re.search(r"N:M violations +0 ", out)
    for checkpoint in tmp_path.rglob("*.ckpt"):  # 300 MB
        checkpoint.unlink()


def test_the_configs_are_those_of_the_page():
    assert [path.stem for path in CONFIGS] == ["resnet50-bi-mask", "resnet50-sr-ste"]
    assert {(name, pattern) for name, pattern, *_ in PUBLISHED} == {
        *(("SR-STE", pattern) for pattern in ("2:4", "1:4")),
        *(("Bi-Mask", pattern) for pattern in ("2:4", "1:16")),
    }
