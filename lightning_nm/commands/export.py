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
from rich.table import Table
from torch import Tensor

from lightning_nm.callbacks.tables import columns_table
from lightning_nm.commands.output import print_line
from lightning_nm.export.atomic_write import check_folder, check_suffix
from lightning_nm.export.coreml import CoreMLReport, check_output, export_coreml
from lightning_nm.export.executorch.program import ExecutorchExport, export_executorch
from lightning_nm.export.executorch.targets import check_target, require_packages
from lightning_nm.export.graphs import (
    build_model,
    example_of,
    export_onnx,
    export_pt2,
    import_class,
)
from lightning_nm.export.outputs import Written, export_packed, export_torch
from lightning_nm.export.patterns import classify, matrices_in, patterns_in
from lightning_nm.export.sources import Source, holds_bitmasks, read_checkpoint, read_file
from lightning_nm.pattern import NMPattern

Report = list[Table | str]


def _packed_report(written: Sequence[Written], output: str, *, is_int8: bool) -> Report:
    """Each tensor of a packed file, its parts, and their sums."""
    heads = ("weight", "pattern", "layout", "bytes", "of dense", "note")
    table = columns_table("packed", heads, {"weight": 20, "note": 12}, right=("bytes", "of dense"))
    for each in written:
        # Also matrices that --int8-embeddings names: their pattern reads "dense".
        if each.pattern:
            note = ", ".join(filter(None, (each.stored, each.reason)))
            cells = (each.key, each.pattern, each.layout, f"{each.bytes}", _share([each]), note)
            table.add_row(*cells, style="green")
        else:
            table.add_row(each.key, "dense", "", f"{each.bytes}", "", each.reason, style="dim")

    by_part: dict[str, list[Written]] = {}
    for each in written:
        if each.part:  # tied weights have none: their first key has their bytes
            by_part.setdefault(each.part, []).append(each)
    size = sum(each.bytes for each in written)
    numbers = ("tensors", "bytes", "of file", "of dense")
    parts = columns_table("parts", ("part", *numbers), {}, right=numbers)
    # What --dtype int8 left in float, with the option that would round it.
    in_float = []
    # The largest part first.
    for part, members in sorted(by_part.items(), key=lambda item: -_bytes(item[1])):
        of_file = f"{_bytes(members) / size:.1%}" if size else ""
        parts.add_row(part, f"{len(members)}", f"{_bytes(members)}", of_file, _share(members))
        # The names are those that export/outputs.py gives, such as "dense, float32" or "N:M, float32, three axes".
        if part.startswith("dense") and "int8" not in part:
            in_float.append(
                f"{of_file} of the file are dense matrices (embeddings: --int8-embeddings GLOB)"
            )
        elif part.endswith("three axes") and "int8" not in part:
            in_float.append(
                f"{of_file} of the file are N:M weights of three axes (of experts: --int8-experts GLOB)"
            )

    report: Report = [table, parts]
    if is_int8 and in_float:
        report.append(f"not in int8: {'; '.join(in_float)}")
    # Others are dense, some of these in int8.
    packed = [each for each in written if each.pattern not in ("", "dense")]
    report.append(
        f"wrote {output}: {len(packed)} of {len(written)} tensors packed, at {_share(packed)} of their dense size; "
        f"all tensors together {size} bytes, {_share(written)} of dense"
    )
    return report


def _bytes(written: Sequence[Written]) -> int:
    return sum(each.bytes for each in written)


def _share(written: Sequence[Written]) -> str:
    """Bytes in the file over those of dense tensors; empty for tied weights, which another one holds."""
    dense_size = sum(each.dense_bytes for each in written)
    return f"{_bytes(written) / dense_size:.3f}" if dense_size else ""


def _coreml_report(report: CoreMLReport, output: str) -> Report:
    """The N:M weights of a Core ML package, as they were read back from it, and what was not tried."""
    heads = ("weight", "pattern", "operator", "bytes", "of dense", "in the file")
    table = columns_table(
        "Core ML", heads, {"weight": 20, "in the file": 12}, right=("bytes", "of dense")
    )
    for each in report.weights:
        if not each.name:  # the forward does not use it, so it was not converted
            table.add_row(each.key, each.pattern, "", "", "", "not in the program", style="dim")
            continue
        operators = ", ".join(each.operators)
        fraction = f"{each.bytes / each.dense_bytes:.3f}"
        name = each.name if each.is_sparse else f"dense: {each.name}"
        style = "" if each.is_sparse else "dim"
        table.add_row(
            each.key, each.pattern, operators, f"{each.bytes}", fraction, name, style=style
        )
    sparse = sum(each.is_sparse for each in report.weights)
    # A weight that two operators use is counted for both.
    counts = [f"{count} {operator}" for operator, count in report.operators.items()]
    used = f" ({', '.join(counts)})" if counts else ""
    fraction = f"{report.bytes / report.dense_bytes:.3f}"
    return [
        table,
        f"wrote {output}: {sparse} of {len(report.weights)} N:M weights as nonzeros and a bit mask{used}; "
        f"{report.bytes} bytes, {fraction} of the dense package's {report.dense_bytes}",
        "The weights were read back and are N:M. The program was not run: that needs macOS, and no speed is claimed.",
    ]


