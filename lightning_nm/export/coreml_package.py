"""Core ML packages (``.mlpackage``): coremltools reads their weights back, on any system."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.nn.packed import LAYOUTS
from lightning_nm.nn.packed.tensor import shape_of_blocks
from lightning_nm.pattern import NMPattern

SUFFIX = ".mlpackage"

METADATA = "lightning_nm"
"""Key of the package's user-defined metadata under which the exported patterns are, as JSON."""

SCHEMA = 1
"""Version of that JSON."""

SPARSE = "constexpr_sparse_to_dense"
"""The operator that holds the nonzeros of a weight and a bit mask."""


class CoreMLWeight(NamedTuple):
    """A floating-point constant of two or more dimensions in a package.

    Args:
        name: In the program.
        shape: Of the dense tensor.
        storage: The operator that holds it: ``"const"`` for dense values, ``"constexpr_sparse_to_dense"`` for the
            nonzeros and a bit mask, or another one.
        operators: The kinds of operators that use it, such as ``("linear",)``.
        constant: The operator, of coremltools.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    operators: tuple[str, ...]
    constant: Any

    @property
    def is_sparse(self) -> bool:
        """Whether the package holds the nonzeros alone."""
        return self.storage == SPARSE

    @property
    def bytes(self) -> int:
        """In the file: of the values, and of the bit mask if there is one."""
        if self.storage == "const":
            return int(self.constant.outputs[0].val.nbytes)
        parts = [self.constant.inputs[name].val for name in ("nonzero_data", "mask")]
        return sum(part.nbytes for part in parts)


class CoreMLPackage:
    """The weights of a Core ML package.

    Args:
        path: The folder ``.mlpackage``.

    Attributes:
        weights: Of two or more dimensions, by their names in the program.
        exported: What this package's exporter noted of weights: the model's key, the pattern and the layout.

    Raises:
        ValueError: If the package cannot be read, or coremltools is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            coremltools = import_coremltools()
            from coremltools.converters.mil.frontend.milproto.load import load
        except ImportError as error:
            raise ValueError(f"cannot read '{self.path}': {error}") from error
        # A link could lead out of the package.
        links = [file for file in self.path.rglob("*") if file.is_symlink()]
        if links:
            raise self._damaged(f"'{links[0]}' is a link")
        try:
            with quiet():
                model = coremltools.models.MLModel(str(self.path), skip_model_load=True)
                spec = model.get_spec()
                program = load(spec, spec.specificationVersion, model.weights_dir or "")
        except Exception as error:  # of many classes
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        blocks = list(program.functions.values())
        self.weights: dict[str, CoreMLWeight] = {}
        for block in blocks:  # branches and loops add theirs
            for operation in block.operations:
                blocks += operation.blocks
                if operation.op_type == "const" or operation.op_type.startswith("constexpr_"):
                    self._add(operation)
        self.exported = self._read_metadata(dict(spec.description.metadata.userDefined))

    def _add(self, constant: Any) -> None:
        (output,) = constant.outputs
        shape = tuple(getattr(output, "shape", None) or ())
        users = tuple(sorted({each.op_type for each in output.child_ops}))
        # The program also holds strides, text, vectors, and the parts of compressed weights.
        is_part = any(each.startswith("constexpr_") for each in users)
        if len(shape) > 1 and output.dtype.__name__.startswith("fp") and not is_part:
            weight = CoreMLWeight(output.name, shape, constant.op_type, users, constant)
            self.weights[output.name] = weight

    def read(self, name: str) -> Tensor:
        """A weight as a dense tensor.

        Raises:
            ValueError: If its values, and its bit mask, do not fit its shape.
        """
        weight = self.weights[name]
        constant = weight.constant
        try:
            if weight.storage == "const":
                values = constant.outputs[0].val
            else:
                values = constant.materialized_val_inference()
            return torch.from_numpy(values.reshape(weight.shape).copy())
        except Exception as error:  # of coremltools and numpy
            raise self._damaged(f"'{name}': {error}") from error

    def _read_metadata(self, noted: dict[str, str]) -> dict[str, dict[str, str]]:
        """What the exporter noted, checked: a file may come from anywhere."""
        if METADATA not in noted:
            return {}
        try:
            content = json.loads(noted[METADATA])
            schema, weights = content["schema"], content["weights"]
            entries = {
                name: {part: str(entry[part]) for part in ("key", "pattern", "layout")}
                for name, entry in weights.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its metadata '{METADATA}' is not as it was written") from error
        if schema != SCHEMA:
            raise self._damaged(f"its metadata '{METADATA}' has the schema {schema}, not {SCHEMA}")
        for name, entry in entries.items():
            # A renamed or removed weight would otherwise pass unchecked.
            if name not in self.weights:
                raise self._damaged(f"it has no weight '{name}', which its metadata names")
            shape = self.weights[name].shape
            try:
                layout = {str(each): each for each in LAYOUTS}[entry["layout"]]
                rest = shape_of_blocks(shape, layout)[-1] % NMPattern.parse(entry["pattern"]).m
            except (KeyError, ValueError):
                rest = 1
            if rest:
                raise self._damaged(
                    f"'{name}' of shape {list(shape)} has no blocks {entry['pattern']} in the layout "
                    f"'{entry['layout']}'"
                )
        return entries

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"cannot read '{self.path}' as a Core ML package: {reason}")


def is_package(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder that is named as a Core ML package."""
    return Path(path).suffix == SUFFIX and Path(path).is_dir()


def import_coremltools() -> Any:
    """The module ``coremltools``, which warns of what it lacks outside of macOS when it is imported.

    Raises:
        ImportError: With the extra that installs it.
    """
    try:
        with quiet():
            import coremltools
    except ImportError as error:
        raise ImportError(
            f"{error}: pip install -e '.[coreml]' in a checkout of lightning_nm"
        ) from error
    return coremltools


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars, and warnings of versions that coremltools has not tested, from the terminal."""
    # coremltools warns at each import of the system, of torch and of scikit-learn.
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
