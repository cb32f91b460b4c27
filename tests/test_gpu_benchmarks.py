"""The scripts of benchmarks/gpu as far as a CPU can run them; what they measure there means nothing."""

import doctest
import importlib
import json
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import correctness, costs, layers, simulated
from benchmarks.gpu import report as reports
from benchmarks.gpu.apart import PRELOADED, messages
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.report import Report, plain
from benchmarks.gpu.setting import Setting, SoftwareOperators
from benchmarks.gpu.simulated import SimulatedSparseKernel
from tests.support import child_functions

DRY = Setting(dry_run=True)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The .grad attribute"
        )  # torch.compile asks for it, and hides this
        return json.loads(
            command.main(["--dry-run", "--out", str(tmp_path_factory.mktemp("gpu"))]).read_text()
        )


def values(dry_run, part):
    """The values of a part's answers; some questions are not asked on a CPU, or in a run that takes too long."""
    answers = dry_run["parts"][part]["answers"]
    return {name: answer["value"] for name, answer in answers.items() if "value" in answer}


@pytest.mark.slow
def test_a_dry_run_answers_all_questions_and_says_that_it_means_nothing(dry_run):
    assert dry_run["dry run"] is True
    assert "no figure has a meaning" in dry_run["meaning"]
    described = {"device", "driver", "torch", "cuda", "cusparselt", "triton"}
    assert described <= set(dry_run["environment"])
    assert list(dry_run["parts"]) == list(command.PARTS)
    for name, part in dry_run["parts"].items():
        assert "error" not in part, name
        assert part["answers"]
        for question, answer in part["answers"].items():
            assert {"value", "not asked"} & set(answer), (name, question, answer)
    assert list(dry_run["parts"]["checks"]["answers"]) == [check.name for check in CHECKS]


@pytest.mark.slow
def test_what_is_right_in_software_is_found_right(dry_run):
    answers = values(dry_run, "checks")
    assert all(row["as expected"] for row in answers["V4"].values())
    assert {name: row["verdict"] for name, row in answers["V7"].items()} == {
        "pruned": "right",
        "minus zeros": "right",
        "unpruned": "wrong",
        "a transposed view": "right",
    }
    assert {row.get("verdict", "right") for row in answers["V8"].values()} == {"right"}
    for gemm in ("linear", "matmul"):
        assert set(answers[f"V10 {gemm} bfloat16"]["ms"]) == {"0", "1"}
        assert answers[f"V12 {gemm} bfloat16"]["equal"] == ["0", "1"]


def near(value):
    """As rounded in the report."""
    return pytest.approx(value, rel=2e-3)


@pytest.mark.slow
def test_the_table_of_gemms_adds_up(dry_run):
    found = values(dry_run, "gemms")
    verdict, _ = found.pop("verdict"), found.pop("ceilings")
    assert verdict["products"] == 3 * len(found) > 0
    for rows in found.values():
        products = [rows[gemm] for gemm in ("forward", "dgrad", "wgrad")]
        for row in products:
            (kernel,) = row["kernels"].values()
            total = kernel["product ms"] + kernel["pack ms"]
            assert row["best ms"] == near(total)
            assert kernel["packed x"] == near(row["dense ms"] / total)
            assert row["auto x"] == (1 if row["auto"] == "reference" else kernel["packed x"])
        for name, summed in (("forward and dgrad", products[:2]), ("all three", products)):
            dense, best = (sum(row[what] for row in summed) for what in ("dense ms", "best ms"))
            assert rows[name]["packed x"] == near(dense / best)


SPARSE = {False: {"forward", "dgrad"}, True: {"forward", "dgrad", "wgrad"}}
"""The GEMMs that can be sparse, without and with an estimator."""


def sparse_gemms(variant):
    """The GEMMs that a variant runs sparse."""
    return SPARSE[variant.mvue] if variant.mode == "sparse" else set()


@pytest.mark.slow
@pytest.mark.parametrize("variant", layers.VARIANTS, ids=lambda variant: variant.name)
def test_layers_run_the_products_that_their_variant_says_and_run_them_right(dry_run, variant):
    names = {variant.name for variant in layers.VARIANTS}
    tables = [rows for rows in values(dry_run, "layers").values() if set(rows) == names]
    assert len(tables) == len(layers.TINY) + 1
    gemms = sparse_gemms(variant)
    for rows in tables:
        row = rows[variant.name]
        assert row["x"] == near(rows["dense"]["ms"] / row["ms"])
        if not variant.method:
            continue
        found = [
            tuple(name.split())
            for name, why in row["products"].items()
            if why.startswith("simulated")
        ]
        if variant.mode == "auto":  # what is faster on this machine now
            assert {gemm for _, gemm in found} <= SPARSE[variant.mvue]
            assert (row["sparse share"] > 0) == bool(found)
        else:
            assert len(found) == len({name for name, _ in found}) * len(gemms)
            assert {gemm for _, gemm in found} == gemms
            assert row["sparse share"] == near(len(gemms) / 3)
        assert (row["error"] is None) == (variant.mode == "reference")
        assert (row["error"] or 0) < 1e-2
        assert ("masks ms" in row) == (variant.mode == "reference")
        assert row.get("masks ms", 1) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "variants"), [("compiled", layers.COMPILED), ("CUDA graphs", layers.GRAPHED)]
)
def test_compiled_layers_run_too(dry_run, end, variants):
    (rows,) = (rows for name, rows in values(dry_run, "layers").items() if name.endswith(end))
    assert list(rows) == [variant.name for variant in variants]
    assert [name for name, row in rows.items() if row.get("error")] == []
    for variant in (variant for variant in variants if variant.mode != "auto"):
        share = rows[variant.name].get("sparse share", 0)
        assert share == near(len(sparse_gemms(variant)) / 3)


