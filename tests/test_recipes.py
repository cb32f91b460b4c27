"""The recipes of configs/recipes: they parse, they are what the studies compare, and shortened they run."""

import re
from pathlib import Path

import pytest
import torch

from lightning_nm import NMPattern
from lightning_nm import functional as nmf
from lightning_nm.cli import main
from lightning_nm.commands.from_config import read_yaml
from lightning_nm.commands.study.spec import Cell, last_part, read

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STUDIES = {
    task: read(ROOT / "studies" / f"recipes-{task}.yaml")
    for task in ("fashion-mnist", "help-topics")
}
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def task_of(path):
    (task,) = [task for task in STUDIES if path.stem.startswith(task)]
    return task


def masks_of(config):
    (masks,) = [
        one for one in config["trainer"]["callbacks"] if last_part(one) == "NMSparsityCallback"
    ]
    return {key: masks["init_args"].get(key) for key in ("method", "grad_estimator")}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_what_the_study_compares(path):
    task = task_of(path)
    study, recipe = STUDIES[task], read_yaml(path)
    compared = study.trial_config(Cell(path.stem.removeprefix(f"{task}-"), {}), {})
    written, meant = masks_of(recipe), masks_of(compared)
    for masks in (written, meant):  # unquoted, 2:4 is a number in YAML
        if masks["grad_estimator"]:
            pattern = masks["grad_estimator"]["init_args"]["pattern"]
            masks["grad_estimator"]["init_args"]["pattern"] = str(NMPattern.parse(pattern))
    assert written == meant
    for part in ("model", "data"):
        assert recipe[part]["class_path"] == compared[part]["class_path"]
        assert recipe[part].get("init_args") == compared[part].get("init_args")
    for length in ("max_steps", "max_epochs"):
        assert recipe["trainer"].get(length) == compared["trainer"].get(length)


def test_every_compared_recipe_has_a_file():
    compared = {f"{task}-{name}" for task, study in STUDIES.items() for name in study.variants}
    defaults = {name for name in compared if name.endswith(("-default", "-no-decay"))}
    # The default method needs no recipe.
    defaults |= {f"{task}-bame" for task in STUDIES}
    others = defaults | {name for name in compared if name.split("-dense")[0] in STUDIES}
    assert {path.stem for path in RECIPES} == compared - others


def test_no_setting_was_chosen_by_the_seeds_of_the_comparison():
    for task, study in STUDIES.items():
        searches = sorted(ROOT.glob(f"studies/search/*/{task}-*.yaml"))
        assert searches
        for path in searches:
            search = read(path)
            assert not set(search.seeds) & set(study.seeds), path.name
            assert search.overrides["data.init_args.tuning"] is True, path.name


@pytest.mark.parametrize(
    ("step", "tasks"), [("2-learning-rate", list(STUDIES)), ("3-decay", ["help-topics"])]
)
def test_every_method_was_searched_as_much(step, tasks):
    for task in tasks:
        searches = [
            read(path) for path in (ROOT / "studies" / "search" / step).glob(f"{task}-*.yaml")
        ]
        assert len({(search.trials, *search.seeds) for search in searches}) == 1
        suffixes = re.compile("-default|-no-decay|-ends-dense|(?<=dense)-0.*")
        assert {name for search in searches for name in search.variants} == {
            suffixes.sub("", name) for name in STUDIES[task].variants
        }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_shortened(path, tmp_path, monkeypatch, capsys):
    if task_of(path) == "fashion-mnist" and not FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    monkeypatch.chdir(tmp_path)
    options = {"max_steps": 6, "max_epochs": 1, "val_check_interval": 3, "limit_val_batches": 1}
    options |= {"accelerator": "cpu", "enable_progress_bar": "false"}
    words = [f"--trainer.{name}={value}" for name, value in options.items()]
    assert main(["fit", "-c", str(path), *words]) == 0
    assert "N:M summary" in capsys.readouterr().out
    (checkpoint,) = tmp_path.glob("runs/**/*.ckpt")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    inner = [w for name, w in weights.items() if name.endswith(("conv1.weight", "fc1.weight"))]
    assert inner
    for weight in inner:
        assert nmf.is_nm(weight, "2:4", dim=1) != path.stem.endswith("-ends-dense")
