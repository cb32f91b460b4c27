"""The times of each product of the masked layers, dense and as chosen, and their sums. Nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from lightning_nm.kernels.api import bucketed, multiply_adds, uses_of_pack
from lightning_nm.kernels.router.registry import KernelRegistry, reason_or_error
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.kernels.router.tuner import speedup
from lightning_nm.nn.products.routed_ops import GEMMS
from lightning_nm.sparsifier import NMSparsifier


@dataclass(frozen=True)
class Row:
    """One GEMM of a layer, with the chosen kernel and measured times, None where they are unknown.

    Example::

        >>> import torch
        >>> from lightning_nm.functional.pattern import NMPattern
        >>> from lightning_nm.kernels import GemmKey
        >>> key = GemmKey("forward", 64, 32, 128, torch.bfloat16, NMPattern(2, 4), "cuda:0")
        >>> product = Product("head", key)
        >>> row = Row(product, 1, "cusparselt", "faster", pack_uses=4, dense_ms=3.0, sparse_ms=1.0, pack_ms=2.0)
        >>> row.chosen_ms, row.gain
        (1.5, 2.0)
    """

    product: Product
    calls: float  # in an optimizer step, in all of its micro-batches
    kernel: str
    why: str  # why this kernel was chosen, or why no other one can run
    pack_uses: int  # products that share one packed operand
    dense_ms: float | None = None
    sparse_ms: float | None = None  # of the best sparse product without packing, chosen or not
    pack_ms: float | None = None  # of packing its operand once
    # Where nothing is measured: kernels that fit the dtype, pattern and sizes.
    could: tuple[str, ...] = ()

    @property
    def sparse(self) -> bool:
        """Whether a sparse kernel was chosen."""
        return self.kernel != "reference"

    @property
    def eligible(self) -> bool:
        """Whether a sparse kernel can run the product, as far as is known."""
        if self.product.reason:
            return False
        was_measured = self.sparse_ms is not None
        return self.sparse or was_measured or bool(self.could)

    @property
    def chosen_ms(self) -> float | None:
        """Milliseconds as chosen: the dense ones, or ``sparse + pack / pack_uses``."""
        if not self.sparse:
            return self.dense_ms
        if self.sparse_ms is None or self.pack_ms is None:
            return None
        return self.sparse_ms + self.pack_ms / self.pack_uses

    @property
    def gain(self) -> float | None:
        """``dense / (sparse + pack / pack_uses)``, chosen or not; None if a time is unknown."""
        if self.dense_ms is None or self.sparse_ms is None or self.pack_ms is None:
            return None
        return speedup(self.dense_ms, self.sparse_ms, self.pack_ms, self.pack_uses)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as primitives, for JSON."""
        key = self.product.key
        content = {"layer": self.product.layer, **vars(key), **vars(self)}
        del content["device"]  # that of the machine
        del content["product"]  # its parts are entries of their own
        content["dtype"] = str(key.dtype).removeprefix("torch.")
        content["pattern"] = str(key.pattern)
        content["could"] = list(self.could)
        content["eligible"] = self.eligible
        content["chosen_ms"] = self.chosen_ms
        content["gain"] = self.gain
        return content


