"""A small config for the doctor, and what it prints of one."""

import json

from lightning_nm.cli import main

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
NO_LIBRARY = "the library of CPU kernels was not built: install a compiler"


def write(tmp_path, text, name="config.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def document(capsys, *words):
    assert main(["doctor", "--json", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 3
    assert set(content) == {"schema", "machine", "reports"}
    return content
