"""``lightning-nm export``: a file for inference, of a sparse checkpoint."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from torch import Tensor

from lightning_nm.commands.export_reports import (
    Report,
    coreml_report,
    executorch_report,
    packed_report,
)
from lightning_nm.commands.output import print_line
from lightning_nm.export.atomic_write import check_folder
from lightning_nm.export.coreml import check_output, export_coreml
from lightning_nm.export.executorch import export_executorch
from lightning_nm.export.executorch.targets import check_target, require_packages
from lightning_nm.export.files import read_file
from lightning_nm.export.graphs import (
    build_model,
    example_of,
    export_onnx,
    export_pt2,
    import_class,
)
from lightning_nm.export.huggingface import holds_bitmasks
from lightning_nm.export.outputs import export_packed, export_torch
from lightning_nm.export.patterns import patterns_in
from lightning_nm.export.sources import Source, read_source
from lightning_nm.export.verdicts import classify, is_matrix
from lightning_nm.pattern import NMPattern

_SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "executorch": ".pte"}
_GRAPHS = ("onnx", "pt2", "executorch", "coreml")  # files of a model, whose class is needed
_OPTIONS: dict[str, tuple[str, ...]] = {
    "model": _GRAPHS,
    "input": _GRAPHS,
    "pattern": ("packed", "executorch", "coreml"),
    "dtype": ("packed",),
    "precision": ("coreml",),
    "target": ("executorch",),
    "calibration": ("executorch",),
    "allow-float": ("executorch",),
}
"""What each option is for."""
_DATA_SUFFIXES = (".pt", ".pth", ".safetensors", ".npy")
_BATCH = 32  # rows of a calibration file


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm export`` and return its exit status."""
    options = _parser().parse_args(list(args))
    try:
        with _stopped_as_by_keyboard():
            _check(options)
            source = read_source(options.checkpoint, options.prefix)
            # Models, compilers and torch print, too; stdout is for the report.
            with redirect_stdout(sys.stderr):
                report = _write(source, options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"lightning-nm export: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"lightning-nm export: stopped, '{options.output}' was not written", file=sys.stderr)
        return 130  # as of a shell for a program that SIGINT ended: 128 + 2
    console = Console()
    for part in report:
        if isinstance(part, str):
            print_line(console, part)
        else:
            console.print(part)
    return 0


@contextmanager
def _stopped_as_by_keyboard() -> Iterator[None]:
    """Let SIGTERM end the export as Ctrl-C does, so that temporary files are removed."""
    # Python handles signals in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before a large checkpoint is read.

    Raises:
        ValueError: With the option.
        ImportError: If a package is missing.
        OSError: If the output's folder cannot be written.
    """
    for name, kinds in _OPTIONS.items():
        if getattr(options, name.replace("-", "_")) and options.to not in kinds:
            raise ValueError(f"--{name} is for --to {', '.join(kinds)}, not {options.to}")
    if options.to in _GRAPHS and not options.model:
        raise ValueError(f"--to {options.to} needs the model's class: --model train.Net")
    if (options.int8_experts or options.int8_embeddings) and not options.dtype:
        raise ValueError("--int8-experts and --int8-embeddings are for --dtype int8")
    if options.to == "coreml":
        check_output(options.output)
        return
    suffix = _SUFFIXES.get(options.to)
    if suffix and Path(options.output).suffix != suffix:
        raise ValueError(f"--to {options.to} writes {suffix}, not '{options.output}'")
    if options.to != "torch" and Path(options.output).is_dir():
        raise ValueError(f"'{options.output}' is a folder: name a file")
    check_folder(Path(options.output))
    if options.to != "executorch":
        return
    if not options.target:
        raise ValueError("--to executorch needs a target: --target ethos-u85-256, or --target cpu")
    check_target(options.target)
    if not options.calibration:
        raise ValueError(
            "int8 scales are chosen from data: --calibration images.pt, a file of inputs, or --calibration train.Data, "
            "a LightningDataModule"
        )
    require_packages(options.target)


def _write(source: Source, options: argparse.Namespace) -> Report:
    """Write the file of a checkpoint, and return what to print of it."""
    output = options.output
    if options.to == "packed":
        written = export_packed(
            source,
            output,
            options.pattern,
            options.dtype,
            options.int8_experts,
            options.int8_embeddings,
        )
        return packed_report(written, output, is_int8=bool(options.dtype))
    if options.to == "torch":
        export_torch(source, output)
        return [f"wrote {output}{_bitmasks(source)}"]
    model = build_model(source, options.model)
    example = example_of(model, options.input)
    if options.to == "pt2":
        export_pt2(model, example, output)
        return [f"wrote {output}"]
    if options.to == "onnx":
        difference = export_onnx(model, example, output)
        return [f"wrote {output}; onnxruntime differs by {difference:.2g} of the largest output"]
    if options.to == "coreml":
        written_package = export_coreml(
            model,
            example,
            output,
            options.pattern,
            precision=options.precision or "float32",
            states=source.states,
        )
        return coreml_report(written_package, output)
    patterns = None  # found for each weight
    if source.states or options.pattern:
        pattern = NMPattern.parse(options.pattern) if options.pattern else None
        patterns = patterns_in(source.weights, source.states, pattern)
    program = export_executorch(
        model,
        output,
        example,
        target=options.target,
        calibration=calibration_data(options.calibration),
        patterns=patterns,
        allow_float=options.allow_float,
    )
    return executorch_report(program, output)


def _bitmasks(source: Source) -> str:
    """A remark on weights that were read from bitmasks; empty for other checkpoints."""
    if source.folder is None or not holds_bitmasks(source.folder):
        return ""
    matrices = {k: w for k, w in source.weights.items() if is_matrix(w.dtype, w.dim())}
    verdicts = [classify(key, weight, NMPattern(2, 4)).verdict for key, weight in matrices.items()]
    return f"; bitmasks became tensors with zeros: {verdicts.count('N:M')} of {len(verdicts)} matrices are 2:4"


def calibration_data(text: str) -> Iterable[Any]:
    """Batches for a calibration.

    Args:
        text: A file with one tensor, whose first axis is that of samples (``.pt``, ``.safetensors``, ``.npy``), or with
            a list of them, one for each input of the model (``.pt``); or the import path of a ``LightningDataModule``
            that needs no arguments, whose training data are taken.

    Raises:
        ValueError: If there is no such file or class, or it holds something else.
    """
    path = Path(text)
    if path.is_file():
        return _batches_of(path)
    if path.suffix in _DATA_SUFFIXES:
        raise ValueError(f"--calibration {text}: there is no such file")
    cls = import_class(text, "--calibration", pl.LightningDataModule)
    try:
        data = cls()
        data.prepare_data()
        data.setup("fit")
        loader: Iterable[Any] = data.train_dataloader()
    except Exception as error:  # of a user's class
        raise ValueError(f"--calibration {text}: {type(error).__name__}: {error}") from error
    return loader


def _batches_of(path: Path) -> list[tuple[Tensor, ...]]:
    """The tensors of a file, in batches."""
    if path.suffix == ".npy":
        import numpy as np

        content: Any = torch.from_numpy(np.load(path, allow_pickle=False))
    else:
        content = read_file(path)
    if isinstance(content, Tensor):
        content = [content]
    elif isinstance(content, dict) and len(content) == 1:
        content = list(content.values())  # names of several do not tell their order
    is_sequence = isinstance(content, (list, tuple))
    if not is_sequence or not all(isinstance(each, Tensor) and each.dim() for each in content):
        raise ValueError(
            f"--calibration '{path}' holds no tensors of samples: save one tensor, or a list with one for each input"
        )
    return list(zip(*(each.split(_BATCH) for each in content), strict=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm export",
        description="Make a file of a sparse checkpoint for inference: packed N:M weights for "
        "lightning_nm.load_packed, a dense state dict, a graph, or a Core ML package. Exits with 0, or with 2 if the "
        "checkpoint cannot be read or is not N:M; nothing is written then.",
    )
    kinds = "Lightning checkpoint, state dict (.pt, .safetensors), packed model, or folder of transformers"
    parser.add_argument("checkpoint", metavar="CKPT", help=kinds)
    parser.add_argument(
        "--to",
        choices=("packed", "torch", "onnx", "pt2", "executorch", "coreml"),
        default="packed",
        help="default: packed",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="what to write; replaced when complete",
    )
    found = (
        "for packed, executorch and coreml: pattern of the sparse weights; by default that of the sparsifier state, or "
        "found for each weight"
    )
    parser.add_argument("--pattern", metavar="N:M", help=found)
    parser.add_argument(
        "--dtype",
        choices=("int8",),
        help="for packed: round the values of N:M weights to int8, with a scale for each output; those of three axes "
        "stay as they are, and so does all that is not N:M",
    )
    parser.add_argument(
        "--int8-experts",
        metavar="GLOB",
        action="append",
        default=[],
        help="with --dtype int8: N:M weights of three axes, by key or module name, that are of experts, which are "
        "rounded, too, with a scale for each output of each expert",
    )
    parser.add_argument(
        "--int8-embeddings",
        metavar="GLOB",
        action="append",
        default=[],
        help="with --dtype int8: embeddings, by key or module name, that are rounded, too, with a scale for each row; "
        "rows are dequantised when they are looked up, and other matrices when the file is loaded",
    )
    taken = "take only the keys that begin with this, and remove it: 'model.' for a model within a LightningModule"
    parser.add_argument("--prefix", default="", help=taken)
    parser.add_argument(
        "--model",
        metavar="CLASS",
        help="for onnx, pt2, executorch and coreml: the model's class, such as train.Net",
    )
    shapes = "for them: shape of an input, such as 2x3x32x32 or 2x16:int64; once for each input"
    parser.add_argument("--input", metavar="SHAPE", action="append", default=[], help=shapes)
    parser.add_argument(
        "--precision",
        choices=("float32", "float16"),
        help="for coreml: of weights and products; default: float32. The Neural Engine needs float16",
    )
    parser.add_argument(
        "--target", metavar="NAME", help="for executorch: ethos-u85-256 or another size, or cpu"
    )
    data = (
        "for executorch: inputs to choose int8 scales with, a file of tensors (.pt, .safetensors, .npy) or a "
        "LightningDataModule such as train.Data, whose training data are taken"
    )
    parser.add_argument("--calibration", metavar="DATA", help=data)
    parser.add_argument(
        "--allow-float",
        action="store_true",
        help="for executorch: write a program in which layers that the target cannot quantise run in float on a CPU",
    )
    return parser
