"""The table of layers: grouped rows, names that are broken at dots alone, reasons once each."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.callbacks.tables import broken_name, print_layers, print_summary
from lightning_nm.nn.selection import NO_MATRICES
from lightning_nm.spelling import grouped

PARTS = st.sampled_from(["0", "1", "2", "3", "10", "11", "up", "layers", "q_proj"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
ROWS = st.dictionaries(NAMES, st.sampled_from(["2:4", "-"]), min_size=1, max_size=30)


def spread(name):
    """The names that a grouped name stands for."""
    name, _, count = name.partition(" x")
    names = [""]
    for part in re.split(r"(\{[^}]*\})", name):
        places = [part]
        if part.startswith("{"):
            first, dots, last = part[1:-1].partition("..")
            places = part[1:-1].split(",")
            if dots:
                places = [str(place) for place in range(int(first), int(last) + 1)]
        names = [known + place for known in names for place in places]
    assert len(names) == int(count or 1)
    return names


@given(ROWS)
def test_groups_stand_for_the_rows_and_no_others(rows):
    found = [(name, cell) for group, cell in grouped([*rows.items()]) for name in spread(group)]
    assert sorted(found) == sorted(rows.items())


def test_groups_are_as_large_as_they_can_be():
    rows = [(f"blocks.{b}.heads.{h}.q", "2:4") for b in range(12) for h in (0, 2)] + [("head", "-")]
    assert grouped(rows) == [("blocks.{0..11}.heads.{0,2}.q x24", "2:4"), ("head", "-")]
    assert grouped(rows[1:]) == rows[1:], "one is missing, so no range is true"


def test_a_range_is_no_glob():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(ValueError, match=r"'\{0,2\}' matches no"):
        NMSparsifier(model, method="bi-mask", include="{0,2}").attach()
    assert list(NMSparsifier(model, method="bi-mask", include="[02]").attach().layers) == ["0", "2"]


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("glob", ["1.0.weight", "1.*.weight"])
def test_a_parameter_as_input_is_told_to_drop_its_last_part(option, glob):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=rf"drop '\.weight' and write '{re.escape(glob[:-7])}'"):
        NMSparsifier(model, method="bi-mask", **{option: glob}).attach()


@given(NAMES, st.integers(1, 40))
def test_names_are_broken_at_dots_alone(name, width):
    lines = broken_name(name, width).splitlines()
    assert "".join(lines) == name
    assert all(line.endswith(".") for line in lines[:-1])
    longest = max(len(part) + 1 for part in name.split("."))
    assert all(len(line) <= max(width, longest) for line in lines)


class Deep(nn.Module):
    def __init__(self, depth=32):
        super().__init__()
        self.transformer_layers = nn.ModuleList(
            nn.ModuleDict(
                {"self_attention": nn.ModuleDict({"query_projection": nn.Linear(16, 16)})}
            )
            for _ in range(depth)
        )
        self.odd, self.head = nn.Linear(7, 5), nn.Linear(16, 8)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_cut_at_any_width(width, terminal):
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)
    print_layers(NMSparsifier(Deep(), "2:4", "transposable").attach(), console)
    text = console.file.getvalue()
    assert "…" not in text
    for word in ("transformer_layers.", "query_projection x32", "transposable", "2:4", "dgrad"):
        assert word in text
    assert re.search(r"^\(\d\) in 7 % 4 != 0 \(M = 7 would fit\)$", text, re.MULTILINE)
    assert re.search(r"^\(\d\) last linear layer$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("method", "overlaps"), [("bi-mask", True), ("sr-ste", False), ("transposable", False)]
)
def test_overlap_is_told_where_there_are_two_masks(method, overlaps):
    trainer = SimpleNamespace(callback_metrics={}, checkpoint_callback=None, loggers=[])
    console = Console(width=120, file=io.StringIO())
    print_summary(NMSparsifier(Deep(2), "2:4", method).attach(), trainer, console)
    assert ("overlap" in console.file.getvalue()) == overlaps


def lines_of(model, width=100, **options):
    """The lines of the table above its rule, between it and the empty line at its end, and those below."""
    console = Console(width=width, file=io.StringIO())
    options = {"method": "bi-mask", **options}
    print_layers(NMSparsifier(model, "2:4", **options).attach(), console)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    rule = next(k for k, line in enumerate(lines) if line.startswith("───"))
    end = lines.index("", rule)
    return lines[:rule], lines[rule + 1 : end], lines[end + 1 :]


def first_cells(rows):
    return [row.split(" ", 1)[0] for row in rows]


class Vision(nn.Module):
    """The names of a vision transformer in a LightningModule, deep enough to need more than 100 columns."""

    def __init__(self):
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 9, 16))
        self.patches = nn.Conv2d(3, 16, 4)
        self.encoder_layers = nn.ModuleList(
            nn.ModuleDict({"self_attention": nn.MultiheadAttention(16, 2)}) for _ in range(12)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8)


@pytest.mark.parametrize("method", ["bi-mask", "transposable"])
def test_rows_are_in_the_order_of_the_model_and_one_line_each(method):
    _, rows, below = lines_of(nn.ModuleDict({"net": Vision()}), method=method)
    attention = "net.encoder_layers.{0..11}.self_attention"
    projections = [f"{attention}.in_proj_weight", f"{attention}.out_proj"]
    assert first_cells(rows) == ["net.patches", *projections, "net.head"]
    assert f"no rows for net: {NO_MATRICES}" in below


@pytest.mark.parametrize("other", [{}, {"pattern": "1:4"}, {"method": "sr-ste"}])
def test_what_all_masked_layers_have_is_in_the_title_where_names_are_long(other):
    options = {"method": "transposable", "rules": [{"include": "*out_proj", **other}]}
    (title, *_, header), rows, _ = lines_of(Vision(), **options)
    for column, value in (("pattern", "2:4"), ("method", "transposable")):
        differs = column in other
        assert (f"{column} {value}" in title) != differs
        assert (column in header.split()) == differs
    for column, value in other.items():
        assert any(value in row.split() for row in rows), column
    # Where there is room, nothing moves.
    (title, *_, header), _, _ = lines_of(Vision(), 200, **options)
    assert title == "N:M layers"
    assert {"pattern", "method"} <= set(header.split())


class Mixed(nn.Module):
    """Every kind of row."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8))
        self.embed = nn.Embedding(8, 8)
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=12)
        self.odd = nn.Linear(7, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)


