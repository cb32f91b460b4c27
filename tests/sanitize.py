"""Random products and layouts of the CPU kernels, and packed files that were damaged, with the sanitizers.

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
from tests.support import evolution
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
CASES = 150  # of each kernel and instruction set
FILES = 2000  # mutated packed models
_PERMUTED = [2, 4, 8, 16, 32]
"""M of the patterns that cpu-permute takes."""


def main():
    command = build.compiler()
    runtimes = (
        [_file(command, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
        if command
        else []
    )
    if not runtimes or not all(os.path.isabs(runtime) for runtime in runtimes):
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
    draw = random.Random(0)
    for level in products.LEVELS:
        for kernel in products.KERNELS:
            if not products.has_kernel(kernel, level):
                continue
            with products.at_level(level):
                for seed in range(CASES):
                    _one(products, kernel, draw, seed)
        with products.at_level(level):
            for seed in range(CASES):
                _one_conv(products, draw, seed)
                _one_evolution(draw, seed)
                _one_int8(level, draw, seed)
    print(
        f"no errors in {CASES} cases of each kernel, convolutions, passes of BAME and int8 weights, at "
        f"{', '.join(products.LEVELS)}"
    )


def files(products):
    """Mutated packed files: what is not refused is laid out for the kernels, and multiplies."""
    torch.set_num_threads(1)
    draw, ran = random.Random(0), {}
    layers, experts = _layers, _experts
    kinds = [
        (layers, "1:16", torch.float32, None),
        (layers, "2:4", torch.bfloat16, None),
        (layers, "2:4", torch.float32, "int8"),
        (layers, "1:16", torch.bfloat16, "int8"),
        (experts, "1:16", torch.float32, None),
        (experts, "2:4", torch.bfloat16, "int8"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for level in products.LEVELS:
            kernel_choice.registry_of.cache_clear()  # what the kernels take depends on the instruction set
            with products.at_level(level):
                ran[level] = sum(
                    _mutate(draw, path, *kind, FILES // len(products.LEVELS) // len(kinds))
                    for kind in kinds
                )
    if min(ran.values()) < FILES // len(products.LEVELS) // 5:
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
    """A mixture of experts, likewise."""
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


def _one(products, kernel, draw, seed):
    most = draw.choice([3, 20, 80, 300])
    m = draw.choice(_PERMUTED if kernel.name == "cpu-permute" else [3, 4, 7, 8, 32])
    arguments = {
        "rows": draw.randint(1, most),
        "depth": draw.randint(1, most),
        "tokens": draw.randint(0, most),
        "pattern": f"{draw.randint(1, m - 1)}:{m}"
        if kernel.name == "cpu-permute" or draw.random() < 0.7
        else None,
        "dtype": draw.choice([torch.float32, torch.bfloat16]),
        "weight_dtype": draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        "storage": draw.choice(products.STORAGES),
        "permuted": kernel.ordered and draw.random() < 0.4,
        "bias": draw.random() < 0.5,
        "bit": draw.choice([1, 2, 128]),
        "seed": seed,
    }
    torch.set_num_threads(draw.choice([1, 2, 3]))
    try:
        products.compare(kernel, products.case(**arguments))
    except Exception:
        print(f"{kernel.name}: {arguments}")
        raise


def _one_evolution(draw, seed):
    arguments = evolution.random_case(draw, seed)
    torch.set_num_threads(draw.choice([1, 2, 3]))
    try:
        evolution.compare(evolution.case(**arguments))
    except Exception:
        print(f"evolution: {arguments}")
        raise


def _one_int8(level, draw, seed):
    # Not before main has named the library: its import loads that.
    from tests.support.cpu_int8 import compare_int8, int8_case

    m = draw.choice([2, 4, 8, 16, 32, 64])
    arguments = {
        "rows": draw.randint(1, draw.choice([20, 80])),
        "blocks": draw.randint(1, 40),
        "tokens": draw.randint(1, draw.choice([5, 80])),
        "pattern": f"{draw.randint(1, m - 1)}:{m}",
        "dtype": draw.choice([torch.float32, torch.bfloat16]),
        "bias": draw.random() < 0.5,
        "seed": seed,
    }
    torch.set_num_threads(draw.choice([1, 2, 3]))
    try:
        compare_int8(int8_case(**arguments), [level])
    except Exception:
        print(f"int8: {arguments}")
        raise


def _one_conv(products, draw, seed):
    def pair(low, high):
        return draw.randint(low, high), draw.randint(low, high)

    groups = draw.choice([1, 1, 2])
    kernel, stride, padding, dilation = pair(1, 5), pair(1, 3), pair(0, 3), pair(1, 3)
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)
    ]
    size = tuple(low + draw.randint(0, draw.choice([2, 40])) for low in least)
    channels = groups * draw.randint(1, 8), groups * draw.randint(1, 12)
    conv = products.Convolution(*channels, size, kernel, stride, padding, dilation, groups)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    arguments = (
        conv,
        draw.randint(1, 4),
        draw.choice([0, 0.1, 1]),
        dtype,
        draw.random() < 0.5,
        seed,
    )
    torch.set_num_threads(draw.choice([1, 2, 3]))
    try:
        products.compare_conv(products.KERNELS[1], products.conv_case(*arguments))
    except Exception:
        print(f"convolution: {arguments}")
        raise


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    library.LIBRARY = Path(sys.argv[2])
    from tests.support import cpu_products

    if cpu_products.REASON:
        sys.exit(cpu_products.REASON)
    {"read-beyond": read_beyond, "misaligned": misaligned, "fuzz": fuzz, "files": files}[
        sys.argv[1]
    ](cpu_products)