class Wrong(SimulatedSparseKernel):
    def sparse_linear(self, packed, x, bias):
        return super().sparse_linear(packed, x, bias) * self.factor

    factor = 1.0


def test_a_wrong_kernel_shows_in_the_error_of_a_layer(monkeypatch):
    kernel = Wrong()
    monkeypatch.setattr(Setting, "kernels", property(lambda self: [kernel]))
    calls = []

    def turns(setting, made):
        calls.extend(made)
        kernel.factor = 1.5  # not before: the router tries its kernels first
        return dict.fromkeys(made, (1.0, 1.0))

    monkeypatch.setattr(layers, "turns", turns)
    rows = layers.compare(
        DRY,
        layers.TINY["tiny mlp"],
        [layers.DENSE, layers.Variant("transposable", False, "sparse")],
    )
    assert calls == list(rows)
    assert rows["transposable, sparse"]["error"] > 0.3


def test_a_variant_that_fails_leaves_the_others(monkeypatch):
    variants = [
        layers.DENSE,
        layers.Variant("no such method", False, "sparse"),
        layers.Variant("ste", False, "sparse"),
    ]
    rows = layers.compare(DRY, layers.TINY["tiny mlp"], variants)
    assert "no such method" in rows["no such method, sparse"]["error"]
    assert rows["ste, sparse"]["sparse share"] == pytest.approx(1 / 3)


def test_the_parts_fit_into_a_run():
    assert sum(part.seconds for part in command.PARTS.values()) <= 470 - command.GRACE


class Faulty(SoftwareOperators):
    """Algorithm 1 is wrong in one row, 2 never twice the same, and 3 is refused."""

    def __init__(self):
        self.calls = 0

    def spoil(self, result, algorithm):
        self.calls += 1
        if algorithm == 3:
            raise RuntimeError("no such algorithm")
        return (
            result
            + {1: 1000.0, 2: 1e-3 * self.calls}.get(algorithm, 0.0)
            * torch.eye(*result.shape).bfloat16()
        )

    def linear(self, packed, x, algorithm=0):
        return self.spoil(super().linear(packed, x), algorithm)

    def matmul(self, packed, matrix, algorithm=0):
        return self.spoil(super().matmul(packed, matrix), algorithm)

    def search(self, packed, other, transpose_result):
        return 0, 1, -1, 3


class FaultySetting(Setting):
    @property
    def operators(self):
        return Faulty()


@pytest.mark.parametrize("gemm", ["linear", "matmul"])
def test_algorithms_that_are_wrong_or_change_are_found(gemm):
    setting = FaultySetting(dry_run=True)
    answer = correctness.algorithms(setting, gemm, BF16)
    assert set(answer["ms"]) == {"0", "2"}
    assert {name: row["verdict"] for name, row in answer["not right"].items()} == {
        "1": "wrong",
        "3": "refused",
    }
    answer = correctness.repeatable(setting, gemm, BF16)
    assert (answer["equal"], answer["differs"], answer["refused"]) == (["0", "1"], ["2"], ["3"])


class LibraryError(Exception):
    pass


def refused():
    raise LibraryError("CUSPARSE_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("product", "verdict"),
    [
        (lambda: torch.ones(3, 2), "wrong"),
        (lambda: torch.ones(2, 3) * torch.nan, "wrong"),
        (lambda: torch.ones(2, 3), "right"),
        (refused, "refused"),
    ],
)
def test_verdicts(product, verdict):
    answer = correctness.judge(product, torch.ones(2, 3))
    assert answer["verdict"] == verdict
    if verdict == "refused":
        assert answer["message"] == "LibraryError: CUSPARSE_STATUS_NOT_SUPPORTED"


def test_a_shape_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(
        costs, "TINY", {"first": (64, 32, 48), "bad": (64, 30, 48), "last": (32, 32, 48)}
    )
    answer = costs.gains(DRY, BF16)
    assert answer["bad"]["error"].startswith("ValueError: shape (64, 30)")
    assert "gain by ms" in answer["first"]
    assert "gain by ms" in answer["last"]


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.apart], ids=lambda check: check.name
)
def test_what_is_asked_apart_can_travel(check):
    again = pickle.loads(pickle.dumps((check.question, DRY)))
    assert again[1] == DRY