def test_the_order_holds_for_every_kind_of_row_and_each_has_its_reason():
    _, rows, below = lines_of(nn.ModuleDict({"net": Mixed()}))
    projections = [f"attention.{name}_proj_weight" for name in "qkv"]
    after = ["attention.out_proj", "odd", "normed", "tied", "frozen", "last"]
    names = ["embed", "lstm", *projections, *after]
    assert first_cells(rows) == ["net", *(f"net.{name}" for name in names)]
    assert any("frozen" in line for line in below)


class Holder(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.held = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "is_matrix"),
    [((1, 9, 16), False), ((1, 16), False), ((16, 1), False), ((8, 16), True), ((4, 8, 16), True)],
)
def test_only_a_parameter_that_can_be_multiplied_makes_a_row(shape, is_matrix):
    _, rows, below = lines_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Holder(*shape)))
    assert ("2" in first_cells(rows)) == is_matrix
    assert any("no adapter for Holder" in line for line in below) == is_matrix
    assert (f"no rows for 2: {NO_MATRICES}" in below) != is_matrix


def test_a_forward_of_its_own_is_told_with_the_module_of_the_class():
    class Linear(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    _, _, below = lines_of(nn.Sequential(nn.Linear(8, 8), Linear(8, 8), nn.Linear(8, 8)))
    assert f"(1) {__name__}.Linear has a forward of its own" in below
