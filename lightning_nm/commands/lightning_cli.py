"""NMLightningCLI: a LightningCLI that knows the demo's classes, and says what is wrong with an argument.

jsonargparse explains a mistake in YAML by all forms that a value might have. The last line is ours: :func:`hint` says
which key is wrong, and what was probably meant.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_nm.config import arguments_of
from lightning_nm.functional.spelling import did_you_mean

EXTRA = "The command line needs the extra `cli`: pip install 'lightning-nm[cli]'"


class _Parser(LightningArgumentParser):
    """Adds a hint to the message of a usage error."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        said = hint(message) if self.exit_on_error else ""  # parsers of single classes raise
        super().error(f"{message}\nhint: {said}" if said else message, ex)


class NMLightningCLI(LightningCLI):
    """The LightningCLI of ``lightning-nm fit``, for a command line of one's own.

    It takes the arguments of Lightning's class. A mistake in the arguments or in YAML ends with a hint: which key is
    wrong, and what was probably meant. The models and data modules of the demo are known by their short names.

    Raises:
        ImportError: Without the extra ``cli``; the message says how to install it.

    Example::

        # train.py: python train.py fit --config config.yaml
        from lightning_nm import NMLightningCLI

        if __name__ == "__main__":
            NMLightningCLI(Net, Data)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Lightning 2.6 calls a name that torch 2.13 deprecates; users can do nothing about it.
        warnings.filterwarnings(
            "ignore",
            message=r"`isinstance\(treespec, LeafSpec\)` is deprecated",
            category=FutureWarning,
        )
        require_extra()
        importlib.import_module(
            "lightning_nm.demo"
        )  # makes its classes available by their short names
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Lightning's parser, with hints."""
        self.parser_class = _Parser
        return super().init_parser(**kwargs)

    def instantiate_classes(self) -> None:
        """Create the model, the data and the Trainer; an error of a class about its arguments is a usage error."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse takes an error that a class raises for a bad argument for a mismatch of types.
            if "Does not validate against any of the Union subtypes" not in str(error):
                raise
            self.parser.error(str(error))

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Create the Trainer; two callbacks of this package without names are a usage error."""
        try:
            return super().instantiate_trainer(**kwargs)
        except RuntimeError as error:
            found = re.search(
                r"more than one stateful callback of type `(NM\w+|MaskMonitor)`", str(error)
            )
            if found is None:
                raise
            self.parser.error(
                f"trainer.callbacks: there are two {found[1]}s with the same name: give each its own `name`, or "
                "use one with `rules` for layers that differ"
            )


def require_extra() -> None:
    """Raise ``ImportError``, with :data:`EXTRA`, if a package of the command line is missing."""
    for package in ("jsonargparse", "docstring_parser"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"{EXTRA} ({error})") from error


def hint(message: str) -> str:
    """Return which key of a message of jsonargparse is wrong, why, and what was probably meant; empty if unknown.

    Example:
        >>> print(hint('''Parser key "data":
        ...   Problem with given class_path 'lightning_nm.demo.Digits':
        ...     Option 'batchsize' is not accepted'''))
        data, Digits: there is no 'batchsize'; did you mean 'batch_size'?
    """
    lines = message.splitlines()
    for find in (_unknown_key, _unknown_class, _own_words, _none_of):
        for number, line in enumerate(lines):
            if said := find(line, lines[number:], _places(lines[: number + 1])):
                places = [
                    place.rpartition(".")[2] if "class:" in place else place
                    for place in _places(lines[:number])
                ]
                return ": ".join(filter(None, (", ".join(places), said)))
    return ""


def _places(lines: Sequence[str]) -> list[str]:
    """The keys and the classes (marked by ``class:``) that enclose the last of some lines, from the outside."""
    if not lines:
        return []
    found: list[str] = []
    depth = len(lines[-1]) - len(lines[-1].lstrip(" -")) + 1
    for line in reversed(lines):
        indent = len(line) - len(line.lstrip(" -"))
        if line.strip() and indent < depth:
            depth = indent
            if key := re.match(r"(?:error: )?Parser key \"(.*)\":", line.strip(" -")):
                found.append(key[1])
            elif path := re.match(r"Problem with given class_path '(.*)':", line.strip(" -")):
                found.append(f"class:{path[1]}")
    return found[::-1]


def _unknown_key(line: str, after: Sequence[str], places: Sequence[str]) -> str:
    if option := re.search(r"Option '([^']*)' is not accepted", line):
        path = next((place[6:] for place in reversed(places) if place.startswith("class:")), "")
        if path.endswith((".LightningModule", ".LightningDataModule")):
            return "no class is named: write `class_path: module.Class`, and its arguments under `init_args`"
        return f"there is no '{option[1]}'{_meant(option[1], _parameters(path))}"
    if keys := re.search(r"Unexpected keys: \{(.*?)\}", line):
        from lightning_nm.config.rules import RuleSpec

        first = keys[1].split(",")[0].strip(" '")
        known = list(RuleSpec.__annotations__) if places and places[-1] == "rules" else []
        return f"there is no '{first}'{_meant(first, known)}"
    return ""


def _unknown_class(line: str, after: Sequence[str], places: Sequence[str]) -> str:
    missing = re.search(r"module '(\S+)' has no attribute '(\S+)'", line)
    if missing is None:
        return ""
    return f"{missing[1]} has no {missing[2]}{_meant(missing[2], dir(importlib.import_module(missing[1])))}"


def _own_words(line: str, after: Sequence[str], places: Sequence[str]) -> str:
    """What the constructor of a class said of its arguments."""
    words = line.strip()
    if words.startswith("Not of type "):
        return words.partition(": ")[2]
    others = (
        "Expected ",
        "Problem with ",
        "Not a valid ",
        "Does not ",
        "Unexpected ",
        "a class path",
        "a dict ",
    )
    return words[2:] if words.startswith("- ") and not words[2:].startswith(others) else ""


def _none_of(line: str, after: Sequence[str], places: Sequence[str]) -> str:
    literal = re.search(r"Expected a typing\.Literal(\[.*?\])", line)
    values = _given(after)
    if literal is None or values is None:
        return ""
    known = [str(name) for name in ast.literal_eval(literal[1])]
    return f"'{values}' is none of {', '.join(known)}{_meant(values, known)}"


def _given(lines: Sequence[str]) -> str | None:
    """The value that the first of some lines complains about."""
    for line in lines:
        if value := re.search(r"Got value: (.*)|Given value: (.*)", line):
            return value[1] or value[2]
    return None


def _parameters(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    try:
        return arguments_of(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError, TypeError):
        return []


def _meant(word: str, known: Sequence[str]) -> str:
    return did_you_mean(word, known) or (
        f"; there are {', '.join(known)}" if 0 < len(known) < 12 else ""
    )
