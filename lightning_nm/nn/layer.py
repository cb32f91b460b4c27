"""One masked weight: where it lives, how its blocks lie, and what its method keeps beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_nm.functional import FlopsKind, GemmDensity, fold_seed
from lightning_nm.functional.mask_bits import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.functional.statistics import gradient_energies
from lightning_nm.kernels.handles import HasHandle
from lightning_nm.nn.weight import Layout, WeightAccess
from lightning_nm.pattern import NMPattern

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


@lru_cache(maxsize=256)
def _pattern(treatment: str) -> NMPattern | None:
    return NMPattern.parse(treatment) if ":" in treatment else None


class Gemm(NamedTuple):
    """What one GEMM of a layer does, and its multiply-adds relative to the dense GEMM counted in three ways.

    Args:
        treatment: ``"2:4"`` (an operand is N:M along the contraction axis), ``"masked"`` (zeros, but not along the
            contraction axis), ``"dense"``, or ``"none"`` (a frozen weight's wgrad: neither this training nor the
            dense one runs it, so it counts as dense).
        reason: Why, in a few words; empty when there is nothing to explain.
        arithmetic: Share of multiply-adds whose operand is nonzero and whose output is needed.
        paper: Share counted as the N:M training papers count it.
        eligible: Share that N:M hardware would execute.
    """

    treatment: str
    reason: str = ""
    arithmetic: float = 1.0
    paper: float = 1.0
    eligible: float = 1.0

    @property
    def pattern(self) -> NMPattern | None:
        """The N:M pattern along the contraction axis; ``None`` for an operand without."""
        return _pattern(self.treatment)


class Gemms(NamedTuple):
    """The three GEMMs of a layer: ``Y = X W_F^T``, ``dX = dY W_B`` and ``dW = E(dY)^T X``."""

    forward: Gemm
    dgrad: Gemm
    wgrad: Gemm


def _as_bool(marks: Tensor) -> Tensor:
    """Bytes 0 and 1 as bool; a view only in eager code: what Inductor makes of a view, no C++ compiler takes."""
    return marks.ne(0) if torch.compiler.is_compiling() else marks.view(torch.bool)


class NMLayer(HasHandle, WeightAccess):
    """A weight under an N:M method.

    The masks are two bits of one byte per weight (``marks``), so both masks together cost one byte, are one input of a
    compiled graph, and move in place. Processes that shard the weight hold all of its masks, each of them.

    Args:
        name: Name in the model: the module's, with the parameter's appended when that is not ``weight``.
        module: The module that owns the parameter.
        parameter: The parameter's name in the module.
        pattern: The N:M pattern.
        method: Decides the weights of the forward and the dgrad GEMM.
        estimator: Replaces dY in the wgrad GEMM; ``None`` uses dY itself.
        layout: ``"plain"``: forward blocks along dimension 1, dgrad blocks along dimension 0. ``"flat"``: the same
            after ``flatten(1)`` (the papers' order for convolutions). ``"transposed"``: the same for the transposed
            weight.
        groups: The output rows are split into this many equal groups that no dgrad block crosses.
        seed: Base of the layer's random choices.
        forward_reason: Why the forward GEMM cannot be N:M; empty when it can.
        dgrad_reason: Why the dgrad GEMM cannot be N:M; empty when it can.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter: str,
        pattern: NMPattern,
        method: Method,
        estimator: GradientEstimator | None = None,
        *,
        layout: Layout = "plain",
        groups: int = 1,
        seed: int = 0,
        forward_reason: str = "",
        dgrad_reason: str = "",
    ) -> None:
        WeightAccess.__init__(self, module, parameter, layout)
        self.name = name
        self.pattern = pattern
        self.method = method
        self.estimator = estimator
        self.groups = groups
        self.seed = seed
        self.forward_reason = forward_reason
        self.dgrad_reason = dgrad_reason

        self.tag = torch.empty(self.handle, 0, device=self.param.device)
        """An empty tensor whose size is the layer's number."""
        self.marks: Tensor | None = None
        self.own_backward = False
        """Whether the backward weight has a mask of its own; otherwise dgrad uses the forward weight."""
        self.permutation: Tensor | None = None
        self.buffers: dict[str, Tensor] = {}
        """Further tensors of the method; they are saved as they are and follow the weight's device."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that the method owns; the sparsifier hands them to the optimizer of the weight."""
        self.dense_gradient = False
        """Whether the method needs dL/dW_F at pruned entries, too: settled before a window's first forward."""
        self.handover: Any = None
        """What the method hands from one call of a step to the next; never saved."""
        self.clock = 0
        """Training steps so far, of all layers together: batches after which any optimizer had stepped."""
        self.schedule: tuple[int, ...] = ()
        """The training steps at which the method begins or ends something, as they were planned when training began."""
        self.spent: dict[FlopsKind, list[float]] = {kind: [0.0] * 3 for kind in get_args(FlopsKind)}
        """Density of each GEMM, summed over the steps so far."""
        self.counted = 0
        """How many steps these are."""
        self.estimating = estimator is not None
        """Whether the estimator works in the current window: settled before its first forward."""
        self.estimator_schedule: tuple[int, ...] = ()
        """As ``schedule``, the estimator's."""
        self.data_rank: int | None = None
        """Which part of the global batch this process sees, where that is not its rank."""
        self.cut = False
        """Whether tensor parallelism cuts the weight: processes that see the same batch have gradients of their own."""
        self.draws = 0
        """Number of the last :meth:`draw_seed`."""
        self.calls: dict[int, int] = {}
        """Backward passes since then, by first output row; compiled ones are not counted."""
        self.noise: Tensor | None = None
        """Four words that the estimator's random numbers are made of, int64 [4]; others after each
        :meth:`NMSparsifier.step` and each optimizer step."""
        self.observing = False
        """Whether the coming backward passes compare the estimate with the exact gradient."""
        self.observed: Tensor | None = None
        """What the last such passes found: sums of dW^2 and of its error's squares, nonzeros and entries of E(dY)."""
        self.observed_at = 0
        """The clock at which they were."""
        self.step = 0
        """Real optimizer steps of the weight so far."""
        self.updated_at = 0
        """The step at which the masks last moved."""
        self.flips: Tensor | None = None
        """Forward mask bits that the last update changed."""
        self.total_flips: Tensor | None = None
        """Forward mask bits that all updates together changed."""
        self.parked: dict[str, Any] | None = None
        """The state before other weights were loaded, until the masks move: it comes back if its weights do."""
        self.backward_density: float | None = None
        """Share of W that the backward mask keeps, when last measured."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tag = self.tag.new_empty(self.handle, 0)

    # ----------------------------------------------------------------------------------------------- the masks

    @property
    def maskable(self) -> bool:
        """Whether the method makes the forward or the backward weight of this layer N:M at some time."""
        forward, dgrad = self.method.sparse_forward, self.method.sparse_dgrad
        return (forward and not self.forward_reason) or (dgrad and not self.dgrad_reason)

    @property
    def forward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        return None if self.marks is None or self.forward_reason else _as_bool(self.marks & FORWARD_BIT)

    @property
    def kept(self) -> Tensor | None:
        """:attr:`forward_mask` for use at once: it may be a view of ``marks``, which changes when the masks move."""
        if self.marks is None or self.own_backward:
            return self.forward_mask
        return None if self.forward_reason else _as_bool(self.marks)

    @property
    def backward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight."""
        return (self.marks & BACKWARD_BIT).ne(0) if self.marks is not None and self.own_backward else None

    @torch.no_grad()
    def set_masks(self, forward: Tensor | None, backward: Tensor | None = None) -> None:
        """Move the masks in place and count the forward bits that changed.

        Args:
            forward: Bool mask of the weight's shape, or ``None`` for a dense forward weight.
            backward: Bool mask of the weight's shape, or ``None`` when dgrad uses the forward weight.
        """
        if forward is None and backward is None:
            self.marks, self.flips, self.own_backward = None, None, False
            return
        shape = self.param.shape
        marks = (
            torch.full(shape, FORWARD_BIT, dtype=torch.uint8, device=self.param.device)
            if forward is None
            else forward.to(torch.uint8)
        )
        if backward is not None:
            marks += backward.to(torch.uint8) * BACKWARD_BIT
        self.own_backward = backward is not None
        if self.marks is None:
            # In memory like the weight's own values: one elementwise pass reads both.
            like = marks.contiguous() if self.sharded else self.param
            self.marks = torch.empty_like(like, dtype=torch.uint8).copy_(marks)
            self.flips = torch.zeros((), dtype=torch.int64, device=marks.device)
            self.total_flips = self.flips.clone() if self.total_flips is None else self.total_flips
        else:
            self.flips = torch.count_nonzero((self.marks ^ marks) & FORWARD_BIT)
            self.total_flips = self.flips if self.total_flips is None else self.total_flips + self.flips
            self.marks.copy_(marks)  # in place: a compiled graph sees the new masks without recompiling

    def forward_weight(self) -> Tensor:
        """W_F, the values that the forward GEMM uses, detached; gathered if it is sharded."""
        with torch.no_grad(), self.whole():
            return self.method.forward_weight(self, self.weight.detach())

    def backward_weight(self) -> Tensor:
        """W_B, the values that the dgrad GEMM uses, detached; gathered if it is sharded."""
        with torch.no_grad(), self.whole():
            return self.method.backward_weight(self, self.weight.detach())

    def forward_part(self) -> Tensor:
        """W_F where this process holds W, detached; of a method that selects entries without a word from the others."""
        if not self.sharded:
            return self.forward_weight()
        with torch.no_grad():
            found = self.method.forward_part(self, self.here)
        return self.part(self.forward_weight()) if found is None else found

    # ------------------------------------------------------------------------------------------------ and beside

    def crossed(self, every: int) -> bool:
        """Whether a multiple of `every` steps lies in ``(updated_at, step]``."""
        return self.step // every > self.updated_at // every

    def generator(self) -> torch.Generator:
        """A generator that depends on the seed, the layer and the step alone: equal on all ranks and after a resume."""
        key = hashlib.sha256(f"{self.seed}/{self.name}/{self.step}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)

    def draw_seed(self, draw: int | None = None) -> None:
        """Make the ``noise`` of this draw, by default the next: the seed, the layer's name and the process do the rest.

        The old tensor stays as it is: a graph that was made with it keeps it.
        """
        if self.estimator is not None:
            rank = self.data_rank
            if rank is None or self.cut:
                rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self.draws = self.draws + 1 if draw is None else draw
            self.calls.clear()
            seed = fold_seed(self.seed, self.name, self.draws, rank)
            self.noise = seed.to(self.param.device, non_blocking=True)

    def call_noise(self, noise: Tensor, row: int) -> Tensor:
        """The noise of one backward pass.

        Parts of a joint projection have noise of their own, and so has, in eager code, each call of a module that is
        called several times in a micro-batch: a compiled graph would be compiled anew for each count.

        Args:
            noise: The noise that the forward pass saw.
            row: The first output row of the part.
        """
        if torch.compiler.is_compiling():
            return noise + row
        count = self.calls[row] = self.calls.get(row, 0) + 1
        return noise + (row + (count - 1) * 0x9E3779B1)

    def estimate(self, grad: Tensor, seed: Tensor) -> Tensor:
        """E(dY) for ``dY [tokens, out]``, by the layer's estimator.

        Raises:
            TypeError: If that is of another shape or dtype.
        """
        assert self.estimator is not None
        pruned = self.estimator.estimate(self, grad, seed)
        if pruned.shape != grad.shape or pruned.dtype != grad.dtype:
            raise TypeError(
                f"{type(self.estimator).__name__} made {pruned.dtype} {tuple(pruned.shape)} of the output gradient at "
                f"layer '{self.name}', which is {grad.dtype} {tuple(grad.shape)}: keep the shape and the dtype"
            )
        return pruned

    @torch.no_grad()
    def observe(self, estimate: Tensor, exact: Tensor, found: Tensor) -> None:
        """Add what one backward pass of an observed layer tells.

        Args:
            estimate: E(dY).
            exact: dW made of dY.
            found: dW made of E(dY).
        """
        nonzeros = torch.count_nonzero(estimate).double()
        size = torch.full_like(nonzeros, estimate.numel())
        sums = torch.stack([*gradient_energies(exact, found), nonzeros, size])
        sums = torch.where(sums.isfinite().all(), sums, 0)  # a GradScaler skips such a step
        before = self.observed if self.observed_at == self.clock else None
        self.observed = sums if before is None else before + sums
        self.observed_at = self.clock

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor beside the weight that training needs: the persistent memory of the layer."""
        for tensor in (self.marks, self.permutation, *self.buffers.values(), *self.parameters.values()):
            if tensor is not None:
                yield tensor

    def follow(self) -> None:
        """Move the layer's tensors to the weight's device."""
        device = self.param.device
        for name in ("tag", "marks", "permutation", "flips", "total_flips", "noise", "observed"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != device:
                setattr(self, name, tensor.to(device))
        self.buffers = {name: tensor.to(device) for name, tensor in self.buffers.items()}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    def gemms(self) -> Gemms:
        """What each of the three GEMMs does now."""
        return self.method.gemms(self)

    def densities(self) -> dict[FlopsKind, GemmDensity]:
        """What the three GEMMs cost now, in each counting."""
        gemms = self.gemms()
        return {kind: GemmDensity(*(getattr(gemm, kind) for gemm in gemms)) for kind in get_args(FlopsKind)}

    def mean_densities(self) -> dict[FlopsKind, GemmDensity]:
        """What they cost on average over the steps so far; now if there were none."""
        if not self.counted:
            return self.densities()
        return {kind: GemmDensity(*(total / self.counted for total in totals)) for kind, totals in self.spent.items()}

    def count_step(self) -> None:
        """Advance by a real optimizer step and add up what its GEMMs cost."""
        self.count_cost()
        self.step += 1

    def count_cost(self) -> None:
        """Add up what the GEMMs of a training step cost, whether or not it trained this layer."""
        gemms = self.gemms()
        for kind, totals in self.spent.items():
            for k, gemm in enumerate(gemms):
                totals[k] += getattr(gemm, kind)
        self.counted += 1

    def __repr__(self) -> str:
        settings: dict[str, Any] = {"pattern": str(self.pattern), "method": self.method}
        return f"NMLayer({self.name!r}, {', '.join(f'{key}={value}' for key, value in settings.items())})"