def _executorch_report(result: ExecutorchExport, output: str) -> Report:
    """The operators of a program with their estimated cycles, and what was written."""
    # Cycles are Vela's, for an NPU: a program for a CPU has no such operators.
    report: Report = [_operators(result)] if result.operators else []
    sparse = sum(bool(each.pattern) for each in result.layers)
    report += [
        f"wrote {output}: {result.bytes} bytes, {sparse} of {len(result.layers)} weights are N:M as int8",
        f"int8 scales of activations are from {result.calibrated_with} inputs",
    ]
    for each in result.on_cpu:
        where = f" of '{each.module}'" if each.module else ""
        report.append(f"on the host's CPU: {each.operator}{where}")
    if result.difference is not None:
        report.append(
            f"ExecuTorch's runtime differs from torch by {result.difference:.2g} of the largest output"
        )
    if result.operators:
        weights = sum(each.has_weight for each in result.operators)
        estimate = (
            f"Vela's estimate, which no chip has confirmed: {len(result.sparse)} of {weights} operators with weights "
            f"run sparse; {result.cycles} cycles of the NPU"
        )
        if result.dense_cycles is not None:
            gain = result.dense_cycles / max(result.cycles, 1)
            estimate += (
                f", {result.dense_cycles} with dense weights, {gain:.2f}x; {result.bytes} bytes, "
                f"{result.dense_bytes} with dense weights"
            )
        report.append(estimate)
    return report


def _operators(result: ExecutorchExport) -> Table:
    table = columns_table(
        f"cycles on {result.target}, estimated by Vela",
        ("operator", "layer", "cycles", "dense", "gain", "weight", "why"),
        {"operator": 10, "layer": 8, "why": 16},
        right=("cycles", "dense", "gain"),
    )

    rows = []
    for each in result.operators:
        if each.has_weight:
            weight = "2:4" if each.sparse else "dense"
            rows.append((each.kind, each.module, [each], weight, each.reason))
    # Sparsity saves nothing in an operator without a weight: these share the last row.
    others = [each for each in result.operators if not each.has_weight]
    if others:
        rows.append((f"{len(others)} others", "", others, "", ""))
    for kind, module, members, weight, why in rows:
        cycles = sum(each.cycles for each in members)
        dense, gain = "-", "-"
        if result.dense_cycles is not None:
            dense_cycles = sum(each.dense_cycles or 0 for each in members)
            dense = str(dense_cycles)
            gain = f"{dense_cycles / cycles:.2f}x" if weight and cycles else ""
        style = {"2:4": "green", "": "dim"}.get(weight)
        table.add_row(kind, module, str(cycles), dense, gain, weight, why, style=style)
    return table


