import ctypes
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

from lightning_nm.kernels import Router
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


def compiled(text):
    def write(target):
        source = target.with_suffix(".c")
        source.write_text(text)
        options = ["-shared", "-fPIC", str(source), "-o", str(target)]
        subprocess.run([*build.compiler(), *options], check=True)

    return write


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda target: target.write_bytes(b""), ""),
        (lambda target: target.write_bytes(b"no library"), ""),
        (lambda target: target.write_bytes(b"\x7fELF" + b"\x01" * 60 + b"\x00" * 1000), ""),
        pytest.param(compiled("int other;"), ".*undefined symbol", marks=needs_compiler),
        pytest.param(
            compiled('const char *nm_source(void) { return ""; }'),
            ".*undefined symbol",
            marks=needs_compiler,
        ),
    ],
    ids=["empty", "text", "damaged", "another", "another version"],
)
def test_a_file_that_is_not_the_library_is_refused(elsewhere, write, error):
    write(elsewhere)
    with refused(f"cannot be loaded {error}.* install lightning-nm again"):
        library.load()


@needs_library
def test_a_library_of_other_sources_is_refused(elsewhere, monkeypatch):
    shutil.copy(build.LIBRARY, elsewhere)
    assert library.unavailable() == ""
    library.load.cache_clear()
    library.level.cache_clear()
    monkeypatch.setattr(library, "source", lambda: "0123")
    with refused("compiled from other sources than those next to it: .* `make library`"):
        library.load()
    elsewhere.with_name("libnm.txt").write_text("cc failed\n")
    with refused(r"compiled from other sources than those next to it \(cc failed\)"):
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


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes a script the compiler."""

    def become(script):
        command = tmp_path / "own-cc"
        command.write_text(script)
        command.chmod(0o755)
        monkeypatch.setenv("CC", f"{command} -O2")
        return command

    return become


def test_a_compiler_that_fails_is_the_reason(compiler, tmp_path, monkeypatch):
    command = compiler("#!/bin/sh\necho 'internal error' >&2\nexit 3\n")
    assert build.compiler() == [str(command), "-O2"]
    reason = build.build(tmp_path)
    assert reason.startswith(f"{command} -O2 ")
    assert reason.endswith("failed with status 3: internal error")
    assert (tmp_path / "libnm.txt").read_text() == f"{reason}\n"
    compiler("#!/no/such/shell\n")
    assert "failed: " in build.build(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    assert build.build(tmp_path) == "there is no library for win32"


@pytest.mark.slow
@needs_compiler
def test_a_build_replaces_the_library_and_the_reason(tmp_path, compiler, monkeypatch):
    """By a compiler that does not know all instructions, whose GEMMs are then those of AVX2."""
    known = " ".join(build.compiler())
    compiler(f'#!/bin/sh\ncase "$*" in *-mavx512vnni*) exit 1;; esac\nexec {known} "$@"\n')
    compile_library = build.compile_library
    monkeypatch.setattr(build, "compile_library", lambda target: compile_library(target, FAST))
    place = tmp_path / "place"
    place.mkdir()
    (place / "libnm.txt").write_text("there was no C compiler\n")
    (place / "libnm.so").write_text("old")
    assert build.build(place) == ""
    assert [file.name for file in place.iterdir()] == ["libnm.so"]
    assert build.is_current(place / "libnm.so")
    found = ctypes.CDLL(str(place / "libnm.so"))
    levels = range(len(LEVELS))
    assert [found.nm_int8_level(level) for level in levels] == [min(level, 1) for level in levels]


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_the_variable_lowers_the_level(level):
    with at_level(level):
        assert library.LEVELS[library.level()] == level
        assert library.load().nm_lanes(library.level()) == LANES[level]


@pytest.mark.parametrize(
    ("level", "error"),
    [
        ("sse9", "LIGHTNING_NM_ISA='sse9' is unknown: use one of baseline, avx2, or unset"),
        ("avx512", "'avx512' is not an instruction set of this CPU: use one of baseline, avx2, or"),
    ],
)
def test_a_level_that_the_cpu_lacks_or_nobody_knows_is_refused(level, error, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(nm_best_level=lambda: 1))
    with at_level("avx2"):
        assert library.level() == 1
    with at_level(level), refused(error):
        library.level()


def test_the_cpu_has_a_name():
    assert library.cpu_name()


@pytest.mark.parametrize(
    ("flags", "amx"), [("fpu amx_bf16 amx_tile avx", True), ("fpu avx512_bf16", False), ("", False)]
)
def test_amx_is_read_from_the_flags(monkeypatch, flags, amx):
    monkeypatch.setattr(library, "_cpu_info", {"flags": flags}.get)
    assert library.has_amx() == amx


def usable():
    return [kernel for kernel in KERNELS if has_kernel(kernel, library.LEVELS[library.level()])]


@needs_library
def test_without_torch_s_loop_there_is_one_thread(monkeypatch):
    made = case(100, 64, 130, "2:8")
    torch.set_num_threads(2)
    kernels = usable()
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
    """Each item is a GEMM that a worker computes."""

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
    for kernel in usable():
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
