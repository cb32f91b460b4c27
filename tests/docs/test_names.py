"""Pages, docstrings, configs and notebooks: what they name is there, and what went is in the changelog alone."""

import contextlib
import importlib
import importlib.util
import io
import json
import re
from functools import cache

import pytest

from lightning_nm import cli
from tests.docs.blocks import ROOT

FOLDERS = (
    "docs",
    "lightning_nm",
    "configs",
    "studies",
    "benchmarks",
    "notebooks",
    "tools",
    ".github",
)
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".ipynb", ".toml"}
FILES = sorted(
    path
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")),
        ROOT / "pyproject.toml",
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    ]
    if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")
)

GONE = (
    # 0.1 and 0.2
    r"refuse_removed|_REPLACED_HOOKS|\.wake\(",
    # choices of patterns during training
    r"""["'`]auto:\d|pattern: auto""",
    # packed storage in training
    r"""storage=["']packed|storage: packed|refuse_gradient_scaler""",
    # SLoPe's adapters in the layer
    r"""low_rank=\d|low_rank: \d|low_rank_start|low_rank_lr""",
    # a second binding of cuSPARSELt
    r"nvmath",
    r"head_hint|turn_off_mfu",
    # the demo
    r"Resumable(Loader|Sampler)|HeatMapFigure|demo\.(MLP|MobileCNN|ResNet50|TinyTransformer|ImageNet|PythonSource)",
    r"lightning-nm (report|sensitivity)\b",
    r"doctor --gpu|--storage\b",
)
"""What 0.4 has not, as regular expressions. The changelog says what to do instead."""


@cache
def text_of(path):
    """The text of a file; of a notebook, that of its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


@cache
def fault_of(name):
    """Why a dotted name names nothing; empty if it does."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            if importlib.util.find_spec(module) is None:
                continue
            if cut == len(parts):
                return ""
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("lightning_nm", "studies"):
                return ""  # of a package that is not installed, such as Triton
            continue
        for part in parts[cut:]:
            if part in getattr(found, "__annotations__", {}):
                return ""
            if not hasattr(found, part):
                return f"{name}: no '{part}'"
            found = getattr(found, part)
        return ""
    return f"{name}: no such module"


def test_dotted_names_exist():
    # A file name such as studies.md is no module.
    pattern = r"(?<![\w./-])((?:lightning_nm|studies)(?:\.(?!md\b|py\b|yaml\b|egg)[A-Za-z_]\w*)+)"
    faults = {
        f"{path.relative_to(ROOT)}: {fault}"
        for path in FILES
        for name in set(re.findall(pattern, text_of(path))) - {"lightning_nm.packed"}  # a format
        if (fault := fault_of(name))
    }
    assert not faults


@pytest.mark.parametrize("pattern", GONE)
def test_what_went_is_named_nowhere(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in FILES
        for match in re.finditer(pattern, text_of(path))
    ]
    assert not found


def named_commands():
    """Each `lightning-nm COMMAND ...` of a line of code, or in backticks: the file, the command, its other words."""
    for path in FILES:
        for line in re.findall(
            r"`lightning-nm ([a-z][^`]*)`|^[ #>$]*lightning-nm ([a-z].*)$",
            text_of(path),
            re.MULTILINE,
        ):
            command, _, words = "".join(line).partition("#")[0].strip().partition(" ")
            yield path.relative_to(ROOT).as_posix(), command, words


@cache
def help_of(command):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return printed.getvalue()


def test_commands_and_their_options_exist():
    faults, seen = [], set()
    for path, command, words in named_commands():
        seen.add(command)
        if command not in (*cli._LIGHTNING, *cli._OWN):
            faults.append(f"{path}: there is no `lightning-nm {command}`")
        elif command in cli._OWN:
            for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", words):
                # With "=" or a comma behind it in the help.
                if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_of(command)):
                    faults.append(f"{path}: `lightning-nm {command}` has no {option}")
    assert not faults
    assert {"fit", "export", "verify", "study"} <= seen
