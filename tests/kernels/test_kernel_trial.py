"""A kernel's trial: its GEMM next to the dense one, and how both are timed."""

from types import SimpleNamespace

import pytest
import torch

from lightning_nm import functional as nmf
from lightning_nm.kernels import tuner as checks
from lightning_nm.kernels.api import GemmKernel
from tests.support.fake_kernels import DENSE, FakeKernel, FakeTimer, Flickering, gemm_key

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GEMMS = ["forward", "dgrad", "wgrad"]
of_each_gemm = pytest.mark.parametrize("gemm", GEMMS)


class Recorder(FakeKernel):
    """Keeps what it is given."""

    def pack(self, matrix):
        self.matrix = matrix
        return super().pack(matrix)

    def linear(self, packed, x, bias=None):
        self.other = x
        return super().linear(packed, x, bias)

    def matmul(self, packed, matrix):
        self.other = matrix
        return super().matmul(packed, matrix)


@pytest.mark.parametrize("pattern", ["2:4", "1:12"])  # 12 does not divide 64
@pytest.mark.parametrize(
    ("gemm", "dtype"), list(zip(GEMMS, [torch.bfloat16, torch.float16, torch.float32], strict=True))
)
def test_the_operands_are_those_of_the_key(gemm, dtype, pattern):
    key = gemm_key(gemm, dtype=dtype, pattern=pattern)
    kernel, whole = Recorder(), 64 // key.pattern.m
    assert checks.check(kernel, key) == ""
    assert (kernel.matrix.shape, kernel.matrix.dtype) == ((32, 64), dtype)
    assert nmf.is_nm(kernel.matrix[:, : whole * key.pattern.m], key.pattern)
    assert kernel.matrix.count_nonzero() >= 32 * whole * key.pattern.n - 1
    assert kernel.other.shape == ((64, 128) if gemm == "wgrad" else (128, 64))
    assert kernel.other.is_contiguous()
    assert kernel.other.float().std().item() == pytest.approx(1, abs=0.1)


def nan(product):
    product[3, 5] = float("nan")
    return product


@of_each_gemm
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (nan, "wrong by nan"),
        (lambda product: product * float("inf"), "wrong by"),
        (lambda product: product * 1.02, "wrong by 0.02 of"),
        (lambda product: -product, "wrong by 2 of"),
        (torch.zeros_like, "wrong by 1 of"),
        (lambda product: product[:1], "not {}"),
        (lambda product: product.float(), "not {} torch.bfloat16"),
    ],
)
def test_a_wrong_product_is_found(gemm, spoil, words):
    objection = checks.check(FakeKernel(spoil=spoil), gemm_key(gemm))
    assert words.format("(32, 128)" if gemm == "wgrad" else "(128, 32)") in objection


class Own(GemmKernel):
    """A kernel whose linear() is a function of the operands and of the right GEMM."""

    def __init__(self, own):
        self.own = own

    def linear(self, packed, x, bias=None):
        return self.own(packed, x, bias, super().linear)


def halves(packed, x, bias, linear):
    """Sums that are rounded on the way."""
    parts = zip(packed.chunk(2, 1), x.chunk(2, 1), strict=True)
    total = sum(linear(a, b) for a, b in parts)
    return total if bias is None else total + bias


def too_large(packed, x, bias, linear):
    """Wrong by less than a bias, which is several times as large as the GEMM of a sparse matrix."""
    product = linear(packed, x) * (1 + 2 * checks.TOLERANCE_FLOAT32)
    return product if bias is None else product + bias


@pytest.mark.parametrize(
    ("own", "key", "words"),
    [
        (lambda packed, x, bias, linear: linear(packed, x), gemm_key(), "wrong by"),
        (lambda packed, x, bias, linear: linear(packed, x), gemm_key("dgrad"), ""),
        (too_large, gemm_key(pattern="1:16", dtype=torch.float32), "wrong by 0.0002 of"),
        (halves, gemm_key(depth=1024, dtype=torch.bfloat16), ""),
        (halves, gemm_key(depth=1024, dtype=torch.float16), ""),
    ],
    ids=["no bias", "no bias in dgrad", "too large", "halves", "halves in float16"],
)
def test_the_tolerance(own, key, words):
    objection = checks.check(Own(own), key)
    assert words in objection
    assert bool(objection) == bool(words)


@of_each_gemm
@pytest.mark.parametrize("call", [0, 1, checks.REPEATS])
def test_a_product_that_changes_is_refused_where_deterministic_algorithms_are_asked_for(
    gemm, call, deterministic
):
    class Packing(FakeKernel):
        def pack(self, matrix):
            return super().pack(matrix) * (1 if len(self.calls) < 3 else 1.01)

    fault = "gives other bits when it is repeated, and deterministic algorithms are asked for"
    assert checks.check(FakeKernel(), gemm_key(gemm)) == ""
    assert checks.check(Packing(), gemm_key(gemm)) == fault
    assert checks.check(FakeKernel(spoil=Flickering(call)), gemm_key(gemm)) == fault
    torch.use_deterministic_algorithms(False)
    assert checks.check(FakeKernel(spoil=Flickering(call)), gemm_key(gemm)) == ""


@of_each_gemm
def test_kernels_that_change_operands_or_share_results_are_refused(gemm):
    class Greedy(Recorder):
        def __init__(self):
            super().__init__(spoil=self.greedy)

        def greedy(self, product):
            self.other.zero_()
            return product

    kept = []

    def one_buffer(product):
        kept.append(product)
        return kept[0].copy_(product)

    key = gemm_key(gemm, dtype=torch.float32)
    assert checks.check(Greedy(), key) == "changes its operands"
    fault = "returns the same memory for two GEMMs"
    assert checks.check(FakeKernel(spoil=one_buffer), key) == fault


