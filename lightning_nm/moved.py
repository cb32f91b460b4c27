"""The error that an import of a module's path before 0.3 gets: it names the new path. To be removed in 0.4."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "lightning_nm.doctor": "lightning_nm.commands.doctor",
    "lightning_nm.flops": "lightning_nm.commands.flops",
    "lightning_nm.report": "lightning_nm.commands.report",
    "lightning_nm.study": "lightning_nm.commands.study",
    "lightning_nm.nn.spec": "lightning_nm.nn.layer.spec",
    "lightning_nm.kernels.dispatch": "lightning_nm.kernels.router",
    "lightning_nm.kernels.backends": "lightning_nm.kernels.gpu",
}


class MovedModules(MetaPathFinder):
    """Raises ``ModuleNotFoundError`` with the new path of a module that no other finder found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise if the module has moved; ``None`` otherwise."""
        if fullname in MOVED:
            raise ModuleNotFoundError(f"{fullname} is {MOVED[fullname]} since 0.3", name=fullname)
        return None


def install() -> None:
    """Ask this finder last, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
