"""Compile the library of CPU kernels when a wheel is built or the package is installed; without a compiler, do not."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

KERNELS = "lightning_nm/kernels/cpu"


class LibraryBuildHook(BuildHookInterface):
    """Wheels with the library are tagged ``py3-none-<platform>``; those without say why in ``libnm.txt``, and are pure.

    An editable install has both files in the checkout.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add what there is to the wheel."""
        sources = Path(self.root) / KERNELS
        spec = importlib.util.spec_from_file_location("build", sources / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        if version == "editable":
            reason = "" if build.is_current(build.LIBRARY) else build.build()  # pip asks twice
        else:
            self.folder = tempfile.TemporaryDirectory()
            folder = Path(self.folder.name)
            reason = build.build(folder)
            build_data["force_include"].update(
                {str(file): f"{KERNELS}/{file.name}" for file in folder.iterdir()}
            )
        if reason:
            self.app.display_warning(f"There are no kernels for CPUs: {reason}")
        else:
            # The library does not depend on the version of Python. Its C library is this machine's: not "manylinux".
            platform = next(
                tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux"))
            )
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if version != "editable":
            self.folder.cleanup()
