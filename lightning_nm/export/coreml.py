"""Core ML models whose N:M weights are stored as their nonzeros and a bit mask."""

from __future__ import annotations

import copy
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_nm.export.atomic_write import FilePath, check_folder, check_suffix, replacing
from lightning_nm.export.graphs import first_line
from lightning_nm.export.packed_file import memory_of
from lightning_nm.export.patterns import Found, patterns_in
from lightning_nm.functional import is_nm
from lightning_nm.methods.calibration import uncached_evaluation
from lightning_nm.nn.weight import Layout
from lightning_nm.packed.module import packed_weights, places_of
from lightning_nm.packed.tensor import LAYOUTS, blocks_last, shape_of_blocks
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import check_option

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
        # Sizes are asked of the export's own weights alone, which have the form of iOS 16.
        parts = self.constant.inputs
        return int(parts["nonzero_data"].val.nbytes + parts["mask"].val.nbytes)


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

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path)
        try:
            coremltools = _import_coremltools()
            # The converter's own reader gives operators with their values; a model has its protobuf alone.
            from coremltools.converters.mil.frontend.milproto.load import load
        except ImportError as error:
            raise ValueError(f"cannot read '{self.path}': {error}") from error
        # A link could lead out of the package.
        links = [file for file in self.path.rglob("*") if file.is_symlink()]
        if links:
            raise self._damaged(f"'{links[0]}' is a link")
        try:
            with _quiet():
                # Without loading it into Core ML, which needs macOS.
                model = coremltools.models.MLModel(str(self.path), skip_model_load=True)
                spec = model.get_spec()
                program = load(spec, spec.specificationVersion, model.weights_dir or "")
        except Exception as error:  # of many classes
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        blocks = list(program.functions.values())
        self.weights: dict[str, CoreMLWeight] = {}
        for block in blocks:  # branches and loops add theirs
            for operation in block.operations:
                blocks += operation.blocks  # grows while it is read
                kind = operation.op_type
                if kind != "const" and not kind.startswith("constexpr_"):
                    continue
                # Constants, and operators that decompress them, have one output.
                (output,) = operation.outputs
                shape = tuple(getattr(output, "shape", None) or ())
                # Sorted, so that a weight which several operators use is described alike each time.
                users = tuple(sorted({each.op_type for each in output.child_ops}))
                # The program also holds strides, text, vectors, and the parts of compressed weights.
                is_part = any(each.startswith("constexpr_") for each in users)
                if len(shape) > 1 and output.dtype.__name__.startswith("fp") and not is_part:
                    weight = CoreMLWeight(output.name, shape, kind, users, operation)
                    self.weights[output.name] = weight
        self.exported = self._read_metadata(dict(spec.description.metadata.userDefined))

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
                # coremltools decompresses each of its forms, also those of versions after iOS 16.
                values = constant.materialized_val_inference()
            # A copy is writable, and does not keep the whole program alive.
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
                # In this order: verify takes the three values apart.
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
                # Not Layout(...), which also reads the layouts of experts: no weight of a file has them.
                layout = {str(each): each for each in LAYOUTS}[entry["layout"]]
                rest = shape_of_blocks(shape, layout)[-1] % NMPattern.parse(entry["pattern"]).m
            except (KeyError, ValueError):
                # Whichever of the two is wrong, the message below shows both.
                rest = 1
            if rest:
                raise self._damaged(
                    f"'{name}' of shape {list(shape)} has no blocks {entry['pattern']} in the layout "
                    f"'{entry['layout']}'"
                )
        return entries

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"cannot read '{self.path}' as a Core ML package: {reason}")


