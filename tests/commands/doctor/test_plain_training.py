"""Training without masks, which the doctor measures first: the same config and precision, and no masks."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_nm.cli import main
from lightning_nm.commands.build import build
from lightning_nm.commands.doctor.training import plain_step_ms
from lightning_nm.nn.adapters import Adapter
from lightning_nm.plugins.routing import KernelRouting
from tests.commands.doctor.runs import SMALL, document, write


@pytest.mark.parametrize(
    ("plugin", "twin"),
    [("NMPrecision", Precision), ("NMMixedPrecision", MixedPrecision)],
    ids=["32", "bf16-mixed"],
)
def test_the_trainer_is_that_of_the_config_without_masks(tmp_path, plugin, twin):
    path = write(tmp_path, f"{SMALL}  plugins: [{{class_path: lightning_nm.{plugin}}}]\n")
    cli = build([path], masks=False)
    assert type(cli.trainer.precision_plugin) is twin
    assert not isinstance(cli.trainer.precision_plugin, KernelRouting)
    masked = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            masked.append(any(isinstance(module, Adapter) for module in pl_module.modules()))

    cli.trainer.callbacks.append(Look())
    assert plain_step_ms(cli.trainer, cli.model, cli.datamodule) > 0
    steps = len(masked) // cli.trainer.accumulate_grad_batches
    assert steps in (7, 8), (
        "callbacks after the one that ends the training do not see its last batch"
    )
    assert not any(masked)


NEEDY = """
import lightning.pytorch as pl
from lightning_nm import NMSparsityCallback

class Needy(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        if not any(isinstance(callback, NMSparsityCallback) for callback in trainer.callbacks):
            raise RuntimeError("where are the masks?")
"""


@pytest.mark.usefixtures("kernels")
def test_a_training_that_needs_its_masks_has_no_plain_time(tmp_path, capsys, monkeypatch):
    (tmp_path / "needy.py").write_text(NEEDY)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, SMALL.replace("callbacks:", "callbacks:\n    - class_path: needy.Needy"))
    content = document(capsys, "-c", path)
    (report,) = content["reports"]
    assert report["plain_step_ms"] is report["speedup"] is None
    assert report["step_ms"] > 0
    assert main(["doctor", "-c", path]) == 0
    assert "plain dense training was not measured: where are the masks?" in capsys.readouterr().err
