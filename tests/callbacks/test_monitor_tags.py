"""Every tag that is logged is documented, and every one that is documented is logged."""

import re
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm import BAME, CAST, LBC, MaskMonitor, MaxQ, NMSparsityCallback, RigL
from lightning_nm.callbacks.tensorboard import CHARTS, MODEL_ONLY
from tests.support.event_files import Events
from tests.support.lightning_models import Data, fit, new_model

PAGE = Path(__file__).parents[2] / "docs" / "tensorboard.md"
ROWS = {
    cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `nm/") and (cells := re.split(r"(?<!\\)\|", line.strip()[1:-1]))
}
# tests/strategies/test_monitor_in_processes.py, tests/plugins
NOT_HERE = {"nm/grad_bytes_ratio", "nm/sparse_gemm_share", "nm/kernels"}
TEXTS = {"nm/layers", "nm/environment", "nm/summary", "nm/kernels"}
RUNS = {
    **{
        name: {"method": name}
        for name in ("dense", "ste", "sr-ste", "asp", "bi-mask", "slope", "mask-logits")
    },
    **{
        name: {"method": "transposable", "grad_estimator": name}
        for name in ("mvue", "approx-mvue", "top-n")
    },
    "lbc": {"method": LBC(stop=2)},
    "maxq": {"method": MaxQ(stop=2)},
    "bame": {"method": BAME(stop=4, every=1, evidence_rate=0.5)},
    "rigl": {"method": RigL(every=1, stop=4)},
    "cast": {"method": CAST(end=2)},
    "bame-bi-mask": {
        "method": BAME(stop=4, every=1, evidence="batch", dgrad="bi-mask"),
        "grad_estimator": "mvue",
    },
}


def test_what_is_logged_is_documented_and_the_other_way_round(tmp_path):
    found = set()
    for name, options in RUNS.items():
        settings = {"log_layers": True, "histograms_every": 1, "images_every": int(name == "ste")}
        monitor = MaskMonitor(**settings)  # heat maps take long, and are the same of all
        nm = NMSparsityCallback(grad_snr_every=1, show_tables=False, monitor=monitor, **options)
        logger = TensorBoardLogger(str(tmp_path), name=name)
        trainer = {"logger": logger, "max_steps": 3, "log_every_n_steps": 1, "limit_val_batches": 0}
        fit(tmp_path, [nm], new_model(optimizer="adamw"), Data(48), **trainer)
        tags = Events(logger.log_dir).tags()
        assert len(tags) > 10, name
        for tag in tags:
            _, statistic, *layer = tag.split("/")
            assert layer in ([], ["net.3"], ["net.6"]), (name, tag)
            found.add(f"nm/{statistic}")
    assert found == set(ROWS) - NOT_HERE


def test_each_row_says_all():
    for tag, cells in ROWS.items():
        assert all(len(cell) > 3 for cell in cells), tag
        assert cells[0].endswith("."), tag
        assert len(cells) == (1 if tag in TEXTS else 3), tag


def test_charts_are_of_documented_statistics():
    assert {f"nm/{name}" for names in (*CHARTS.values(), MODEL_ONLY) for name in names} <= set(ROWS)