def _import_coremltools() -> Any:
    """The module ``coremltools``, which warns of what it lacks outside of macOS when it is imported.

    Raises:
        ImportError: With the extra that installs it.
    """
    try:
        with _quiet():
            import coremltools
    except ImportError as error:
        raise ImportError(
            f"{error}: pip install -e '.[coreml]' in a checkout of lightning_nm"
        ) from error
    return coremltools


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars, and warnings of versions that coremltools has not tested, from the terminal."""
    # coremltools warns at each import of the system, of torch and of scikit-learn.
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # Progress bars are drawn on stderr.
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


Precision = Literal["float32", "float16"]

# A weight of the file is one of the model if it has no other nonzeros, and at least this fraction of them: small values
# may become zero in float16, or by the scales of a batch norm that the converter multiplies into the weight.
_SAME_NONZEROS = 0.9
# What the compression appends to a constant's name.
_SPARSIFIED = "_sparsified"


class CoreMLWritten(NamedTuple):
    """An N:M weight of the model, as it was read back from the package.

    Attributes:
        key: In the model's state dict.
        pattern: That the weight in the file has been checked against.
        name: In the file; empty if the program has no such weight.
        operators: What uses it there, such as ``("linear",)``.
        is_sparse: Whether the file holds the nonzeros and a bit mask.
        density: Fraction of nonzeros in the file.
        bytes: In the file.
        dense_bytes: In the dense twin.
    """

    key: str
    pattern: str
    name: str = ""
    operators: tuple[str, ...] = ()
    is_sparse: bool = False
    density: float = 0.0
    bytes: int = 0
    dense_bytes: int = 0


class CoreMLReport(NamedTuple):
    """The result of :func:`export_coreml`.

    Attributes:
        bytes: Of all files of the package.
        dense_bytes: Of the same model with dense weights.
        weights: The N:M weights of the model.
    """

    bytes: int
    dense_bytes: int
    weights: list[CoreMLWritten]

    @property
    def operators(self) -> dict[str, int]:
        """The number of sparse weights that each kind of operator in the file uses."""
        used = [weight.operators for weight in self.weights if weight.is_sparse]
        return dict(Counter(chain.from_iterable(used)))


def export_coreml(
    model: nn.Module,
    example: tuple[Any, ...],
    output: FilePath,
    pattern: PatternLike | None = None,
    *,
    precision: Precision = "float32",
    states: Sequence[Mapping[str, Any]] = (),
) -> CoreMLReport:
    """Write a model as a Core ML package whose N:M weights are stored as nonzeros and a bit mask.

    The model is traced by ``torch.export`` and converted by coremltools for iOS 16 and macOS 13. A sparse weight takes
    ``density + 1 / bits`` of its dense size, where ``bits`` is 32 or 16. The package is then read again: every N:M
    weight that the program holds must be N:M there. The program is not run, because only macOS can run it.

    Args:
        model: Any module without installed masks and packed layers. It is exported in evaluation mode, in float32 (a
            model of another dtype is copied), and without the cache that decoders of ``transformers`` return.
        example: Inputs, positional tensors. The shapes of the program are these, and cannot vary.
        output: The package, ``.mlpackage``; it must not exist.
        pattern: The pattern of the weights to store as sparse; by default each weight has its own.
        precision: Of weights and GEMMs; coremltools leaves layers with values beyond float16 in float32. In float32
            the file has the model's values bit for bit, but for those that the converter multiplies by the scales of a
            batch norm. The Neural Engine needs float16.
        states: Sparsifier states of the checkpoint: only the layers that they mask are stored as sparse.

    Returns:
        Sizes, and what the file holds of each N:M weight.

    Raises:
        ImportError: If coremltools is missing: ``pip install -e '.[coreml]'``.
        ValueError: If no weight is N:M, masks are installed, layers are packed, the model cannot be traced or
            converted, or the output is no new ``.mlpackage``. Nothing is written.
        OSError: If the package cannot be written.

    Example::

        >>> import torch
        >>> from lightning_nm import prune
        >>> from lightning_nm.export import export_coreml
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> result = prune(model, "2:4", skip_first_last=False)
        >>> report = export_coreml(model, (torch.randn(1, 64),), "model.mlpackage")  # doctest: +SKIP
        >>> report.operators  # doctest: +SKIP
        {'linear': 1}
    """
    # What the caller can correct at once is said before coremltools is imported.
    check_output(output)
    check_option("precision", precision, Precision)
    coremltools = _import_coremltools()
    # The model is checked before it is traced, which takes minutes for a large one.
    kind = type(model).__name__
    if any(True for _ in packed_weights(model)):
        raise ValueError(f"{kind} has packed layers: export the model before pack()")
    places_of(model)  # refuses installed masks
    model = _in_float32(model)
    # Of the model that is converted: ties are found by memory, and a copy has memory of its own.
    weights = model.state_dict()
    # What is sparse in training is known as for packed files, so that both hold the same weights as sparse.
    found = patterns_in(weights, states, pattern, kind)
    sparse: dict[str, Found] = {}
    held = set()  # a tied weight has further keys, and the program holds it once
    for key, each in found.items():
        if each.pattern is not None and memory_of(weights[key]) not in held:
            held.add(memory_of(weights[key]))
            sparse[key] = each

    program = _traced(model, example)
    # Constants keep the names of the program's inputs, with a suffix where they were rounded.
    rounded = "_to_fp16" if precision == "float16" else ""
    names = {
        key: f"{name}{rounded}"
        for name, key in program.graph_signature.inputs_to_parameters.items()
    }
    converted = _converted(coremltools, program, kind, precision)
    # With dense weights: it tells where the converter has put each weight, and how large the file would be.
    dense = CoreMLPackage(converted.package_path)
    places = _places(weights, sparse, names, dense)
    # A weight that is all zero has no nonzeros to list, and stays dense.
    chosen = {name for name, _ in places.values() if torch.count_nonzero(dense.read(name))}
    from coremltools.optimize.coreml import (
        OpThresholdPrunerConfig,
        OptimizationConfig,
        prune_weights,
    )

    # A threshold of zero prunes what is zero already, so that no value changes.
    # By default tensors of 2048 entries or fewer, or with less than half zeros, would stay dense.
    exact = OpThresholdPrunerConfig(
        threshold=0.0, minimum_sparsity_percentile=0.0, weight_threshold=0
    )
    with _quiet():
        # By name, without a global configuration: all other constants stay dense.
        config = OptimizationConfig(op_name_configs=dict.fromkeys(chosen, exact))
        compressed = prune_weights(converted, config)
    # verify() reads these patterns, as it reads the header of a packed file.
    noted = {
        f"{name}{_SPARSIFIED}" if name in chosen else name: {
            "key": key,
            "pattern": str(sparse[key].pattern),
            "layout": layout,
        }
        for key, (name, layout) in places.items()
    }
    metadata = json.dumps({"schema": SCHEMA, "weights": noted})
    compressed.user_defined_metadata[METADATA] = metadata
    # A package is a folder, which gets its name as a whole after the checks below.
    with replacing(Path(output)) as new:
        with _quiet():
            compressed.save(str(new))
        # Read from the disk, because that is what other readers get.
        package = CoreMLPackage(new)
        # Such as the head of a model whose forward does not use it is not in the program.
        written = {key: CoreMLWritten(key, str(each.pattern)) for key, each in sparse.items()}
        for name, entry in noted.items():
            key, weight = entry["key"], package.weights[name]
            # In the layout of the file, in which a matrix on the right of a GEMM lies transposed.
            rows = blocks_last(package.read(name), places[key][1])
            if not is_nm(rows, entry["pattern"]):
                raise ValueError(
                    f"'{key}' is not {entry['pattern']} in the file: nothing is written"
                )
            written[key] = written[key]._replace(
                name=name,
                operators=weight.operators,
                is_sparse=weight.is_sparse,
                density=float(torch.count_nonzero(rows)) / rows.numel(),
                bytes=weight.bytes,
                dense_bytes=dense.weights[places[key][0]].bytes,
            )
        size, dense_size = (
            sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
            for each in (new, dense.path)
        )
        return CoreMLReport(size, dense_size, list(written.values()))


def check_output(output: FilePath) -> None:
    """Refuse a path that is no new ``.mlpackage``.

    Raises:
        ValueError: If it has another suffix, or exists.
        OSError: If its folder does not exist or cannot be written.
    """
    path = Path(output)
    check_suffix(path, (SUFFIX,), "coreml")
    # exists() is false of a broken link, which is an entry of the folder all the same.
    if path.exists() or path.is_symlink():
        raise ValueError(f"'{path}' exists: give a package that does not")
    check_folder(path)


def _in_float32(model: nn.Module) -> nn.Module:
    """The model, or a copy of it in float32, the one dtype of floating-point numbers that coremltools converts."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{type(model).__name__} has no values, it is on the meta device: load its weights first"
        )
    floating = [x for x in tensors if x.is_floating_point()]
    if all(x.dtype == torch.float32 and x.device.type == "cpu" for x in floating):
        return model
    # bfloat16 and float16 are exact in float32; the user's model stays as it is.
    return copy.deepcopy(model).float().cpu()


