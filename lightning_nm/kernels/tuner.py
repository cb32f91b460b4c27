"""The choice of a kernel for each product."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from lightning_nm.kernels import cost, trial
from lightning_nm.kernels.api import GemmKey
from lightning_nm.kernels.cache import Decision, Decisions, Source
from lightning_nm.kernels.cost import DeviceModel
from lightning_nm.kernels.keys import bucketed, multiply_adds
from lightning_nm.kernels.registry import KernelRegistry, failure
from lightning_nm.kernels.timing import Timer

_DETERMINISTIC = "; deterministic"

MODES = ("auto", "sparse", "reference", "heuristic", "replay:FILE")


def check_mode(mode: str) -> None:
    """Refuse a mode that :class:`Chooser` does not know.

    Raises:
        ValueError: Naming those that there are.
    """
    if mode not in MODES[:-1] and not (mode.startswith("replay:") and mode != "replay:"):
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")


class Chooser:
    """Chooses a kernel for each product, and remembers it.

    Before a sparse kernel may run, its probe must pass on the device, it must support the product, and its product of
    random operands must agree with the dense one; a kernel that raises is passed over. A product without a kernel
    is dense, with the reason in its :class:`~lightning_nm.kernels.cache.Decision`.

    Under ``torch.use_deterministic_algorithms(True)`` a kernel must also repeat its product bit for bit; decisions that
    were made without that check do not hold there.

    A decision is made for the bucket of a token count and holds for all of it; a count within the bucket that the
    kernel does not support is dense.

    Args:
        mode: ``"auto"`` takes the fastest as measured, a sparse kernel only if ``dense / (sparse + pack / reuse)`` is
            at least ``1 + hysteresis``. ``"heuristic"`` does the same with predicted times. ``"sparse"`` takes the
            first kernel that is legal, ``"reference"`` none. ``"replay:FILE"`` takes what is recorded in a file, and
            the reference for a product that is not.
        registry: The kernels, the sparse ones in order of preference.
        decisions: Known decisions, to which ``"auto"`` adds; other modes take the environment alone from them.
        timer: Measures times for ``"auto"``.
        device_model: Figures for ``"heuristic"``, and for ``"auto"`` where its budget ends.
        hysteresis: The share by which a sparse product must be faster.
        reuse: Products that use one pack of a weight: the micro-batches of an optimizer step. Output gradients are
            packed for each product.

    Raises:
        ValueError: If the mode is unknown, has no device model where it needs one, or has nothing to replay, or if
            `reuse` or `hysteresis` is out of range.
    """

    def __init__(
        self,
        mode: str,
        registry: KernelRegistry,
        decisions: Decisions,
        timer: Timer,
        device_model: DeviceModel | None = None,
        hysteresis: float = 0.03,
        reuse: int = 1,
    ) -> None:
        check_mode(mode)
        name, _, path = mode.partition(":")
        if mode == "heuristic" and device_model is None:
            raise ValueError("mode='heuristic' predicts times: pass the figures of the GPU as device_model")
        if hysteresis < 0 or reuse < 1:
            raise ValueError(f"hysteresis={hysteresis!r} must be at least 0, and reuse={reuse!r} at least 1")
        self.registry = registry
        self.mode = mode
        self.decisions = decisions if mode == "auto" else Decisions(decisions.environment)
        if name == "replay":
            self.decisions = Decisions.load(path, decisions.environment)
            if not self.decisions:
                raise ValueError(
                    f"mode={mode!r} has nothing to replay: {self.decisions.ignored or 'the file is empty'}"
                )
        self.timer = timer
        self.device_model = device_model
        self.hysteresis = hysteresis
        self.reuse = reuse
        self._decide = {
            "auto": self._measured,
            "sparse": self._forced,
            "reference": self._dense,
            "heuristic": self._predicted,
            "replay": self._unrecorded,
        }[name]

    def decide(self, key: GemmKey) -> Decision:
        """Decide for a product, or recall the decision.

        In ``"auto"`` a product that is not known yet is measured, which must not happen while a CUDA graph is being
        captured: :meth:`tune` beforehand.
        """
        bucket = bucketed(key)
        if not self._known(bucket):
            self._settle(bucket, self._decide(key))
        decision = self.decisions[bucket]
        kernel = self.registry.kernels.get(decision.kernel)
        if kernel is None:
            decision = _default([f"{decision.kernel} is not among the kernels"])
        elif reason := self.registry.reason(kernel, key):
            decision = _default([f"{decision.kernel}: {reason}"])
        return decision

    def tune(self, keys: Iterable[GemmKey], budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Decide for many products within a time, in ``"auto"`` those first that cost most.

        The cost of a product is its multiply-adds, times how often it is among the keys. When the time is used up, the
        rest gets predicted decisions, or without a device model the reference; a later call measures them. The last
        measurement may exceed the time. With several processes one tunes, and all go on with
        ``chooser.decisions = share(chooser.decisions)``.

        Args:
            keys: The products of a step; repeated keys count.
            budget_s: Seconds.
            clock: Tells seconds.
        """
        counts: Counter[GemmKey] = Counter()
        sizes: dict[GemmKey, GemmKey] = {}  # what is measured for a bucket is a size that occurs
        for key in keys:
            counts[bucketed(key)] += 1
            sizes.setdefault(bucketed(key), key)
        end = clock() + budget_s
        for bucket in sorted(counts, key=lambda bucket: counts[bucket] * multiply_adds(bucket), reverse=True):
            key = sizes[bucket]
            if self.mode == "auto" and not (self._known(bucket) and self.decisions[bucket].source == "measured"):
                self._settle(bucket, self._measured(key) if clock() < end else self._left(key, budget_s))
            self.decide(key)

    def _uses(self, key: GemmKey) -> int:
        return 1 if key.gemm == "wgrad" else self.reuse

    def _terms(self, key: GemmKey) -> str:
        terms = f"kernels {self.registry}; reuse {self._uses(key)}; hysteresis {self.hysteresis:g}"
        return terms + _DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else terms

    def _known(self, key: GemmKey) -> bool:
        decision = self.decisions.get(key)
        if decision is None or self.mode == "auto":
            return decision is not None and decision.terms == self._terms(key)
        return (
            decision.kernel == self.registry.reference.name
            or decision.terms.endswith(_DETERMINISTIC)
            or not torch.are_deterministic_algorithms_enabled()
        )

    def _settle(self, key: GemmKey, decision: Decision) -> None:
        self.decisions[key] = replace(decision, terms=self._terms(key))

    def _measured(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        dense: list[float] = []
        times = {}
        for kernel in self.registry.legal(key, notes):
            try:
                # Before and after each kernel: a GPU at its power limit slows down while it works.
                dense = dense or [trial.dense_ms(key, self.timer)]
                times[kernel.name] = trial.sparse_ms(kernel, key, self.timer)
                dense.append(trial.dense_ms(key, self.timer))
            except Exception as error:
                notes.append(f"{kernel.name}: {failure(error)}")
        if not times:
            return _default(notes)
        return self._compared(key, fmean(dense), times, notes, "measured")

    def _predicted(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        kernel = next(self.registry.legal(key, notes), None)
        model = self.device_model
        if kernel is None or model is None:
            return _default(notes)
        try:
            dense_ms, sparse_ms, pack_ms = (
                cost.dense_ms(key, model),
                cost.sparse_ms(key, model),
                cost.pack_ms(key, model),
            )
        except ValueError as error:
            return _default([*notes, str(error)])
        return self._compared(key, dense_ms, {kernel.name: (sparse_ms, pack_ms)}, notes, "predicted")

    def _compared(
        self, key: GemmKey, dense_ms: float, times: dict[str, tuple[float, float]], notes: list[str], source: Source
    ) -> Decision:
        gains = {name: cost.speedup(dense_ms, *pair, self._uses(key)) for name, pair in times.items()}
        best = max(gains, key=lambda name: gains[name])
        least = 1 + self.hysteresis
        figures = [f"{name} {gain:.3f}x" for name, gain in gains.items()]
        notes = [f"{source} {', '.join(figures)}; sparse from {least:g}x", *notes]
        kernel = best if gains[best] >= least else "reference"
        return Decision(kernel, dense_ms, *times[best], "; ".join(notes), source)

    def _forced(self, key: GemmKey) -> Decision:
        notes: list[str] = []
        kernel = next(self.registry.legal(key, notes), None)
        if kernel is None:
            return _default(notes)
        return Decision(kernel.name, None, None, None, "; ".join([f"mode {self.mode!r}", *notes]), "forced")

    def _dense(self, key: GemmKey) -> Decision:
        return Decision("reference", None, None, None, f"mode {self.mode!r}", "forced")

    def _unrecorded(self, key: GemmKey) -> Decision:
        how = " as deterministic" if torch.are_deterministic_algorithms_enabled() else ""
        return _default([f"not recorded{how} in {self.mode.partition(':')[2]}"])

    def _left(self, key: GemmKey, budget_s: float) -> Decision:
        why = f"the budget of {budget_s:g} s is used up"
        if self.device_model is None:
            return _default([why])
        decision = self._predicted(key)
        return replace(decision, reason=f"{why}; {decision.reason}")


def _default(notes: Sequence[str]) -> Decision:
    return Decision("reference", None, None, None, "; ".join(notes) or "there is no sparse kernel", "default")