@pytest.mark.slow
def test_what_the_server_imports_touches_no_gpu():
    code = f"""
import torch
def touched(*args):
    raise SystemExit("touched")
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_capability"):
    setattr(torch.cuda, name, touched)
for name in {PRELOADED}:
    __import__(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_messages_arrive_from_a_process_however_it_ends():
    assert list(messages(child_functions.counts, 3, seconds=60)) == [0, 1, 2]
    for function, error, match in (
        (child_functions.raises, RuntimeError, "ValueError: the reason"),
        (child_functions.dies, RuntimeError, "died, exit code 3"),
    ):
        stream = messages(function, seconds=60)
        assert next(stream) == "before"
        with pytest.raises(error, match=match):
            next(stream)
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        next(messages(child_functions.hangs, seconds=0))


@pytest.mark.slow
def test_a_question_that_kills_its_process_leaves_the_others(monkeypatch):
    """As on a GPU, a part in a process of its own and in it a question in another, which no dry run does."""
    monkeypatch.setattr(
        command, "PARTS", {"part": command.Part("tests.support.child_functions", 120)}
    )
    answers = {}
    command.answers("part", Setting(), 120, [], lambda name, answer: answers.update({name: answer}))
    assert answers["dies"]["error"] == "RuntimeError: the process died, exit code 3"
    assert answers["lives"]["value"] == {"dry run": False}
    monkeypatch.setattr(command, "PARTS", {"part": command.Part("tests.no_such_part", 120)})
    with pytest.raises(RuntimeError, match=r"ModuleNotFoundError: .*no_such_part"):
        command.answers("part", Setting(), 120, [], lambda name, answer: None)


def answers_of(part_run, monkeypatch, tmp_path, *arguments):
    """Run a part of the test's own before one that is well."""
    parts = {"broken": command.Part("broken", 60), "well": command.Part("well", 60)}
    runs = {"broken": part_run, "well": lambda report: report.ask("one", lambda setting: 1)}
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(importlib, "import_module", lambda name: child_functions.Part(runs[name]))
    return json.loads(command.main(["--dry-run", "--out", str(tmp_path), *arguments]).read_text())[
        "parts"
    ]


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(monkeypatch, tmp_path):
    def broken(report):
        report.ask("first", lambda setting: {"dry": setting.dry_run})
        report.ask("second", lambda setting: 1 / 0)
        report.ask("third", lambda setting: float("nan"))
        raise ImportError("no such library")

    parts = answers_of(broken, monkeypatch, tmp_path)
    answers = parts["broken"]["answers"]
    assert answers["first"]["value"] == {"dry": True}
    assert answers["second"]["error"] == "ZeroDivisionError: division by zero"
    assert answers["third"]["value"] == "nan"
    assert parts["broken"]["error"] == "ImportError: no such library"
    assert parts["well"]["answers"]["one"]["value"] == 1


def test_questions_are_not_asked_once_the_time_is_up(monkeypatch, tmp_path):
    recorded = {}
    report = Report(DRY, 0, lambda name, answer: recorded.update({name: answer}))
    assert report.ask("late", lambda setting: 1) is None
    assert recorded["late"]["not asked"] == "the time was up"
    parts = answers_of(lambda report: None, monkeypatch, tmp_path, "--seconds", "1")
    assert {part["error"] for part in parts.values()} == {
        "TimeoutError: the 1 s of the whole run are used up"
    }


def test_only_some_questions():
    recorded = []
    report = Report(DRY, 60, lambda name, answer: recorded.append(name), only=["V1"])
    for name in ("V1", "V10 linear", "V1 again"):
        report.ask(name, lambda setting: None)
    assert recorded == ["V1", "V1 again"]


def test_a_run_without_a_gpu_says_how_to_go_on(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path)])
    assert "--dry-run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["sparse", "--dry-run", "--out", str(tmp_path)])
    assert "the parts are checks, gemms" in capsys.readouterr().err


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(
    st.recursive(
        LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
    )
)
def test_answers_are_json_whatever_their_numbers(value):
    text = json.dumps(plain(value), allow_nan=False)
    assert json.loads(text) == plain(value)


@pytest.mark.parametrize("module", [costs, reports, simulated], ids=lambda module: module.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_the_page_lists_every_question():
    page = (Path(__file__).parent.parent / "benchmarks" / "gpu" / "README.md").read_text()
    # V11 was of plans that are kept, and V18 of the doctor's predictions: they are asked no more.
    numbers = [number for number in range(1, 18) if number != 11]
    listed = re.findall(r"^\| (V\d+) \|", page, re.MULTILINE)
    assert listed == [f"V{number}" for number in numbers]
    asked = {check.name.split()[0] for check in CHECKS}
    others = set(re.findall(r"(V\d+) is the part `preprocess`", page))
    assert set(listed) - others == asked


@pytest.mark.gpu
def test_verdicts_on_a_gpu(tmp_path):
    result = json.loads(
        command.main(["checks", "--only", "V1", "V4", "V8", "--out", str(tmp_path)]).read_text()
    )
    answers = result["parts"]["checks"]["answers"]
    assert not result["dry run"]
    assert answers["V1"]["value"]["refused"] == ""
    assert {row.get("verdict", "right") for row in answers["V8"]["value"].values()} == {"right"}
