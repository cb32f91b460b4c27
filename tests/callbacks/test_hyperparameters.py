"""What a run was trained with is in its log and in the callback's repr."""

import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_nm import BAME, NMSparsityCallback
from tests.support.lightning_models import Data, make_trainer, new_model

OPTIONS = {
    "pattern": "1:4",
    "method": BAME(stop=0.5, every=2),
    "grad_estimator": "mvue",
    "rules": [{"include": "net.3", "pattern": "2:4", "method": "sr-ste"}],
    "exclude": "net.8",
}


def test_every_logger_gets_the_settings(tmp_path):
    loggers = [
        TensorBoardLogger(tmp_path, "tb", default_hp_metric=False),
        CSVLogger(tmp_path, "csv"),
    ]
    make_trainer(tmp_path, [NMSparsityCallback(**OPTIONS, show_tables=False)], logger=loggers).fit(
        new_model(), Data()
    )
    for logger in loggers:
        found = yaml.safe_load((tmp_path / logger.name / "version_0" / "hparams.yaml").read_text())
        assert found["nm/pattern"] == "1:4"
        assert (found["nm/method"], found["nm/method/stop"], found["nm/method/every"]) == (
            "bame",
            0.5,
            2,
        )
        assert found["nm/grad_estimator"] == "MVUE"
        assert found["nm/rules/0/include"] == "net.3"
        assert (found["nm/rules/0/pattern"], found["nm/rules/0/method"]) == ("2:4", "sr-ste")
        assert found["nm/exclude"] == "net.8"
    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    assert "hp_metric" not in events.Tags()["scalars"]


def test_repr_names_the_settings():
    text = repr(NMSparsityCallback(**OPTIONS))
    assert text.startswith("NMSparsityCallback(config=SparsityConfig(pattern='1:4', method=BAME(")
    for word in (
        "every=2",
        "stop=0.5",
        "grad_estimator='mvue'",
        "'include': 'net.3'",
        "exclude='net.8'",
        "seed=0",
    ):
        assert word in text
