"""Write the lists of hooks and flags of a method into docs/extend/method.md: ``python -m tools.hooks``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise

from lightning_nm.methods import base
from tools.modules import ROOT, plain

PAGE = ROOT / "docs" / "extend" / "method.md"
BEGIN = "<!-- `python -m tools.hooks` writes what follows. -->\n"
END = "<!-- end of the lists -->\n"
# What the package asks, and no method defines.
NOT_HOOKS = {
    "changes_pattern",
    "defined_hooks",
    "has_own_backward_weight",
    "has_training_weight",
}


def members() -> list[ast.stmt]:
    """The statements of the class ``Method``."""
    tree = ast.parse(inspect.getsource(base))
    (method,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Method"
    )
    return method.body


def hooks() -> Iterator[tuple[str, str]]:
    """The signature of each hook, and the first sentence of its docstring."""
    for node in members():
        if (
            not isinstance(node, ast.FunctionDef)
            or node.name.startswith("_")
            or node.name in NOT_HOOKS
        ):
            continue
        arguments = ", ".join(argument.arg for argument in node.args.args[1:])
        returns = ast.unparse(node.returns) if node.returns else "None"
        result = "" if returns == "None" else f" -> {returns}"
        yield (
            f"{node.name}({arguments}){result}",
            plain(ast.get_docstring(node) or "").partition("\n")[0],
        )


def flags() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each flag."""
    body = members()
    for node, after in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and ast.unparse(node.target) not in NOT_HOOKS
        ):
            meaning = " ".join(plain(str(after.value.value)).split())
            yield ast.unparse(node.target), ast.unparse(node.value) if node.value else "", meaning


def lists() -> str:
    """Both tables."""
    rows = ["| hook | what it does |", "|---|---|"]
    rows += [
        f"| `{signature.replace('|', chr(92) + '|')}` | {meaning} |"
        for signature, meaning in hooks()
    ]
    rows += ["", "| flag | default | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in flags()]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with today's lists."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
