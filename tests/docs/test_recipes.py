"""docs/recipes.md: its Python runs and is the recipes' settings, its commands name what is there."""

import re
import shlex
from pathlib import Path

from lightning_nm import MVUE, NMPattern
from lightning_nm.commands.from_config import read_yaml
from tests.docs.blocks import read

ROOT = Path(__file__).parent.parent.parent
PAGE, _, _ = read("recipes.md").partition("\n## The right scale of sparse weights\n")


def fenced(language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def recipe(name):
    callbacks = read_yaml(ROOT / "configs" / "recipes" / f"{name}.yaml")["trainer"]["callbacks"]
    return callbacks[0]["init_args"]


def test_its_python_has_the_settings_of_the_transformer():
    found = {}
    (code,) = fenced("python")
    exec(code, found)
    for name, masks in (
        ("transposable", found["transposable"]),
        ("three-gemms", found["three_gemms"]),
    ):
        settings = recipe(f"help-topics-{name}")
        for key, value in settings["method"]["init_args"].items():
            assert getattr(masks.config.method, key) == value, (name, key)
    written = recipe("help-topics-three-gemms")["grad_estimator"]["init_args"]
    estimator = found["three_gemms"].config.grad_estimator
    assert isinstance(estimator, MVUE)
    assert estimator.pattern == NMPattern.parse(written["pattern"])
    assert estimator.dense_end == written.get("dense_end", 0)


def test_its_commands_name_what_is_there():
    commands = [shlex.split(line) for block in fenced("") for line in block.splitlines()]
    assert len(commands) >= 2
    for words in commands:
        assert words[:2] in (["lightning-nm", "fit"], ["lightning-nm", "study"], ["python", "-m"])
        for word in words:
            if word.startswith(("configs/", "studies/")):
                assert (ROOT / word).is_file(), word
        if words[0] == "python":
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()


def test_the_table_has_the_settings_of_the_configs():
    rows = [row for row in PAGE.splitlines() if row.startswith("| `")]
    names = [re.match(r"\| `([\w-]+)`", row).group(1) for row in rows]
    assert sorted(names) == sorted(
        path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")
    )
    for name, row in zip(names, rows, strict=True):
        for key, value in recipe(name)["method"].get("init_args", {}).items():
            assert f"{key}={value:g}" in row.replace("`", ""), (name, key)
