"""Chooses a kernel for each GEMM: compares it with the dense matmul, times both, and remembers the decision."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import collect_env

from lightning_nm.functional import nm_mask, nm_prune
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import (
    Convolution,
    Failures,
    GemmKernel,
    GemmKey,
    MaskedMatrix,
    Sparsity,
    bucketed,
    check_mode,
    describe_error,
    multiply,
    multiply_adds,
    uses_of_pack,
)
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.cpu.library import (
    LEVELS,
    compiled_from,
    cpu_name,
    has_amx,
    level,
    unavailable,
)
from lightning_nm.kernels.gpu.cusparselt import CuSparseLtKernel, library_version
from lightning_nm.kernels.operands import TOKENS, permuted_columns
from lightning_nm.pattern import NMPattern
from lightning_nm.spelling import not_given

_ENOUGH = 0.01
"""Seconds of a sample on the host, at which a tick of the clock and the loop no longer count."""

_LONG = 0.05
"""Seconds of a call on the host of which few are enough."""


class DeviceTimer:
    """Median over samples of back-to-back calls, after a warm-up.

    On CUDA a sample is the time between two events on the current stream, so the slower of device and host decides.
    Elsewhere :func:`time.perf_counter` is read, around fewer calls if they are long.

    Args:
        warmup: Calls that are not measured.
        samples: Samples of which the median is taken.
        calls: Calls in a sample.

    Example::

        >>> x = torch.randn(64, 64)
        >>> DeviceTimer().time(lambda: x @ x, torch.device("cpu")) > 0
        True
    """

    def __init__(self, warmup: int = 3, samples: int = 7, calls: int = 10) -> None:
        self.warmup = warmup
        self.samples = samples
        self.calls = calls

    def time(self, function: Callable[[], object], device: torch.device) -> float:
        """Return the seconds of one call."""
        warmup, samples, calls = self.warmup, self.samples, self.calls
        if device.type != "cuda":
            # The first call is part of the warm-up, and says how many calls a sample needs. A coarse clock may give 0.
            first = max(_sample(function, device, 1), 1e-9)
            calls = min(max(round(_ENOUGH / first), 1), calls)
            warmup -= 1
            if first >= _LONG:
                warmup, samples = 0, min(samples, 3)
        for _ in range(warmup):
            function()
        return median(_sample(function, device, calls) for _ in range(samples)) / calls


def _sample(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of some calls together, by the clock of the host or between two events of a GPU."""
    if device.type != "cuda":
        began = perf_counter()
        for _ in range(calls):
            function()
        return perf_counter() - began
    # Events are recorded on the current stream of the current device, which need not be this one.
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        # The host runs ahead: without this the end is not reached yet.
        end.synchronize()
        return start.elapsed_time(end) / 1e3  # from milliseconds


