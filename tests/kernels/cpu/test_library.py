import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_nm.kernels import KernelRegistry, Router
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, build, library
from tests.support.cpu_products import (
    FAST,
    KERNELS,
    LEVELS,
    at_level,
    case,
    compare,
    has_kernel,
    needs_library,
)
from tests.support.routed import attach, gradients, ran

CPU = torch.device("cpu")
LANES = {"baseline": 0, "avx2": 8, "avx512": 16, "avx512-bf16": 16}
other_copy = library._other_copy
needs_compiler = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The library is looked for in another folder, which is empty."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libnm.so")
    monkeypatch.setattr(library, "_other_copy", lambda: None)
    library.load.cache_clear()
    library.level.cache_clear()
    yield tmp_path / "libnm.so"
    library.load.cache_clear()
    library.level.cache_clear()


def compile_c(text, target):
    source = target.with_suffix(".c")
    source.write_text(text)
    subprocess.run(
        [*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(target)], check=True
    )


def refused(match):
    assert library.unavailable()
    for kernel in KERNELS:
        assert kernel.probe(CPU) == library.unavailable()
    return pytest.raises(RuntimeError, match=match)


def test_a_missing_library_says_why_and_what_to_do(elsewhere):
    with refused(r"was not built: install lightning-nm again .* `make library`"):
        library.load()
    elsewhere.with_name("libnm.txt").write_text("there was no C compiler\n")
    with refused(r"was not built \(there was no C compiler\): install"):
        library.load()


def test_a_copy_that_was_built_is_named(elsewhere, tmp_path, monkeypatch):
    """As after `pip install .`, when Python runs in the checkout."""
    other = tmp_path / "site-packages"
    (other / "lightning_nm" / "kernels" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(library, "_other_copy", other_copy)
    monkeypatch.setattr(sys, "path", [str(library.PLACE), str(other)])
    with refused(r"was not built: install lightning-nm again"):
        library.load()
    (other / "lightning_nm" / "kernels" / "cpu" / "libnm.so").touch()
    library.load.cache_clear()
    with refused(
        rf"imports lightning_nm from {library.PLACE}\. Run `.*build\.py` or `make library`.* in {other}, "
    ):
        library.load()


def test_products_are_dense_without_a_library(elsewhere):
    module = torch.nn.Linear(32, 16)
    attach(module)
    router = Router("sparse", [CpuPermuteKernel(), CpuCsrKernel()])
    x = torch.randn(8, 32)
    for found, expected in zip(
        gradients(module, x, router), gradients(module, x, None), strict=True
    ):
        assert torch.equal(found, expected)
    assert "the library of CPU kernels was not built" in router.registry.unavailable_reason("cpu")
    assert not any(kernel.startswith("cpu") for _, kernel in ran(router))


@pytest.mark.parametrize(
    "content", [b"", b"no library", b"\x7fELF" + b"\x01" * 60 + b"\x00" * 1000]
)
def test_a_damaged_library_is_refused(elsewhere, content):
    elsewhere.write_bytes(content)
    with refused("cannot be loaded .* install lightning-nm again"):
        library.load()


@needs_compiler
@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            'const char *nm_source(void) { return ""; }',
            "cannot be loaded .*undefined symbol.* install",
        ),
        ("int other(void) { return 1; }", "cannot be loaded .*undefined symbol.* install"),
    ],
)
def test_a_library_of_another_version_is_refused(elsewhere, text, match):
    compile_c(text, elsewhere)
    with refused(match):
        library.load()


@needs_library
def test_a_library_of_other_sources_is_refused(elsewhere, monkeypatch):
    shutil.copy(build.LIBRARY, elsewhere)
    assert library.unavailable() == ""
    library.load.cache_clear()
    library.level.cache_clear()
    monkeypatch.setattr(library, "source", lambda: "0123")
    with refused("compiled from other sources than those beside it: .* `make library`"):
        library.load()
    elsewhere.with_name("libnm.txt").write_text("cc failed\n")
    with refused(r"compiled from other sources than those beside it \(cc failed\)"):
        library.load()


def test_every_source_file_counts(tmp_path, monkeypatch):
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    first = build.source()
    seen = {first}
    for file in sorted((tmp_path / "csrc").iterdir()):
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        seen.add(build.source())
        file.write_bytes(content)
    assert len(seen) == 1 + len(list((tmp_path / "csrc").iterdir()))
    assert build.source() == first


@needs_library
def test_the_library_is_of_the_present_sources(tmp_path):
    assert build.is_current(build.LIBRARY)
    assert not build.is_current(tmp_path / "nothing.so")
    (tmp_path / "text.so").write_text("text")
    assert not build.is_current(tmp_path / "text.so")


