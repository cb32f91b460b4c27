"""What tests of documentation share: the code blocks of a page, and ways to run them."""

import json
import re
import shlex
from pathlib import Path

import lightning.pytorch as pl

from lightning_nm.cli import main

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def read(name):
    """The text of a page of the documentation."""
    return (DOCS / name).read_text(encoding="utf-8")


def benchmark_tables():
    """The CSV file of each table of the benchmarks."""
    return sorted((ROOT / "benchmarks" / "results" / "tables").glob("*.csv"))


def benchmarks():
    """The text of the page on benchmarks and of all tables."""
    return "\n".join(
        [read("benchmarks.md"), *(path.read_text(encoding="utf-8") for path in benchmark_tables())]
    )


def section(page, title):
    """The part of a page's text under a heading of the second level."""
    _, heading, rest = page.partition(f"\n## {title}\n")
    assert heading, title
    return rest.partition("\n## ")[0]


def blocks(language, page):
    """The code blocks of a page's text in a language; ``""`` for those without one, such as commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def prose(path):
    """The text of a page without its code blocks; of a notebook, that of its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(
        "".join(cell["source"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "markdown"
    )


def execute(page, **names):
    """Run the Python blocks of a page's text in order, as one program; return its names."""
    for block in blocks("python", page):
        exec(block, names)
    return names


def run_commands(block):
    """Run the ``lightning-nm`` commands of a block, with the patterns of their arguments expanded as a shell does."""
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "lightning-nm"
        expanded = [
            found for word in words for found in sorted(map(str, Path().glob(word))) or [word]
        ]
        assert main(expanded) == 0, line


class QuietTrainer(pl.Trainer):
    """A Trainer on the CPU that prints no progress; takes the place of ``pl.Trainer`` in a page."""

    def __init__(self, **options):
        quiet = {
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        super().__init__(**quiet | options)


class ShortTrainer(QuietTrainer):
    """One epoch, without files."""

    def __init__(self, **options):
        super().__init__(
            **options | {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
        )
