"""The callback as users meet it: one line in a Trainer, its logs, its tables, its errors."""

import inspect
import io

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from torch import nn

from lightning_nm import (
    MaskMonitor,
    NMSparsifier,
    NMSparsityCallback,
    QuantizationAwareTraining,
    RNGState,
)
from lightning_nm.callbacks.tables import layer_table, print_layers, print_summary
from lightning_nm.nn.adapters import Adapter
from tests.support.event_files import Events
from tests.support.lightning_models import Data, Net, make_trainer, new_model

SCALARS = {"nm/density", "nm/flip_rate", "nm/kept_magnitude", "nm/overlap", "nm/train_flops_ratio"}


@pytest.fixture(scope="module")
def tensorboard_run(tmp_path_factory):
    """One fit with everything on, and what it printed."""
    path = tmp_path_factory.mktemp("run")
    logger = TensorBoardLogger(str(path), name="logs")
    nm = NMSparsityCallback("2:4", log_layers=True)
    trainer = make_trainer(path, [nm, ModelCheckpoint(path / "checkpoints")], logger=logger)
    trainer.fit(new_model(), Data())
    return trainer, logger.log_dir


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(folder)
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def test_scalars_are_in_the_event_files(tensorboard_run):
    scalars = events(tensorboard_run[1])
    assert set(scalars) >= SCALARS - {"nm/train_flops_ratio"}, "that stays the same: a text"
    assert [event.step for event in scalars["nm/density"]] == [1, 3, 5, 7, 9, 11]
    assert all(event.value == 0.5 for event in scalars["nm/density"])
    assert all(0 <= event.value < 0.5 for event in scalars["nm/flip_rate"])
    assert any(event.value > 0 for event in scalars["nm/flip_rate"])
    assert all(0.7 < event.value < 1 for event in scalars["nm/overlap"])
    assert all(0.5 < event.value < 1 for event in scalars["nm/kept_magnitude"])
    assert {"nm/flip_rate/net.3", "nm/overlap/net.6"} <= set(scalars)
    # 2:4 in forward and dgrad of the masked layers; the stem and the head are dense
    macs = {"stem": 8 * 8 * 9 * 16, "conv": 4 * 4 * 9 * 16 * 16, "fc": 256 * 32, "head": 32 * 4}
    masked, total = macs["conv"] + macs["fc"], sum(macs.values())
    (text,) = Events(tensorboard_run[1]).texts["nm/train_flops_ratio"]
    assert text.startswith(f"{1 - masked / total / 3:.4g} of the multiply-adds")


def test_every_logger_gets_them(tmp_path):
    logger = CSVLogger(str(tmp_path))
    make_trainer(tmp_path, [NMSparsityCallback(show_tables=False)], logger=logger).fit(
        new_model(), Data()
    )
    logger.save()
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert set(header.split(",")) >= SCALARS


def test_without_a_logger_and_without_logging(tmp_path):
    trainer = make_trainer(tmp_path, [NMSparsityCallback(show_tables=False)], log_every_n_steps=0)
    trainer.fit(new_model(), Data())
    assert not SCALARS & set(trainer.callback_metrics)


def render(thing):
    console = Console(width=160, file=io.StringIO())
    thing(console)
    return console.file.getvalue()


def test_the_table_tells_what_each_gemm_does_and_why():
    model = Net()
    sparsifier = NMSparsifier(model).attach()
    lines = render(lambda console: console.print(layer_table(sparsifier))).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip().startswith("net.")}
    assert rows["net.3"] == ["16x16x3x3", "2:4", "bi-mask", "2:4", "2:4", "dense"]
    assert rows["net.0"] == ["16x1x3x3", "-", "-", "dense", "dense", "dense", "(1)"]
    assert rows["net.8"] == ["4x32", "-", "-", "dense", "dense", "dense", "(2)"]
    text = render(lambda console: print_layers(sparsifier, console))
    assert "(1) first convolution\n(2) last linear layer\n" in text
    assert "FLOPs not known before a batch" in text
    model(torch.randn(2, 1, 8, 8))
    text = render(lambda console: print_layers(sparsifier, console))
    assert "of its weight FLOPs" in text
    assert "warning" not in text
    small = NMSparsifier(Net(), include="net.3").attach()
    assert "less than half" in render(lambda console: print_layers(small, console))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_large_embedding_is_no_reason_for_a_warning(frozen):
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 64), nn.Linear(64, 16))
    model[0].requires_grad_(not frozen)
    sparsifier = NMSparsifier(model, skip_first_last=False).attach()
    assert sparsifier.shares()["parameters"] < 0.5
    assert "less than half" not in render(lambda console: print_layers(sparsifier, console))
    model(torch.zeros(2, 4, dtype=torch.int64))
    assert "less than half" not in render(lambda console: print_layers(sparsifier, console))


def test_many_masked_parameters_of_few_flops_are_a_reason_for_a_warning():
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(16, 16)])
    sparsifier = NMSparsifier(model, include="0").attach()
    model[0](torch.zeros(1, 64))
    model[1](torch.zeros(1000, 16))
    assert "less than half of the model's weight FLOPs" in render(
        lambda console: print_layers(sparsifier, console)
    )


