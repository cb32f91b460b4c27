"""The subcommand ``lightning-nm export``."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.commands.export import executorch
from lightning_nm.commands.export.coreml import coreml_table, coreml_text
from lightning_nm.export.atomic_write import check_folder
from lightning_nm.export.coreml import CoreMLReport, check_output, export_coreml
from lightning_nm.export.graphs import build_model, example_of, export_onnx, export_pt2
from lightning_nm.export.huggingface import holds_bitmasks
from lightning_nm.export.outputs import Written, export_packed, export_torch
from lightning_nm.export.sources import Source, read_source
from lightning_nm.export.verdicts import classify, is_matrix
from lightning_nm.functional.pattern import NMPattern

# Of the files that hold a graph of a model, whose class is needed.
_GRAPHS = ("onnx", "pt2")
_SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "executorch": ".pte"}


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm export`` and return its exit status."""
    options = _parser().parse_args(list(args))
    try:
        with _stopped_as_by_keyboard():
            return _export(options)
    except KeyboardInterrupt:
        print(f"lightning-nm export: stopped, '{options.output}' was not written", file=sys.stderr)
        return 130  # as of a shell for a program that SIGINT ended: 128 + 2


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


def _export(options: argparse.Namespace) -> int:
    """Write the file, and say on stdout what it holds."""
    console = Console()
    note = ""
    try:
        _check(options)
        source = read_source(options.checkpoint, options.prefix)
        if options.to == "packed":
            written = export_packed(
                source,
                options.output,
                options.pattern,
                options.dtype,
                options.int8_experts,
                options.int8_embeddings,
            )
            console.print(_table(written))
            console.print(_parts_table(written))
            in_float = _in_float(written) if options.dtype else ""
            if in_float:
                console.print(in_float, markup=False, highlight=False, soft_wrap=True)
            console.print(_summary(written, options.output), markup=False, soft_wrap=True)
            return 0
        if options.to == "executorch":
            # Compilers print, too; stdout is for the report.
            with redirect_stdout(sys.stderr):
                result = executorch.export(source, options)
            executorch.print_export(result, options.output, console)
            return 0
        if options.to == "coreml":
            report = _export_coreml(source, options)
            console.print(coreml_table(report))
            text = coreml_text(report, options.output)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            return 0
        if options.to == "torch":
            export_torch(source, options.output)
            note = _bitmasks(source)
        else:
            note = _export_graph(source, options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"lightning-nm export: {error}", file=sys.stderr)
        return 2
    # Without markup: a path may have square brackets.
    console.print(f"wrote {options.output}{note}", markup=False, soft_wrap=True)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before a large checkpoint is read.

    Raises:
        ValueError: With the option.
        OSError: If the output's folder cannot be written.
    """
    is_coreml = options.to == "coreml"
    is_executorch = options.to == "executorch"
    needs_class = is_coreml or options.to in _SUFFIXES
    if needs_class and not options.model:
        raise ValueError(f"--to {options.to} needs the model's class: --model train.Net")
    if not needs_class and (options.model or options.input):
        raise ValueError(
            f"--model and --input are for --to onnx, pt2, executorch and coreml, not {options.to}"
        )
    if options.pattern and options.to not in ("packed", "executorch", "coreml"):
        raise ValueError("--pattern is for --to packed, executorch and coreml")
    if options.dtype and options.to != "packed":
        raise ValueError("--dtype is for --to packed")
    if (options.int8_experts or options.int8_embeddings) and not options.dtype:
        raise ValueError("--int8-experts and --int8-embeddings are for --dtype int8")
    if options.precision and not is_coreml:
        raise ValueError("--precision is for --to coreml")
    if not is_executorch and (options.target or options.calibration or options.allow_float):
        raise ValueError("--target, --calibration and --allow-float are for --to executorch")
    if is_coreml:
        check_output(options.output)
        return
    suffix = _SUFFIXES.get(options.to)
    if suffix and Path(options.output).suffix != suffix:
        raise ValueError(f"--to {options.to} writes {suffix}, not '{options.output}'")
    if options.to != "torch" and Path(options.output).is_dir():
        raise ValueError(f"'{options.output}' is a folder: name a file")
    check_folder(Path(options.output))
    if is_executorch:
        executorch.check_options(options)


def _bitmasks(source: Source) -> str:
    """A remark on weights that were read from bitmasks; empty for other checkpoints."""
    if source.folder is None or not holds_bitmasks(source.folder):
        return ""
    pattern = NMPattern(2, 4)
    verdicts = [
        classify(key, weight, pattern).verdict
        for key, weight in source.weights.items()
        if is_matrix(weight.dtype, weight.dim())
    ]
    return f"; bitmasks became tensors with zeros: {verdicts.count('N:M')} of {len(verdicts)} matrices are 2:4"


def _export_graph(source: Source, options: argparse.Namespace) -> str:
    """Write the graph of a model with the checkpoint's weights; return a remark on it."""
    # The model and torch print, too.
    with redirect_stdout(sys.stderr):
        model = build_model(source, options.model)
        example = example_of(model, options.input)
        if options.to == "pt2":
            export_pt2(model, example, options.output)
            return ""
        difference = export_onnx(model, example, options.output)
    return f"; onnxruntime differs by {difference:.2g} of the largest output"


