"""Every tag that is logged is documented, and every one that is documented is logged."""

import re
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm import BAME, CAST, LBC, MaskMonitor, MaxQ, NMSparsityCallback, RigL
from lightning_nm.callbacks.tensorboard import CHARTS, MODEL_ONLY
from tests.support.event_files import Events
from tests.support.lightning_models import Data, make_trainer, new_model

PAGE = Path(__file__).parents[2] / "docs" / "tensorboard.md"
ROWS = {
    cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `nm/") and (cells := re.split(r"(?<!\\)\|", line.strip()[1:-1]))
}
# tests/strategies/test_monitor_in_processes.py, tests/plugins/test_measured_between_steps.py
ONLY_IN_PROCESSES = {"nm/grad_bytes_ratio", "nm/sparse_gemm_share"}
ONLY_WITH_KERNELS = {"nm/kernels"}  # tests/plugins
TEXTS = {"nm/layers", "nm/environment", "nm/summary", "nm/kernels"}

RUNS = {
    **{
        method: {"method": method}
        for method in ("dense", "ste", "sr-ste", "asp", "transposable", "bi-mask", "slope")
    },
    **{
        name: {"method": "transposable", "grad_estimator": name}
        for name in ("mvue", "approx-mvue", "top-n")
    },
    "lbc": {"method": LBC(stop=2)},
    "maxq": {"method": MaxQ(stop=2)},
    "mask-logits": {"method": "mask-logits"},
    "bame": {"method": BAME(stop=4, every=1, evidence_rate=0.5)},
    "rigl": {"method": RigL(every=1, stop=4)},
    "cast": {"method": CAST(end=2)},
    "bame-bi-mask": {
        "method": BAME(stop=4, every=1, evidence="batch", dgrad="bi-mask"),
        "grad_estimator": "mvue",
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The tags of each run without the layers' names, and those names."""
    path = tmp_path_factory.mktemp("tags")
    found = {}
    for name, options in RUNS.items():
        monitor = MaskMonitor(log_layers=True, histograms_every=1, images_every=1)
        nm = NMSparsityCallback(
            "2:4", grad_snr_every=1, show_tables=False, monitor=monitor, **options
        )
        logger = TensorBoardLogger(str(path), name=name)
        make_trainer(
            path, [nm], logger=logger, max_steps=3, log_every_n_steps=1, limit_val_batches=0
        ).fit(new_model(optimizer="adamw"), Data(48))
        found[name] = Events(logger.log_dir).tags()
    return found


def base(tag):
    return "/".join(tag.split("/")[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_is_logged_is_documented(written, name):
    assert len(written[name]) > 10
    for tag in written[name]:
        assert base(tag) in ROWS, f"{tag} is missing in {PAGE.name}"
        assert len(tag.split("/")) == 2 or tag.split("/")[2:] in (["net.3"], ["net.6"])


def test_what_is_documented_is_logged(written):
    assert set(ROWS) - ONLY_IN_PROCESSES - ONLY_WITH_KERNELS == {
        base(tag) for tags in written.values() for tag in tags
    }


def test_each_row_says_all():
    for tag, cells in ROWS.items():
        assert all(len(cell) > 3 for cell in cells), tag
        assert cells[0].endswith("."), tag
        assert len(cells) == (1 if tag in TEXTS else 3), tag


def test_charts_are_of_documented_statistics():
    assert {f"nm/{name}" for names in (*CHARTS.values(), MODEL_ONLY) for name in names} <= set(ROWS)