def test_tokens_of_an_estimate_are_padded():
    class Strict(GemmKernel):
        def matmul(self, packed, matrix):
            return packed @ matrix

    key = gemm_key("wgrad", depth=13, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        checks.check(Strict(), key)
    assert checks.check(GemmKernel(), key) == ""


# ---------------------------------------------------------------------------------------------------------- timing


def test_training_goes_on_as_if_nothing_was_tried():
    weight = torch.randn(4, 4, requires_grad=True)
    state = torch.get_rng_state()
    seen = []

    def spoil(product):
        seen.append(torch.is_autocast_enabled("cpu") or (weight * weight).requires_grad)
        return product

    kernel = FakeKernel(spoil=spoil)
    timer = FakeTimer([kernel], dense=1, fast=(1, 1))
    key = gemm_key(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert checks.check(kernel, key) == ""
        checks.dense_ms(key, timer)
        checks.sparse_ms(kernel, key, timer)
    assert seen == [False] * 4
    assert torch.equal(torch.get_rng_state(), state)


@of_each_gemm
def test_what_is_timed(gemm):
    kernel = FakeKernel()
    timer = FakeTimer([kernel], dense=7, fast=(4, 1.5))
    assert checks.dense_ms(gemm_key(gemm), timer) == pytest.approx(7)
    assert checks.sparse_ms(kernel, gemm_key(gemm), timer) == pytest.approx((4, 1.5))
    product = "matmul" if gemm == "wgrad" else "linear"
    assert timer.timed == [DENSE, ("fast", product), ("fast", "pack")]


class Watching:
    """A timer that keeps what a function finds of what is timed."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def time(self, function, device):
        self.seen.append(self.look(function))
        return 1.0


@of_each_gemm
def test_what_is_timed_copies_no_operand(gemm):
    """What makes the operands writes them in the order that GEMMs take: W and dY as they are, and transposed."""

    def copies(function):
        with torch.profiler.profile() as profile:
            function()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")

    timer, key = Watching(copies), gemm_key(gemm, dtype=torch.float32)
    checks.dense_ms(key, timer)
    kernel = Own(lambda packed, x, bias, linear: linear(packed, x, bias))
    checks.sparse_ms(kernel, key, timer)
    assert timer.seen == [0, 0, 0]


@pytest.fixture
def cache(monkeypatch):
    """Makes a GPU's cache as large as so many bytes."""

    def become(size):
        properties = SimpleNamespace(L2_cache_size=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return become


def test_operands_are_rotated_past_the_cache(cache, monkeypatch):
    cache(3 * 4096)
    on_cuda = checks.copies_past_cache
    monkeypatch.setattr(checks, "copies_past_cache", lambda size, device: on_cuda(size, CUDA))
    timer = Watching(lambda function: len({function().data_ptr() for _ in range(20)}))
    kernel = Own(lambda packed, x, bias, linear: x)
    checks.sparse_ms(kernel, gemm_key(), timer)  # 4096 bytes of A, 16384 of x
    assert timer.seen == [2, 7]


@pytest.mark.parametrize(("size", "copies"), [(1 << 30, 1), (121, 1), (120, 2), (50, 3), (1, 32)])
def test_copies_exceed_twice_the_cache(cache, size, copies):
    cache(60)
    assert checks.copies_past_cache(size, CUDA) == copies
    assert checks.copies_past_cache(size, CPU) == 1


class Clock:
    """A clock that only the timed function moves."""

    def __init__(self, *durations):
        self.now, self.calls = 0.0, 0
        self.durations = iter(durations)

    def __call__(self):
        return self.now

    def work(self):
        self.calls += 1
        self.now += next(self.durations)


@pytest.mark.parametrize(
    ("options", "durations", "seconds", "calls"),
    [
        # The median of samples after a warm-up.
        (
            (2, 3, 4),
            [1e-3, 1e-1, *[1e-4] * 4, 2e-4, 3e-4, 2e-4, 3e-4, 5e-2, *[1e-4] * 3],
            2.5e-4,
            2 + 3 * 4,
        ),
        # One call tells how many make a sample of 10 ms.
        *(
            ((0, 5, 10), [duration] * 100, duration, 1 + 5 * calls)
            for duration, calls in ((1e-5, 10), (1e-3, 10), (2.5e-3, 4), (1e-2, 1), (0.0, 10))
        ),
        # Long calls are few.
        ((3, 7, 10), [3.0] * 100, 3.0, 1 + 3),
    ],
)
def test_samples_on_the_host(options, durations, seconds, calls, monkeypatch):
    clock = Clock(*durations)
    monkeypatch.setattr(checks, "perf_counter", clock)
    assert checks.DeviceTimer(*options).time(clock.work, CPU) == pytest.approx(seconds)
    assert clock.calls == calls


def test_events_of_the_device(monkeypatch):
    """CUDA events on a device that runs behind the host: an event has its time once it was waited for."""
    clock, used = Clock(*[100], *[0.25, 0.25], *[0.5, 0.25], *[9, 9]), []

    class Using:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            used.append(self.device)

        def __exit__(self, *error):
            used.pop()

    class Event:
        seen = False

        def __init__(self, enable_timing):
            assert enable_timing
            assert used == [torch.device("cuda:1")]

        def record(self):
            self.time = clock()

        def synchronize(self):
            self.seen = True

        def elapsed_time(self, end):
            assert end.seen
            return 1e3 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", Using)
    seconds = checks.DeviceTimer(warmup=1, samples=3, calls=2).time(
        clock.work, torch.device("cuda:1")
    )
    assert seconds == pytest.approx(0.375)
