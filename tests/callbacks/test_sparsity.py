"""The callback as users meet it: one line in a Trainer, its logs, its tables, its errors."""

import inspect
import io

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_nm import (
    BAME,
    MaskMonitor,
    NMSparsifier,
    NMSparsityCallback,
    QuantizationAwareTraining,
    RNGState,
)
from lightning_nm.callbacks.tables import layer_table, print_layers, print_summary
from lightning_nm.commands.verify import main as verify
from tests.support.event_files import Events
from tests.support.lightning_models import (
    Data,
    Net,
    callback,
    fit,
    is_plain,
    is_sparse,
    make_trainer,
    new_model,
)

SCALARS = {"nm/density", "nm/flip_rate", "nm/kept_magnitude", "nm/overlap"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One fit with everything on, and its events."""
    path = tmp_path_factory.mktemp("run")
    logger = TensorBoardLogger(str(path), name="logs")
    callbacks = [
        NMSparsityCallback("2:4", "bi-mask", log_layers=True),
        ModelCheckpoint(path / "checkpoints"),
    ]
    trainer, _ = fit(path, callbacks, logger=logger)
    return trainer, Events(logger.log_dir)


def test_scalars_are_in_the_event_files(run):
    scalars = {tag: [event.value for event in found] for tag, found in run[1].scalars.items()}
    assert set(scalars) >= SCALARS | {"nm/flip_rate/net.3", "nm/overlap/net.6"}
    assert run[1].steps("nm/density") == [1, 3, 5, 7, 9, 11]
    assert set(scalars["nm/density"]) == {0.5}
    assert 0 < max(scalars["nm/flip_rate"]) < 0.5
    assert all(0.7 < value < 1 for value in scalars["nm/overlap"])
    assert all(0.5 < value < 1 for value in scalars["nm/kept_magnitude"])
    # 2:4 in forward and dgrad of the masked layers; the stem and the head are dense
    macs = {"stem": 8 * 8 * 9 * 16, "conv": 4 * 4 * 9 * 16 * 16, "fc": 256 * 32, "head": 32 * 4}
    masked, total = macs["conv"] + macs["fc"], sum(macs.values())
    (text,) = run[1].texts["nm/train_flops_ratio"]
    assert text.startswith(f"{1 - masked / total / 3:.4g} of the multiply-adds")


def test_without_a_logger_and_without_logging(tmp_path):
    trainer, _ = fit(tmp_path, [callback()], log_every_n_steps=0)
    assert not SCALARS & set(trainer.callback_metrics)


def test_the_settings_are_in_every_logger_and_in_the_repr(tmp_path):
    options = {
        "pattern": "1:4",
        "method": BAME(stop=0.5, every=2),
        "grad_estimator": "mvue",
        "rules": [{"include": "net.3", "pattern": "2:4", "method": "sr-ste"}],
        "exclude": "net.8",
    }
    nm = NMSparsityCallback(**options, show_tables=False)
    board = TensorBoardLogger(tmp_path, "tb", default_hp_metric=False)
    fit(tmp_path, [nm], logger=[board, CSVLogger(tmp_path, "csv")])
    expected = {"pattern": "1:4", "method": "bame", "method/stop": 0.5, "method/every": 2}
    expected |= {"grad_estimator": "MVUE", "exclude": "net.8", "rules/0/include": "net.3"}
    expected |= {"rules/0/pattern": "2:4", "rules/0/method": "sr-ste"}
    for name in ("tb", "csv"):
        found = yaml.safe_load((tmp_path / name / "version_0" / "hparams.yaml").read_text())
        assert {f"nm/{key}": value for key, value in expected.items()}.items() <= found.items()
    assert "hp_metric" not in Events(board.log_dir).scalars
    assert repr(nm).startswith("NMSparsityCallback(config=SparsityConfig(pattern='1:4', method=B")
    for word in ("every=2", "stop=0.5", "'include': 'net.3'", "exclude='net.8'", "seed=0"):
        assert word in repr(nm)


def printed(function, *args):
    console = Console(width=160, file=io.StringIO())
    function(*args, console)
    return console.file.getvalue()


def test_the_table_tells_what_each_gemm_does_and_why():
    model = Net()
    sparsifier = NMSparsifier(model, method="bi-mask").attach()
    lines = printed(lambda console: console.print(layer_table(sparsifier))).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip().startswith("net.")}
    assert rows["net.3"] == ["16x16x3x3", "2:4", "bi-mask", "2:4", "2:4", "dense"]
    assert rows["net.0"] == ["16x1x3x3", "-", "-", "dense", "dense", "dense", "(1)"]
    assert rows["net.8"] == ["4x32", "-", "-", "dense", "dense", "dense", "(2)"]
    text = printed(print_layers, sparsifier)
    assert "(1) first convolution\n(2) last linear layer\n" in text
    assert "FLOPs not known before a batch" in text
    model(torch.randn(2, 1, 8, 8))
    text = printed(print_layers, sparsifier)
    assert "of its weight FLOPs" in text
    assert "warning" not in text
    small = NMSparsifier(Net(), method="bi-mask", include="net.3").attach()
    assert "less than half" in printed(print_layers, small)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_large_embedding_is_no_reason_for_a_warning(frozen):
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 64), nn.Linear(64, 16))
    model[0].requires_grad_(not frozen)
    sparsifier = NMSparsifier(model, method="bi-mask", skip_first_last=False).attach()
    assert sparsifier.shares()["parameters"] < 0.5
    assert "less than half" not in printed(print_layers, sparsifier)
    model(torch.zeros(2, 4, dtype=torch.int64))
    assert "less than half" not in printed(print_layers, sparsifier)


def test_many_masked_parameters_of_few_flops_are_a_reason_for_a_warning():
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(16, 16)])
    sparsifier = NMSparsifier(model, method="bi-mask", include="0").attach()
    model[0](torch.zeros(1, 64))
    model[1](torch.zeros(1000, 16))
    assert "less than half of the model's weight FLOPs" in printed(print_layers, sparsifier)


def test_the_summary_names_every_figure_and_where_things_are(run):
    trainer = run[0]
    text = printed(print_summary, NMSparsifier(new_model(), method="bi-mask").attach(), trainer)
    for word in ("val_loss", "density", "N:M violations", "flip rate", "arithmetic", "paper"):
        assert word in text
    assert "eligible" in text
    paths = text.replace("\n", "")
    assert trainer.logger.log_dir in paths
    assert trainer.checkpoint_callback.best_model_path in paths


def test_tables_are_printed_around_fit(tmp_path, capsys):
    fit(tmp_path, [NMSparsityCallback()], max_epochs=1)
    out = capsys.readouterr().out
    assert out.index("N:M layers") < out.index("N:M summary")
    assert "masked: 9" in out


@pytest.mark.parametrize("names", [(None, "b"), ("a", "b")])
def test_two_callbacks_with_layers_of_their_own_save_and_resume(tmp_path, names):
    def callbacks():
        layers = zip(names, ("net.3", "net.6"), ("2:4", "1:4"), strict=True)
        return [callback("ste", p, name=name, include=layer) for name, layer, p in layers]

    path = tmp_path / "two.ckpt"
    trainer, model = fit(tmp_path, callbacks(), max_epochs=1)
    assert is_sparse(model)
    trainer.save_checkpoint(path)
    keys = {f"NMSparsityCallback[{name}]" if name else "NMSparsityCallback" for name in names}
    assert set(torch.load(path)["callbacks"]) == keys
    assert verify([str(path)]) == 0
    fit(tmp_path, callbacks(), new_model(1), ckpt_path=path)


def test_the_other_lightning_package_is_refused():
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", logger=False)
    with pytest.raises(
        TypeError, match=r"made for lightning\.pytorch.*not from `pytorch_lightning`"
    ):
        NMSparsityCallback().setup(trainer, other.LightningModule(), "fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "5:4"}, "5:4"),
        ({"pattern": "2:0"}, "2:0"),
        ({"pattern": "2-4"}, "2-4"),
        ({"method": "BiMask"}, r"'BiMask' does not exist.*; did you mean 'bi-mask'\?"),
        ({"method": "SRSTE"}, "did you mean 'sr-ste'"),
        ({"grad_estimator": "mvu"}, "'mvu' does not exist: use one of 'dense', 'mvue'"),
        ({"rules": [{"include": "x", "grad_estimator": "topn"}]}, "'topn' .*did you mean 'top-n'"),
        ({"rules": [{"include": "x", "metod": "ste"}]}, r"rules\[0\] takes .*'metod'.*'method'"),
        ({"grad_snr_every": -1}, "grad_snr_every=-1"),
        ({"grad_snr_every": None}, "grad_snr_every=None"),
        ({"grad_snr_every": 1.5}, r"grad_snr_every=1\.5"),
        ({"compare_ranks_every": -1}, "compare_ranks_every=-1"),
        ({"compare_ranks_every": 0.5}, r"compare_ranks_every=0\.5"),
        ({"frozen": "sparse"}, "frozen='sparse' is unknown: use 'dense' or 'mask'"),
        *(
            ({"log_layers": True, "monitor": monitor}, r"write MaskMonitor\(log_layers=True\)")
            for monitor in (False, None, MaskMonitor())
        ),
    ],
)
def test_bad_options_fail_before_any_trainer(options, message):
    with pytest.raises(ValueError, match=message):
        NMSparsityCallback(**options)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [callback(include="nothing")], "matches no layer"),
        (lambda: [callback(include="net.1")], "cannot be masked"),
        (lambda: [callback(pattern="1:512")], "no layer can be masked"),
        (
            lambda: [callback(name="a", include="net.3"), callback(name="b")],
            r"layer 'net\.3' is masked already.*disjoint `include`",
        ),
        (
            lambda: [callback(), ModelPruning("l1_unstructured", amount=0.5)],
            r"ModelPruning and NMSparsityCallback in one Trainer .* twice: remove one",
        ),
    ],
    ids=["no-layer", "no-adapter", "no-width", "twice", "pruning"],
)
def test_what_cannot_be_is_refused_before_training_and_changes_nothing(
    callbacks, message, tmp_path
):
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, callbacks(), model)
    assert is_plain(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_evaluation_alone_needs_nothing(tmp_path):
    model, nm = new_model(), NMSparsityCallback()
    trainer, plain = make_trainer(tmp_path, [nm]), make_trainer(tmp_path)
    for how in ("validate", "test"):
        found = getattr(trainer, how)(model, Data(), verbose=False)
        assert found == getattr(plain, how)(new_model(), Data(), verbose=False)
    trainer.predict(model, DataLoader(Data().val_set.tensors[0], batch_size=16))
    assert is_plain(model)
    assert nm.sparsifier is None
    assert nm.state_dict() == {}


@pytest.mark.parametrize(
    "callback", [NMSparsityCallback, MaskMonitor, QuantizationAwareTraining, RNGState]
)
def test_hooks_take_the_arguments_of_lightning_by_name(callback):
    """A subclass may call ``super().on_train_batch_start(trainer=trainer, ...)``."""
    for name, hook in vars(Callback).items():
        if name.startswith("on_") or name in ("setup", "teardown"):
            arguments = dict.fromkeys(inspect.signature(hook).parameters)
            inspect.signature(getattr(callback, name)).bind(**arguments)
