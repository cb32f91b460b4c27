"""Caches the outputs of finished blocks during calibration, so that each block runs a few times, whatever the depth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lightning_nm.nn.weight import known_shape
from lightning_nm.training.macs import tensors_in

# A shorter list costs little more when the whole model runs for each of its layers.
_WORTH_A_WARNING = 4


@dataclass(eq=False)
class BlockList:
    """Modules that run one after the other, and what a :class:`Trace` shows of them.

    Attributes:
        name: The name of the module that holds them.
        blocks: The modules.
        orders: The orders in which batches call them.
        returned: The tensors that the one called last in this batch returned.
        is_chain: Whether each is given a tensor which the one called before it returned.
    """

    name: str
    blocks: list[nn.Module]
    orders: set[tuple[nn.Module, ...]] = field(default_factory=set)
    returned: list[Tensor] | None = None
    is_chain: bool = True

    def __str__(self) -> str:
        """Return the name and what it holds, for messages."""
        return f"'{self.name}' ({len(self.blocks)} {type(self.blocks[0]).__name__})"


def find_lists(
    model: nn.Module, names: str | Sequence[str] | None, layers: set[nn.Module]
) -> list[BlockList]:
    """The lists of blocks that a user names, else all modules that may be some, the longest first.

    These are ``ModuleList``, ``Sequential`` and similar modules of modules of one class.

    Raises:
        TypeError: If ``names`` are no names.
        ValueError: If a named module does not exist, or does not hold two blocks with layers.
    """
    # All modules, since a user may name one that is no list by its looks.
    lists = {name: BlockList(name, list(part.children())) for name, part in model.named_modules()}

    def holding(name: str) -> int:
        blocks = lists[name].blocks
        return sum(not layers.isdisjoint(block.modules()) for block in blocks)

    possible = []
    for name, module in model.named_modules():
        # ModuleList and Sequential call their children by numbers.
        numbered = all(child.isdecimal() for child, _ in module.named_children())
        kinds = {type(block) for block in lists[name].blocks}
        if numbered and len(kinds) == 1 and holding(name) > 1:
            possible.append(lists[name])
    # The longest one is likely the depth of the model. choose_lists() goes by this order where lists overlap.
    possible.sort(key=lambda each: -len(each.blocks))
    if names is None:
        return possible
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"blocks={names!r} must be the name of the module that holds the blocks, for example 'model.layers', "
            "or a list of such names"
        )
    for name in names:
        if name not in lists or holding(name) < 2:
            known = ", ".join(map(str, possible)) or "none"
            raise ValueError(
                f"blocks={name!r} names no module of {type(model).__name__} of which two modules or more hold layers "
                f"to prune: name the one that holds the blocks themselves. Its lists of modules of one class: {known}"
            )
    return [lists[name] for name in names]


class Trace:
    """What a pass over the data shows of the calls of a model's modules, of all with matrices.

    Args:
        model: The model.
        layers: The modules whose weights are calibrated.
        lists: The lists that may hold blocks.
    """

    def __init__(
        self, model: nn.Module, layers: set[nn.Module], lists: Sequence[BlockList]
    ) -> None:
        self.layers = layers
        self.order: list[nn.Module] = []
        """The layers that were called, in the order of their calls."""
        # Without a matrix a module costs next to nothing, and may run every time.
        watched = {module for module in model.modules() if _has_matrices(module)}
        watched |= {block for each in lists for block in each.blocks}
        self.counts: dict[nn.Module, set[int]] = {module: set() for module in watched}
        """How often a batch calls a module."""
        self.shared: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        """By layer, the layer that was called right before each of its calls with the same one input, or ``None``."""
        self.needs: dict[nn.Module, set[nn.Module]] = defaultdict(set)
        """By module, the layers that were called before it returned: its output may depend on them."""
        self.sizes: dict[nn.Module, int] = defaultdict(int)
        """The entries of the largest output of a module."""
        self._lists = lists
        self._called: list[nn.Module] = []  # in the present batch
        self._last: tuple[nn.Module, Tensor, int] | None = None  # call of a layer with one input

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls of the model while the context is open."""
        with ExitStack() as stack:
            for module in self.counts:
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._called.append(module)
        inputs = tensors_in((args, kwargs))
        for each in self._lists:
            if module in each.blocks and each.returned is not None:
                # The same object: what was only computed from it is no hand-over.
                each.is_chain &= any(x is y for x in inputs for y in each.returned)
        if module not in self.layers:
            return
        # Layers can be calibrated together if each is called with one tensor, and nothing else, and it is the same one.
        shared = last = None
        # An inference tensor does not tell whether it was changed.
        if len(tree_leaves((args, kwargs))) == len(inputs) == 1 and not inputs[0].is_inference():
            last = module, inputs[0], inputs[0]._version
            # The object may be the same and its values not: the version counts writes in place.
            if self._last is not None and self._last[1] is inputs[0] and self._last[2] == last[2]:
                shared = self._last[0]
        self.shared[module].add(shared)
        self._last = last

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # All that ran before it in this batch, whether it used it or not: too many needs only make it finish later.
        self.needs[module].update(self.layers.intersection(self._called))
        outputs = tensors_in(output)
        self.sizes[module] = max(sum(x.numel() for x in outputs), self.sizes[module])
        for each in self._lists:
            if module in each.blocks:
                each.returned = outputs

    def end_batch(self) -> None:
        """Take note of the end of a batch."""
        times = Counter(self._called)
        for module, counts in self.counts.items():
            counts.add(times[module])
        for each in self._lists:
            each.orders.add(tuple(module for module in self._called if module in each.blocks))
            each.returned = None
        # A layer that the batches before did not call, as some experts, stands before the one that follows it here.
        place = len(self.order)
        for module in reversed(list(dict.fromkeys(self._called))):
            if module in self.layers:
                if module not in self.order:
                    self.order.insert(place, module)
                place = self.order.index(module)
        self._called = []
        self._last = None

    def fault(self, each: BlockList) -> str:
        """Why the modules of a list cannot answer from memory; empty if they can."""
        if len(each.orders) > 1:
            return "batches call its modules in different orders"
        (order,) = each.orders
        for number, block in enumerate(each.blocks):
            times = order.count(block)
            holds_layers = not self.layers.isdisjoint(block.modules())
            # A block without layers may be skipped by all batches, one with layers must run to be calibrated.
            if times > 1 or (holds_layers and not times):
                return f"a batch calls module {number} of it {times} times, not once"
        return ""

    def choose_lists(self, *, named: bool) -> tuple[list[BlockList], str]:
        """The lists whose modules can answer from memory, with these in the order of their calls.

        Of lists within others, the longest one is taken.

        Returns:
            The lists, and why the longest one cannot.

        Raises:
            ValueError: If a list that the user named cannot, or lies within another one.
        """
        chosen: list[BlockList] = []
        held: set[nn.Module] = set()
        reason = ""
        for each in self._lists:
            fault = self.fault(each)
            inside = {module for block in each.blocks for module in block.modules()}
            if named and not fault and not inside.isdisjoint(held):
                fault = "overlaps with other named blocks"
            if named and fault:
                raise ValueError(f"blocks={each.name!r}: {fault}")
            if not named and not fault and not each.is_chain:
                # As experts, each of which gets tokens of its own.
                fault = (
                    "they do not hand a tensor from one to the next. Name the blocks if each needs no more of those "
                    "before it than what the last one returned"
                )
            if fault:
                # Of lists with few modules, or with less than half of the layers, nobody misses the savings.
                is_depth = 2 * len(self.layers & inside) >= len(self.layers)
                if not reason and is_depth and len(each.blocks) >= _WORTH_A_WARNING:
                    reason = f"the modules of {each} cannot be calibrated block by block: {fault}"
            elif inside.isdisjoint(held):
                held |= inside
                (order,) = each.orders
                # From the order of registration to that of the calls, in which blocks finish.
                each.blocks = list(order)
                chosen.append(each)
        return chosen, reason


