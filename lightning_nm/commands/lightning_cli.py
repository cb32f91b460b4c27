"""NMLightningCLI: a LightningCLI that knows the demo's classes, and says what is wrong with an argument.

jsonargparse explains a mistake in YAML by all forms that a value might have, over many lines. :func:`hint` reads that
message, and says before it which key is wrong, and what was probably meant.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm.config import arguments_of
from lightning_nm.functional.spelling import did_you_mean

EXTRA = (
    "The command line needs the extra `cli`: pip install -e '.[cli]' in a checkout of lightning_nm"
)


class _Parser(LightningArgumentParser):
    """A parser whose usage errors begin with a hint."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers of single classes do not exit but raise, and the outer parser quotes their message.
        text = hint(message) if self.exit_on_error else ""
        if not text or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)
        # jsonargparse would print a page of all options first.
        self.exit(2, f"hint: {text}\n\nerror: {message}\n")


class NMLightningCLI(LightningCLI):
    """The LightningCLI of ``lightning-nm fit``, for a command line of one's own.

    It takes the arguments of Lightning's class. The message of a mistake in the arguments or in YAML begins with a
    hint: which key is wrong, and what was probably meant. The models and data modules of the demo are known by their
    short names.

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
        # jsonargparse finds the subclasses that are imported, and takes their short names.
        importlib.import_module("lightning_nm.demo")
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return Lightning's parser, with hints."""
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
            trainer = super().instantiate_trainer(**kwargs)
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
        # Lightning's default logger would log hp_metric = -1.
        logger = trainer.logger
        is_default = self._get(self.config_init, "trainer.logger") in (None, True)
        if is_default and isinstance(logger, TensorBoardLogger):
            trainer.logger = TensorBoardLogger(
                trainer.default_root_dir, logger.name, logger.version, default_hp_metric=False
            )
        return trainer


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
    # The order matters: a message lists every form that the value did not fit, and the first hint found is given.
    for find in (_unknown_key, _unknown_class, _message_of_class, _none_of_literal):
        for number, line in enumerate(lines):
            after = lines[number:]
            text = find(line, after, _places(lines[: number + 1]))
            if text:
                # The fault is named by what encloses its line, without the line itself.
                where = ", ".join(place.short_name for place in _places(lines[:number]))
                return f"{where}: {text}" if where else text
    return ""


class _Place(NamedTuple):
    """A key of the YAML, or a class, that encloses a line of a message."""

    name: str
    is_class: bool

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2] if self.is_class else self.name


def _places(lines: Sequence[str]) -> list[_Place]:
    """The keys and the classes that enclose the last of some lines, from the outside."""
    if not lines:
        return []
    inside_out: list[_Place] = []
    # The last line counts as its own place, so the search begins one deeper than it.
    depth = _indent(lines[-1]) + 1
    for line in reversed(lines):
        text = line.strip(" -")
        indent = _indent(line)
        is_blank = not line.strip()
        if is_blank or indent >= depth:
            continue
        depth = indent
        key = re.match(r"(?:error: )?Parser key \"(.*)\":", text)
        class_path = re.match(r"Problem with given class_path '(.*)':", text)
        if key is not None:
            inside_out.append(_Place(key[1], is_class=False))
        elif class_path is not None:
            inside_out.append(_Place(class_path[1], is_class=True))
    return inside_out[::-1]


def _indent(line: str) -> int:
    # The dash of a list's item counts as indent, so the item is deeper than the line above it.
    return len(line) - len(line.lstrip(" -"))


# Each of the following finds one kind of mistake in a line: it returns a text about it, or an empty one. `after` are
# the lines from this one on, `places` what encloses it.


