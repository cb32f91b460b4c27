"""benchmarks/memory.py at a small size: docs/memory.md's training of a model whose dense training does not fit."""

import json

import pytest

from benchmarks import memory

DENSE_BYTES = 16
"""Of a weight in float32, its gradient and the two moments of AdamW."""

# The command of docs/memory.md for a width of 128 in place of 4096, whose learning rate is larger.
COMMAND = "--width 128 --layers 9 --pattern 1:16 --lr 1e-3 --steps 20 --threads 1"


def run(mode, path):
    memory.main([*COMMAND.split(), "--only", mode, "--json", str(path)])
    (found,) = json.loads(path.read_text())["found"]
    return found


@pytest.mark.slow
def test_packed_weights_train_in_a_share_of_the_dense_bytes(tmp_path):
    found = run("asp-packed", tmp_path / "found.json")
    dense = DENSE_BYTES * found["weights"]
    # 1/16 of the masked weights and a byte for each position are 0.066; embeddings stay dense: 7 % of this model.
    assert found["counted"] < 0.12 * dense
    assert len(found["losses"]) == 20
    assert sum(found["losses"][-5:]) < 0.8 * sum(found["losses"][:5])


@pytest.mark.slow
def test_packed_weights_adapt_in_less_than_the_dense_bytes(tmp_path):
    found = run("bame-packed", tmp_path / "found.json")
    # U and V are 8 bytes of each masked weight, all else together 1.25.
    assert found["counted"] < 0.65 * DENSE_BYTES * found["weights"]
    assert sum(found["losses"][-5:]) < 0.8 * sum(found["losses"][:5])


@pytest.mark.slow
def test_the_dense_bytes_are_those_that_a_dense_training_holds(tmp_path):
    found = run("dense", tmp_path / "found.json")
    assert found["counted"] == pytest.approx(DENSE_BYTES * found["weights"], rel=0.01)
