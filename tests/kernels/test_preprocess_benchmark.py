"""The benchmark of preprocessing kernels in its dry run; `make interpreter` lets it call the kernels."""

import json
import math

import pytest

benchmark = pytest.importorskip(
    "benchmarks.gpu.preprocess", reason="benchmarks are not in the source distribution"
)


# The interpreter's numpy: 0 / 0 and 1 / 0.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
def test_a_dry_run(tmp_path, capsys):
    path = tmp_path / "results" / "run.json"
    benchmark.main(["--dry-run", "--json", str(path)])
    result = json.loads(path.read_text())
    assert "CPU" in result["setup"]["device"]
    assert result["setup"]["device"] in capsys.readouterr().out
    assert not result["left out"]
    rows = {(row["input"], row["makes"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 4 + 8 * 3 + 4 * 2
    for row in rows.values():
        assert all(0 < row[key] < math.inf for key in ("ms", "torch ms", "copy ms", "GB/s"))
    assert rows["dY bfloat16", "gather and estimate"]["bytes"] == 2 * 48 * (40 + 40 + 48)
    assert rows["dY bfloat16", "gather, then estimate"]["bytes"] == 2 * 48 * (40 + 40 + 48)
    assert rows["W float32, permuted", "W_F, then W_B"]["bytes"] == 48 * 32 * 2 * (4 + 1 + 2)
    assert rows["W bfloat16, stored [in, out]", "W_F"]["bytes"] == 48 * 32 * (2 + 1 + 2)
    assert rows["BAME 2:4 bfloat16", "evidence"]["bytes"] == 48 * 32 * (1 + 2 * 2 + 4 * 4)


def test_what_time_did_not_allow_is_told(tmp_path, capsys):
    benchmark.main(["--dry-run", "--seconds", "0", "--json", str(tmp_path / "run.json")])
    result = json.loads((tmp_path / "run.json").read_text())
    assert not result["rows"]
    assert len(result["left out"]) == 1 + 8 + 4
    assert "Left out after 0 seconds: dY bfloat16 40 x 48;" in capsys.readouterr().out


def test_without_a_device_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "--dry-run" in capsys.readouterr().err
