"""The page quotes messages that the package has, and the errors it describes are raised with these words."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_nm
from lightning_nm import ASP, NMPattern, NMPrecision, NMSparsifier, NMSparsityCallback, pack, prune
from lightning_nm.export import verify
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
    "score=... needs calibration batches: ": lambda path: prune(model(), score="wanda"),
    "`data` can be read only once, but every layer reads it: ": lambda path: prune(
        model(), data=iter([])
    ),
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
        assert len([cell for cell in row.strip("|").split(" | ") if cell.strip()]) == 3, row