def _traced(model: nn.Module, example: tuple[Any, ...]) -> Any:
    """The model as a program of ``torch.export`` with fixed shapes.

    Raises:
        ValueError: If it cannot be traced, or a shape depends on values.
    """
    kind = type(model).__name__
    for position, each in enumerate(example):
        if not isinstance(each, Tensor):
            raise ValueError(
                f"input {position} is {each!r}: Core ML takes tensors, so give it to {kind} in its constructor"
            )
    # As the model was converted: inputs of another dtype or device would not fit its weights.
    inputs = tuple(x.float().cpu() if x.is_floating_point() else x.cpu() for x in example)
    try:
        # Decoders of transformers then return no cache of keys and values, which is an object and no tensor.
        with _quiet(), uncached_evaluation(model):
            program = torch.export.export(model, inputs)
    except Exception as error:
        raise ValueError(f"torch.export cannot trace {kind}: {first_line(error)}") from error
    # Sizes that torch could not compute from the example have names and bounds.
    if program.range_constraints:
        sizes = ", ".join(map(str, program.range_constraints))
        raise ValueError(
            f"the shapes of {kind} depend on values ({sizes}): a Core ML program has fixed shapes"
        )
    return program


def _converted(coremltools: Any, program: Any, kind: str, precision: Precision) -> Any:
    """The program as a Core ML model; operators that coremltools does not know are taken apart.

    Raises:
        ValueError: If an operator is unknown and cannot be taken apart, or the conversion fails.
    """
    options = {
        "convert_to": "mlprogram",
        "minimum_deployment_target": coremltools.target.iOS16,  # the first one with sparse weights
        "compute_precision": getattr(coremltools.precision, precision.upper()),
        "skip_model_load": True,  # only macOS can
    }
    # Operators stay whole where possible, because coremltools recognises more of the whole ones.
    whole: Any = {}
    # An empty table takes nothing apart, but makes the dialect that coremltools reads: torch.export's own is for
    # training.
    for table in (whole, torch.export.default_decompositions()):
        # It gives its input another name, and coremltools does not know it.
        table[torch.ops.aten.alias.default] = lambda x: x
        try:
            with _quiet():
                return coremltools.convert(program.run_decompositions(table), **options)
        except NotImplementedError as error:
            # "Unsupported fx node lstm, kind lstm.input": the name before the overload.
            unknown = re.search(r"kind (\w+)", str(error))
            operator = f"the operator '{unknown[1]}'" if unknown else first_line(error)
            failed = ValueError(f"coremltools cannot convert {operator} of {kind}")
            # By hand: it is raised after the loop, where `error` is no longer bound.
            failed.__cause__ = error
        except Exception as error:
            raise ValueError(
                f"coremltools cannot convert {kind}: {type(error).__name__}: {first_line(error)}"
            ) from error
    raise failed