def copies_past_cache(size: int, device: torch.device) -> int:
    """Count the copies of `size` bytes that together exceed twice the L2 cache, at most 32; one without CUDA."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    # Twice, so that a copy has left the cache when its turn comes again.
    enough = 1 + 2 * cache_bytes // size
    # Small operands would need thousands of copies.
    return min(enough, 32)


def rotated(function: Callable[..., object], *operands: Sequence[Any]) -> Callable[[], object]:
    """Return a function that calls another one with the next copy of each operand in turn.

    Example::

        >>> call = rotated(lambda a, b: a + b, "abc", "xy")
        >>> [call() for _ in range(4)]
        ['ax', 'by', 'cx', 'ay']
    """
    rings = [cycle(copies) for copies in operands]
    return lambda: function(*map(next, rings))


try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

# Of the file. It is raised when keys or decisions change their meaning: entries of another one are ignored.
SCHEMA = 2

Source = Literal["measured", "forced", "default", "postponed"]
"""Timed on the device; requested by the mode; the reference because no other kernel can run, or because there was no
time left to measure."""


@dataclass(frozen=True)
class Environment:
    """Where decisions were measured; they are reused only in an equal environment.

    Example::

        >>> str(Environment("H200", "580.65", "2.13.0", "13.0", "801"))
        'device H200, driver 580.65, torch 2.13.0, cuda 13.0, cusparselt 801'
    """

    device: str  # its name; the others are versions, None for what is missing
    driver: str | None
    torch: str
    cuda: str | None  # that torch was built for
    cusparselt: str | None  # the loaded library

    def __str__(self) -> str:
        # The text is the key of the decisions in their file.
        return ", ".join(f"{name} {value or 'none'}" for name, value in vars(self).items())


def environment_of(device: torch.device) -> Environment:
    """Describe a device of this machine; a CPU by its model, instruction set, library and threads."""
    if device.type == "cpu":
        # Another instruction set, build of the library or number of threads is another speed.
        parts = [cpu_name()]
        # Virtual machines report one name for CPUs with AMX and without, whose dense GEMMs differ in speed.
        if has_amx():
            parts.append("AMX")
        parts += (
            ["no kernels"] if unavailable() else [LEVELS[level()], f"library {compiled_from()}"]
        )
        # The limit of oneDNN, which computes torch's dense GEMMs.
        if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
            parts.append(f"oneDNN up to {limit}")
        name = "; ".join([*parts, f"threads: {torch.get_num_threads()}"])
        return Environment(name, None, torch.__version__, None, None)
    if device.type != "cuda":
        return Environment(device.type, None, torch.__version__, torch.version.cuda, None)
    cusparselt = library_version()
    return Environment(
        device=torch.cuda.get_device_name(device),
        # torch itself does not know the driver's version: this asks nvidia-smi, and is None without it.
        driver=collect_env.get_nvidia_driver_version(collect_env.run),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cusparselt=None if cusparselt is None else str(cusparselt),
    )


NO_KERNEL = "there is no sparse kernel"


@dataclass(frozen=True)
class Decision:
    """The kernel chosen for a GEMM, the reason, and measured times; None where a time is unknown."""

    kernel: str
    dense_ms: float | None = None
    sparse_ms: float | None = None  # of the best sparse GEMM without packing, chosen or not
    pack_ms: float | None = None  # of packing its operand once
    reason: str = NO_KERNEL  # why this kernel, and why not others
    source: Source = "default"
    # When it holds: available kernels, uses of a pack, margin, whether GEMMs must be deterministic.
    terms: str = ""

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Decision:
        """Read what :func:`dataclasses.asdict` and JSON made of a decision.

        Raises:
            TypeError: If it is none.
        """
        decision = cls(**entry)
        # Dataclasses check no types, and a file may have been edited.
        for name, value in entry.items():
            types = (int, float, type(None)) if name.endswith("_ms") else str
            if not isinstance(value, types):
                raise TypeError(f"{entry!r} is no decision")
        return decision


def decisions_file(path: str | os.PathLike[str] | None) -> Path | None:
    """The file at a path, which may begin with ``~``; ``None`` if the user has no home directory."""
    if path is None:
        return None
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no home directory, as for some users of containers
        return None


class Decisions(MutableMapping[GemmKey, Decision]):
    """The decisions of one environment.

    Keys whose tokens are in one bucket (:func:`~lightning_nm.kernels.api.token_bucket`) are the same key, and so are
    those of two devices of one type: the GPUs of a machine are assumed to be equal.

    One thread may add decisions while others read them: iterating goes through those that were there when it began.

    Example::

        >>> from lightning_nm import NMPattern
        >>> decisions = Decisions(environment_of(torch.device("cpu")))
        >>> key = GemmKey("forward", 64, 32, 1000, torch.float32, NMPattern(2, 4), "cpu")
        >>> decisions[key] = Decision("cpu-csr", 1.0, 0.5, 0.1, "measured", "measured")
        >>> decisions[GemmKey("forward", 64, 32, 1024, torch.float32, NMPattern(2, 4), "cpu")].kernel
        'cpu-csr'
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._decisions: dict[GemmKey, Decision] = {}
        self._unsaved = False  # whether a measured one was added
        self._warned = False

    def __getitem__(self, key: GemmKey) -> Decision:
        return self._decisions[stored_key(key)]

    def __setitem__(self, key: GemmKey, decision: Decision) -> None:
        self._decisions[stored_key(key)] = decision
        # Others are made again without a measurement, or are still to be measured.
        self._unsaved |= decision.source == "measured"

    def __delitem__(self, key: GemmKey) -> None:
        del self._decisions[stored_key(key)]

    def __iter__(self) -> Iterator[GemmKey]:
        return iter(list(self._decisions))  # the copy is made without switching to another thread

    def __len__(self) -> int:
        return len(self._decisions)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None, environment: Environment) -> Decisions:
        """Read the decisions of an environment; a file that is missing, damaged or of another schema has none."""
        decisions = cls(environment)
        if path is None:
            return decisions
        # Whatever is wrong with the file: the GEMMs are measured again, and saving says what is wrong.
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            entries = _read(Path(path)).get(str(environment), {})
            found = {_read_key(text): Decision.from_dict(entry) for text, entry in entries.items()}
            # Past `__setitem__`, which would mark them as unsaved.
            decisions._decisions = found  # all or none
        return decisions

    def keep(self, path: Path | None) -> None:
        """:meth:`save` what was measured, if there is a path; the first failure is a warning, no reason to end."""
        if path is None or not self._unsaved:
            return
        self._unsaved = False  # also after a failure
        try:
            self.save(path)
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                message = "the choice of kernels is not kept and will be measured again next time"
                warnings.warn(f"{message}: {describe_error(error)}", RuntimeWarning, stacklevel=3)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Add the decisions to a file; those of other environments and of other keys stay in it.

        The file is replaced atomically. Processes and threads that save at the same time take turns, except on Windows
        and on file systems without locks, where the decisions of one may be lost.

        Raises:
            ValueError: If the file exists and does not hold decisions; one of another schema is replaced.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            # Read again at each save: another process may have added decisions.
            environments = _read(path) if path.exists() else {}
            entries = environments.setdefault(str(self.environment), {})
            for key, decision in self.items():
                # A postponed GEMM is still to be measured, here or by the next training.
                if decision.source != "postponed":
                    entries[_written_key(key)] = asdict(decision)
            content = {"schema": SCHEMA, "environments": environments}
            # A reader sees the old file or the new one, never a part: renaming is atomic.
            # In the same folder, because renaming does not cross file systems. With a name of its own, because without
            # locks several may save at a time.
            new = path.with_name(f".{path.name}.{uuid4().hex}")
            try:
                new.write_text(json.dumps(content, indent=1) + "\n")
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)  # left if writing or renaming failed


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out that lock the folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    # Not the file: each save replaces it, and who holds a lock on the old file keeps nobody out of the new one.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of a file, by environment; one of another schema has none."""
    try:
        content = json.loads(path.read_text())
        environments = content["environments"]
        if not isinstance(environments, dict):
            raise TypeError("`environments` is not a mapping")
        # Another schema is this package's own file all the same: it is replaced, not refused.
        return environments if content["schema"] == SCHEMA else {}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold decisions: give another path, or remove it"
        ) from error


