"""NMLightningCLI: a LightningCLI that knows the demo's classes, and says what is wrong with an argument.

jsonargparse explains a mistake in YAML by all forms that a value might have, over many lines. :func:`hint` finds in its
message which key is wrong, and what was probably meant, to say it in one line before the message.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import warnings
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm.config import RuleSpec, arguments_of
from lightning_nm.schedule import ScheduleSpec
from lightning_nm.spelling import did_you_mean

EXTRA = (
    "The command line needs the extra `cli`: pip install -e '.[cli]' in a checkout of lightning_nm"
)


class _Parser(LightningArgumentParser):
    """A parser whose usage errors begin with a hint."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers of single classes do not exit but raise, and the outer parser quotes their message.
        text = hint(message) if self.exit_on_error else ""
        # With this variable jsonargparse raises the error, with its traceback, instead of exiting.
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
        # Before Lightning's own check, whose message does not name the extra of this package.
        require_extra()
        # jsonargparse finds the subclasses that are imported, and takes their short names.
        importlib.import_module("lightning_nm.demo")
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return Lightning's parser, with hints."""
        # Lightning calls this for the main parser and for that of each subcommand.
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
            # Lightning knows the state of a callback in a checkpoint by a key, here its class and its `name`.
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
        # None and True leave the choice of the logger to Lightning.
        is_default = self._get(self.config_init, "trainer.logger") in (None, True)
        if is_default and isinstance(logger, TensorBoardLogger):
            trainer.logger = TensorBoardLogger(
                trainer.default_root_dir, logger.name, logger.version, default_hp_metric=False
            )
        return trainer


def require_extra() -> None:
    """Raise ``ImportError``, with :data:`EXTRA`, if a package of the command line is missing."""
    # Lightning needs jsonargparse with its extra `signatures`, which brings the second one.
    for package in ("jsonargparse", "docstring_parser"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"{EXTRA} ({error})") from error


# What jsonargparse writes of a mistake. A message lists every form that the value did not fit, so the order matters:
# what is surely wrong comes first, and a name that is none of a Literal's last, since an object may have been meant.
_MISTAKES = (
    # An argument that a class does not take; of a dotted one the part before the first dot.
    r"Option '(?P<word>[^'.]+)[^']*' is not accepted",
    # A key of a rule or of a schedule.
    r"(?P<keys>Unexpected keys): \{'(?P<word>[^']+)'",
    # A class path whose module exists.
    r"module '(?P<module>\S+)' has no attribute '(?P<word>\S+)'",
    # A type with a function that reads it, such as NMPattern: what that function raised.
    r"Not of type [^:\n]+: (?P<told>.+)",
    # An error that a class raised: an item of the list that does not begin as jsonargparse's own.
    r"^ *- (?P<told>(?!Expected |Problem with |Not a |Does not |Unexpected |a class path|a dict ).+)",
    r"(?P<number>Expected a <class 'float'>\n *- )?"
    r"Expected a typing\.Literal(?P<literal>\[.*?\])(?:(?!class_path)[\s\S])*?G(?:ot|iven) value: (?P<word>.*)",
)
# The line of a key or a class which encloses the end of a text: the lines after it are deeper or empty.
_PLACE = r"""^( *).*(?:Parser key "(.*)":|class_path '(.*)':)(?=(?:\n(?:\1 .*)?)*\Z)"""


def hint(message: str) -> str:
    """Return which key of a message of jsonargparse is wrong, why, and what was probably meant; empty if unknown.

    Example:
        >>> print(hint('''Parser key "data":
        ...   Problem with given class_path 'lightning_nm.demo.Digits':
        ...     Option 'batchsize' is not accepted'''))
        data, Digits: there is no 'batchsize'; did you mean 'batch_size'?
    """
    for pattern in _MISTAKES:
        found = re.search(pattern, message, re.MULTILINE)
        if found is not None:
            # The dash of a list's item counts as indent, so the item is deeper than the line above it.
            before = message[: found.start()].replace("- ", "  ")
            # Of each line its indent, a key and a class path; one of the latter two is empty.
            places = re.findall(_PLACE, before, re.MULTILINE)
            where = ", ".join(key or path.rpartition(".")[2] for _, key, path in places)
            text = _explanation(found.groupdict(), places[-1][-1] if places else "")
            return f"{where}: {text}" if where else text
    return ""


def _explanation(mistake: dict[str, str], class_path: str) -> str:
    """What is wrong, by the groups of :data:`_MISTAKES` and the class around it."""
    if "told" in mistake:
        return mistake["told"]
    word = mistake["word"]
    text = f"there is no '{word}'"
    known: list[str] = []
    if "literal" in mistake:
        known = list(map(str, ast.literal_eval(mistake["literal"])))
        is_what = "neither a number nor" if mistake["number"] else "none of"
        text = f"'{word}' is {is_what} {', '.join(known)}"
    elif "module" in mistake:
        known = dir(importlib.import_module(mistake["module"]))
    elif "keys" in mistake:  # of a rule or a schedule
        known = [*RuleSpec.__annotations__, *ScheduleSpec.__annotations__]
    elif class_path.endswith((".LightningModule", ".LightningDataModule")):
        # The base classes take nothing: the user wrote arguments, and no class for them.
        return "no class is named: write `class_path: module.Class`, and its arguments under `init_args`"
    elif class_path:
        known = arguments_of(pkgutil.resolve_name(class_path))
    return text + did_you_mean(word, known)
