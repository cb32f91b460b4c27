"""``NMSparsityCallback("auto:0.4:8")``: chosen in a fit, shown, saved, resumed, verified and refused."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import SRSTE, NMSparsityCallback
from lightning_nm.callbacks.report.settings import hyperparameters
from lightning_nm.demo import ExactResume
from lightning_nm.export import verify
from tests.support.lightning_models import (
    Data,
    Inspect,
    SaveAt,
    assert_equal_models,
    make_trainer,
    new_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)

SIZES = {"net.0": 144, "net.3": 2304, "net.6": 8192, "net.8": 128}
METHODS = {"at once": "sr-ste", "late": lambda: SRSTE(dense_start=0.5), "bi-mask": "bi-mask"}


def callback(method="at once", **options):
    chosen = METHODS[method]
    options.setdefault("show_tables", False)
    return NMSparsityCallback(
        "auto:0.4:8", chosen if isinstance(chosen, str) else chosen(), **options
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_fit_keeps_the_budget_and_its_checkpoint_is_verified(tmp_path, method):
    model, seen = new_model(), []

    def look(trainer, module):
        (nm,) = (each for each in trainer.callbacks if isinstance(each, NMSparsityCallback))
        layers = nm.sparsifier.layers
        seen.append({name: str(layer.pattern) for name, layer in layers.items()})
        assert hyperparameters(nm.sparsifier)["nm/pattern"] == "auto:0.4:8"

    trainer = make_trainer(tmp_path, [callback(method), Inspect(look)])
    trainer.fit(model, Data())
    # The steps are 12; half of them are dense with the late masks.
    chosen = seen[-1]
    first = {"net.3": "3:8", "net.6": "3:8"} if method == "late" else chosen
    assert [seen[0], *seen[5:]] == [first, *[chosen] * 7]
    kept = SIZES["net.0"] + SIZES["net.8"]
    for name, pattern in chosen.items():
        weight = model.get_submodule(name).weight
        assert int(weight.count_nonzero()) <= SIZES[name] * int(pattern[0]) / 8
        kept += SIZES[name] * int(pattern[0]) / 8
    assert kept <= 0.4 * sum(SIZES.values())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    result = verify(tmp_path / "end.ckpt")
    assert result.ok
    assert {verdict.key: verdict.pattern for verdict in result.verdicts} == {
        f"{name}.weight": pattern for name, pattern in chosen.items()
    }


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_exact(tmp_path, method, batch):
    straight = new_model()
    save = SaveAt(tmp_path / "mid.ckpt", batch)
    make_trainer(tmp_path, [callback(method), ExactResume(), save]).fit(straight, Data())
    resumed = new_model(7)
    trainer = make_trainer(tmp_path, [callback(method), ExactResume()])
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "mid.ckpt")
    assert_equal_models(straight, resumed)


def test_a_second_fit_keeps_the_patterns(tmp_path):
    model, nm, seen = new_model(), callback(), []
    look = Inspect(
        lambda *_: seen.append({k: str(v.pattern) for k, v in nm.sparsifier.layers.items()})
    )
    make_trainer(tmp_path, [nm, look], max_epochs=1).fit(model, Data())
    with torch.no_grad():
        model.net[6].bias.add_(1)
    make_trainer(tmp_path, [nm, look], max_epochs=2).fit(model, Data())
    assert len(seen) > 6
    assert all(patterns == seen[0] for patterns in seen)


def test_the_tables_show_what_was_chosen_and_when(tmp_path, capsys):
    make_trainer(tmp_path, [callback("late", show_tables=True)]).fit(new_model(), Data())
    out = capsys.readouterr().out
    before, after = out.split("N:M layers")[1:3]
    assert before.count("?:8") == 2
    assert "pattern auto:0.4:8: N is chosen for each layer at training step 6" in before
    assert "?:8" not in after
    assert "N is chosen for each layer by magnitude; 0.3" in after
    assert "of the entries of all weights are kept" in after


def test_a_budget_that_cannot_be_reached_ends_before_the_first_batch(tmp_path):
    model = new_model()
    with pytest.raises(ValueError, match=r"pattern='auto:0.1:8' cannot be reached: .* 0\.1472 of"):
        make_trainer(tmp_path, [NMSparsityCallback("auto:0.1:8")]).fit(model, Data())
    assert type(model.net[6]) is torch.nn.Linear


def test_a_checkpoint_of_another_budget_is_refused(tmp_path):
    save = SaveAt(tmp_path / "mid.ckpt", 4)
    make_trainer(tmp_path, [callback(), save]).fit(new_model(), Data())
    trainer = make_trainer(
        tmp_path, [NMSparsityCallback("auto:0.5:8", "sr-ste", show_tables=False)]
    )
    with pytest.raises(ValueError, match=r"pattern='auto:0.4:8', and this training has"):
        trainer.fit(new_model(), Data(), ckpt_path=tmp_path / "mid.ckpt")


def test_flops_are_counted_in_an_example(tmp_path):
    class WithExample(type(new_model())):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.zeros(2, 1, 8, 8)

    pl.seed_everything(0, verbose=False)
    model, seen = WithExample(), []
    nm = NMSparsityCallback("auto:0.6:8:flops", "ste", show_tables=False)
    look = Inspect(lambda *_: seen.append(nm.sparsifier.patterns.kept_share()))
    make_trainer(tmp_path, [nm, look], max_epochs=1).fit(model, Data())
    assert 0.5 < seen[0] <= 0.6
