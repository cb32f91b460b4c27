"""Random GEMMs and layouts of the CPU kernels, and packed files that were damaged, with the sanitizers.

``make sanitize`` compiles the C code with them.

The sanitizers' runtime must be loaded before Python, so this starts another Python that has it. First that one has to
end with a report for an entry beyond its matrix: otherwise the sanitizers would see nothing. On a CPU with AVX-512 the
instructions of AVX512_BF16 are those of a software model.
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lightning_nm import load_packed, pack, save_packed
from lightning_nm.functional import nm_prune
from lightning_nm.kernels.cpu import build, library
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.module import packed_weights
from tests.support.experts import WIDTH, Experts
from tests.support.packed_models import copied, mutated, on_meta, small, without_checksums

FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
MODEL = ("-include", str(Path(__file__).parent / "kernels/cpu/bf16_model.h"))
CASES = 150  # of each kind and instruction set
FILES = 2000  # mutated packed models


def main():
    command = build.compiler()
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    runtimes = [_file(command, name) for name in names] if command else [""]
    if not all(map(os.path.isabs, runtimes)):
        return "this needs gcc as the C compiler, with its sanitizers"
    options = {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",  # of Python and torch
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "libnm.so"
        if reason := build.compile_library(target, (*FLAGS, *MODEL)):
            return reason
        for what, expected in (
            ("read-beyond", "heap-buffer-overflow"),
            ("misaligned", "misaligned address"),
            ("fuzz", ""),
            ("files", ""),
        ):
            run = [sys.executable, "-m", "tests.sanitize", what, str(target)]
            done = subprocess.run(
                run, env=os.environ | options, capture_output=True, text=True, check=False
            )
            failed = done.returncode != 0
            if failed != bool(expected) or expected not in done.stderr:
                return f"{what}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-10000:]}"
            print(f"{what}: {'found' if expected else done.stdout.strip()}")
    return 0


def _file(command, name):
    return subprocess.run(
        [*command, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def read_beyond(products):
    kernel, case = products.KERNELS[1], products.case(8, 16, 4, "2:4")
    layout = kernel.layout(case.matrix)
    layout.offset[0] = 16 * library.PANEL + 64
    kernel.sampled(layout, case.grad, case.x)


def misaligned(products):
    kernel, case = products.KERNELS[1], products.case(8, 16, 4, "2:4")
    layout = kernel.layout(case.matrix)
    values = torch.zeros(len(layout.offset) + 1)
    sparse = layout.operand(values)
    library = products.library
    sparse.values += 1  # an address
    y = torch.empty(4, 8)
    inputs = (case.x, (4, 16)), (None, ()), (None, ())
    library.run("nm_csr_product", "NM_LINEAR", "nm_operands *", (8, 16, 4), inputs, y, sparse)


def fuzz(products):
    # Not before the library is named: its import loads that.
    from tests.support.cpu_cases import CELLS, check_random

    for kind, level in CELLS:
        for seed in range(CASES):
            try:
                check_random(kind, level, seed)
            except Exception:
                print(f"{kind} at {level}, seed {seed}")
                raise
    print(
        f"no errors in {CASES} cases of each of {', '.join(f'{k} {level}' for k, level in CELLS)}"
    )


def files(products):
    """Mutated packed files: what is not refused is laid out for the kernels, and multiplies."""
    torch.set_num_threads(1)
    draw, ran = random.Random(0), {}
    kinds = [
        (_layers, "1:16", torch.float32, None),
        (_layers, "2:4", torch.bfloat16, None),
        (_layers, "2:4", torch.float32, "int8"),
        (_layers, "1:16", torch.bfloat16, "int8"),
        (_experts, "1:16", torch.float32, None),
        (_experts, "2:4", torch.bfloat16, "int8"),
    ]
    each = FILES // len(products.LEVELS) // len(kinds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for level in products.LEVELS:
            kernel_choice.registry_of.cache_clear()  # what the kernels take depends on the instruction set
            with products.at_level(level):
                ran[level] = sum(_mutate(draw, path, *kind, each) for kind in kinds)
    if min(ran.values()) < len(kinds) * each / 5:
        raise AssertionError(f"too few files ran on kernels: {ran}")
    print(f"no errors in {FILES} damaged packed files; of these ran on kernels: {ran}")


def _with_other_values(draw, content, start):
    """A file whose header is sound: up to 20 bytes of its values and positions are random."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 20)):
        content[draw.randrange(start, len(content))] = draw.randrange(256)
    return bytes(content)


def _layers(pattern, dtype):
    """Convolutions and linear layers, a model to load into, and an input."""
    dense = small(pattern, dtype)
    return dense, on_meta(), (torch.randn(3, 16, 4, 4, dtype=dtype),)


def _experts(pattern, dtype):
    """A mixture of experts, in the same way."""
    torch.manual_seed(0)
    dense = Experts().to(dtype).eval()
    for weight in dense.parameters():
        weight.data = nm_prune(weight.data, pattern, dim=2)
    with torch.device("meta"):
        template = Experts().to(dtype)
    tokens = torch.arange(11)
    return dense, template, (torch.randn(len(tokens), WIDTH, dtype=dtype), tokens % dense.number)


def _on_kernels(model):
    """Whether a weight, or that of one expert, lies in the layout of a kernel."""
    for _, weight in packed_weights(model):
        for part in getattr(weight, "parts", None) or [weight]:
            if part.operand is not None:
                return True
    return False


def _mutate(draw, path, model_of, pattern, dtype, values, number):
    """How many of so many damaged files ran on kernels."""
    dense, template, inputs = model_of(pattern, dtype)
    ran = 0
    save_packed(pack(copied(dense), dtype=values, kernels="reference"), path)
    without_checksums(
        path
    )  # which would refuse nearly all of them before a kernel sees their values
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for place in range(number):
        path.write_bytes(
            mutated(draw, content, start) if place % 2 else _with_other_values(draw, content, start)
        )
        try:
            model = load_packed(copied(template), path, kernels="sparse")
        except ValueError:
            continue
        if _on_kernels(model):
            try:
                model(*inputs)
            except RuntimeError as error:  # a damaged header may give one layer another dtype
                if "type" not in str(error):
                    raise
            ran += 1
    return ran


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    library.LIBRARY = Path(sys.argv[2])
    from tests.support import cpu_products

    if cpu_products.REASON:
        sys.exit(cpu_products.REASON)
    checks = {"read-beyond": read_beyond, "misaligned": misaligned, "fuzz": fuzz, "files": files}
    checks[sys.argv[1]](cpu_products)
