"""The report of Vela, read from its files as the compiler writes them."""

import json
from pathlib import Path

import pytest

from lightning_nm.export.executorch.program import _explained, _read_operators, _with_dense

PERF = """"id","source_id","optimised_id","operator","name","staging_usage","op_cycles","npu_cycles","mac_count"
7,1,2,"Conv2D","rescale_1",10,25234,25234,1769472
8,2,3,"Conv2D","rescale_2",10,50340,50000,9437184
9,3,4,"Transpose","rescale_2_transpose",10,819200,32968,65536
"""
PERF_DEBUG = """"id","weight_format","weight_dtype"
7,Default,"Int8"
8,Fast|Sparse2_4,"Int8"
9,"",""
"""


def operators(perf=PERF, perf_debug=PERF_DEBUG):
    """The operators that are read from files with these tables."""
    tables = {"perf": perf, "perf_debug": perf_debug, "group": '"id"\n'}
    text = "".join(
        f'<table name="{name}">\n<![CDATA[\n{content}]]>\n</table>\n'
        for name, content in tables.items()
    )
    Path("output").mkdir(exist_ok=True)
    Path("output/out_debug.xml").write_text(f"<debug>{text}</debug>")
    stacks = {
        "rescale_1": {"a": ["", "Net"], "b": ["stem.conv", "Conv2d"]},
        "rescale_2": {"a": ["", "Net"], "b": ["body", "Conv2d"]},
        "mean": "No module stack trace available",
    }
    events = [
        {"aten_info": {"node_name": name}, "torch_info": {"nn_module_stack": stack}}
        for name, stack in stacks.items()
    ]
    Path("debug.json").write_text(json.dumps(events))
    return _read_operators(Path())


def test_operators_with_their_layers_and_formats():
    found = operators()
    assert [
        (each.name, each.module, each.cycles, each.has_weight, each.sparse) for each in found
    ] == [
        ("rescale_1", "stem.conv", 25234, True, False),
        ("rescale_2", "body", 50340, True, True),
        ("rescale_2_transpose", "", 819200, False, False),
    ]
    # Reasons are for dense weights alone.
    reasons = [_explained(each, {"stem.conv": "too few zeros"}).reason for each in found]
    assert reasons == ["too few zeros", "", ""]
    assert "does not name its layer" in _explained(found[0], {}).reason
    assert "estimate" in _explained(found[0], {"stem.conv": ""}).reason


def test_the_dense_twin_by_name():
    dense = operators(PERF.replace("50340", "100260"))
    found = [each.dense_cycles for each in _with_dense(operators(), dense)]
    assert found == [25234, 100260, 819200]
    with pytest.raises(RuntimeError, match="other operators"):
        _with_dense(operators(), dense[:-1])


@pytest.mark.parametrize(
    "changes",
    [{"perf": PERF.replace("op_cycles", "cycles")}, {"perf_debug": '"id"\n'}, {"perf": "]]><"}],
)
def test_another_form_of_the_report(changes):
    with pytest.raises(RuntimeError, match="report of Vela cannot be read"):
        operators(**changes)


def test_no_report():
    with pytest.raises(RuntimeError, match=r"FileNotFoundError.*ethos-u-vela 5\.1"):
        _read_operators(Path())
