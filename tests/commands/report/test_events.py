"""Event files read back: restarts, tables, columns of layers, folders without any."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

from lightning_nm.callbacks.report.tensorboard import (
    markdown_table,
    write_map_column,
    write_map_rows,
)
from lightning_nm.commands.report.charts import POINTS, thinned
from lightning_nm.commands.report.events import (
    Series,
    latest,
    layer_scalars,
    markdown_rows,
    read_log,
)
from lightning_nm.commands.report.run import labels

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=12
)


@settings(max_examples=30)
@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=4))
def test_tables_come_back_from_markdown(rows):
    assert markdown_rows(markdown_table(("a", "b", "c"), rows)) == [["a", "b", "c"], *rows]


@given(st.lists(st.integers(0, 12), max_size=30))
def test_the_last_value_of_a_step_counts(steps):
    events = [SimpleNamespace(step=step, value=number) for number, step in enumerate(steps)]
    kept, back = latest(events)
    expected = [n for n, step in enumerate(steps) if all(later > step for later in steps[n + 1 :])]
    assert [event.value for event in kept] == expected
    assert back == {
        b for n, b in enumerate(steps) if n and b < max(steps[:n]) and _kept_before(steps[:n], b)
    }


def _kept_before(steps, step):
    """Whether the last step that still counted was a later one."""
    kept = []
    for one in steps:
        kept = [*(k for k in kept if k < one), one]
    return kept[-1] > step


def test_restarts_in_one_folder_are_joined(tmp_path):
    for number, (steps, layers) in enumerate([((1, 3, 5, 7), ["b"]), ((5, 7, 9), ["a", "b"])]):
        with_writer = SummaryWriter(str(tmp_path), filename_suffix=f".{number}")
        write_map_rows(with_writer, layers, steps[0])
        for step in steps:
            with_writer.add_scalar("loss", 10 * number + step, step)
            write_map_column(with_writer, torch.full((3, len(layers)), number + step / 16), step)
        with_writer.close()
    log = read_log(tmp_path)
    assert len(log.files) == 2
    assert log.rewound == [5]
    assert log.scalars["loss"] == Series([1, 3, 5, 7, 9], [1, 3, 15, 17, 19])
    history = log.maps[""]
    assert (history.layers, history.steps) == (["a", "b"], [1, 3, 5, 7, 9])
    assert history.values[:, 0, 1].tolist() == [1 / 16, 3 / 16, 1 + 5 / 16, 1 + 7 / 16, 1 + 9 / 16]
    assert history.values[:, 0, 0].isnan().tolist() == [True, True, False, False, False]


def test_a_file_that_ends_within_an_event_is_read_up_to_there(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for step in range(50):
        writer.add_scalar("loss", step, step)
    writer.close()
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-7])
    assert read_log(tmp_path).scalars["loss"].steps == list(range(49))


def test_layers_logged_as_scalars_have_columns_in_the_models_order(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.add_text("nm/layers", markdown_table(("layer",), [["z.10"], ["z.9"]]))
    for step in (1, 2):
        for layer in ("z.9", "z.10")[: 2 if step == 2 else 1]:
            writer.add_scalar(f"mine-nm/overlap/{layer}", step / 8, step)
    writer.add_scalar("mine-nm/overlap", 0.5, 1)
    writer.close()
    log = read_log(tmp_path)
    assert "nm/overlap" in log.scalars
    history = layer_scalars(log)["overlap"]
    assert (history.layers, history.steps) == (["z.10", "z.9"], [1, 2])
    assert history.values[:, 0].nan_to_num(-1).tolist() == [[-1, 0.125], [0.25, 0.25]]


def test_a_folder_without_event_files_says_what_is_expected(tmp_path):
    with pytest.raises(
        ValueError, match=r"there is no folder '.*none': expected .*events\.out\.tfevents"
    ):
        read_log(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        read_log(tmp_path / "file")
    with pytest.raises(ValueError, match=r"holds no event files: expected .*version_0$"):
        read_log(tmp_path)
    SummaryWriter(str(tmp_path / "a" / "version_0")).close()
    with pytest.raises(ValueError, match=r"there are some in .*a.version_0$"):
        read_log(tmp_path)


@given(st.integers(0, 5000))
def test_curves_keep_their_last_point(length):
    steps, values = thinned(Series(list(range(length)), [float(k) for k in range(length)]))
    assert len(steps) <= POINTS
    assert values == steps
    assert steps[-1:] == ([length - 1] if length else [])
    assert len(set(torch.tensor(steps).diff().tolist())) <= 1


def test_labels_differ():
    assert labels(["x/a/version_0", "y/a/version_0"]) == ["x/a/version_0", "y/a/version_0"]
    assert labels(["/r"]) == ["//r"]
    assert len(set(labels(["/r/v", "/r/v"]))) == 2
