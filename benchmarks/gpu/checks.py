"""What was not known of 2:4 GEMMs before a GPU was asked: the questions V1 to V17 of benchmarks/gpu/README.md.

``python -m benchmarks.gpu checks`` asks all of them, ``python -m benchmarks.gpu checks --only V5`` one. V14 is the part
`preprocess`, and the layers of V15 are a part of their own.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu import correctness, costs
from benchmarks.gpu.report import Question, Report


class Check(NamedTuple):
    """A question, and whether it is asked in a process of its own because it may crash: what nobody tried on a GPU."""

    name: str
    question: Question
    apart: bool = True


BF16, FP16 = torch.bfloat16, torch.float16

# The verdicts first: if the time is short, times are missing.
CHECKS = (
    Check("V1", costs.versions),
    Check("V4", correctness.packed_sizes),
    Check("V5", correctness.tile),
    Check("V7", correctness.traps),
    Check("V8", correctness.layouts),
    Check("V9 product", costs.captured_product),
    Check("V9 packing", costs.captured_packing),
    Check("V2 bfloat16", partial(costs.gains, dtype=BF16)),
    Check("V3", costs.host, apart=False),
    Check("V6", costs.packing, apart=False),
    Check("V10 linear bfloat16", partial(correctness.algorithms, gemm="linear", dtype=BF16)),
    Check("V10 matmul bfloat16", partial(correctness.algorithms, gemm="matmul", dtype=BF16)),
    Check("V12 linear bfloat16", partial(correctness.repeatable, gemm="linear", dtype=BF16)),
    Check("V12 matmul bfloat16", partial(correctness.repeatable, gemm="matmul", dtype=BF16)),
    Check("V15 power", costs.power, apart=False),
    Check("V16", costs.fp8),
    Check("V13", costs.growth, apart=False),
    Check("V17", costs.tilelang, apart=False),
    Check("V2 float16", partial(costs.gains, dtype=FP16)),
    Check("V9 compiled", costs.compiled),
    Check("V10 linear float16", partial(correctness.algorithms, gemm="linear", dtype=FP16)),
)


def run(report: Report) -> None:
    """Ask them all."""
    for check in CHECKS:
        report.ask(check.name, check.question, apart=check.apart, seconds=40)