@dataclass(eq=False)
class _Remembered:
    """A module that answers from memory.

    ``answers`` has by batch the index of the block that gave an answer, and the answer. The blocks of a list share it,
    and hold the answer of the last one: it is all that the next block depends on.
    """

    module: nn.Module
    answers: dict[int, tuple[int, Any]] = field(default_factory=dict)
    index: int = 0
    parts: list[_Remembered] = field(default_factory=list)


class Memory:
    """Cached outputs of a model's finished parts, by batch.

    A part is finished when all layers that its output depends on are. It runs once more for each batch, and then
    answers from memory. Of a list of blocks only the last finished one is remembered: the blocks before it return the
    same, on which nothing that follows may depend, see :meth:`fault`. Parts of the next block that return no more
    entries than the block does are remembered while it is being finished, and what runs before a list of blocks.

    Args:
        model: The model.
        trace: Of a pass over all batches.
        lists: Blocks in the order of their calls.
        ready: By module, how many layers have to be done until it is finished.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        lists: Sequence[BlockList],
        ready: Mapping[nn.Module, int],
    ) -> None:
        self.batch = 0
        """The number of the present batch."""
        self.block_of: dict[nn.Module, nn.Module] = {}
        """By module, the block that it is a part of."""
        self._ready = ready
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = trace.layers
        self._entries: dict[nn.Module, _Remembered] = {}

        def remember(part: nn.Module, most: float) -> list[_Remembered]:
            # There is one answer for each batch, so every batch must call the part exactly once.
            if trace.counts[part] != {1} or trace.sizes[part] > most:
                return []
            self._entries[part] = _Remembered(part)
            return [self._entries[part]]

        last_ready = max(ready[each.blocks[-1]] for each in lists)
        for part in _parts(model, {block for each in lists for block in each.blocks}):
            # What is finished before the last block would run again for the layers of each block that follows.
            if ready.get(part, last_ready) < last_ready:
                remember(part, float("inf"))
        for each in lists:
            # One dict for all blocks of a list: the answer of a block takes the place of its predecessor's.
            answers: dict[int, tuple[int, Any]] = {}
            for index, block in enumerate(each.blocks):
                self.block_of.update(dict.fromkeys(block.modules(), block))
                parts = [
                    entry
                    for part in _parts(block, set())
                    for entry in remember(part, trace.sizes[block])
                ]
                self._entries[block] = _Remembered(block, answers, index, parts)

    def forget(self) -> None:
        """Forget all answers."""
        for entry in self._entries.values():
            entry.answers.clear()

    @contextmanager
    def answering(self, done: float) -> Iterator[None]:
        """Let what is finished after so many layers answer from memory while the context is open."""
        with ExitStack() as stack:
            for entry in self._entries.values():
                if self._ready[entry.module] > done:
                    continue
                attributes = entry.module.__dict__
                own = {key: value for key, value in attributes.items() if key == "forward"}
                # In the instance, where Python looks first: __call__ finds it there, and the module's hooks still run.
                attributes["forward"] = partial(self._answer, entry, entry.module.forward)
                # The instance may have a forward of its own, as accelerate sets it.
                stack.callback(attributes.update, own)
                # Callbacks run in reverse order: `forward` is taken out first.
                stack.callback(attributes.pop, "forward")
            yield

    def _answer(
        self, entry: _Remembered, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        index, answer = entry.answers.get(self.batch, (-1, None))
        if index < entry.index:
            output = forward(*args, **kwargs)
            # What follows may change its input in place.
            entry.answers[self.batch] = entry.index, tree_map_only(Tensor, Tensor.clone, output)
            # With the answer of the whole block, those of its parts are not needed any more.
            for part in entry.parts:
                part.answers.pop(self.batch, None)
            return output
        # The answers of blocks before the last finished one are not read.
        return tree_map_only(Tensor, Tensor.clone, answer) if index == entry.index else answer

    def fault(self, run: Callable[[], Any]) -> str:
        """Run the model on a batch as it is, and say where answers from memory change what it computes.

        Whenever a block, a part of one or another layer is called, the model runs to the same place once more with
        answers from memory: the inputs have to be equal, bit for bit. Empty if all are.
        """
        seen: set[nn.Module] = set()
        inner: list[tuple[nn.Module, Any]] = []  # where the inner run ends, and the inputs there

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if inner:
                end, inputs = inner[0]
                if module is end:
                    raise Reached(_difference(inputs, (args, kwargs)))
                return
            if module in seen:
                return
            seen.add(module)
            inner.append((module, (args, kwargs)))
            reason = "it is not called"
            try:
                run()
            except Reached as reached:
                reason = str(reached)
            except Exception as error:  # of the model, which lacks what a block leaves behind
                reason = f"{type(error).__name__}: {error}"
            inner.clear()
            if reason:
                raise _Different(f"at '{self._names[module]}': {reason}")

        # Layers outside of blocks may read what an early block returned, as a head on features does.
        outside = [layer for layer in self._layers if layer not in self.block_of]
        self.batch = 0
        try:
            # As if all layers were done, so that everything answers that ever will.
            with self.answering(float("inf")), ExitStack() as stack:
                for module in dict.fromkeys([*self._entries, *outside]):
                    handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                    stack.callback(handle.remove)
                run()
        except _Different as different:
            return str(different)
        finally:
            self.forget()
        return ""


class Reached(Exception):
    """Raised to stop a forward pass once the needed layer has run."""


class _Different(Exception):
    """Answers from memory change what the model computes."""


def _has_matrices(module: nn.Module) -> bool:
    # An embedding is a lookup and no GEMM.
    return any(
        len(known_shape(parameter) or ()) > 1 and not isinstance(part, nn.Embedding)
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
    )


def _parts(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """The children with matrices that are no blocks; in the place of a list, or of what holds blocks, its children."""
    for child in module.children():
        if child in blocks:
            continue
        # Nobody calls a list.
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if is_list or not blocks.isdisjoint(child.modules()):
            yield from _parts(child, blocks)
        elif _has_matrices(child):
            yield child


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def _difference(first: Any, second: Any) -> str:
    """How the inputs of two calls differ; empty if they are equal."""
    leaves, spec = tree_flatten(first)
    others, other_spec = tree_flatten(second)
    where = "are others when the modules before it answer from memory"
    if spec != other_spec:
        return f"its arguments {where}"
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            if not _equal(leaf, other):
                return f"its inputs {where}"
        elif leaf is other and callable(leaf):
            continue  # a function, or a module
        elif not isinstance(leaf, _PLAIN):
            return f"its arguments hold a {type(leaf).__name__}, which blocks may change"
        elif type(leaf) is not type(other) or leaf != other:
            return f"its arguments {where}"
    return ""


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # As bits, so that a value that is not a number equals itself.
    one, two = (x.detach().contiguous().flatten().view(torch.uint8) for x in (first, second))
    return torch.equal(one, two)