# Suffixes that _check() compares; export_packed(), export_torch() and check_output() know their own.
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
# export_executorch() takes the first four batches.
_BATCH = 32  # rows of a calibration file


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm export`` and return its exit status."""
    options = _parser().parse_args(list(args))
    try:
        with _stopped_as_by_keyboard():
            _check(options)
            source = read_checkpoint(options.checkpoint, options.prefix)
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
    # This handler raises KeyboardInterrupt, and unwinding leaves the context managers that remove temporary files.
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
        # None of these options has a default, so one that is set was given.
        if getattr(options, name.replace("-", "_")) and options.to not in kinds:
            raise ValueError(f"--{name} is for --to {', '.join(kinds)}, not {options.to}")
    if options.to in _GRAPHS and not options.model:
        raise ValueError(f"--to {options.to} needs the model's class: --model train.Net")
    # The loop above has refused --dtype for other forms than packed.
    if (options.int8_experts or options.int8_embeddings) and not options.dtype:
        raise ValueError("--int8-experts and --int8-embeddings are for --dtype int8")
    # A package is a folder, and must be new: the checks of files do not fit.
    if options.to == "coreml":
        check_output(options.output)
        return
    if options.to in _SUFFIXES:
        check_suffix(options.output, (_SUFFIXES[options.to],), options.to)
    # With --to torch alone the output may be a folder, and export_torch() refuses one that exists.
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
        return _packed_report(written, output, is_int8=bool(options.dtype))
    if options.to == "torch":
        export_torch(source, output)
        remark = ""
        # A bitmask says where the zeros are, not that they have a pattern: that is counted after decoding.
        if holds_bitmasks(source.path):
            matrices = matrices_in(source.weights)
            two_four = [
                classify(key, weight, NMPattern(2, 4)).verdict == "N:M"
                for key, weight in matrices.items()
            ]
            remark = f"; bitmasks became tensors with zeros: {sum(two_four)} of {len(two_four)} matrices are 2:4"
        return [f"wrote {output}{remark}"]
    # What follows traces the model itself. A packed file and a state dict need the weights alone.
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
            # Not a default of the parser: _check() could not tell whether the option was given.
            precision=options.precision or "float32",
            states=source.states,
        )
        return _coreml_report(written_package, output)
    patterns = None  # found for each weight
    # The weights that a state or --pattern names must be N:M in int8, too, or nothing is written.
    if source.states or options.pattern:
        patterns = patterns_in(source.weights, source.states, options.pattern)
    program = export_executorch(
        model,
        output,
        example,
        target=options.target,
        calibration=_calibration_data(options.calibration),
        patterns=patterns,
        allow_float=options.allow_float,
    )
    return _executorch_report(program, output)


def _calibration_data(text: str) -> Iterable[Any]:
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
    # `images.pt` could also mean a class `pt` in a module `images`.
    if path.suffix in _DATA_SUFFIXES:
        raise ValueError(f"--calibration {text}: there is no such file")
    cls = import_class(text, "--calibration", pl.LightningDataModule)
    try:
        # The hooks in the order in which a Trainer would call them; here its `trainer` is None.
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

        content: Any = torch.from_numpy(np.load(path, allow_pickle=False))  # a pickle may run code
    else:
        content = read_file(path)
    if isinstance(content, Tensor):
        content = [content]
    elif isinstance(content, dict) and len(content) == 1:
        content = list(content.values())  # names of several do not tell their order
    is_sequence = isinstance(content, (list, tuple))
    # A tensor without axes cannot be split into samples.
    if not is_sequence or not all(isinstance(each, Tensor) and each.dim() for each in content):
        raise ValueError(
            f"--calibration '{path}' holds no tensors of samples: save one tensor, or a list with one for each input"
        )
    # From a list of batches for each input to a tuple of inputs for each batch.
    return list(zip(*(each.split(_BATCH) for each in content), strict=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm export",
        description="Make a file of a sparse checkpoint for inference: packed N:M weights for "
        "lightning_nm.load_packed, a dense state dict, a graph, or a Core ML package. Exits with 0, or with 2 if the "
        "checkpoint cannot be read or is not N:M; nothing is written then.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="Lightning checkpoint, state dict (.pt, .safetensors), packed model, or folder of transformers",
    )
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
    parser.add_argument(
        "--pattern",
        metavar="N:M",
        help="for packed, executorch and coreml: pattern of the sparse weights; by default that of the sparsifier "
        "state, or found for each weight",
    )
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
    parser.add_argument(
        "--prefix",
        default="",
        help="take only the keys that begin with this, and remove it: 'model.' for a model within a LightningModule",
    )
    parser.add_argument(
        "--model",
        metavar="CLASS",
        help="for onnx, pt2, executorch and coreml: the model's class, such as train.Net",
    )
    parser.add_argument(
        "--input",
        metavar="SHAPE",
        action="append",
        default=[],
        help="for them: shape of an input, such as 2x3x32x32 or 2x16:int64; once for each input",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "float16"),
        help="for coreml: of weights and GEMMs; default: float32. The Neural Engine needs float16",
    )
    parser.add_argument(
        "--target", metavar="NAME", help="for executorch: ethos-u85-256 or another size, or cpu"
    )
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help="for executorch: inputs to choose int8 scales with, a file of tensors (.pt, .safetensors, .npy) or a "
        "LightningDataModule such as train.Data, whose training data are taken",
    )
    parser.add_argument(
        "--allow-float",
        action="store_true",
        help="for executorch: write a program in which layers that the target cannot quantise run in float on a CPU",
    )
    return parser
