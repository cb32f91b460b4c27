"""The page on methods: its settings exist, its table is that of the classes, and its figures are the benchmarks'."""

import re
from typing import get_args

import pytest

import lightning_nm
from benchmarks.tables.methods import products
from lightning_nm.schedule import Schedule
from lightning_nm.short_names import EstimatorName, MethodName, resolve_method
from tests.docs.blocks import benchmark_tables, read
from tests.test_readme import ROOT

PAGE = ROOT / "docs" / "which-method.md"
TEXT = PAGE.read_text(encoding="utf-8")
SOURCES = [read("benchmarks.md"), read("prune.md")]
TABLES = [path.read_text(encoding="utf-8") for path in benchmark_tables()]
SETTINGS = re.findall(r"`((?:NMSparsityCallback|NMPrecision)\(.*?\))`", TEXT)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE).group(1)


def rows(title):
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("setting", sorted(set(SETTINGS)))
def test_settings_can_be_made(setting):
    assert eval(setting, vars(lightning_nm).copy()) is not None


def test_every_goal_has_settings():
    _, *goals = re.split(r"^### ", section("By goal"), flags=re.MULTILINE)
    assert len(goals) >= 10
    for goal in goals:
        assert "NMSparsityCallback(" in goal
        assert "- Costs: " in goal


def test_every_method_is_in_the_table():
    assert [cells[0].strip("`") for cells in rows("By method")] == list(get_args(MethodName))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", ("dense", "dense", "dense")),
        ("sr-ste", ("N:M", "masked", "dense")),
        ("asp", ("N:M", "masked", "kept entries")),
        ("bi-mask", ("N:M", "N:M", "dense")),
        ("transposable", ("N:M", "N:M", "dense")),
        ("mask-logits", ("N:M", "dense", "dense")),
    ],
)
def test_products_of_a_method(name, expected):
    assert products(resolve_method(name)) == expected


def refuses(method, part):
    """Whether a method refuses a part of a schedule, whatever it is."""
    value = ["3:4"] if part == "ramp" else 2
    try:
        method.follow(Schedule.parse({part: value}))
    except ValueError:
        return True
    return False


def test_what_refuses_a_schedule():
    keys = {cells[0].strip("`"): re.findall("`([^`]+)`", cells[2]) for cells in rows("Schedules")}
    assert list(keys) == ["dense_start", "ramp", "dense_end"]
    for key, names in keys.items():
        refusing = {name for name in get_args(MethodName) if refuses(resolve_method(name), key)}
        assert set(names) == refusing


def test_every_estimator_is_there():
    assert [cells[0] for cells in rows("Gradients")] == [
        f"`{name}`" for name in get_args(EstimatorName)
    ]


def prose():
    """The page without code, links' targets, headings of papers and line breaks."""
    text = re.sub(r"<!-- table: .*?<!-- /table -->", "", TEXT, flags=re.DOTALL)  # tested by its own
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\[\d{4}\.\d{5}\]\([^)]*\)|\]\([^)]*\)", "", text)
    return " ".join(text.split())


def as_shares(points):
    """Figures in points of accuracy as the fractions that some tables have."""
    return re.sub(r"[+-]?\d+\.\d+", lambda figure: f"{float(figure[0]) / 100:+.4f}", points)


def test_every_figure_is_one_of_the_benchmarks():
    in_points = re.findall(r"[+-]\d+\.\d+ points \[[^\]]*\]", prose())
    rest = re.sub(r"[+-]\d+\.\d+ points \[[^\]]*\]", "", prose())
    figures = re.findall(r"(?<![\d.])[+-]?\d+\.\d+", rest)
    assert len(figures) > 60
    for figure in figures:
        assert any(
            re.search(rf"(?<![\d.]){re.escape(figure.lstrip('+-'))}(?!\d)", text)
            for text in SOURCES + TABLES
        ), figure
    assert len(in_points) >= 5  # the next test finds them


def test_every_interval_stands_beside_its_mean():
    """A mean and its interval are in one row, bullet or paragraph of the benchmarks, with these signs."""
    lines = [
        " ".join(block.split()) for text in SOURCES for block in re.split(r"\n\n|\n(?=[-|])", text)
    ]
    lines += [row for text in TABLES for row in text.splitlines()]
    pairs = re.findall(r"([+-]?\d+\.\d+) (points|bits) (\[[^\]]*\d\.\d[^\]]*\])", prose())
    assert len(pairs) >= 18
    assert len(pairs) == len(re.findall(r"\[[+-]?\d", prose())), "an interval has no unit"
    for mean, unit, interval in pairs:
        forms = [(mean, interval)]
        if unit == "points":
            forms.append((as_shares(mean), as_shares(interval)))
        assert any(
            interval in line and mean in line for line in lines for mean, interval in forms
        ), (mean, interval)
