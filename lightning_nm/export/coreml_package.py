"""Core ML packages (``.mlpackage``): their weights are read back without a Mac and without running the model."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import unpack_mask
from lightning_nm.functional.pattern import NMPattern

SUFFIX = ".mlpackage"

METADATA = "lightning_nm"
"""Key of the package's user-defined metadata under which the exported patterns are, as JSON."""

SCHEMA = 1
"""Version of that JSON."""

_SPARSE = "constexpr_sparse_to_dense"
# The name of a type in the program, its dtype in memory, and the number that a record of the file of weights has for
# it.
_DTYPES = {
    "FLOAT16": (torch.float16, 1),
    "FLOAT32": (torch.float32, 2),
    "UINT8": (torch.uint8, 3),
}
# A record of the file of weights begins with this; 64 bytes in all describe it.
_SENTINEL = 0xDEADBEEF
_RECORD_BYTES = 64


class CoreMLWeight(NamedTuple):
    """A floating-point constant of two or more dimensions in a package.

    Args:
        name: In the program.
        shape: Of the dense tensor.
        storage: The operator that holds it: ``"const"`` for dense values, ``"constexpr_sparse_to_dense"`` for the
            nonzeros and a bit mask, or another one, which is not read.
        operators: The kinds of operators that use it, such as ``("linear",)``.
        values: What the program says of the values: of all entries, or of the nonzeros. ``None`` for other operators.
        mask: The same of the bit mask, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    operators: tuple[str, ...]
    values: Any = None
    mask: Any = None

    @property
    def is_sparse(self) -> bool:
        """Whether the package holds the nonzeros alone."""
        return self.storage == _SPARSE


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
        except ImportError as error:
            raise ValueError(f"cannot read '{self.path}': {error}") from error
        try:
            with quiet():
                spec = coremltools.models.utils.load_spec(str(self.path))
        except Exception as error:
            raise self._damaged(str(error)) from error
        # Older models are graphs of layers, without constants that could be sparse.
        if spec.WhichOneof("Type") != "mlProgram":
            raise self._damaged("it holds no ML program, as versions before iOS 15 do not")
        self.weights = dict(self._constants(spec.mlProgram))
        self.exported = self._read_metadata(spec.description.metadata.userDefined)

    def read(self, name: str) -> Tensor:
        """A weight as a dense tensor.

        Raises:
            ValueError: If the file of weights is damaged, or holds the weight in a form that is not read.
        """
        weight = self.weights[name]
        size = math.prod(weight.shape)
        if weight.values is None:
            raise ValueError(
                f"'{self.path}' holds '{name}' by the operator {weight.storage} of a later version, which is not "
                "read: check the checkpoint that it was made from"
            )
        values = self._tensor(weight.values)
        if weight.mask is None:
            if len(values) != size:
                raise self._damaged(f"'{name}' has {len(values)} entries instead of {size}")
            return values.view(weight.shape)
        # Nothing of the dense size is allocated before the mask, which is stored, is known to have it.
        packed = self._tensor(weight.mask)
        if len(packed) != -(-size // 8):
            raise self._damaged(f"the bit mask of '{name}' has {len(packed)} bytes")
        is_kept = unpack_mask(packed, (size,))
        if int(is_kept.sum()) != len(values):
            raise self._damaged(f"the bit mask of '{name}' does not fit its {len(values)} nonzeros")
        # Nonzeros are stored in row-major order.
        dense = torch.zeros(size, dtype=values.dtype)
        dense[is_kept] = values
        return dense.view(weight.shape)

    def stored_bytes(self, name: str) -> int:
        """Bytes of a weight in the file: of its values, and of the bit mask if it has one."""
        weight = self.weights[name]
        parts = [part for part in (weight.values, weight.mask) if part is not None]
        return sum(_dtype(part)[0].itemsize * math.prod(_shape(part.type)) for part in parts)

    def _constants(self, program: Any) -> Iterator[tuple[str, CoreMLWeight]]:
        operations = [each for block in _blocks(program) for each in block.operations]
        # An operator names the constants that it takes; a constant does not know who takes it.
        users: dict[str, list[str]] = {}
        for operation in operations:
            for argument in operation.inputs.values():
                for binding in argument.arguments:
                    users.setdefault(binding.name, []).append(operation.type)
        for operation in operations:
            if operation.type != "const" and not operation.type.startswith("constexpr_"):
                continue
            (output,) = operation.outputs
            shape = _shape(output.type)
            # The program also holds strides, text, and vectors.
            if len(shape) < 2 or not _type_name(output.type).startswith("FLOAT"):
                continue
            # Values are only looked up here. They are read one weight at a time.
            values, mask = _parts(operation)
            operators = tuple(sorted(set(users.get(output.name, []))))
            yield (
                output.name,
                CoreMLWeight(output.name, shape, operation.type, operators, values, mask),
            )

    def _read_metadata(self, noted: Mapping[str, str]) -> dict[str, dict[str, str]]:
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
        # A renamed or removed weight would otherwise pass unchecked.
        missing = [name for name in entries if name not in self.weights]
        if missing:
            raise self._damaged(f"it has no weight '{missing[0]}', which its metadata names")
        for name, entry in entries.items():
            self._check_blocks(name, entry)
        return entries

    def _check_blocks(self, name: str, entry: Mapping[str, str]) -> None:
        """Refuse a pattern and a layout that the weight cannot have."""
        shape, layout = self.weights[name].shape, entry["layout"]
        # The length of the axis along which the blocks of a layout lie.
        lengths = {"plain": shape[1], "flat": math.prod(shape[1:])}
        if len(shape) == 2:
            lengths["transposed"] = shape[0]
        try:
            fits = lengths[layout] % NMPattern.parse(entry["pattern"]).m == 0
        except (KeyError, ValueError):
            fits = False
        if not fits:
            raise self._damaged(
                f"'{name}' of shape {list(shape)} has no blocks {entry['pattern']} in the layout '{layout}'"
            )

    def _tensor(self, value: Any) -> Tensor:
        """The entries that a value of the program names, flat."""
        dtype, number = _dtype(value)
        if not value.HasField("blobFileValue"):
            return _immediate(value.immediateValue.tensor, dtype)
        # "@model_path" is the folder of the program.
        inside = value.blobFileValue.fileName.removeprefix("@model_path/")
        program_folder = self.path / "Data" / "com.apple.CoreML"
        file = program_folder / inside
        # A name with ".." or a link must not lead out of the package.
        if not file.resolve().is_relative_to(program_folder.resolve()) or not file.is_file():
            raise self._damaged(f"it has no file '{inside}' of weights")
        size = dtype.itemsize * math.prod(_shape(value.type))
        offset = value.blobFileValue.offset
        with file.open("rb") as opened:
            opened.seek(offset)
            # Two numbers of 32 bits, two of 64, and others that are not needed.
            record = opened.read(_RECORD_BYTES)
            sentinel, kind = (int.from_bytes(record[at : at + 4], "little") for at in (0, 4))
            stored, start = (int.from_bytes(record[at : at + 8], "little") for at in (8, 16))
            # The record repeats the type and the size that the program has.
            if (sentinel, kind, stored) != (_SENTINEL, number, size):
                raise self._damaged(f"'{inside}' has no such record at {offset}")
            # A damaged record may name any place; nothing is allocated before it is known to be there.
            if start + size > file.stat().st_size:
                raise self._damaged(f"'{inside}' is truncated")
            opened.seek(start)
            content = opened.read(size)
        return _entries(content, dtype)

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


def _blocks(program: Any) -> Iterator[Any]:
    """Every block of a program, also those within operations."""
    # Branches and loops hold blocks of their own.
    waiting = [
        block
        for function in program.functions.values()
        for block in function.block_specializations.values()
    ]
    while waiting:
        block = waiting.pop()
        yield block
        for operation in block.operations:
            waiting += operation.blocks


def _parts(operation: Any) -> tuple[Any, Any]:
    """The values of a constant and its bit mask, as the program describes them."""
    attributes = operation.attributes
    if operation.type == "const":
        return attributes["val"], None
    if operation.type == _SPARSE and "mask" in attributes:
        return attributes["nonzero_data"], attributes["mask"]
    # From iOS 18 on other operators hold the parts.
    return None, None


def _type_name(value_type: Any) -> str:
    """The dtype of a tensor in the program, such as ``"FLOAT16"``."""
    kind = value_type.tensorType
    # The numbers of dtypes are named in the description of the message.
    field = kind.DESCRIPTOR.fields_by_name["dataType"]
    return str(field.enum_type.values_by_number[kind.dataType].name)


def _dtype(value: Any) -> tuple[torch.dtype, int]:
    name = _type_name(value.type)
    if name not in _DTYPES:
        raise ValueError(f"weights of the type {name} are not read")
    return _DTYPES[name]


def _shape(value_type: Any) -> tuple[int, ...]:
    return tuple(each.constant.size for each in value_type.tensorType.dimensions)


def _immediate(tensor: Any, dtype: torch.dtype) -> Tensor:
    """A few entries that the program itself holds."""
    # float32 is a list of numbers there, float16 is bytes.
    if tensor.HasField("floats"):
        return torch.tensor(list(tensor.floats.values), dtype=dtype)
    return _entries(tensor.bytes.values, dtype)


def _entries(content: bytes, dtype: torch.dtype) -> Tensor:
    # torch refuses an empty buffer, and shares the memory of another one, which must be writable.
    if not content:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype)