def _export_coreml(source: Source, options: argparse.Namespace) -> CoreMLReport:
    """Write a Core ML package of a model with the checkpoint's weights."""
    with redirect_stdout(sys.stderr):
        model = build_model(source, options.model)
        return export_coreml(
            model,
            example_of(model, options.input),
            options.output,
            options.pattern,
            precision=options.precision or "float32",
            states=source.states,
        )


def _table(written: Sequence[Written]) -> Table:
    table = Table(title="packed", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Names fold in a narrow terminal; numbers that fold could not be read.
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "layout", "bytes"):
        table.add_column(column, no_wrap=True)
    table.add_column("of dense", no_wrap=True, justify="right")
    table.add_column("note", overflow="fold", min_width=12)
    for each in written:
        if each.pattern:
            share = f"{_share([each]):.3f}" if each.dense_bytes else ""  # none of a tied weight
            note = ", ".join(filter(None, (each.stored, each.reason)))
            cells = (each.key, each.pattern, each.layout, f"{each.bytes}", share, note)
            style = "green"
        else:
            cells = (each.key, "dense", "", f"{each.bytes}", "", each.reason)
            style = "dim"
        table.add_row(*cells, style=style)
    return table


def _parts_table(written: Sequence[Written]) -> Table:
    """What each kind of tensor takes of the file, the largest one first."""
    table = Table(title="parts", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("part", no_wrap=True)
    for column in ("tensors", "bytes", "of file", "of dense"):
        table.add_column(column, no_wrap=True, justify="right")
    for part, members in _parts(written).items():
        size = sum(each.bytes for each in members)
        of_dense = f"{_share(members):.3f}" if size else ""
        table.add_row(part, f"{len(members)}", f"{size}", _of_file(members, written), of_dense)
    return table


def _in_float(written: Sequence[Written]) -> str:
    """What stays in float in a file of int8 weights although an option would round it; empty if nothing does."""
    options = {
        "dense": "dense matrices (embeddings: --int8-embeddings GLOB)",
        "N:M": "N:M weights of three axes (of experts: --int8-experts GLOB)",
    }
    found = []
    for part, members in _parts(written).items():
        kind, _, stored = part.partition(", ")
        is_named = kind == "dense" or stored.endswith("three axes")
        if is_named and "int8" not in stored:
            found.append(f"{_of_file(members, written)} of the file are {options[kind]}")
    return f"not in int8: {'; '.join(found)}" if found else ""


def _parts(written: Sequence[Written]) -> dict[str, list[Written]]:
    """The tensors of each part of a file, the largest part first."""
    parts: dict[str, list[Written]] = {}
    for each in written:
        if each.part:
            parts.setdefault(each.part, []).append(each)
    return dict(sorted(parts.items(), key=lambda item: -sum(each.bytes for each in item[1])))


def _of_file(members: Sequence[Written], written: Sequence[Written]) -> str:
    size = sum(each.bytes for each in written)
    return f"{sum(each.bytes for each in members) / size:.1%}" if size else ""


def _summary(written: Sequence[Written], output: str) -> str:
    # Others are dense, some of these in int8.
    packed = [each for each in written if each.pattern not in ("", "dense")]
    size = sum(each.bytes for each in written)
    return (
        f"wrote {output}: {len(packed)} of {len(written)} tensors packed, at {_share(packed):.3f} of their dense size; "
        f"all tensors together {size} bytes, {_share(written):.3f} of dense"
    )


def _share(written: Sequence[Written]) -> float:
    """Bytes in the file over those of dense tensors."""
    size = sum(each.bytes for each in written)
    dense_size = sum(each.dense_bytes for each in written)
    return size / dense_size


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
