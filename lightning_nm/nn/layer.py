"""One masked weight: its settings, masks, counters, random seeds and costs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_nm.functional import FlopsKind, fold_seed
from lightning_nm.functional.evolution import as_blocks, from_blocks
from lightning_nm.functional.mask_statistics import gradient_energies
from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.functional.select import mask_, masked
from lightning_nm.kernels.api import GemmName, HasHandle
from lightning_nm.kernels.cpu import mask_passes
from lightning_nm.nn.costs import Gemms, find_gemms
from lightning_nm.nn.weight import Layout, PlainWeight, ShardedWeight, is_sharded
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import DENSE, FINAL, Schedule, Stages, Steps, stage_at, within

if TYPE_CHECKING:  # for the types only
    from lightning_nm.estimators.estimator import GradientEstimator
    from lightning_nm.methods.base import Method


def tensor_fingerprint(tensor: Tensor) -> Hashable:
    """Fingerprint of a tensor's storage, version and strides, to invalidate caches.

    It holds a weak reference to the storage: while the fingerprint is kept, no other storage is equal to it, even if it
    got the same address. torch counts writes to the tensor and its views, but neither those through
    ``tensor.data`` or numpy, nor any write to a tensor of inference mode.

    Example::

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> before = tensor_fingerprint(weight)
        >>> weight.data = weight.data.clone()
        >>> tensor_fingerprint(weight) == before
        False
    """
    # A tensor of inference mode has no version counter, and asking for it raises an error.
    version = -1 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())
    # FSDP gives the memory of a storage back, and takes other memory for it.
    address = tensor.data_ptr()
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return storage, address, version, view


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """The settings of one masked weight: its name, pattern, method, estimator and schedule."""

    name: str  # in the model: the module's name, with the parameter's appended when that is not "weight"
    module: nn.Module  # owns the parameter
    parameter: str  # the parameter's name in the module
    pattern: NMPattern
    method: Method
    estimator: GradientEstimator | None = None  # None uses dY itself in the wgrad GEMM
    layout: Layout = Layout.PLAIN
    groups: int = 1  # equal groups of output rows that no dgrad block crosses
    forward_reason: str = ""  # why the forward GEMM cannot be N:M; empty when it can
    dgrad_reason: str = ""  # why the dgrad GEMM cannot be
    # Whether tensor parallelism shards the weight while its module runs.
    tensor_parallel: bool = False
    # What draws W_B of W_F in the dgrad GEMM; None uses the method's W_B.
    dgrad: GradientEstimator | None = None
    # A dense start, a ramp of patterns to `pattern`, and a dense end.
    schedule: Schedule | None = None
    tied: tuple[tuple[nn.Module, str], ...] = ()
    """Other modules that hold the same parameter, with its name in them: they use the same masks."""

    @property
    def maskable(self) -> bool:
        """Whether the method makes the forward or the backward weight of this layer N:M at some time."""
        can_mask_forward = self.method.sparse_forward and not self.forward_reason
        can_mask_dgrad = self.method.sparse_dgrad and not self.dgrad_reason
        return can_mask_forward or can_mask_dgrad

    @property
    def may_draw_backward(self) -> bool:
        """Whether the dgrad GEMM uses a random draw of the weight, at least outside of dense phases."""
        return self.dgrad is not None and not self.dgrad_reason

    @property
    def holders(self) -> tuple[tuple[nn.Module, str], ...]:
        """Every module that holds the parameter, with its name in it."""
        return (self.module, self.parameter), *self.tied


# Numbers for all masks of the process: masks that replace others never have their number.
_generations = count(1)

# What GEMMs read of the masks. Counts such as `flips` are left out: a new count makes no kept pack stale.
_MASK_PARTS = frozenset({"bits", "has_forward", "has_backward", "permutation"})


class LayerMasks:
    """The forward and the backward mask, each one bit of a byte per entry of the weight.

    The bits are one input of a compiled graph and are written in place, so that new masks need no new graph. Where
    processes shard the weight, each holds all of its masks.
    """

    generation: int
    """A new number of this process whenever a part of the masks is assigned or a method here writes to it."""

    def __init__(self) -> None:
        self.bits: Tensor | None = None  # uint8, of the weight's shape; None without masks
        self.has_forward = False  # whether the forward weight is masked
        self.has_backward = False
        """Whether the backward weight has a mask of its own; otherwise dgrad uses the forward weight."""
        self.permutation: Tensor | None = None
        """int64 ``[out]``: the order of the output rows in which the backward mask is N:M."""
        self.backward_density: float | None = None
        """Fraction of the weight that the backward mask keeps, when last measured."""
        # What `density` measured, and the generation of the masks that it belongs to.
        self._density: tuple[int, float] | None = None
        # Forward mask bits that the last update changed, int64 without axes.
        self.flips: Tensor | None = None
        # Forward mask bits that all updates together changed.
        self.total_flips: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MASK_PARTS:
            self.generation = next(_generations)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, whose masks may differ from the original's from now on."""
        self.__dict__.update(state)
        self.generation = next(_generations)

    @property
    def cache_key(self) -> Hashable:
        """Cache key that changes whenever the masks change, and that no other masks of this process have.

        It also changes after a write to the bits or the permutation from outside, if torch counts the write.
        """
        bits, order = self.bits, self.permutation
        return (
            self.generation,
            None if bits is None else tensor_fingerprint(bits),
            None if order is None else tensor_fingerprint(order),
        )

    @property
    def density(self) -> float:
        """Fraction of the weight that the forward mask keeps, 1 without one.

        It is measured once for each move of the masks, and then waits for the device.
        """
        if self.bits is None or not self.has_forward:
            return 1.0
        if self._density is None or self._density[0] != self.generation:
            kept = torch.count_nonzero(self.bits & FORWARD_BIT)
            self._density = (self.generation, int(kept) / self.bits.numel())
        return self._density[1]

    @property
    def forward(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        if self.bits is None or not self.has_forward:
            return None
        return (self.bits & FORWARD_BIT).ne(0)

    @property
    def forward_view(self) -> Tensor | None:
        """:attr:`forward` for use at once: it may share memory with ``bits``, which change when the masks move."""
        if self.bits is None or not self.has_forward:
            return None
        # Without a backward mask the forward bit is the only one, so that the bytes are 0 and 1.
        bits = self.bits & FORWARD_BIT if self.has_backward else self.bits
        # A view in eager code alone: what Inductor makes of a view, no C++ compiler takes.
        return bits.ne(0) if torch.compiler.is_compiling() else bits.view(torch.bool)

    @property
    def backward(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight."""
        if self.bits is None or not self.has_backward:
            return None
        return (self.bits & BACKWARD_BIT).ne(0)

    def zero_pruned(self, tensor: Tensor) -> None:
        """Set the entries of a tensor that the forward mask prunes to +0.0, in place; nothing happens without one."""
        if self.bits is None or not self.has_forward:
            return
        # Neither autograd nor a compiler sees what the library writes.
        is_recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if is_recorded or not mask_passes.mask_(tensor, self.bits):
            mask = self.forward_view
            assert mask is not None
            mask_(tensor, mask)

    def set(
        self, forward: Tensor | None, backward: Tensor | None, like: Tensor | None = None
    ) -> None:
        """Move the masks in place and count the forward bits that changed.

        Args:
            forward: Bool mask, or ``None`` for a dense forward weight.
            backward: Bool mask, or ``None`` when dgrad uses the forward weight.
            like: The bits take its memory order, so that one pass reads a weight and its bits; ``None``: row-major.
        """
        # These assignments also renew the generation, which the copy in place below would not.
        self.has_forward = forward is not None
        self.has_backward = backward is not None
        if forward is None and backward is None:
            self.bits = None
            self.flips = None
            return
        if forward is None:
            assert backward is not None
            # All forward bits of a dense weight are set, so that none of its updates counts a flip.
            forward = torch.ones_like(backward)
        bits = forward.to(torch.uint8)
        if backward is not None:
            bits += backward.to(torch.uint8) * BACKWARD_BIT
        if self.bits is None:
            memory_order = bits.contiguous() if like is None else like
            self.bits = torch.empty_like(memory_order, dtype=torch.uint8).copy_(bits)
            # The first mask prunes entries, but flips none: there was no mask before it.
            self.flips = torch.zeros((), dtype=torch.int64, device=bits.device)
        else:
            self.flips = torch.count_nonzero((self.bits ^ bits) & FORWARD_BIT)
            self.bits.copy_(bits)
        self._add_flips()

    def count_moved(self, flips: int) -> None:
        """Count forward bits that were changed in place, in :attr:`bits`."""
        assert self.bits is not None
        self.flips = torch.tensor(flips, dtype=torch.int64, device=self.bits.device)
        self._add_flips()
        self.generation = next(_generations)

    def _add_flips(self) -> None:
        assert self.flips is not None
        # A new tensor, because `flips` may be read on its own.
        before = torch.zeros_like(self.flips) if self.total_flips is None else self.total_flips
        self.total_flips = before + self.flips

    def set_backward(self, backward: Tensor) -> None:
        """Move the backward mask alone; the forward mask and its counts of changes stay."""
        assert self.bits is not None
        # Assigned even where it is True already: that renews the generation.
        self.has_backward = True
        self.bits.copy_((self.bits & FORWARD_BIT) + backward.to(torch.uint8) * BACKWARD_BIT)

    def set_permutation(self, permutation: Tensor | None) -> None:
        """Set the order of the output rows; in place where there is one."""
        if self.permutation is None or permutation is None:
            self.permutation = permutation
        else:
            self.permutation.copy_(permutation)
            self.generation = next(_generations)

    def measure_backward(self, backward: Tensor) -> None:
        """Measure :attr:`backward_density`; reading it waits for the device."""
        self.backward_density = int(backward.sum()) / backward.numel()

    def load(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Set the counts of a saved state."""
        self.flips = torch.tensor(saved["flips"], dtype=torch.int64, device=device)
        self.total_flips = torch.tensor(saved["total_flips"], dtype=torch.int64, device=device)
        self.backward_density = saved["backward_density"]

    def with_bits(self, bits: Tensor | None) -> LayerMasks:
        """Other masks with the bits of a part of the weight; nothing else is shared."""
        part = LayerMasks()
        part.bits = bits
        part.has_forward = self.has_forward
        part.has_backward = self.has_backward
        part.permutation = self.permutation
        return part

    def of_group(self, group: int, size: int) -> LayerMasks:
        """The masks of one group of `size` output rows, where dimension 0 of the weight counts groups; views."""
        part = self.with_bits(None if self.bits is None else self.bits[group])
        if self.permutation is not None:
            # No permutation crosses groups: the rows of one are counted from its own first row.
            first = group * size
            part.permutation = self.permutation[first : first + size] - first
        return part


class LayerNoise:
    """The layer's random numbers.

    Masks depend on the seed, the name and the step alone, so they are equal on all ranks. The noise of gradient
    estimators and of drawn backward weights also depends on the rank and on the number of the draw.

    Args:
        seed: Base of all random choices of the model.
        name: The layer's name.
        by_process: Whether each process draws its own numbers, as for a weight that tensor parallelism cuts.
    """

    def __init__(self, seed: int, name: str, by_process: bool = False) -> None:
        self.seed = seed
        self.name = name
        self.by_process = by_process
        # The process's part of the global batch, where that is not its rank.
        self.data_rank: int | None = None
        self.draws = 0  # number of the last draw; the only state that is saved
        # Int64 [4], for random numbers in backward passes; None where nothing is random there.
        self.words: Tensor | None = None
        # The calls since the last draw, by what was drawn and by first output row.
        self._calls: dict[tuple[str, int], int] = {}

    def reseed(self, seed: int) -> None:
        """Take the seed of a saved training."""
        self.seed = seed

    def follow_data(self, data_rank: int | None) -> None:
        """Set which part of the global batch this process sees; ``None``: as many parts as processes."""
        self.data_rank = data_rank

    def generator(self, step: int) -> torch.Generator:
        """A generator that depends on the seed, the name and the step alone: equal on all ranks and after a resume."""
        text = f"{self.seed}/{self.name}/{step}"
        # Not Python's hash(), which differs between processes for a text.
        digest = hashlib.sha256(text.encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        return torch.Generator().manual_seed(seed >> 1)  # a generator takes 63 bits

    def draw(self, device: torch.device, number: int | None = None) -> None:
        """Make the seed of a draw, by default the next one, in a new tensor: graphs made with the old one keep it."""
        if number is None:
            number = self.draws + 1
        self.draws = number
        # The next call is number 0 again, also in a run that resumes with this draw.
        self._calls.clear()
        words = fold_seed(self.seed, self.name, self.draws, self._rank())
        self.words = words.to(device, non_blocking=True)

    def _rank(self) -> int:
        """Which part of the data, or of a weight that is cut, this process has."""
        if self.data_rank is not None and not self.by_process:
            return self.data_rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        return 0

    def for_call(self, words: Tensor, row: int) -> Tensor:
        """Seed for one estimate of dY; parts of a joint projection have seeds of their own, by their first output row.

        In eager code they also differ for each call of a module in a micro-batch; a graph would be compiled for each.
        """
        return self._next(words, "dY", row)

    def for_weight(self, words: Tensor, row: int) -> Tensor:
        """Seed for one draw of the backward weight, independent of the estimator's seeds."""
        # In the other order they are another key and another counter of the generator.
        return self._next(words.flip(0), "W_B", row)

    def _next(self, words: Tensor, drawn: str, row: int) -> Tensor:
        """The words of the next call for what is drawn, with this first output row."""
        if torch.compiler.is_compiling():
            return words + row
        calls_before = self._calls.get((drawn, row), 0)
        self._calls[drawn, row] = calls_before + 1
        # An odd constant near 2^32 over the golden ratio: no call and row have the words of others.
        # The words may pass 32 bits by this: counter_uniform() takes them modulo 2^32.
        return words + (row + calls_before * 0x9E3779B1)


@dataclass
class LayerProgress:
    """The counters of a layer, and what it does in the window before the next optimizer step.

    Written by :mod:`lightning_nm.training`: ``optimizer_step.py`` advances the counters, ``phases.py`` plans the
    schedules and goes through a training that is only planned.
    """

    step: int = 0  # real steps of the optimizer that owns the weight
    updated_at: int = 0  # the step at which the masks last moved
    # Training steps of all layers together: batches after which any optimizer had stepped.
    clock: int = 0
    schedule: Steps = ()  # training steps at which the method begins or ends something
    estimator_schedule: Steps = ()  # training steps between which the estimator works
    stages: Stages = ()  # of the user's schedule; () without one
    stage: str = FINAL  # the present one
    # The pattern of the present stage; None for the layer's own. An attribute: compiled graphs read it.
    pattern: NMPattern | None = None
    dense_gradient: bool = False  # whether the window needs dL/dW_F at pruned entries, too
    estimating: bool = False  # whether the estimator works in the window
    # Whether the layer itself has given its weight a gradient; not known where backward passes are compiled.
    trained_by_layer: bool = False
    # Whether before_step() has run since the last optimizer step or end of a batch.
    shaped: bool = False
    # Whether the window's backward passes compare dW = E(dY)^T X with dY^T X.
    observing: bool = False
    observed: Tensor | None = None
    """Of the last such window: sums of dW^2 and of its error's squares, nonzeros and entries of E(dY)."""
    observed_at: int = 0  # the clock of that window

    def crossed(self, every: int, first: int = 0) -> bool:
        """Whether one of the steps ``first, first + every, ...`` after step 0 lies in ``(updated_at, step]``."""
        if self.step < first:
            return False
        turns = (self.step - first) // every
        # Below 0 before `first`, by floor division: so the step `first` itself is a turn, unless it is 0.
        turns_before = (self.updated_at - first) // every
        return turns > turns_before

    @property
    def is_dense(self) -> bool:
        """Whether this is a dense stage of the schedule."""
        return self.stage == DENSE

    @property
    def has_more_stages(self) -> bool:
        """Whether another stage of the schedule follows the present one."""
        return bool(self.stages) and self.stages[-1][0] > self.clock

    @property
    def begins_stage(self) -> bool:
        """Whether a stage of the schedule begins at this training step."""
        return self.clock in dict(self.stages)

    def set_stage(self, stage: str) -> None:
        """Set the present stage."""
        self.stage = stage
        self.pattern = None if stage in (DENSE, FINAL) else NMPattern.parse(stage)

    def enter_stage(self) -> None:
        """Set the stage of this training step."""
        self.set_stage(stage_at(self.stages, self.clock))

    def go_to(self, clock: int) -> None:
        """Set the counters as before training step `clock`, if each step so far trained this layer.

        Whether this window needs a dense gradient is not known by that.
        """
        self.step = self.clock = clock
        # As method.update() finds it at this step: the last update was one step earlier.
        self.updated_at = max(clock - 1, 0)
        self.dense_gradient = False
        self.enter_stage()
        self.estimating = within(self.estimator_schedule, clock)

    def load(self, saved: Mapping[str, Any], stages: Stages) -> None:
        """Set the counters and the plan of a saved state; the clock is the model's."""
        self.step = saved["step"]
        self.updated_at = saved["updated_at"]
        self.dense_gradient = saved["dense_gradient"]
        self.schedule = tuple(saved["schedule"])
        self.estimator_schedule = tuple(saved["estimator_schedule"])
        self.stages = stages
        self.set_stage(saved["stage"])

    @torch.no_grad()
    def observe(self, estimate: Tensor, exact: Tensor, found: Tensor) -> None:
        """Compare one backward pass; the passes of one window are added up.

        ``estimate`` is E(dY), ``exact`` is dW made of dY, and ``found`` is dW made of E(dY).
        """
        # In float64: sums of a window pass 2^24, above which float32 cannot hold every count.
        nonzeros = torch.count_nonzero(estimate).double()
        size = torch.full_like(nonzeros, estimate.numel())
        exact_energy, error_energy = gradient_energies(exact, found)
        sums = torch.stack([exact_energy, error_energy, nonzeros, size])
        # A GradScaler skips a step with infinite gradients.
        sums = torch.where(sums.isfinite().all(), sums, 0)
        if self.observed is not None and self.observed_at == self.clock:
            sums = self.observed + sums
        self.observed = sums
        self.observed_at = self.clock


class LayerCosts:
    """The density of each GEMM, summed over the steps so far."""

    def __init__(self) -> None:
        self.spent: dict[FlopsKind, list[float]] = {kind: [0.0] * 3 for kind in get_args(FlopsKind)}
        self.counted = 0  # steps that were summed
        # The key of the last step and its GEMMs.
        self._gemms: tuple[Hashable, Gemms] | None = None
        self.last_call: int | None = None
        """Multiply-adds of the module's last call, where its GEMMs count themselves; ``None`` if there were none."""

    def count_step(self, layer: NMLayer) -> None:
        """Add a training step to the costs of a layer, whether or not it trained the layer."""
        key = gemms_key(layer)
        # The GEMMs are described again only if something that they depend on has changed.
        if self._gemms is None or self._gemms[0] != key:
            self._gemms = key, layer.gemms()
        self.charge(self._gemms[1], 1)

    def charge(self, gemms: Gemms, steps: int) -> None:
        """Add ``steps`` steps in which the GEMMs are these."""
        for kind, sums in self.spent.items():
            for k, gemm in enumerate(gemms):
                sums[k] += steps * getattr(gemm, kind)
        self.counted += steps

    def record_product(self, macs: int) -> None:
        """Add the multiply-adds of a GEMM to the present call."""
        self.last_call = (self.last_call or 0) + macs

    def charge_dense(self, steps: int) -> None:
        """Start again with ``steps`` steps in which all GEMMs were dense."""
        self.load({kind: [float(steps)] * 3 for kind in self.spent}, steps)

    def load(self, spent: dict[FlopsKind, list[float]], counted: int) -> None:
        """Set saved sums."""
        self.spent = {kind: list(sums) for kind, sums in spent.items()}
        self.counted = counted


class NMLayer(HasHandle):
    """One masked weight: everything that its masks, GEMMs and updates need.

    Each part is modified only by the class that defines it.

    Methods read ``spec`` (what was decided on the weight), ``masks``, ``progress`` (counters and schedules) and
    ``view`` (the weight as rows of outputs), and call :meth:`set_masks`.

    Args:
        spec: The selection's decisions.
        seed: Base of the layer's random choices.
        wrappers: The FSDP modules around the layer's module.
    """

    first_row = 0
    """The first output row, counted from that of the weight which the random numbers belong to."""
    routes_gradients = True
    """Whether GEMMs route their weight gradients through the method."""

    def __init__(
        self, spec: LayerSpec, *, seed: int = 0, wrappers: Sequence[nn.Module] = ()
    ) -> None:
        self.spec = spec
        self.view: PlainWeight = PlainWeight(spec.module, spec.parameter, spec.layout)
        """The weight as rows of outputs, and its local shard."""
        if is_sharded(self.view.param):
            self.view = ShardedWeight(spec.module, spec.parameter, spec.layout, wrappers)
        self.masks = LayerMasks()
        self.noise = LayerNoise(seed, spec.name, by_process=spec.tensor_parallel)
        self.is_random = spec.estimator is not None or spec.may_draw_backward
        """Whether backward passes draw random numbers: in the estimator, or for the backward weight."""
        self.progress = LayerProgress()
        self.costs = LayerCosts()
        self.buffers: dict[str, Tensor] = {}
        """Further tensors of the method; they are saved as they are and follow the weight's device."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that the method owns; the sparsifier hands them to the optimizer of the weight."""
        self.pending: Any = None
        """What the method keeps from one call of a step to the next, such as a pending exchange; never saved."""
        self.replaced_state: dict[str, Any] | None = None
        """The state before other weights were loaded, until the masks move: it comes back if its weights do."""
        # A size of an input can be dynamic in a compiled graph, so that equal layers share one graph.
        self.handle_tensor = torch.empty(
            self.handle, 0, dtype=torch.float32, device=self.param.device
        )
        """An empty tensor whose size is the layer's handle."""
        self.experts: list[Any] = []
        """A layer for each expert of a weight of several, made by their first GEMM."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own.
        return {**vars(self), "experts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Operators find a layer by this size: the tensor of the original would lead them to the original.
        self.handle_tensor = self.handle_tensor.new_empty(self.handle, 0)

    def __repr__(self) -> str:
        return f"NMLayer({self.name!r}, pattern={self.pattern}, method={self.spec.method})"

    @property
    def name(self) -> str:
        """Name in the model."""
        return self.spec.name

    @property
    def pattern(self) -> NMPattern:
        """The N:M pattern of the masks now: that of the present stage of the schedule, else the layer's own."""
        return self.progress.pattern or self.spec.pattern

    @property
    def step(self) -> int:
        """Real optimizer steps of the weight so far."""
        return self.progress.step

    @property
    def param(self) -> nn.Parameter:
        """The latent parameter as the module holds it, for its identity: its values may be sharded."""
        return self.view.param

    @property
    def weight(self) -> nn.Parameter:
        """The latent parameter; within :meth:`full` a plain tensor, even if it is sharded."""
        return self.view.weight

    def full(self, *, gradient: bool = False) -> AbstractContextManager[None]:
        """Within, :attr:`weight` is the full weight; all processes must enter, see :class:`PlainWeight`."""
        return self.view.full(gradient=gradient)

    @property
    def forward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        return self.masks.forward

    @torch.no_grad()
    def set_masks(self, forward: Tensor | None, backward: Tensor | None = None) -> None:
        """Move the masks in place and count the forward bits that changed.

        Args:
            forward: Bool mask of the weight's shape; ``None`` for a dense forward weight. It is ignored where the
                forward GEMM cannot be N:M.
            backward: Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight.
        """
        if self.spec.forward_reason:
            forward = None
        self.masks.set(forward, backward, self.view.memory_order)

    @torch.no_grad()
    def zero_pruned(self, local: Tensor | None = None) -> None:
        """Set the entries that the forward mask prunes to +0.0, in place; nothing happens without one.

        Args:
            local: A tensor like ``view.local``; ``None`` for the weight itself.
        """
        masks = self.masks
        if masks.bits is not None and self.view.is_sharded:
            # A process has the bits of the whole weight, but the values of its shard alone.
            masks = masks.with_bits(self.view.shard_of(masks.bits))
        masks.zero_pruned(self.view.local if local is None else local)

    def forward_weight(self, *, local: bool = False) -> Tensor:
        """W_F, the values that the forward GEMM uses, detached; gathered if it is sharded.

        With ``local`` the shard of this process; the weight is gathered only if the method makes W_F of all of it.
        """
        method = self.spec.method
        with torch.no_grad():
            if local and method.selects_entries:
                mask = self.masks.forward_view
                own = self.view.local
                return own if mask is None else masked(own, self.view.shard_of(mask))
            with self.full():
                whole = method.forward_weight(self, self.weight.detach())
            return self.view.shard_of(whole) if local else whole

    def backward_weight(self) -> Tensor:
        """W_B, the values that the dgrad GEMM uses, detached; gathered if it is sharded.

        Of a layer that draws them (:attr:`draws_backward`) it is their expectation, W_F.
        """
        with torch.no_grad(), self.full():
            return self.spec.method.backward_weight(self, self.weight.detach())

    def values_of(self, which: GemmName, weight: Tensor) -> Tensor:
        """W_F or W_B for a parameter as a matmul receives it, in the parameter's shape.

        W_F for ``"forward"``, W_B for ``"dgrad"``; for both the method's training weight where it has one.
        """
        method = self.spec.method
        if method.has_training_weight and self.spec.module.training:
            return method.training_weight(self, weight)
        make = method.forward_weight if which == "forward" else method.backward_weight
        return make(self, weight)

    @property
    def draws_backward(self) -> bool:
        """Whether the dgrad GEMM now uses a random draw of the weight that is N:M along `out`; not in a dense phase."""
        spec = self.spec
        if not spec.may_draw_backward:
            return False
        # A forward weight that cannot be N:M has no phases: it is dense at all times.
        has_phases = spec.method.uses_masks and not spec.forward_reason
        return self.masks.has_forward or not has_phases

    def draw_noise(self, number: int | None = None) -> None:
        """Draw the next noise of estimator and backward weight; nothing where neither is random."""
        if self.is_random:
            self.noise.draw(self.param.device, number)

    def generator(self) -> torch.Generator:
        """A generator that depends on the seed, the layer and the step alone: equal on all ranks and after a resume."""
        return self.noise.generator(self.progress.step)

    def gemms(self) -> Gemms:
        """What the three GEMMs of the layer do now, by one rule for all methods.

        The forward is N:M where there is a forward mask. dgrad is N:M where its weight is drawn so, where there is a
        backward mask, or where the forward mask is transposable, else masked. wgrad is N:M through an estimator alone;
        where the method needs no gradient at pruned entries, these outputs are not counted as arithmetic.
        """
        return find_gemms(self)

    def read_tensors(self) -> list[Tensor]:
        """The tensors, besides the weight, that forward and backward passes read."""
        found = []
        if self.masks.bits is not None:
            found.append(self.masks.bits)
        if self.masks.permutation is not None:
            found.append(self.masks.permutation)
        if self.spec.method.passes_read_buffers:
            found += self.buffers.values()
        # The parameters come last: autograd functions count their gradients from the end.
        return [*found, *self.parameters.values()]

    def to_weight_device(self) -> None:
        """Move the layer's tensors to the weight's device."""
        device = self.param.device
        for part in (self.masks, self.noise, self.progress):
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and value.device != device:
                    # By setattr, and not in the dict: masks on another device get a new generation.
                    setattr(part, name, value.to(device))
        self.handle_tensor = self.handle_tensor.to(device)
        self.buffers = {name: tensor.to(device) for name, tensor in self.buffers.items()}
        for parameter in self.parameters.values():
            # Through .data, as torch moves parameters: an optimizer may hold this object.
            parameter.data = parameter.data.to(device)

    def with_parts(self, **parts: Any) -> NMLayer:
        """A copy of this layer that shares all parts but those given."""
        # By __getstate__ and __setstate__: the copy has a handle, a handle tensor and experts of its own.
        other = copy.copy(self)
        for name, part in parts.items():
            setattr(other, name, part)
        return other

    def adopt(self, other: NMLayer) -> None:
        """Take over the masks, buffers and parameters of a copy; known parameters are written in place."""
        self.masks = other.masks
        self.buffers = other.buffers
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                if name in self.parameters:
                    # An optimizer may hold this object.
                    self.parameters[name].copy_(parameter)
                else:
                    self.parameters[name] = parameter


def blocks_of(layer: NMLayer, tensor: Tensor) -> Tensor:
    """A tensor of the weight's shape as ``[blocks, M]``."""
    return as_blocks(layer.view.rows(tensor), layer.pattern.m)


def from_blocks_of(layer: NMLayer, blocks: Tensor) -> Tensor:
    """Undo :func:`blocks_of`."""
    return layer.view.unrows(from_blocks(blocks, layer.view.rows(layer.weight).shape))


def gemms_key(layer: NMLayer) -> tuple[Hashable, ...]:
    """Cache key of :meth:`NMLayer.gemms`: everything that its result depends on.

    It is asked for every pass and every step. Hooks of methods and estimators may answer by anything, so they are asked
    again; masks that only moved keep it, unless their density is measured.
    """
    spec, masks = layer.spec, layer.masks
    pattern = spec.method.current_pattern(layer)
    parameter = spec.module._parameters[spec.parameter]
    return (
        masks.has_forward,
        masks.has_backward,
        masks.permutation is None,
        masks.backward_density,
        # Measuring waits for the device: only where no pattern gives the density.
        masks.density if pattern is None else None,
        pattern,
        spec.method.gradient_at_pruned(layer),
        None if spec.estimator is None else spec.estimator.pattern_of(layer),
        layer.progress.estimating,
        parameter is not None and parameter.requires_grad,
        bool(layer.parameters),
    )


@torch.no_grad()
def init_masks(layer: NMLayer) -> None:
    """Choose the masks for a weight that has just been set or loaded; none in a dense stage of the user's schedule."""
    if layer.progress.is_dense:
        layer.set_masks(None)
    else:
        layer.spec.method.init_masks(layer)


def end_masks(layer: NMLayer) -> None:
    """End the masks for a dense stage of the user's schedule, and what the method keeps of them."""
    layer.set_masks(None)
    layer.pending = None
    if not layer.spec.method.latent:
        # What such a method keeps is about exchanges of entries.
        layer.buffers.clear()