def _unknown_key(line: str, after: Sequence[str], places: Sequence[_Place]) -> str:
    """An argument that a class does not have, or a key that a rule does not have."""
    option = re.search(r"Option '([^']*)' is not accepted", line)
    if option is not None:
        return _unknown_argument(option[1], places)
    keys = re.search(r"Unexpected keys: \{(.*?)\}", line)
    if keys is None:
        return ""
    from lightning_nm.config.rules import RuleSpec
    from lightning_nm.functional.schedule import ScheduleSpec

    first = keys[1].split(",")[0].strip(" '")
    # The keys of other mappings are not known here.
    specs: dict[str, Any] = {"rules": RuleSpec, "schedule": ScheduleSpec}
    place = places[-1] if places else None
    known = []
    if place is not None and not place.is_class and place.name in specs:
        in_rule = place.name == "rules" and _is_value_of("schedule", after)
        known = list(specs["schedule" if in_rule else place.name].__annotations__)
    return f"there is no '{first}'{_meant(first, known)}"


def _is_value_of(key: str, after: Sequence[str]) -> bool:
    """Whether the value that does not fit, the first of these lines that has one, is that of a key of a mapping."""
    value = _value(after)
    # The values that enclose it follow.
    return value is not None and any(f"'{key}': {value}" in line for line in after)


def _unknown_argument(option: str, places: Sequence[_Place]) -> str:
    classes = [place.name for place in places if place.is_class]
    class_path = classes[-1] if classes else ""
    # The base classes take nothing: the user wrote arguments, and no class for them.
    if class_path.endswith((".LightningModule", ".LightningDataModule")):
        return "no class is named: write `class_path: module.Class`, and its arguments under `init_args`"
    # Where the value of an unknown argument is a mapping, its keys come after the argument.
    option = option.partition(".")[0]
    return f"there is no '{option}'{_meant(option, _parameters(class_path))}"


def _unknown_class(line: str, after: Sequence[str], places: Sequence[_Place]) -> str:
    """A class that its module does not have."""
    found = re.search(r"module '(\S+)' has no attribute '(\S+)'", line)
    if found is None:
        return ""
    module, name = found.groups()
    known = dir(importlib.import_module(module))
    return f"{module} has no {name}{_meant(name, known)}"


def _message_of_class(line: str, after: Sequence[str], places: Sequence[_Place]) -> str:
    """The message of an error that a class raised about its arguments."""
    text = line.strip()
    if text.startswith("Not of type "):
        _, _, message = text.partition(": ")
        return message
    # The other items of a message are jsonargparse's own.
    of_jsonargparse = (
        "Expected ",
        "Problem with ",
        "Not a valid ",
        "Does not ",
        "Unexpected ",
        "a class path",
        "a dict ",
    )
    is_item = text.startswith("- ")
    message = text.removeprefix("- ")
    if not is_item or message.startswith(of_jsonargparse):
        return ""
    return message


def _none_of_literal(line: str, after: Sequence[str], places: Sequence[_Place]) -> str:
    """A value that is none of the allowed ones."""
    literal = re.search(r"Expected a typing\.Literal(\[.*?\])", line)
    value = _value(after)
    if literal is None or value is None:
        return ""
    known = [str(name) for name in ast.literal_eval(literal[1])]
    return f"'{value}' is none of {', '.join(known)}{_meant(value, known)}"


def _value(lines: Sequence[str]) -> str | None:
    """The value that the first of some lines complains about."""
    for line in lines:
        found = re.search(r"Got value: (.*)|Given value: (.*)", line)
        if found is not None:
            return found[1] or found[2]
    return None


def _parameters(class_path: str) -> list[str]:
    """The arguments of a class; none if it cannot be imported, which is another mistake."""
    module, _, name = class_path.rpartition(".")
    try:
        return arguments_of(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError, TypeError):
        return []


def _meant(word: str, known: Sequence[str]) -> str:
    """The rest of a hint: the known name that is close to a word, or all if they are few."""
    suggestion = did_you_mean(word, known)
    if suggestion:
        return suggestion
    is_short = 0 < len(known) < 12
    return f"; there are {', '.join(known)}" if is_short else ""
