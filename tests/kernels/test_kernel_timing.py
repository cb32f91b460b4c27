from types import SimpleNamespace

import pytest
import torch

from lightning_nm.kernels import tuner as timing


class Clock:
    """A clock that only the timed function moves."""

    def __init__(self, *durations):
        self.now = 0.0
        self.durations = iter(durations)
        self.calls = 0

    def __call__(self):
        return self.now

    def work(self):
        self.calls += 1
        self.now += next(self.durations)


def test_the_median_of_samples_after_a_warm_up(monkeypatch):
    clock = Clock(*[1e-3, 1e-1], *[1e-4] * 4, *[2e-4, 3e-4, 2e-4, 3e-4], *[5e-2, 1e-4, 1e-4, 1e-4])
    monkeypatch.setattr(timing, "perf_counter", clock)
    seconds = timing.DeviceTimer(warmup=2, samples=3, calls=4).time(clock.work, torch.device("cpu"))
    assert seconds == pytest.approx(2.5e-4)
    assert clock.calls == 2 + 3 * 4


@pytest.mark.parametrize(
    ("duration", "calls"), [(1e-5, 10), (1e-3, 10), (2.5e-3, 4), (1e-2, 1), (0.0, 10)]
)
def test_a_sample_on_the_host_is_long_enough_and_no_longer(monkeypatch, duration, calls):
    clock = Clock(*[duration] * 100)
    monkeypatch.setattr(timing, "perf_counter", clock)
    seconds = timing.DeviceTimer(warmup=0, samples=5, calls=10).time(
        clock.work, torch.device("cpu")
    )
    assert seconds == pytest.approx(duration)
    assert clock.calls == 1 + 5 * calls, "one call tells how many make a sample of 10 ms"


def test_long_calls_are_few(monkeypatch):
    clock = Clock(*[3.0] * 100)
    monkeypatch.setattr(timing, "perf_counter", clock)
    assert (
        timing.DeviceTimer(warmup=3, samples=7, calls=10).time(clock.work, torch.device("cpu"))
        == 3.0
    )
    assert clock.calls == 1 + 3


class Events:
    """CUDA events on a device that runs behind the host: an event has its time once it was waited for."""

    def __init__(self, clock):
        self.clock = clock
        self.device = None

    def use(self, device):
        events = self

        class Using:
            def __enter__(self):
                events.device = device

            def __exit__(self, *error):
                events.device = None

        return Using()

    def event(self, enable_timing):
        assert enable_timing
        clock, device = self.clock, self.device
        assert device == torch.device("cuda:1")
        event = SimpleNamespace(time=None, seen=False)
        event.record = lambda: setattr(event, "time", clock())
        event.synchronize = lambda: setattr(event, "seen", True)

        def elapsed_time(end):
            assert end.seen
            return 1e3 * (end.time - event.time)

        event.elapsed_time = elapsed_time
        return event


def test_events_of_the_device(monkeypatch):
    clock = Clock(*[100], *[0.25, 0.25], *[0.5, 0.25], *[9, 9])
    events = Events(clock)
    monkeypatch.setattr(torch.cuda, "Event", events.event)
    monkeypatch.setattr(torch.cuda, "device", events.use)
    seconds = timing.DeviceTimer(warmup=1, samples=3, calls=2).time(
        clock.work, torch.device("cuda:1")
    )
    assert seconds == pytest.approx(0.375)


@pytest.mark.parametrize(("size", "copies"), [(1 << 30, 1), (121, 1), (120, 2), (50, 3), (1, 32)])
def test_copies_exceed_twice_the_cache(monkeypatch, size, copies):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60)
    )
    assert timing.copies_past_cache(size, torch.device("cuda")) == copies
    assert timing.copies_past_cache(size, torch.device("cpu")) == 1


def test_copies_are_taken_in_turn():
    seen = []
    call = timing.rotated(lambda *operands: seen.append(operands), [1, 2, 3], ["a"])
    for _ in range(4):
        call()
    assert seen == [(1, "a"), (2, "a"), (3, "a"), (1, "a")]