def test_the_summary_names_every_figure_and_where_things_are(tensorboard_run, tmp_path):
    trainer, folder = tensorboard_run
    model = new_model()
    sparsifier = NMSparsifier(model).attach()
    text = render(lambda console: print_summary(sparsifier, trainer, console))
    for word in (
        "val_loss",
        "density",
        "N:M violations",
        "flip rate",
        "arithmetic",
        "paper",
        "eligible",
    ):
        assert word in text
    assert folder in text.replace("\n", "")
    assert trainer.checkpoint_callback.best_model_path in text.replace("\n", "")


def test_tables_are_printed_around_fit(tmp_path, capsys):
    make_trainer(tmp_path, [NMSparsityCallback()], max_epochs=1).fit(new_model(), Data())
    out = capsys.readouterr().out
    assert out.index("N:M layers") < out.index("N:M summary")
    assert "masked: 9" in out


def test_two_callbacks_that_claim_one_layer(tmp_path):
    callbacks = [NMSparsityCallback(name="a", include="net.3"), NMSparsityCallback(name="b")]
    model = Net()
    with pytest.raises(ValueError, match=r"layer 'net\.3' is masked already"):
        make_trainer(tmp_path, callbacks).fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())


def test_two_callbacks_with_layers_of_their_own_save_and_resume(tmp_path):
    def callbacks():
        return [
            NMSparsityCallback(name="a", include="net.3", show_tables=False),
            NMSparsityCallback("1:4", name="b", include="net.6", show_tables=False),
        ]

    model = new_model()
    trainer = make_trainer(tmp_path, callbacks(), max_epochs=1)
    trainer.fit(model, Data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert set(states) == {"NMSparsityCallback[a]", "NMSparsityCallback[b]"}
    make_trainer(tmp_path, callbacks()).fit(new_model(1), Data(), ckpt_path=tmp_path / "two.ckpt")


def test_the_other_lightning_package_is_refused(tmp_path):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 8)

        def training_step(self, batch, batch_idx):
            return self.fc(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = pytorch_lightning.Trainer(
        callbacks=[NMSparsityCallback()], logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path), max_epochs=1,
    )  # fmt: skip
    with pytest.raises(
        TypeError, match=r"made for lightning\.pytorch.*not from `pytorch_lightning`"
    ):
        trainer.fit(Other(), torch.utils.data.DataLoader(torch.randn(8, 8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "5:4"}, "5:4"),
        ({"pattern": "2:0"}, "2:0"),
        ({"pattern": "2-4"}, "2-4"),
        ({"method": "BiMask"}, r"'BiMask' does not exist.*; did you mean 'bi-mask'\?"),
        ({"method": "SRSTE"}, "did you mean 'sr-ste'"),
        ({"grad_estimator": "mvu"}, "'mvu' does not exist: use one of 'dense', 'mvue'"),
        (
            {"rules": [{"include": "x", "grad_estimator": "topn"}]},
            "'topn' does not exist.*did you mean 'top-n'",
        ),
        ({"grad_snr_every": -1}, "grad_snr_every=-1"),
        ({"grad_snr_every": None}, "grad_snr_every=None"),
        ({"grad_snr_every": 1.5}, r"grad_snr_every=1\.5"),
        (
            {"rules": [{"include": "x", "metod": "ste"}]},
            r"rules\[0\] takes no key 'metod' .*; did you mean 'method'",
        ),
    ],
)
def test_bad_options_fail_before_any_trainer(options, message):
    with pytest.raises(ValueError, match=message):
        NMSparsityCallback(**options)


@pytest.mark.parametrize(
    "options", [{"include": "nothing"}, {"include": "net.1"}, {"pattern": "1:512"}]
)
def test_bad_selections_fail_before_training_and_install_nothing(options, tmp_path):
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"matches no layer|cannot be masked|no layer can be masked"
    ):
        make_trainer(tmp_path, [NMSparsityCallback(**options)]).fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_evaluation_alone_needs_nothing(tmp_path):
    model, nm = new_model(), NMSparsityCallback()
    trainer, plain = make_trainer(tmp_path, [nm]), make_trainer(tmp_path)
    for evaluate, evaluate_plain in (
        (trainer.validate, plain.validate),
        (trainer.test, plain.test),
    ):
        assert evaluate(model, Data(), verbose=False) == evaluate_plain(
            new_model(), Data(), verbose=False
        )
    assert not any(isinstance(module, Adapter) for module in model.modules())
    assert nm.sparsifier is None
    assert nm.state_dict() == {}


def test_another_pruning_of_the_same_weights_is_refused_by_name(tmp_path):
    trainer = make_trainer(
        tmp_path, [NMSparsityCallback("2:4"), ModelPruning("l1_unstructured", amount=0.5)]
    )
    with pytest.raises(
        ValueError, match=r"ModelPruning and NMSparsityCallback in one Trainer .* twice: remove one"
    ):
        trainer.fit(new_model(), Data())


@pytest.mark.parametrize(
    "callback", [NMSparsityCallback, MaskMonitor, QuantizationAwareTraining, RNGState]
)
def test_hooks_take_the_arguments_of_lightning_by_name(callback):
    """A subclass may call ``super().on_train_batch_start(trainer=trainer, ...)``."""
    for name, hook in vars(Callback).items():
        if name.startswith("on_") or name in ("setup", "teardown"):
            arguments = dict.fromkeys(inspect.signature(hook).parameters)
            inspect.signature(getattr(callback, name)).bind(**arguments)
