"""The facts of docs/comparison.md: what was run, from benchmarks/results/peers.json, and what was only read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

TOOLS = (
    "lightning_nm",
    "ModelPruning",
    "torch.nn.utils.prune",
    "torch.ao.pruning",
    "modelopt",
    "apex ASP",
    "torchao PAT",
)


class Fact(NamedTuple):
    """A row of the table.

    Args:
        name: The key in the JSON file; a probe of that name finds it, if there is one.
        text: The first cell.
        read: Answers from a tool's documentation or source, by tool; of this package, from its tests.
    """

    name: str
    text: str
    read: Mapping[str, str]


NO = "-"  # the tool has no such option
UNKNOWN = "not run"
FACTS = (
    Fact("two-of-four", "prunes to 2:4", {"apex ASP": "yes"}),
    Fact("other-patterns", "prunes to other N:M, such as 1:8", {"apex ASP": "own function"}),
    Fact("convolutions", "N:M along a convolution's input channels", {"apex ASP": "yes"}),
    Fact("masks-move", "pruned weights can come back during training", {"apex ASP": "by hand"}),
    Fact("optimizer-before", "an optimizer made before works", {"apex ASP": "yes"}),
    Fact(
        "loads-without",
        "a checkpoint loads into the dense model, already pruned",
        {"apex ASP": "no"},
    ),
    Fact("resumes", "a resumed run ends with the same bits", {"apex ASP": UNKNOWN}),
    Fact("both-directions", "N:M for the input gradient, too", {"apex ASP": "by option"}),
    Fact("gradients", "N:M for the weight gradient, too", {"lightning_nm": "yes"}),
    Fact("sparse-products", "sparse kernels in training, CPU", {"apex ASP": "no"}),
    Fact(
        "tensor-cores",
        "sparse kernels in training, GPU",
        {"lightning_nm": "one H200: [figures](gpu.md)"},
    ),
    Fact("calibrated", "one-shot pruning with calibration data", {"apex ASP": NO}),
    Fact("permutation", "permutes channels before it prunes", {"apex ASP": "yes"}),
    Fact(
        "unstructured",
        "unstructured or channel pruning",
        {
            "ModelPruning": "yes",
            "torch.nn.utils.prune": "yes",
            "torch.ao.pruning": "yes",
            "modelopt": "yes",
            "torchao PAT": "yes",
        },
    ),
    Fact(
        "quantisation",
        "quantises the pruned model",
        {"lightning_nm": "yes", "modelopt": "yes", "torchao PAT": "yes"},
    ),
)


def cell(fact: Fact, tool: str, ran: Mapping[str, Mapping[str, bool]]) -> str:
    """``yes`` or ``no`` where it was run; an answer with a degree sign where it was read."""
    if fact.name in ran.get(tool, {}):
        return "yes" if ran[tool][fact.name] else "no"
    answer = fact.read.get(tool, NO)
    return answer if answer in (NO, UNKNOWN) or tool == "lightning_nm" else f"{answer}°"


def table(ran: Mapping[str, Mapping[str, bool]]) -> str:
    """The facts as a Markdown table."""
    rows = [[fact.text, *(cell(fact, tool, ran) for tool in TOOLS)] for fact in FACTS]
    head = f"| | {' | '.join(TOOLS)} |\n|{'---|' * (len(TOOLS) + 1)}"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)])
