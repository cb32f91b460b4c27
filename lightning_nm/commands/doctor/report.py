"""The times of each product of the masked layers, dense and as chosen, and their sums. Nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_nm.kernels.api import bucketed, multiply_adds, uses_of_pack
from lightning_nm.kernels.router.registry import KernelRegistry, reason_or_error
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.kernels.router.tuner import speedup
from lightning_nm.nn.products.routed_ops import GEMMS
from lightning_nm.sparsifier import NMSparsifier


@dataclass(frozen=True)
class Row:
    """One GEMM of a layer, with the chosen kernel and measured times, None where they are unknown."""

    product: Product
    calls: float  # in an optimizer step, in all of its micro-batches
    kernel: str
    why: str  # why this kernel was chosen, or why no other one can run
    pack_uses: int  # products that share one packed operand
    dense_ms: float | None = None
    sparse_ms: float | None = None  # of the best sparse product without packing, chosen or not
    pack_ms: float | None = None  # of packing its operand once
    could: tuple[
        str, ...
    ] = ()  # where nothing is measured: kernels that fit the dtype, pattern and sizes

    @property
    def sparse(self) -> bool:
        """Whether a sparse kernel was chosen."""
        return self.kernel != "reference"

    @property
    def eligible(self) -> bool:
        """Whether a sparse kernel can run the product, as far as is known."""
        return not self.product.reason and (
            self.sparse or self.sparse_ms is not None or bool(self.could)
        )

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
        """As primitives, for JSON."""
        content = {"layer": self.product.layer, **vars(self.product.key), **vars(self)}
        del content["device"], content["product"]
        content |= {
            "dtype": str(content["dtype"]).removeprefix("torch."),
            "pattern": str(content["pattern"]),
        }
        derived = {name: getattr(self, name) for name in ("eligible", "chosen_ms", "gain")}
        return {**content, **derived, "could": list(self.could)}


@dataclass(frozen=True)
class Report:
    """The products of a training step with their times."""

    rows: tuple[Row, ...]  # in the order of layers, each with its forward, dgrad and wgrad
    kernels: (
        str | None
    )  # the router's mode; None where no sparse kernel works and nothing is chosen
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
        return tuple(
            row for row in self.rows if row.dense_ms is not None and row.chosen_ms is not None
        )

    @property
    def dense_ms(self) -> float:
        """Milliseconds of the timed rows in a step if all were dense."""
        return sum(row.calls * (row.dense_ms or 0.0) for row in self.timed)

    @property
    def chosen_ms(self) -> float:
        """Milliseconds of the timed rows in a step on the chosen kernels."""
        return sum(row.calls * (row.chosen_ms or 0.0) for row in self.timed)

    @property
    def predicted_step_ms(self) -> float | None:
        """``step - sum(dense - chosen)`` under masks; None if the step or a sparse product has no time."""
        if self.step_ms is None or any(row.sparse and row not in self.timed for row in self.rows):
            return None
        return self.step_ms - (self.dense_ms - self.chosen_ms)

    @property
    def speedup(self) -> float | None:
        """``plain step / predicted step``: against training without masks; None if one is unknown or not positive."""
        return self.against_plain(self.predicted_step_ms)

    @property
    def kernel_speedup(self) -> float | None:
        """``step / predicted step``: against dense products under the same masks; None likewise."""
        return _ratio(self.step_ms, self.predicted_step_ms)

    def against_plain(self, step_ms: float | None) -> float | None:
        """``plain step / step``; None if one is unknown or not positive."""
        return _ratio(self.plain_step_ms, step_ms)

    @property
    def verdict(self) -> str:
        """One sentence for the user."""
        chosen = [row for row in self.rows if row.sparse]
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
        count = f"{len(chosen)} of {len(self.rows)} products run sparse"
        if any(row not in self.timed for row in chosen):
            return f"{count}, but not all have a time: whether that is faster is not known"
        if self.dense_ms <= self.chosen_ms:
            return f"{count}, and that is not faster: train without the plugin"
        saved = f"{self.dense_ms:.3g} ms of their layers' GEMMs become {self.chosen_ms:.3g} ms"
        if self.speedup is not None:
            return f"{count}; {saved}: a predicted step is {self.speedup:.3f}x as fast as plain dense training"
        if self.kernel_speedup is not None:
            return f"{count}; {saved}: a predicted step is {self.kernel_speedup:.3f}x as fast as under dense products"
        return f"{count}; {saved} in a step"

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        return {
            **vars(self),
            "rows": [row.to_dict() for row in self.rows],
            "unseen": list(self.unseen),
            "dense_ms": self.dense_ms if self.timed else None,
            "chosen_ms": self.chosen_ms if self.timed else None,
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
    """Make a report: `make_row` makes the row of a product with its calls; the rest is as :func:`report`'s."""
    layers = {
        name: place for place, name in enumerate(name for s in sparsifiers for name in s.layers)
    }
    order = sorted(
        counts,
        key=lambda product: (layers.get(product.layer, len(layers)), GEMMS.index(product.key.gemm)),
    )
    return Report(
        tuple(make_row(product, counts[product]) for product in order),
        kernels,
        {
            name: reason
            for s in sparsifiers
            for name, reason in s.skipped.items()
            if name not in layers
        },
        tuple(name for name in layers if all(product.layer != name for product in counts)),
        tokens,
        step_ms,
    )


def static_row(registry: KernelRegistry, reuse: int, product: Product, calls: float) -> Row:
    """The row of a product if nothing is measured: which kernels could run it, and why others could not."""
    key, reasons = product.key, {}
    if not product.reason:
        reasons = {
            kernel.name: registry.sparsity_reason(kernel, key)
            or reason_or_error(partial(kernel.static_reason, key))
            for kernel in registry.backends
        }
    why = product.reason or "; ".join(
        f"{name}: {reason}" for name, reason in reasons.items() if reason
    )
    could = tuple(name for name, reason in reasons.items() if not reason)
    return Row(
        product, calls, registry.reference.name, why, uses_of_pack(key.gemm, reuse), could=could
    )


def _row(router: Router, product: Product, calls: float) -> Row:
    key, registry = product.key, router.registry
    pack_uses = uses_of_pack(key.gemm, router.pack_reuse(key.device))
    decision = None if product.reason or router.tuner is None else router.tuner.decisions.get(key)
    if decision is None:
        return Row(
            product, calls, registry.reference.name, product.reason or "not decided", pack_uses
        )
    name, why = decision.kernel, decision.reason
    if reason := registry.reason_against(
        name, key
    ):  # a kernel may support its bucket's size and not this one
        name, why = registry.reference.name, f"{name}: {reason}"
    share = multiply_adds(key) / (multiply_adds(bucketed(key)) or 1)
    times = (decision.dense_ms, decision.sparse_ms, decision.pack_ms)
    shares = (share, share, share if key.gemm == "wgrad" else 1.0)
    dense, sparse, pack = (
        None if time is None else part * time for time, part in zip(times, shares, strict=True)
    )
    return Row(product, calls, name, why, pack_uses, dense, sparse, pack)