def _places(
    weights: Mapping[str, Tensor],
    sparse: Mapping[str, Found],
    names: Mapping[str, str],
    package: CoreMLPackage,
) -> dict[str, tuple[str, Layout]]:
    """The constant of each N:M weight in the package, and how its blocks lie there.

    The converter gives new names to constants that it computes, such as a convolution's with a batch norm in it. Their
    zeros tell which weight they are.
    """
    places: dict[str, tuple[str, Layout]] = {}
    # Dense constants alone: the program is not compressed yet.
    free = {name: each for name, each in package.weights.items() if each.storage == "const"}
    # GEMMs of a matrix on the right become linear operators, whose weights are [out, in].
    turned = {Layout.PLAIN: Layout.TRANSPOSED, Layout.TRANSPOSED: Layout.PLAIN}
    # Names first, so that weights without one choose among the rest.
    for key in sorted(sparse, key=lambda key: names.get(key) not in free):
        layout = sparse[key].layout
        # Zeros stay where they are in every precision; values may be rounded or scaled.
        is_nonzero = weights[key] != 0
        forms = {layout: is_nonzero}
        if is_nonzero.dim() == 2 and layout in turned:
            forms[turned[layout]] = is_nonzero.t()
        own_name = names.get(key)
        for name in [own_name] if own_name in free else list(free):
            found = [
                layout_there
                for layout_there, form in forms.items()
                if free[name].shape == tuple(form.shape)
                and _same_nonzeros(package.read(name), form)
            ]
            if found:
                # Two weights with the same zeros have two constants.
                places[key] = name, found[0]
                del free[name]
                break
    return places


def _same_nonzeros(found: Tensor, is_nonzero: Tensor) -> bool:
    is_found = found != 0
    # An entry where the weight has a zero belongs to another weight.
    if bool((is_found & ~is_nonzero).any()):
        return False
    return int(is_found.sum()) >= _SAME_NONZEROS * int(is_nonzero.sum())
