"""The page quotes messages that the package has, and the errors it describes are raised with these words."""

import ast
import functools
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_nm
from lightning_nm import (
    ASP,
    BAME,
    NMPattern,
    NMPrecision,
    NMSparsifier,
    NMSparsityCallback,
    pack,
    prune,
)
from lightning_nm.export import verify
from tests.test_card import QUIET
from tests.test_readme import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def first_cells():
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| message"):
            yield line.strip("| ").split(" | ")[0]


def messages():
    """The quoted messages: cells that hold code alone."""
    for cell in first_cells():
        if not re.sub(r"[\s,]", "", SPAN.sub("", cell)):
            for ticks, text in SPAN.findall(cell):
                yield text[1:] if len(ticks) > 1 and text.startswith(" ") else text


def template(node):
    """A text of the source with one NUL where a value stands."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


def texts():
    for path in Path(lightning_nm.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                yield template(node)


def quotes(text, message):
    """Whether a template holds a message in which an ellipsis stands for values and the words between them."""
    first, *rest = parts = message.split("...")
    if not all(part in text for part in parts):
        return False
    starts = [at + len(first) for at in range(len(text) + 1) if text.startswith(first, at)]
    for part in rest:
        starts = [
            at + len(part)
            for at in range(len(text) + 1)
            if text.startswith(part, at) and any("\0" in text[start:at] for start in starts)
        ]
    return bool(starts)


SOURCE = [text for text in texts() if len(text) > 3]


@pytest.mark.parametrize("message", sorted(set(messages())))
def test_a_message_is_one_of_the_package(message):
    assert any(quotes(text, message) for text in SOURCE), message


def test_there_are_many():
    assert len(set(messages())) >= 90
    assert not any(quotes(text, "layer '...' is not named by anything") for text in SOURCE)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 6))


def attached(**options):
    return NMSparsifier(model(), "2:4", "asp", **options).attach()


def saved(tmp_path, content):
    path = tmp_path / "saved.pt"
    torch.save(content, path)
    return path


RAISED = {
    "no layer can be masked. ": lambda path: NMSparsifier(nn.Linear(30, 30), "2:4").attach(),
    "layer '...' is named by `include` but cannot be masked: ": lambda path: NMSparsifier(
        nn.Sequential(nn.Linear(30, 30)), include="0"
    ).attach(),
    "... '...' matches no layer; ": lambda path: attached(include="encoder.*"),
    "cannot read ... as an N:M pattern: ": lambda path: NMPattern.parse("two of four"),
    "pattern '...' prunes nothing: ": lambda path: NMPattern.parse("4:4"),
    "method ... does not exist: ": lambda path: NMSparsityCallback("2:4", "sr_ste"),
    "layer '...' is not ... sparse, so init='zeros' cannot take its mask": lambda path: (
        NMSparsifier(model(), "2:4", ASP(init="zeros")).attach()
    ),
    "no optimizer is registered: ": lambda path: attached().step(),
    "the sparsifier is not attached: ": lambda path: NMSparsifier(model()).state_dict(),
    "layer '...' is masked already: ": lambda path: NMSparsifier(attached().model, "2:4").attach(),
    "layer '...' is masked by a sparsifier: ": lambda path: pack(attached().model),
    "... needs calibration batches: ": lambda path: prune(model(), score="wanda"),
    "kernels=... is unknown: ": lambda path: NMPrecision(kernels="fast"),
    "'...' has no sparsifier state that names its masked layers: ": lambda path: verify(
        saved(path, model().state_dict())
    ),
    "'...' holds no state dict: ": lambda path: verify(saved(path, [1])),
}


@pytest.mark.parametrize("message", RAISED)
def test_an_error_is_raised_with_the_words_of_the_page(message, tmp_path):
    assert message in set(messages())
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        RAISED[message](tmp_path)
    at = 0
    for part in message.split("..."):
        assert part in str(error.value)[at:]
        at = str(error.value).index(part, at) + len(part)


def test_every_row_has_a_fix():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for row in rows:
        assert len([cell for cell in row.strip("|").split(" | ") if cell.strip()]) == 2, row


class Attributed(pl.LightningModule):
    """One layer; keeps its input gradients: those of a validation within the fit and of a test."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 16, bias=False)

    def training_step(self, x):
        return self.layer(x).square().mean()

    def saliency(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.layer(x).sum(), x)
        return gradient[0]

    def validation_step(self, x):
        masked = self.layer.nm_layers["weight"]
        self.within = self.saliency(x)
        self.forward_sum, self.backward_sum = (
            weight.detach().sum(0) for weight in (masked.forward_weight(), masked.backward_weight())
        )

    def test_step(self, x):
        self.after = self.saliency(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("method", "dgrad", "kind"),
    [
        ("sr-ste", None, "exact"),
        ("transposable", None, "exact"),
        (BAME(stop=1), None, "exact"),
        ("bi-mask", None, "masked"),
        ("slope", None, "masked"),
        (BAME(stop=1, dgrad="bi-mask"), None, "masked"),
        ("sr-ste", "mvue", "drawn"),
    ],
)
def test_input_gradients_within_a_fit(method, dgrad, kind):
    nm = NMSparsityCallback("2:4", method, skip_first_last=False, dgrad=dgrad)
    options = {"logger": False, "enable_checkpointing": False, "inference_mode": False}
    trainer = pl.Trainer(**QUIET, **options, max_epochs=1, num_sanity_val_steps=0, callbacks=[nm])
    model, data = Attributed(), DataLoader(torch.randn(8, 32), batch_size=8)
    trainer.fit(model, data, data)
    close = functools.partial(torch.allclose, rtol=1e-5, atol=1e-5)
    assert close(model.within, model.forward_sum) == (kind == "exact")
    if kind == "masked":
        assert close(model.within, model.backward_sum)
    trainer.test(model, data, verbose=False)
    assert close(model.after, model.forward_sum)
    assert close(model.after, model.layer.weight.sum(0))
