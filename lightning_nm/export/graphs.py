"""Models by the paths of their classes, and their graphs: ``torch.export`` programs and ONNX files."""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_nm.export.atomic_write import FilePath, replacing
from lightning_nm.export.sources import Source, check_loadable, hyperparameters

TOLERANCE = 1e-3
"""Largest difference of an output of onnxruntime and of torch, relative to the largest output."""


def export_pt2(model: nn.Module, example: tuple[Any, ...], output: FilePath) -> None:
    """Write a model as a program of ``torch.export``, dense or packed; its first axis of each input may vary.

    The program of a packed model holds the packed weights and unpacks them for each product by torch's operators. It
    runs without this package.

    Args:
        model: Any module that ``torch.export`` takes; it is exported in evaluation mode.
        example: Inputs, positional; an axis that may vary must not be 0 or 1 in them.
        output: The file, ``.pt2``.

    Raises:
        OSError: If it cannot be written.
    """
    shapes = _first_axis_varies(example)
    with evaluation(model):
        program = torch.export.export(model, example, dynamic_shapes=shapes)
    # torch aborts the process where it cannot write a file to its end.
    content = io.BytesIO()
    torch.export.save(program, content)
    with replacing(Path(output)) as new:
        new.write_bytes(content.getbuffer())


def export_onnx(model: nn.Module, example: tuple[Any, ...], output: FilePath) -> float:
    """Write a model as ONNX, by ``torch.onnx.export(dynamo=True)``, and compare it with torch in onnxruntime.

    Weights are dense, with zeros.

    Args:
        model: A module that is not packed; it is exported in evaluation mode.
        example: Inputs, positional tensors; their first axis may vary, and must not be 0 or 1 in them.
        output: The file, ``.onnx``.

    Returns:
        The largest difference of an output, relative to the largest output, on random inputs of these shapes; integers
        are the example's.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is missing: ``pip install -e '.[onnx]'``.
        RuntimeError: If onnxruntime computes something else; nothing is written.
        OSError: If the file cannot be written.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise ImportError(
            f"{error}: pip install -e '.[onnx]' in a checkout of lightning_nm"
        ) from error
    shapes = _first_axis_varies(example)
    inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in example)
    with evaluation(model):
        program: Any = torch.onnx.export(
            model, example, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        outputs = model(*inputs)
    with replacing(Path(output)) as new:
        program.save(str(new), external_data=False)
        session = onnxruntime.InferenceSession(str(new), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        found = [torch.from_numpy(array) for array in session.run(None, feeds)]
        return worst_difference("onnxruntime", found, outputs, TOLERANCE)


def build_model(source: Source, name: str) -> nn.Module:
    """A model with the weights of a checkpoint.

    Args:
        source: The checkpoint.
        name: Import path of the model's class. It is called with the hyperparameters that Lightning saved, or without
            arguments; a class of ``transformers`` reads its folder.

    Raises:
        ValueError: If the class cannot be imported or called, or the weights do not fit.
    """
    cls = import_class(name, "--model", nn.Module)
    try:
        if source.folder is not None and hasattr(cls, "from_pretrained"):
            check_loadable(source.folder)
            found: nn.Module = cls.from_pretrained(source.folder)
            return found.eval()
        names = inspect.signature(cls).parameters
        saved = hyperparameters(source.path)
        arguments = {name: value for name, value in saved.items() if name in names}
        model: nn.Module = cls(**arguments)
        model.load_state_dict(source.weights)
    except (TypeError, RuntimeError, OSError) as error:
        raise ValueError(f"--model {name} and '{source.path}': {error}") from error
    return model.eval()


def example_of(model: nn.Module, texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs by their shapes, such as ``2x3x32x32`` or ``2x16:int64``; by default the model's ``example_input_array``.

    Raises:
        ValueError: If there are none, a text cannot be read, or the model does not take them.
    """
    if texts:
        example = tuple(_example_input(text) for text in texts)
    else:
        own_example = getattr(model, "example_input_array", None)
        if own_example is None:
            raise ValueError(
                "give the shape of each input, for example --input 2x3x32x32, or --input 2x16:int64"
            )
        example = (own_example,) if isinstance(own_example, Tensor) else tuple(own_example)
    # Tracers and compilers answer inputs that do not fit by pages of traces.
    try:
        with evaluation(model):
            model(*example)
    except Exception as error:
        given = " ".join(f"--input {text}" for text in texts) or "its example_input_array"
        kind = type(model).__name__
        raise ValueError(f"{kind} does not take {given}: {first_line(error)}") from error
    return example


def _example_input(text: str) -> Tensor:
    """Random numbers, or zeros of another dtype."""
    shape_text, _, dtype_name = text.partition(":")
    sizes = shape_text.split("x")
    dtype = getattr(torch, dtype_name or "float32", None)
    if not all(map(str.isdecimal, sizes)) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--input {text}: a shape is written 2x3x32x32, with a dtype 2x16:int64")
    shape = [int(size) for size in sizes]
    # Zeros are valid indices of every embedding.
    make = torch.randn if dtype.is_floating_point else torch.zeros
    return make(shape, dtype=dtype)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards the model's mode is as before."""
    # Submodules may be in different modes.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _first_axis_varies(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shapes of inputs for torch, which keeps the first axis fixed where the model needs that."""
    free = {0: torch.export.Dim.AUTO}
    return tuple(free if isinstance(x, Tensor) and x.dim() else None for x in example)


def worst_difference(who: str, found: list[Tensor], outputs: Any, tolerance: float) -> float:
    """The largest difference of another runtime's outputs and of torch's, relative to the largest expected value.

    Raises:
        RuntimeError: If it is larger than the tolerance.
    """
    expected = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    errors = [
        float(
            (own.double() - each.double()).abs().max() / each.double().abs().max().clamp_min(1e-30)
        )
        for own, each in zip(found, expected, strict=True)
        if each.numel()
    ]
    worst = max(errors, default=0.0)
    # An error may be NaN.
    if not all(error < tolerance for error in errors):
        raise RuntimeError(
            f"{who} differs from torch by {worst:.2g} of the largest output: nothing is written"
        )
    return worst


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class without one: compilers answer by pages of traces."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def find_modules_here() -> None:
    """Let modules of the current folder be imported, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_class(path: str, option: str, kind: type) -> Any:
    """Import a class by its path; modules in the working folder can be imported, too.

    Args:
        path: Such as ``train.Net``.
        option: Of the command line, for messages.
        kind: What the class must be derived from.

    Raises:
        ValueError: If it cannot be imported, or is no such class.
    """
    module, _, name = path.rpartition(".")
    find_modules_here()
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option} {path}: {error}; give a class as module.Class, from this folder"
        ) from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{option} {path}: is no {kind.__name__}")
    return found
