"""The page on sparse tensor cores: its table of methods is what the layers say, its YAML names what is there."""

import re

import pytest
from torch import nn

from lightning_nm import BAME, NMSparsifier, NMSparsityCallback
from tests.docs.blocks import blocks, read

PAGE = read("gpu.md")
ROWS = re.findall(
    r"^\| (`.*`) \| (2:4|dense) \| (2:4|dense) \| (2:4|dense) \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize(("names", "forward", "dgrad", "wgrad"), ROWS)
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_operands_that_are_2_4(names, forward, dgrad, wgrad, estimator):
    assert wgrad == "dense"
    for name in re.findall(r"`([^`]+)`", names):
        method = BAME(dgrad="bi-mask", stop=10) if name.startswith("BAME") else name
        layers = NMSparsifier(
            nn.Linear(32, 32), "2:4", method, estimator, skip_first_last=False, planned_steps=1000
        )
        (layer,) = layers.attach().layers.values()
        found = [gemm.label if gemm.label == "2:4" else "dense" for gemm in layer.gemms()]
        assert found == [forward, dgrad, "2:4" if estimator else wgrad], name


def test_every_method_is_in_the_table():
    assert len(ROWS) == 2
    assert "lightning_nm.NMMixedPrecision" in blocks("yaml", PAGE)[0]
    assert f"lightning_nm.{NMSparsityCallback.__name__}" in blocks("yaml", PAGE)[0]