def test_without_a_compiler_there_is_a_reason_beside_the_library(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.compiler() == []
    assert build.build(tmp_path) == "there was no C compiler: neither $CC, cc, gcc nor clang"
    assert [file.name for file in tmp_path.iterdir()] == ["libnm.txt"]


def test_a_compiler_that_fails_is_the_reason(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'internal error' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} -O2")
    assert build.compiler() == [str(compiler), "-O2"]
    reason = build.build(tmp_path)
    assert reason.startswith(f"{compiler} -O2 ")
    assert reason.endswith("failed with status 3: internal error")
    assert (tmp_path / "libnm.txt").read_text() == f"{reason}\n"
    compiler.write_text("#!/no/such/shell\n")
    assert "failed: " in build.build(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    assert build.build(tmp_path) == "there is no library for win32"


@pytest.mark.slow
@needs_compiler
def test_a_build_replaces_the_library_and_the_reason(tmp_path, monkeypatch):
    compile_library = build.compile_library
    monkeypatch.setattr(build, "compile_library", lambda target: compile_library(target, FAST))
    (tmp_path / "libnm.txt").write_text("there was no C compiler\n")
    (tmp_path / "libnm.so").write_text("old")
    assert build.build(tmp_path) == ""
    assert [file.name for file in tmp_path.iterdir()] == ["libnm.so"]
    assert build.is_current(tmp_path / "libnm.so")


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_the_variable_lowers_the_level(level):
    with at_level(level):
        assert library.LEVELS[library.level()] == level
        assert library.load().nm_lanes(library.level()) == LANES[level]


@needs_library
def test_a_level_that_does_not_exist_is_refused():
    with at_level("sse9"), refused("LIGHTNING_NM_ISA='sse9' is unknown: use one of baseline"):
        library.level()


def test_a_level_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(nm_best_level=lambda: 1))
    with at_level("avx2"):
        assert library.level() == 1
    with (
        at_level("avx512"),
        refused(
            "'avx512' is not an instruction set of this CPU: use one of baseline, avx2, or unset"
        ),
    ):
        library.level()


def test_the_cpu_has_a_name():
    assert library.cpu_name()


@pytest.mark.parametrize(
    ("flags", "amx"), [("fpu amx_bf16 amx_tile avx", True), ("fpu avx512_bf16", False), ("", False)]
)
def test_amx_is_read_from_the_flags(monkeypatch, flags, amx):
    monkeypatch.setattr(library, "_cpu_info", {"flags": flags}.get)
    assert library.has_amx() == amx


@needs_library
def test_without_torch_s_loop_there_is_one_thread(monkeypatch):
    made = case(100, 64, 130, "2:8")
    torch.set_num_threads(2)
    kernels = [kernel for kernel in KERNELS if has_kernel(kernel, library.LEVELS[library.level()])]
    with_threads = [compare(kernel, made) for kernel in kernels]
    monkeypatch.setattr(library, "parallel", lambda: None)
    assert library.structure("nm_operands *").threads == 1
    for kernel, expected in zip(kernels, with_threads, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(compare(kernel, made), expected, strict=True))


@needs_library
def test_torch_has_the_loop():
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (library.parallel() is not None) == (release >= (2, 10))


@needs_library
def test_a_lack_of_memory_and_of_a_kernel_are_errors(monkeypatch):
    dense = "nm_operands *", (1, 1, 1), (), torch.empty(1)
    sparse = library.ffi.new("nm_permute *")
    with at_level("baseline"), pytest.raises(RuntimeError, match="baseline has no such kernel"):
        library.run("nm_permute_product", "NM_LINEAR", *dense, sparse)
    library.level()
    short = SimpleNamespace(product=lambda *_: 1, NM_LINEAR=0, NM_NO_MEMORY=1)
    monkeypatch.setattr(library, "load", lambda: short)
    with pytest.raises(MemoryError, match="panels"):
        library.run("product", "NM_LINEAR", *dense, sparse)


class Products(Dataset):
    """Each item is a product that a worker computes."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __len__(self):
        return 4

    def __getitem__(self, index):
        made = case(96, 64, 200, "2:8", seed=index)
        return self.kernel.linear(
            self.kernel.pack_masked(made.matrix, self.kernel.layout(made.matrix)), made.x
        )


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_forked_after_products_on_threads_compute_the_same():
    torch.set_num_threads(2)
    for kernel in (
        kernel for kernel in KERNELS if has_kernel(kernel, library.LEVELS[library.level()])
    ):
        data = Products(kernel)
        expected = [data[index] for index in range(4)]
        loader = DataLoader(
            data, batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork"
        )
        assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_interpreter_ends_while_a_product_runs(threads):
    script = f"""
        import threading, time
        import torch
        from tests.support.cpu_products import KERNELS, case, has_kernel, library
        torch.set_num_threads({threads})
        made = case(512, 512, 4096, "2:8")
        kernel = KERNELS[has_kernel(KERNELS[0], library.LEVELS[library.level()]) - 1]
        layout = kernel.layout(made.matrix)
        values = kernel.pack_masked(made.matrix, layout).values
        running = threading.Event()

        def work():  # the library alone: a thread that ends within torch's own operators ends the process, too
            y = torch.empty(len(made.x), layout.rows)
            inputs = (made.x, made.x.shape), (None, ()), (None, ())
            sizes, sparse = (layout.rows, layout.depth, len(made.x)), layout.operand(values)
            while True:
                library.run(kernel.function, "NM_LINEAR", "nm_operands *", sizes, inputs, y, sparse)
                running.set()

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        assert running.wait(60)
        time.sleep(0.1)
        print("end", flush=True)
    """
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def _forked(queue, made):
    torch.set_num_threads(1)
    queue.put(
        [
            torch.equal(a, b)
            for a, b in zip(compare(KERNELS[1], made), compare(KERNELS[1], made), strict=True)
        ]
    )


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_after_products_on_threads():
    torch.set_num_threads(2)
    made = case(100, 64, 200, "2:8")
    compare(KERNELS[1], made)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_forked, args=(queue, made))
    process.start()
    assert all(queue.get(timeout=60))
    process.join(60)
    assert process.exitcode == 0


@needs_library
def test_the_package_s_kernels_take_all_products():
    registry = KernelRegistry()
    assert registry.unavailable_reason("cpu") == ""
    assert {"masked", "outputs", "n:m"} == registry.takes("cpu")