def _written_key(key: GemmKey) -> str:
    """A key as the text that names its entry in a file: its fields in JSON."""
    values = {field.name: getattr(key, field.name) for field in fields(key)}
    # The pattern as "2:4", the dtype as "float32".
    return json.dumps(values, default=lambda value: str(value).removeprefix("torch."))


def _read_key(text: str) -> GemmKey:
    """Undo :func:`_written_key`; raise a ValueError, a TypeError or an AttributeError for another text."""
    values = json.loads(text)
    dtype = getattr(torch, values["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{values['dtype']} is no dtype")
    conv = values["conv"]
    if conv is not None:
        # JSON turned tuples into lists, which cannot be part of a key.
        conv = Convolution._make(tuple(x) if isinstance(x, list) else x for x in conv)
    pattern = NMPattern.parse(values["pattern"])
    return GemmKey(**{**values, "dtype": dtype, "pattern": pattern, "conv": conv})


# Cached for the reason of `bucketed`: every look-up of a decision asks for it.
@lru_cache(maxsize=1 << 14)
def stored_key(key: GemmKey) -> GemmKey:
    """The key under which a decision is stored: a bucket of tokens and a device type."""
    return replace(bucketed(key), device=torch.device(key.device).type)


def share(decisions: Decisions) -> Decisions:
    """Return the decisions of the first process, with their environment, in every process.

    Processes that decide for themselves may choose differently where two kernels are equally fast. Every process must
    call this. Without :mod:`torch.distributed` it returns `decisions`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return decisions
    box = [decisions]
    dist.broadcast_object_list(box, src=0)
    return box[0]


_NOT_TAKEN: dict[Sparsity, str] = {
    "n:m": "it takes no operand that is N:M along the contraction axis",
    "masked": "its sparse operand must be N:M along the contraction axis",
    "outputs": "it computes all outputs, not those at kept entries alone",
}


class KernelRegistry:
    """The reference and the sparse kernels, in order of preference.

    An exception that a kernel raises counts as a reason against it. Each kernel is probed once per device.

    Args:
        backends: The kernels besides the reference, each with its own name; ``None`` takes those of the package:
            ``cusparselt`` for GPUs, ``cpu-permute`` and ``cpu-csr`` for CPUs.

    Raises:
        ValueError: If two kernels have one name, or something is not a kernel.

    Example::

        >>> from lightning_nm import NMPattern
        >>> class Mine(GemmKernel):
        ...     name = "mine"
        >>> registry = KernelRegistry([CuSparseLtKernel(), Mine()])
        >>> key = GemmKey("forward", 64, 32, 8, torch.float32, NMPattern(2, 4), "cpu")
        >>> [(kernel.name, registry.reason(kernel, key)) for kernel in registry.kernels.values()]
        [('reference', ''), ('cusparselt', 'cuSPARSELt needs a CUDA device, not cpu'), ('mine', '')]
    """

    def __init__(self, backends: Sequence[GemmKernel] | None = None) -> None:
        self.reference = GemmKernel()
        self.kernels: dict[str, GemmKernel] = {}
        if backends is None:
            # For CPUs the faster kernel first; cpu-csr takes what it refuses. CpuInt8Kernel is for packed layers alone.
            backends = [
                CuSparseLtKernel(),
                CpuPermuteKernel(),
                CpuCsrKernel(),
            ]
        # A mode as text or a single kernel is a likely mistake.
        if not isinstance(backends, (list, tuple)):
            raise ValueError(f"backends must be a list of GemmKernel objects{not_given(backends)}")
        for kernel in (self.reference, *backends):
            if not isinstance(kernel, GemmKernel):
                raise ValueError(f"backends must hold GemmKernel objects{not_given(kernel)}")
            if kernel.name in self.kernels:
                raise ValueError(
                    f"two kernels are named '{kernel.name}': give the second one another `name`"
                )
            self.kernels[kernel.name] = kernel
        self.backends = list(backends)
        """The kernels besides the reference, in order."""
        self.failures: Failures = {}
        """What :func:`~lightning_nm.kernels.api.attempt` found of these kernels."""
        self._variants: dict[str, GemmKernel] = {}
        # By the kernel's name and the key: the name of the variant that its search found.
        self._searched: dict[tuple[str, GemmKey], str] = {}
        # By the kernel's name and the device: why the kernel does not work there, empty if it does.
        self._probes: dict[tuple[str, str], str] = {}

    def __str__(self) -> str:
        return ", ".join(self.kernels)

    def made_for(self, device: str) -> list[GemmKernel]:
        """Return the kernels besides the reference that are made for a device's type, in order; all if none is."""
        kind = torch.device(device).type
        found = [kernel for kernel in self.backends if kernel.device_type in ("", kind)]
        # With none the others are asked, so that the report says why each does not work here.
        return found or self.backends

    def reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Return why a kernel is not used for a GEMM: a failure, its probe or its `supports`; empty if it is."""
        # The probe comes first: a kernel may need the device to answer the rest.
        reason = self.failures.get((kernel.name, key)) or self.probe(kernel, key.device)
        if reason:
            return reason
        # The dense GEMM takes every operand, whatever is sparse in it.
        if kernel is not self.reference:
            if key.conv is not None and not kernel.convolutions:
                return "it takes no convolutions"
            if key.sparsity not in kernel.takes:
                return _NOT_TAKEN[key.sparsity]
        return reason_or_error(partial(kernel.supports, key))

    def reason_against(self, name: str, key: GemmKey) -> str:
        """:meth:`reason` of the kernel with this name, which may not be among the kernels."""
        try:
            kernel = self.find(name)
        except ValueError:  # of a decision from a file
            return "not among the kernels"
        return self.reason(kernel, key)

    def find(self, name: str) -> GemmKernel:
        """Return the kernel with a name, or the variant of a kernel.

        Raises:
            ValueError: If there is none.
        """
        found = self.kernels.get(name) or self._variants.get(name)
        if found is None:
            # A kernel's own name may have a colon.
            owners = [each for each in self.kernels if name.startswith(f"{each}:")]
            # The reference has no variants: it raises the error.
            owner = self.kernels[max(owners, key=len)] if owners else self.reference
            found = self._variants[name] = owner.variant(name)
        return found

    def searched(self, kernel: GemmKernel, key: GemmKey) -> list[GemmKernel]:
        """Return a kernel, after the variant of it that its search finds for a GEMM."""
        if key.dtype not in kernel.searched:
            return [kernel]
        # By bucket, as decisions are: one search takes tenths of a second.
        asked = kernel.name, bucketed(key)
        if asked not in self._searched:
            with _no_autocast():
                packed, _ = _packed(kernel, key, _sparse_operand(key, 0))
                self._searched[asked] = kernel.search(key, packed, _dense_operand(key, 1))
        name = self._searched[asked]
        # Both are checked and timed: what a search finds may be wrong, or slower than the default.
        return [self.find(name), kernel] if name else [kernel]

    def probe(self, kernel: GemmKernel, device: str) -> str:
        """Return why a kernel does not work on a device; asked once for each."""
        asked = kernel.name, device
        if asked not in self._probes:
            self._probes[asked] = reason_or_error(partial(kernel.probe, torch.device(device)))
        return self._probes[asked]

    def takes(self, device: str) -> frozenset[Sparsity]:
        """Return what may be sparse in the GEMMs of the kernels that work on a device."""
        working = [kernel.takes for kernel in self.backends if not self.probe(kernel, device)]
        return frozenset[Sparsity]().union(*working)

    def unavailable_reason(self, device: str) -> str:
        """Return why no sparse kernel works on a device; empty if one does."""
        names: dict[str, list[str]] = {}  # by reason: the kernels of one library share it
        # That a kernel for GPUs does not run on a CPU explains nothing.
        for kernel in self.made_for(device):
            reason = self.probe(kernel, device)
            if not reason:
                return ""
            names.setdefault(reason, []).append(kernel.name)
        reasons = [f"{', '.join(kernels)}: {reason}" for reason, kernels in names.items()]
        return "; ".join(reasons) or NO_KERNEL


def reason_or_error(ask: Callable[[], str]) -> str:
    """Ask for a reason; an exception is one."""
    try:
        return ask()
    except Exception as error:
        return describe_error(error)


TOLERANCE = 1e-2
"""Largest relative Frobenius difference of two 16-bit GEMMs. Rounding both results to bfloat16 makes 2.3e-3, and the
dense one may round partial sums, too. A kernel that loses one value in 5000 exceeds it."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for wider dtypes: sums of a million terms in another order differ by less than 1e-5."""

REPEATS = 3
"""How often a GEMM must have the same bits if deterministic algorithms are requested."""


def check(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's GEMM of random operands with the dense one: ``|P - D|_F / |D|_F < 1e-2``.

    The forward is compared with a bias, as large as the product's entries, so that one that is left out shows; and
    without one, which would hide errors of the GEMM. For dtypes of more than 16 bits the limit is 1e-4; a kernel may
    have one of its own. Under ``torch.use_deterministic_algorithms(True)`` it is repeated, always to the same bits.

    Returns:
        What is wrong; empty if nothing is. Exceptions of the kernel pass through.
    """
    with _no_autocast():
        matrix, dense = _sparse_operand(key, 0), _dense_operand(key, 1)
        # To find a kernel that writes to its operands: autograd has saved them for the GEMMs of the backward pass.
        copies = matrix.clone(), dense.clone()
        bias = None
        if key.gemm == "forward":
            outputs = key.rows if key.conv is None else key.conv.outputs
            # A sum of `depth` products of normal numbers has this standard deviation.
            bias = _random(key, (outputs,), 3) * math.sqrt(key.depth)
        packed = _packed(kernel, key, matrix)
        result = _product(kernel, key, packed, dense, bias=bias)
        # The first result still exists: a kernel that has one buffer for all would overwrite it in training.
        second = _product(kernel, key, packed, dense, bias=bias)
        if not all(map(torch.equal, (matrix, dense), copies)):
            return "changes its operands"
        if result.data_ptr() == second.data_ptr():
            return "returns the same memory for two GEMMs"
        reference = GemmKernel()
        exact = _packed(reference, key, matrix)
        expected = _product(reference, key, exact, dense, bias=bias)
        fault = _difference(kernel, key, result, expected)
        if bias is not None and not fault:
            without_bias = _product(kernel, key, packed, dense)
            fault = _difference(kernel, key, without_bias, _product(reference, key, exact, dense))
        if fault:
            return fault
        if torch.are_deterministic_algorithms_enabled():
            products = [result, second]
            for _ in range(REPEATS - 1):
                # Packed again: the packing has to be deterministic, too.
                again = _packed(kernel, key, matrix)
                products.append(_product(kernel, key, again, dense, bias=bias))
            # Bytes are compared, because a NaN does not equal itself and -0 equals +0.
            bits = [product.contiguous().view(torch.uint8) for product in products]
            if not all(torch.equal(each, bits[0]) for each in bits):
                return "gives other bits when it is repeated, and deterministic algorithms are asked for"
    return ""


def _difference(kernel: GemmKernel, key: GemmKey, result: Tensor, expected: Tensor) -> str:
    """What is wrong with a kernel's GEMM; empty if it agrees with the dense one within the tolerance."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"returns {tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    # The kernel may return anything at entries that are not needed.
    entries = _needed(key).bits.bool() if key.sparsity == "outputs" else ...
    # Norms of 16-bit tensors would overflow float16, and lose their small terms in bfloat16.
    dtype = torch.promote_types(expected.dtype, torch.float32)
    compared = (result - expected)[entries], expected[entries]
    # Stacked, so that the device is waited for once; divided in double precision.
    norms = torch.stack([torch.linalg.vector_norm(each, dtype=dtype) for each in compared])
    difference, norm = norms.tolist()
    most = kernel.tolerance
    if most is None:
        most = TOLERANCE if expected.itemsize <= 2 else TOLERANCE_FLOAT32
    if not difference / norm < most:  # true of NaN
        return f"wrong by {difference / norm:.2g} of the dense GEMM, not less than {most:g}"
    return ""


def dense_ms(key: GemmKey, timer: DeviceTimer) -> float:
    """Milliseconds of the dense GEMM of the N:M operand as the layer has it."""
    return _product_ms(GemmKernel(), key, timer)


def sparse_ms(
    kernel: GemmKernel, key: GemmKey, timer: DeviceTimer, packed: Any = None
) -> tuple[float, float]:
    """Milliseconds of a kernel's GEMM, permuting the dense matrix included, and of packing the sparse operand once.

    Packing includes building the layout from the mask, as if the mask had moved. Where outputs are sparse, and where
    the operand is given `packed`, nothing is packed. The operand of a kernel for N:M matrices is contiguous, so
    transposed where the layer packs a transposed one. Like the dense product's, the times include neither masking nor
    drawing.
    """
    product_ms = _product_ms(kernel, key, timer, packed)
    if key.sparsity == "outputs" or packed is not None:
        return product_ms, 0.0
    with _no_autocast():
        # The masks are made before the time is taken, layouts and values within it.
        operands = [_operand(kernel, key, matrix) for matrix in _copies(key, _sparse_operand)]
        call = rotated(partial(_pack, kernel), operands)
        return product_ms, 1e3 * timer.time(call, torch.device(key.device))


def _product_ms(kernel: GemmKernel, key: GemmKey, timer: DeviceTimer, packed: Any = None) -> float:
    """Milliseconds of a kernel's GEMM alone, or of the dense one by the reference."""
    with _no_autocast():
        packs: list[tuple[Any, Tensor | None]] = [(packed, None)]
        if packed is None:
            packs = [_packed(kernel, key, matrix) for matrix in _copies(key, _sparse_operand)]
        # Training permutes dY for each GEMM, so it is part of the time.
        product = partial(_product, kernel, key, order=_order(key, kernel))
        # Rings of their own lengths: a small operand needs more copies than a large one to exceed the cache.
        call = rotated(product, packs, _copies(key, _dense_operand))
        return 1e3 * timer.time(call, torch.device(key.device))


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Switch off autograd and autocast: the caller may be a forward pass under both."""
    with (
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _random(key: GemmKey, shape: Sequence[int], seed: int) -> Tensor:
    # A generator of its own: the random numbers of the training stay as they are.
    generator = torch.Generator(key.device).manual_seed(seed)
    # Not zeros: with them a GPU at its power limit would run faster than in training.
    return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)


def _sparse_operand(key: GemmKey, seed: int) -> Tensor:
    """A random ``A [rows, depth]``, sparse as the key says, with the strides of W or dY.

    Of a convolution it is ``W [out, in / groups * taps]``, N:M by rows, or for wgrad dY.
    """
    conv = key.conv
    if conv is not None and key.gemm == "wgrad":
        return _random(key, (key.images, conv.outputs, *conv.positions), seed)
    # A masked A is W_F^T [in, out] of dgrad, with blocks along `in`, its rows. W of a convolution is not transposed.
    axis = 0 if key.sparsity == "masked" and conv is None else 1
    rows, depth = key.rows, key.depth
    if conv is not None:
        rows, depth = conv.outputs, math.prod(conv.weight_shape[1:])
    # Whole blocks along either axis; the last one is cut below.
    m = key.pattern.m
    matrix = _random(key, (rows + -rows % m, depth + -depth % m), seed)
    # Where outputs are sparse the matrix is dY^T, which is dense.
    if key.sparsity != "outputs":
        matrix = nm_prune(matrix, key.pattern, axis)
    matrix = matrix[:rows, :depth]
    if key.gemm == "wgrad" and key.sparsity == "n:m":  # estimates have padded tokens
        matrix = pad(matrix, (0, -depth % TOKENS))
    if key.gemm == "forward" or conv is not None:
        return matrix.contiguous()
    # W^T of dgrad and dY^T of wgrad are transposed views of what lies in memory.
    return matrix.t().contiguous().t()


def _dense_operand(key: GemmKey, seed: int) -> Tensor:
    """A random dense operand: x, or dY for dgrad."""
    conv = key.conv
    if conv is not None:
        is_dgrad = key.gemm == "dgrad"
        shape = (conv.outputs, *conv.positions) if is_dgrad else (conv.inputs, *conv.size)
        return _random(key, (key.images, *shape), seed)
    # B of `A B`, or x of `x A^T`.
    shape = (key.depth, key.columns) if key.gemm == "wgrad" else (key.columns, key.depth)
    return _random(key, shape, seed)


def _copies(key: GemmKey, make: Callable[[GemmKey, int], Tensor]) -> list[Tensor]:
    """Copies of an operand that do not stay in the cache: as in training, they are read from memory."""
    first = make(key, 0)
    count = copies_past_cache(first.nbytes, first.device)
    return [first, *(make(key, seed) for seed in range(1, count))]


def _masked(key: GemmKey, matrix: Tensor, order: Tensor | None = None) -> MaskedMatrix:
    """A matrix and its nonzeros as the mask; with an order, a matrix that is `matrix` in that order."""
    dense = matrix.contiguous()  # made before it is timed: making it is masking
    # `values[:, order]` is `matrix`. Indexing the transpose leaves it stored as the layer's W^T is, a view of W.
    values = matrix if order is None else matrix.t()[order.argsort()].t()
    bits = values.ne(0).view(torch.uint8)
    return MaskedMatrix(values, bits, FORWARD_BIT, key.pattern, key.dtype, order, lambda: dense)


def _order(key: GemmKey, kernel: GemmKernel) -> Tensor | None:
    """The permutation of a permuted GEMM, for a kernel that takes it."""
    if not (key.permuted and kernel.ordered) or type(kernel) is GemmKernel:
        return None
    # Drawn on the CPU, so every call and every device has the same one.
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(key.depth, generator=generator).to(key.device)


def _needed(key: GemmKey) -> MaskedMatrix:
    """A matrix whose mask is the needed outputs of a GEMM."""
    width = key.columns + -key.columns % key.pattern.m  # whole blocks
    # Always of this seed: the layout that a kernel gets and the comparison must have the same mask.
    scores = _random(key, (key.rows, width), 2)
    mask = nm_mask(scores, key.pattern)[:, : key.columns].contiguous()
    return _masked(key, mask.to(key.dtype))


def _operand(kernel: GemmKernel, key: GemmKey, matrix: Tensor) -> Tensor | MaskedMatrix:
    """What a kernel packs: a matrix and its mask, but no mask of what is drawn for each GEMM."""
    if key.packs_each_time:
        return matrix.contiguous()
    return _masked(key, matrix, _order(key, kernel))


def _pack(kernel: GemmKernel, operand: Tensor | MaskedMatrix) -> Any:
    if isinstance(operand, MaskedMatrix):
        return kernel.pack_masked(operand, kernel.layout(operand))
    return kernel.pack(operand)


def _packed(kernel: GemmKernel, key: GemmKey, matrix: Tensor) -> tuple[Any, Tensor | None]:
    """A matrix as a kernel takes it; where outputs are sparse, the mask's layout and dY."""
    if key.sparsity == "outputs":
        # The matrix is dY^T, but dY itself of a convolution.
        return kernel.layout(_needed(key)), matrix.t().contiguous() if key.conv is None else matrix
    if type(kernel) is GemmKernel:  # the reference multiplies the matrix as it is
        return matrix, None
    return _pack(kernel, _operand(kernel, key, matrix)), None


def _product(
    kernel: GemmKernel,
    key: GemmKey,
    operand: tuple[Any, Tensor | None],
    dense: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The GEMM of what :func:`_packed` returned, and of a dense matrix, that may first be permuted."""
    packed, grad = operand
    if order is not None:
        dense = permuted_columns(dense, order)
    return multiply(kernel, key, packed, dense, bias, grad)


PANEL_BYTES = 4 << 20
"""A dense GEMM next to a packed weight is timed with so much of a weight: more than a core's own cache, less than a
weight of interest."""


def few_rows(key: GemmKey) -> GemmKey:
    """A GEMM with the first rows of the weight, of at most :data:`PANEL_BYTES`; the same for a smaller weight.

    Example::

        >>> few_rows(GemmKey("forward", 4096, 4096, 16, torch.float32, NMPattern(2, 4), "cpu")).rows
        256
    """
    rows = max(PANEL_BYTES // (key.depth * key.dtype.itemsize) // 64 * 64, 64)
    # With groups, fewer outputs would be fewer in each group, which is another convolution.
    if key.rows <= rows or (key.conv is not None and key.conv.groups > 1):
        return key
    conv = None if key.conv is None else key.conv._replace(outputs=rows)
    return replace(key, rows=rows, conv=conv)


DENSE = GemmKernel.name
"""What decisions for the dense GEMM name."""

HYSTERESIS = 0.03
"""The fraction by which a sparse GEMM must be faster to be chosen, in training."""


class Tuner:
    """Chooses a kernel for each GEMM, and remembers it.

    A sparse kernel may run if its probe passes on the device, it supports the GEMM, and its GEMM of random
    operands agrees with the dense one, see :func:`check`. A kernel that raises is passed over. A GEMM without a
    kernel is dense, with the reason in its :class:`~lightning_nm.kernels.tuner.Decision`.

    A decision holds for the bucket of a token count; a count in it that the kernel does not support is dense.

    Args:
        kernels: ``"auto"`` takes the fastest as measured, a sparse kernel only if ``dense / (sparse + pack / reuse)``
            is at least ``1 + hysteresis``. ``"sparse"`` takes the first kernel that is right, ``"reference"`` none.
        registry: The kernels, the sparse ones in order of preference.
        decisions: Known decisions, to which ``"auto"`` adds; other modes take only the environment from them.
        timer: Measures times for ``"auto"``.
        reuse: GEMMs that use one pack of a weight; output gradients are packed for each GEMM.
        hysteresis: The margin of a sparse kernel.

    Raises:
        ValueError: If the mode is unknown or `reuse` is less than 1.
    """

    def __init__(
        self,
        kernels: str,
        registry: KernelRegistry,
        decisions: Decisions,
        timer: DeviceTimer,
        reuse: int = 1,
        hysteresis: float = HYSTERESIS,
    ) -> None:
        check_mode(kernels)
        if reuse < 1:
            raise ValueError(f"reuse={reuse!r} must be at least 1")
        self.kernels = kernels
        self.registry = registry
        self.decisions = decisions if kernels == "auto" else Decisions(decisions.environment)
        self.timer = timer
        self.reuse = reuse
        self.hysteresis = hysteresis

    def recall(self, key: GemmKey) -> Decision | None:
        """The decision for a GEMM, if there is one that holds under the present terms."""
        decision = self.decisions.get(key)
        return decision if decision is not None and decision.terms == self._terms(key) else None

    def nearest(self, key: GemmKey) -> Decision | None:
        """The measured decision for the most similar GEMM: of the same matrix if there is one, else of another."""

        def distance(other: GemmKey) -> tuple[bool, float]:
            # Whether their matrices or convolutions differ, then the ratios of their sizes.
            sizes = ((key.rows, other.rows), (key.depth, other.depth), (key.columns, other.columns))
            # In octaves: 100 tokens are as far from 200 as 200 are from 400.
            ratios = sum(abs(math.log2(a / b)) for a, b in sizes)
            return (key.rows, key.depth, key.conv) != (other.rows, other.depth, other.conv), ratios

        terms = self._terms(key)
        measured = [
            other
            for other, decision in self.decisions.items()
            if (decision.source, decision.terms) == ("measured", terms)
            and (other.dtype, other.pattern) == (key.dtype, key.pattern)
            and (other.conv is None) == (key.conv is None)
        ]
        return self.decisions[min(measured, key=distance)] if measured else None

    def decide(self, key: GemmKey, packed: Any = None) -> Decision:
        """Decide for a GEMM, or recall the decision.

        In ``"auto"`` an unknown GEMM is measured: call :meth:`tune` before a CUDA graph is captured.

        Args:
            key: The GEMM.
            packed: Its operand in the form of the only kernel, if it is packed already, as in a packed layer: to pack
                another one would take longer than the GEMM, and more memory.
        """
        decision = self.recall(key) or self._remember(key, self._decide(key, packed))
        # The decision holds for the whole bucket; the kernel may still refuse this very size, or have failed at it.
        reason = self.registry.reason_against(decision.kernel, key)
        if reason:
            return Decision(DENSE, reason=f"{decision.kernel}: {reason}")
        return decision

    def tune(
        self, keys: Iterable[GemmKey], budget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Decide for many GEMMs within a budget of time, in ``"auto"`` in descending order of cost.

        The cost is the multiply-adds, times how often a GEMM is among the keys. When the budget is used up, the rest
        is postponed: dense until a later call measures it. The last measurement may exceed the budget. With several
        processes one tunes, and all :meth:`take_over` what :func:`~lightning_nm.kernels.tuner.share` returns.
        """
        costs: Counter[GemmKey] = Counter()
        sizes: dict[GemmKey, GemmKey] = {}  # a bucket is measured at a size that occurs
        for key in keys:
            bucket = bucketed(key)
            costs[bucket] += multiply_adds(bucket)
            sizes.setdefault(bucket, key)
        end = clock() + budget_s
        for bucket, _ in costs.most_common():
            key = sizes[bucket]
            known = self.recall(key)
            # A decision that an earlier call postponed is known, but is still to be measured.
            if self.kernels == "auto" and (known is None or known.source != "measured"):
                reason = f"not measured yet: the budget of {budget_s:g} s is used up"
                decision = Decision(DENSE, reason=reason, source="postponed")
                if clock() < end:
                    decision = self._decide(key)
                self._remember(key, decision)
            # Other modes decide here; in "auto" this asks whether the kernel supports the size.
            self.decide(key)

    def take_over(self, decisions: Decisions) -> None:
        """Merge in other decisions, which replace those for the same GEMMs."""
        for key, decision in self.decisions.items():
            decisions._decisions.setdefault(key, decision)  # nothing that is to be saved
        self.decisions = decisions

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a GEMM right; each is checked when the iterator reaches it.

        Kernels for other types of devices are not noted, unless there are no others.
        """
        # Of an empty GEMM the comparison would divide by a norm of 0.
        if not multiply_adds(key):
            notes.append("the GEMM is empty")
            return
        for kernel in self.registry.made_for(key.device):
            # The registry is asked first: the check runs the kernel, which may not exist for this device.
            if reason := self.registry.reason(kernel, key):
                notes.append(f"{kernel.name}: {reason}")
                continue
            ways = [kernel]
            # The other modes take what is right without measuring, and the same in every run.
            if self.kernels == "auto":
                try:
                    ways = self.registry.searched(kernel, key)
                except Exception as error:
                    notes.append(f"{kernel.name}: its search failed, {describe_error(error)}")
            for way in ways:
                if reason := reason_or_error(partial(check, way, key)):
                    notes.append(f"{way.name}: {reason}")
                else:
                    yield way

    def _terms(self, key: GemmKey) -> str:
        """The conditions under which a decision holds, as text; a stored one with other terms is made again."""
        uses = uses_of_pack(key, self.reuse)
        # All kernels are named, not the chosen one alone: among others the choice may be another.
        terms = f"kernels {self.registry}; reuse {uses}; hysteresis {self.hysteresis:g}"
        if torch.are_deterministic_algorithms_enabled():
            terms += "; deterministic"
        for kernel in self.registry.made_for(key.device):
            # An error must not end the training, as that of a probe does not.
            if conditions := reason_or_error(partial(kernel.conditions, key)):
                terms += f"; {kernel.name} {conditions}"
        return terms

    def _remember(self, key: GemmKey, decision: Decision) -> Decision:
        """Store a decision with the terms under which it was made."""
        self.decisions[key] = decision = replace(decision, terms=self._terms(key))
        return decision

    def _decide(self, key: GemmKey, packed: Any = None) -> Decision:
        """Decide for a GEMM by the mode."""
        if self.kernels == "reference":
            return Decision(DENSE, reason="mode 'reference'", source="forced")
        if self.kernels == "auto":
            found = self._measured(key, packed)
            if packed is not None and found.source == "measured" and found.kernel == DENSE:
                # Other work on the machine can slow one of the two down for a moment, and a packed layer does not go
                # back from dense.
                return self._measured(key, packed)
            return found
        notes: list[str] = []
        # No kernel after the first right one is tried.
        for kernel in self.legal(key, notes):
            reason = "; ".join(["mode 'sparse'", *notes])
            return Decision(kernel.name, reason=reason, source="forced")
        return Decision(DENSE, reason="; ".join(notes) or NO_KERNEL)

    def _measured(self, key: GemmKey, packed: Any) -> Decision:
        """Take the fastest kernel if its speedup reaches the margin, else the reference."""
        notes: list[str] = []
        dense_times: list[float] = []
        times: dict[str, tuple[float, float]] = {}  # of the GEMM and of packing, by kernel
        # A dense weight next to the packed one would take its memory: a few of its rows stand for all.
        part = key if packed is None else few_rows(key)
        for kernel in self.legal(part, notes):
            try:
                # Before and after each kernel: a GPU at its power limit slows down while it works.
                if not dense_times:
                    dense_times.append(dense_ms(part, self.timer))
                times[kernel.name] = sparse_ms(kernel, key, self.timer, packed)
                dense_times.append(dense_ms(part, self.timer))
            except Exception as error:
                notes.append(f"{kernel.name}: {describe_error(error)}")
        if not times:
            return Decision(DENSE, reason="; ".join(notes) or NO_KERNEL)
        # The time of a dense GEMM is taken to grow with its rows.
        dense = fmean(dense_times) * (key.rows / part.rows)
        uses = uses_of_pack(key, self.reuse)
        gains = {name: dense / (product + pack / uses) for name, (product, pack) in times.items()}
        # Of equally fast ones the first: the kernels are in order of preference.
        best = max(gains, key=gains.__getitem__)
        least_gain = 1 + self.hysteresis
        measured = ", ".join(f"{name} {gain:.3f}x" for name, gain in gains.items())
        return Decision(
            best if gains[best] >= least_gain else DENSE,
            dense,
            *times[best],
            "; ".join([f"measured {measured}; sparse from {least_gain:g}x", *notes]),
            "measured",
        )