@dataclass(frozen=True)
class Report:
    """The products of a training step with their times, as :func:`report` returns them.

    Example::

        >>> empty = Report(rows=(), kernels="auto", skipped={}, unseen=(), step_ms=8.0, plain_step_ms=6.0)
        >>> empty.predicted_step_ms, empty.speedup
        (8.0, 0.75)
    """

    rows: tuple[Row, ...]  # in the order of layers, each with its forward, dgrad and wgrad
    # The router's mode; None where no sparse kernel works and nothing is chosen.
    kernels: str | None
    skipped: dict[str, str]  # why other layers are dense
    unseen: tuple[str, ...]  # masked layers without a product
    tokens: int | None = None  # the assumed token count; None for the real ones
    step_ms: float | None = None  # measured, under masks, with dense products
    plain_step_ms: float | None = None  # measured, of the same training without masks
    # Of a report on a CPU: products that could run sparse on a GPU, by dtype, pattern, sizes.
    on_gpu: int | None = None

    @property
    def timed(self) -> tuple[Row, ...]:
        """The rows with times, dense and as chosen."""
        with_dense_time = (row for row in self.rows if row.dense_ms is not None)
        return tuple(row for row in with_dense_time if row.chosen_ms is not None)

    @property
    def dense_ms(self) -> float:
        """Milliseconds of the timed rows in a step if all were dense."""
        return sum(row.calls * (row.dense_ms or 0.0) for row in self.timed)

    @property
    def chosen_ms(self) -> float:
        """Milliseconds of the timed rows in a step on the chosen kernels."""
        return sum(row.calls * (row.chosen_ms or 0.0) for row in self.timed)

    @property
    def _untimed_choices(self) -> list[Row]:
        """The rows on a sparse kernel without times."""
        timed = self.timed
        return [row for row in self.rows if row.sparse and row not in timed]

    @property
    def predicted_step_ms(self) -> float | None:
        """``step - sum(dense - chosen)`` under masks; None if the step or a sparse product has no time."""
        if self.step_ms is None:
            return None
        if self._untimed_choices:
            # The saving of a chosen kernel is missing, so the difference would be a guess.
            return None
        saved_ms = self.dense_ms - self.chosen_ms
        return self.step_ms - saved_ms

    @property
    def speedup(self) -> float | None:
        """``plain step / predicted step``: against training without masks; None if one is unknown or not positive."""
        return self.against_plain(self.predicted_step_ms)

    @property
    def kernel_speedup(self) -> float | None:
        """``step / predicted step``: against dense products under the same masks; None as for :attr:`speedup`."""
        return _ratio(self.step_ms, self.predicted_step_ms)

    def against_plain(self, step_ms: float | None) -> float | None:
        """Return ``plain step / step``; None if one is unknown or not positive."""
        return _ratio(self.plain_step_ms, step_ms)

    @property
    def verdict(self) -> str:
        """One sentence for the user: whether the training gains from sparse kernels."""
        chosen = [row for row in self.rows if row.sparse]
        # First the reports in which nothing was chosen or measured.
        if not self.rows:
            return "no product of a masked layer was seen, so there is nothing to say"
        if self.kernels is None:
            eligible = sum(row.eligible for row in self.rows)
            could = f"{eligible} of {len(self.rows)} products could run on a sparse kernel"
            return f"{could}, but none works here; run this command on a machine where one works to measure them"
        if self.kernels == "reference":
            return "mode 'reference' runs every product dense"
        if not chosen:
            return "no product is faster sparse: train without the plugin"
        # Some kernel is chosen; a speed is named only where every chosen product has its times.
        count = f"{len(chosen)} of {len(self.rows)} products run sparse"
        if self._untimed_choices:
            return f"{count}, but not all have a time: whether that is faster is not known"
        if self.dense_ms <= self.chosen_ms:
            return f"{count}, and that is not faster: train without the plugin"
        saved = f"{self.dense_ms:.3g} ms of their layers' GEMMs become {self.chosen_ms:.3g} ms"
        # Without masks is what users would do otherwise, so that comparison is preferred.
        if self.speedup is not None:
            return f"{count}; {saved}: a predicted step is {self.speedup:.3f}x as fast as plain dense training"
        if self.kernel_speedup is not None:
            return f"{count}; {saved}: a predicted step is {self.kernel_speedup:.3f}x as fast as under dense products"
        return f"{count}; {saved} in a step"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as primitives, for JSON."""
        # Sums over no row would read as a measured 0.0.
        dense_ms = self.dense_ms if self.timed else None
        chosen_ms = self.chosen_ms if self.timed else None
        return {
            **vars(self),
            "rows": [row.to_dict() for row in self.rows],
            "unseen": list(self.unseen),
            "dense_ms": dense_ms,
            "chosen_ms": chosen_ms,
            "untimed": len(self.rows) - len(self.timed),
            "predicted_step_ms": self.predicted_step_ms,
            "speedup": self.speedup,
            "kernel_speedup": self.kernel_speedup,
            "verdict": self.verdict,
        }


def _ratio(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or before <= 0 or after <= 0:
        return None
    return before / after


def report(
    router: Router,
    *sparsifiers: NMSparsifier,
    steps: float = 1,
    counts: Mapping[Product, float] | None = None,
    tokens: int | None = None,
    step_ms: float | None = None,
) -> Report:
    """Sum up a router's decisions for the products of masked layers.

    A decision holds for a bucket of token counts; its times are scaled to the token counts of `counts`. The router's
    own counts have their bucket's size, up to a quarter more than the real one.

    Args:
        router: After some training, or after it decided for `counts`.
        sparsifiers: Those of the model, for the order of layers and the reasons for dense ones.
        steps: Optimizer steps in which the router counted its products.
        counts: Products with their calls in one step, instead of the router's own counts.
        tokens: Noted in the report, as `step_ms`.
        step_ms: Measured milliseconds of a step with dense products.

    Raises:
        ValueError: If `steps` is not positive.

    Example::

        >>> import torch
        >>> from lightning_nm.kernels import SimulatedSparseKernel, routing
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> sparsifier = NMSparsifier(model, skip_first_last=False).attach()
        >>> router = Router("sparse", backends=[SimulatedSparseKernel()])
        >>> with routing(router):
        ...     model(torch.randn(16, 32)).sum().backward()
        >>> for row in report(router, sparsifier).rows[:3]:
        ...     print(row.product.layer, row.product.key.gemm, row.kernel, row.calls)
        0 forward simulated 1.0
        0 wgrad reference 1.0
        2 forward simulated 1.0
    """
    if not steps > 0:
        raise ValueError(
            f"steps={steps} must be positive: the optimizer steps in which the router counted"
        )
    if counts is None:
        seen: Counter[Product] = Counter()
        for used in router.used():
            seen[used.product] += used.calls
        counts = {product: calls / steps for product, calls in seen.items()}
    return summarize(partial(_row, router), router.kernels, sparsifiers, counts, tokens, step_ms)


def summarize(
    make_row: Callable[[Product, float], Row],
    kernels: str | None,
    sparsifiers: Sequence[NMSparsifier],
    counts: Mapping[Product, float],
    tokens: int | None = None,
    step_ms: float | None = None,
) -> Report:
    """Make a report of products, in the order of their layers.

    Args:
        make_row: Makes the row of a product, given its calls in a step.
        kernels: The router's mode, or ``None`` where nothing is chosen.
        sparsifiers: Those of the model.
        counts: Products with their calls in one step.
        tokens: Noted in the report, as `step_ms`.
        step_ms: Measured milliseconds of a step with dense products.
    """
    layers = chain.from_iterable(sparsifier.layers for sparsifier in sparsifiers)
    place_of_layer = {name: place for place, name in enumerate(layers)}

    def place(product: Product) -> tuple[int, int]:
        # A layer that no sparsifier knows comes last.
        layer_place = place_of_layer.get(product.layer, len(place_of_layer))
        return layer_place, GEMMS.index(product.key.gemm)

    rows = [make_row(product, counts[product]) for product in sorted(counts, key=place)]
    called = {product.layer for product in counts}
    unseen = [name for name in place_of_layer if name not in called]
    skipped = {}
    for sparsifier in sparsifiers:
        for name, reason in sparsifier.skipped.items():
            # What one sparsifier skips, another one may mask.
            if name not in place_of_layer:
                skipped[name] = reason
    return Report(
        rows=tuple(rows),
        kernels=kernels,
        skipped=skipped,
        unseen=tuple(unseen),
        tokens=tokens,
        step_ms=step_ms,
    )


def static_row(registry: KernelRegistry, reuse: int, product: Product, calls: float) -> Row:
    """Return the row of a product if nothing is measured: which kernels could run it, and why others could not."""
    key = product.key
    why_not: dict[str, str] = {}
    could = []
    if not product.reason:
        for kernel in registry.backends:
            reason = registry.sparsity_reason(kernel, key)
            if not reason:
                reason = reason_or_error(partial(kernel.static_reason, key))
            if reason:
                why_not[kernel.name] = reason
            else:
                could.append(kernel.name)
    why = product.reason
    if not why:
        why = "; ".join(f"{name}: {reason}" for name, reason in why_not.items())
    return Row(
        product=product,
        calls=calls,
        kernel=registry.reference.name,
        why=why,
        pack_uses=uses_of_pack(key, reuse),
        could=tuple(could),
    )


def _row(router: Router, product: Product, calls: float) -> Row:
    """Return the row of a product as a router decided, its times scaled from the bucket to the real size."""
    key = product.key
    registry = router.registry
    pack_uses = uses_of_pack(key, router.pack_reuse(key.device))
    decision = None
    if not product.reason and router.tuner is not None:
        decision = router.tuner.decisions.get(key)
    if decision is None:
        why = product.reason or "not decided"
        return Row(product, calls, registry.reference.name, why, pack_uses)

    name = decision.kernel
    why = decision.reason
    # The decision holds for a bucket: the kernel may support the bucket's size and not this one.
    reason_against = registry.reason_against(name, key)
    if reason_against:
        why = f"{name}: {reason_against}"
        name = registry.reference.name

    share = multiply_adds(key) / (multiply_adds(bucketed(key)) or 1)
    # Packing an output gradient takes time by the token; packing a weight does not depend on tokens.
    pack_share = share if key.gemm == "wgrad" else 1.0
    return Row(
        product=product,
        calls=calls,
        kernel=name,
        why=why,
        pack_uses=pack_uses,
        dense_ms=_scaled(decision.dense_ms, share),
        sparse_ms=_scaled(decision.sparse_ms, share),
        pack_ms=_scaled(decision.pack_ms, pack_share),
    )


def _scaled(milliseconds: float | None, share: float) -> float | None:
    return None if milliseconds is None else share * milliseconds
