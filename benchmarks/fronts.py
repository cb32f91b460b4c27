"""Latency and file size of the models of a study: dense in the fastest of several runtimes, N:M ones packed.

``python -m benchmarks.fronts mlp`` takes the variants of ``study-scale-fronts-fashion-mnist.csv``, and ``gpt`` those of
``study-scale-equal-nonzeros-python-source.csv``. It builds each with random weights, prunes the sparse ones to their
pattern, and times whole forward passes in turn, in one process: dense by torch (eager and compiled), onnxruntime and
OpenVINO, in float32 and bfloat16; packed in both dtypes, eager and compiled. The latency of a variant is that of its
fastest run; its file is in bfloat16.

It also times both sides in int8: dense ones by the runtimes of :mod:`benchmarks.rivals`, packed ones with int8 weights.
``ms_int8`` is then the fastest run of any precision, and ``bytes_int8`` the smallest file in int8. Quote no figure from
a loaded machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import rivals
from benchmarks.inference import DTYPES, Run, measure, other_runtimes
from benchmarks.tables.markdown import read_csv
from lightning_nm import pack, prune
from lightning_nm.demo import GPT
from lightning_nm.export import save_packed
from lightning_nm.kernels.cpu.library import cpu_name
from studies.models import MLP


class Variant(NamedTuple):
    """A model of a study."""

    name: str
    pattern: str  # empty if it is dense
    width: int

    @classmethod
    def of(cls, name: str) -> Variant:
        """Read ``dense-WIDTH`` or ``METHOD-PATTERN-WIDTH``, which may end in ``-supar``.

        Example::

            >>> Variant.of("asp-1:16-256-supar")
            Variant(name='asp-1:16-256-supar', pattern='1:16', width=256)
        """
        kind, *pattern, width = name.removesuffix("-supar").split("-")
        return cls(name, pattern[0] if kind != "dense" else "", int(width))


class Kind(NamedTuple):
    """A study, and how its models are built."""

    results: str
    masked: str  # the layers that are pruned
    shapes: list[tuple[int, ...]]  # of the inputs


KINDS = {
    "mlp": Kind(
        "study-scale-fronts-fashion-mnist.csv", "*hidden.*", [(1, 1, 28, 28), (256, 1, 28, 28)]
    ),
    "gpt": Kind("study-scale-equal-nonzeros-python-source.csv", "*blocks.*", [(1, 128), (8, 128)]),
}


class Plain(nn.Module):
    """A model without what belongs to its training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """What the model computes."""
        return self.model(x)


def build(kind: str, width: int) -> nn.Module:
    """A dense model with random weights."""
    torch.manual_seed(0)
    if kind == "gpt":
        return Plain(GPT(dim=width, heads=4, context=128))
    mlp = MLP(width=width)
    layers: list[nn.Module] = []
    for layer in mlp.hidden:
        layers += [layer, nn.ReLU()]
    return nn.Sequential(
        OrderedDict(flat=nn.Flatten(), hidden=nn.Sequential(*layers), head=mlp.head)
    )


def runs_of(
    kind: str, variant: Variant, x: Tensor, folder: Path
) -> Iterator[tuple[str, Run, Path]]:
    """Every way to run a variant, with its file."""
    model = build(kind, variant.width).eval()
    if variant.pattern:
        prune(model, variant.pattern, include=KINDS[kind].masked, skip_first_last=False)
    stem = variant.name.replace(":", "_")
    for name, dtype in DTYPES.items():
        file = folder / f"{stem}-{name}.safetensors"
        cast = copy.deepcopy(model).to(dtype)
        if variant.pattern:
            cast = pack(cast)
            save_packed(cast, file)
        else:
            save_file({k: v.contiguous().clone() for k, v in cast.state_dict().items()}, file)
        yield from eager_and_compiled(name, cast, dtype, file)
    if variant.pattern:
        for name, dtype in DTYPES.items():
            rounded = pack(copy.deepcopy(model).to(dtype), dtype="int8")
            file = folder / f"{stem}-int8-{name}.safetensors"
            save_packed(rounded, file)
            yield from eager_and_compiled(f"int8 for {name}", rounded, dtype, file)
        return
    own_folder = folder / variant.name
    own_folder.mkdir()
    yield from other_runtimes(model, own_folder, x)
    yield from rivals.variants(model, own_folder, x)


def eager_and_compiled(
    name: str, net: nn.Module, dtype: torch.dtype, file: Path
) -> Iterator[tuple[str, Run, Path]]:
    """Both ways to run a model of torch."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    compiled = torch.compile(net, dynamic=False)
    yield name, lambda x: net(cast(x)), file
    yield f"{name}, compiled", lambda x: compiled(cast(x)), file


def is_int8(way: str) -> bool:
    """Whether a way to run a model rounds it to int8.

    Example::

        >>> [is_int8(way) for way in ("bf16, compiled", "int8 for bf16", "onnxruntime int8")]
        [False, True, True]
    """
    return "int8" in way


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=120, help="of measuring, for each shape")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    kind = KINDS[args.kind]
    variants = {row["variant"]: Variant.of(row["variant"]) for row in read_csv(kind.results)}
    found: dict[str, dict[str, Any]] = {
        name: {"ms": {}, "ms_int8": {}, "ways": {}} for name in variants
    }
    for shape in kind.shapes:
        x = torch.randn(shape) if args.kind == "mlp" else torch.randint(0, 256, shape)
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[str, Run] = {}
            for name, variant in variants.items():
                for way, run, file in runs_of(args.kind, variant, x, Path(folder)):
                    runs[f"{name} {way}"] = run
                    size = file.stat().st_size
                    if way == "bf16":
                        found[name]["bytes"] = size
                    if is_int8(way):
                        found[name]["bytes_int8"] = min(size, found[name].get("bytes_int8", size))
            times = measure(runs, x, args.seconds)
        batch = str(shape[0])
        for name in variants:
            ways = {
                run.removeprefix(f"{name} "): ms
                for run, ms in times.items()
                if run.startswith(f"{name} ")
            }
            without_int8 = {way: ms for way, ms in ways.items() if not is_int8(way)}
            for field, those in (("ms", without_int8), ("ms_int8", ways)):
                fastest = min(those, key=those.__getitem__)
                found[name][field][batch] = those[fastest]
                print(f"{batch:>4s} | {name:16s} | {fastest:24s} | {those[fastest]:8.3f} ms")
            found[name]["ways"][batch] = ways
    if args.json:
        where = {"cpu": cpu_name(), "threads": args.threads, "torch": torch.__version__}
        args.json.write_text(json.dumps({"machine": where, "variants": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
