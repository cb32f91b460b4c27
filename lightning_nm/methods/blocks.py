"""Blocks of a model that answer from memory: calibration then runs each of them a few times, whatever the depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

# A shorter list costs little more when the whole model runs for each of its layers.
_WORTH_A_WARNING = 4


class BlockList(NamedTuple):
    """Modules that run one after the other.

    Attributes:
        name: The name of the module that holds them.
        blocks: The modules.
    """

    name: str
    blocks: list[nn.Module]

    def __str__(self) -> str:
        """Return the name and what it holds, for messages."""
        return f"'{self.name}' ({len(self.blocks)} {type(self.blocks[0]).__name__})"


def lists_of_one_class(model: nn.Module, layers: set[nn.Module]) -> list[BlockList]:
    """The ``ModuleList``, ``Sequential`` and similar modules that may hold blocks, the longest first.

    All their modules are of one class, and at least two hold some of the layers.
    """
    found = []
    for name, module in model.named_modules():
        children = dict(module.named_children())  # each once
        numbered = all(child.isdecimal() for child in children)
        if not numbered or len({type(child) for child in children.values()}) != 1:
            continue
        blocks = list(children.values())
        if sum(any(part in layers for part in block.modules()) for block in blocks) > 1:
            found.append(BlockList(name, blocks))
    return sorted(found, key=lambda each: -len(each.blocks))


def named_lists(
    model: nn.Module, names: str | Sequence[str], layers: set[nn.Module]
) -> list[BlockList]:
    """The lists that a user names.

    Raises:
        TypeError: If these are no names.
        ValueError: If a module does not exist, or holds no blocks with layers to calibrate.
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"blocks={names!r} must be the name of the module that holds the blocks, for example 'model.layers', "
            "or a list of such names"
        )
    modules = dict(model.named_modules())
    found = []
    for name in names:
        if name not in modules:
            lists = ", ".join(map(str, lists_of_one_class(model, layers))) or "none"
            raise ValueError(
                f"blocks={name!r} names no module of {type(model).__name__}. Its lists of modules of one class: {lists}"
            )
        blocks = list(modules[name].children())
        held = [block for block in blocks if any(part in layers for part in block.modules())]
        if len(held) < 2:
            raise ValueError(
                f"blocks={name!r} names a {type(modules[name]).__name__} of which {len(held)} modules hold layers to "
                "prune: name the module that holds the blocks themselves, for example 'model.layers'"
            )
        found.append(BlockList(name, blocks))
    return found


class Trace:
    """What a pass over the data shows of the calls of a model's modules.

    Args:
        model: The model.
        layers: The modules whose weights are calibrated.
        lists: The lists that may hold blocks.
    """

    def __init__(
        self, model: nn.Module, layers: Collection[nn.Module], lists: Sequence[BlockList]
    ) -> None:
        self.layers = set(layers)
        self.counts: dict[nn.Module, set[int]] = {module: set() for module in layers}
        """How often a batch calls a module."""
        self.shared: dict[nn.Module, set[nn.Module | None]] = {module: set() for module in layers}
        """By layer, the layer that was called right before each of its calls with the same one input, or ``None``."""
        self.needs: dict[nn.Module, set[nn.Module]] = {}
        """By module, the layers that were called before it returned: its output may depend on them."""
        self.sizes: dict[nn.Module, int] = {}
        """The entries of the largest output of a module."""
        self.orders: dict[str, set[tuple[nn.Module, ...]]] = {each.name: set() for each in lists}
        """By list, the orders in which batches call its modules."""
        self.unchained: set[str] = set()
        """Lists with a module that is given no tensor which the module called before it returned."""
        self.parts: dict[nn.Module | str, list[nn.Module]] = {}
        """The parts of each block, and by list those that are called before its blocks."""
        self._lists = lists
        self._lists_of: dict[nn.Module, list[BlockList]] = {}
        for each in lists:
            self.parts[each.name] = _parts_around(model, each)
            for block in each.blocks:
                self.parts[block] = _parts(block)
                self._lists_of.setdefault(block, []).append(each)
        for module in (*self.parts, *(part for parts in self.parts.values() for part in parts)):
            if isinstance(module, nn.Module):
                self.counts.setdefault(module, set())
        self._called: list[nn.Module] = []  # in the present batch
        self._returned: dict[str, list[Tensor]] = {}  # by list, of its module called last
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
        inputs = _tensors((args, kwargs))
        for each in self._lists_of.get(module, ()):
            if each.name not in self._returned:
                # The first one: what was called before it is no part of what follows.
                called = set(self._called)
                parts = [part for part in self.parts[each.name] if part in called]
                self.parts[each.name] = parts
            elif not any(x is y for x in inputs for y in self._returned[each.name]):
                self.unchained.add(each.name)
        if module not in self.layers:
            return
        shared = last = None
        # An inference tensor does not tell whether it was changed.
        if len(tree_leaves((args, kwargs))) == len(inputs) == 1 and not inputs[0].is_inference():
            last = module, inputs[0], inputs[0]._version
            if self._last is not None and self._last[1] is inputs[0] and self._last[2] == last[2]:
                shared = self._last[0]
        self.shared[module].add(shared)
        self._last = last

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.needs.setdefault(module, set()).update(self.layers.intersection(self._called))
        outputs = _tensors(output)
        size = sum(x.numel() for x in outputs)
        self.sizes[module] = max(size, self.sizes.get(module, 0))
        for each in self._lists_of.get(module, ()):
            self._returned[each.name] = outputs

    def end_batch(self) -> list[nn.Module]:
        """Take note of the end of a batch, and return the layers that it called, in their order."""
        times = Counter(self._called)
        for module, counts in self.counts.items():
            counts.add(times[module])
        for each in self._lists:
            blocks = set(each.blocks)
            order = tuple(module for module in self._called if module in blocks)
            self.orders[each.name].add(order)
        layers = [module for module in self._called if module in self.layers]
        self._called = []
        self._returned = {}
        self._last = None
        return layers

    def fault(self, each: BlockList) -> str:
        """Why the modules of a list cannot answer from memory; empty if they can."""
        for number, block in enumerate(each.blocks):
            counts = self.counts[block]
            holds_layers = not self.layers.isdisjoint(block.modules())
            if counts != {1} and (holds_layers or counts != {0}):
                times = " or ".join(map(str, sorted(counts)))
                return f"a batch calls module {number} of it {times} times, not once"
        if len(self.orders[each.name]) > 1:
            return "batches call its modules in different orders"
        return ""


def choose_lists(
    trace: Trace, lists: Sequence[BlockList], *, named: bool
) -> tuple[list[BlockList], str]:
    """The lists whose modules can answer from memory, in the order of their calls, and why the longest one cannot.

    Of lists within others, the longest one is taken.

    Raises:
        ValueError: If a list that the user named cannot, or lies within another one.
    """
    chosen: list[BlockList] = []
    held: set[nn.Module] = set()
    reason = ""
    for each in lists:
        fault = trace.fault(each)
        inside = {module for block in each.blocks for module in block.modules()}
        if named:
            if fault:
                raise ValueError(f"blocks={each.name!r}: {fault}")
            if not inside.isdisjoint(held):
                raise ValueError(f"blocks={each.name!r} overlaps with other named blocks")
        elif not fault and each.name in trace.unchained:
            # As experts, each of which gets tokens of its own.
            fault = (
                "they do not hand a tensor from one to the next. Name the blocks if each needs no more of those before "
                "it than what the last one returned"
            )
        if fault:
            is_depth = 2 * len(trace.layers & inside) >= len(trace.layers)
            if not reason and is_depth and len(each.blocks) >= _WORTH_A_WARNING:
                reason = f"the modules of {each} cannot be calibrated block by block: {fault}"
        elif inside.isdisjoint(held):
            held |= inside
            (order,) = trace.orders[each.name]
            chosen.append(each._replace(blocks=list(order)))
    return chosen, reason


@dataclass(eq=False)
class _Remembered:
    """A module that answers from memory.

    ``answers`` has by batch the index of the block that gave an answer, and the answer. The blocks of a list share it,
    and hold the answer of the last one: it is all that the next block depends on.
    """

    module: nn.Module
    needs: set[nn.Module]
    answers: dict[int, tuple[int, Any]] = field(default_factory=dict)
    index: int = 0
    parts: list[_Remembered] = field(default_factory=list)

    def knows(self, batch: int) -> bool:
        return batch in self.answers and self.answers[batch][0] >= self.index


class Memory:
    """What the finished parts of a model return for each batch.

    A part is finished when all layers that its output depends on are. It runs once more for each batch, and then
    answers from memory. Of a list of blocks only the last finished one is remembered: the blocks before it return the
    same, on which nothing that follows may depend, see :meth:`fault`. Parts of the next block that return no more
    entries than the block does are remembered while it is being finished, and what runs before the first block.

    Args:
        model: The model.
        trace: Of a pass over all batches.
        lists: Blocks in the order of their calls.
    """

    def __init__(self, model: nn.Module, trace: Trace, lists: Sequence[BlockList]) -> None:
        self.batch = 0
        """The number of the present batch."""
        self.needs = trace.needs
        self.block_of: dict[nn.Module, nn.Module] = {}
        """By module, the block that it is a part of."""
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = trace.layers
        self._entries: dict[nn.Module, _Remembered] = {}

        def remembered(parts: Iterable[nn.Module], most: float) -> list[_Remembered]:
            return [
                _Remembered(part, trace.needs[part])
                for part in parts
                if trace.counts[part] == {1} and trace.sizes[part] <= most
            ]

        held = {module for each in lists for block in each.blocks for module in block.modules()}
        for each in lists:
            around = [part for part in trace.parts[each.name] if held.isdisjoint(part.modules())]
            for part in remembered(around, float("inf")):
                self._entries.setdefault(part.module, part)
            answers: dict[int, tuple[int, Any]] = {}
            for index, block in enumerate(each.blocks):
                self.block_of.update(dict.fromkeys(block.modules(), block))
                parts = remembered(trace.parts[block], trace.sizes[block])
                self._entries.update((part.module, part) for part in parts)
                needs = trace.needs[block]
                self._entries[block] = _Remembered(block, needs, answers, index, parts)

    def forget(self) -> None:
        """Forget all answers."""
        for entry in self._entries.values():
            entry.answers.clear()

    @contextmanager
    def answering(self, done: Collection[nn.Module] | None = None) -> Iterator[None]:
        """Let what is finished once these layers are, or all that can, answer from memory while the context is open."""
        with ExitStack() as stack:
            for entry in self._entries.values():
                if done is not None and not entry.needs.issubset(done):
                    continue
                attributes = entry.module.__dict__
                own = attributes.get("forward")  # of the instance, as accelerate sets it
                attributes["forward"] = partial(self._answer, entry, entry.module.forward)
                stack.callback(_restore, attributes, own)
            yield

    def _answer(
        self, entry: _Remembered, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not entry.knows(self.batch):
            output = forward(*args, **kwargs)
            # What follows may change its input in place.
            entry.answers[self.batch] = entry.index, tree_map(_copied, output)
            for part in entry.parts:
                part.answers.pop(self.batch, None)
            return output
        index, answer = entry.answers[self.batch]
        # The answers of blocks before the last finished one are not read.
        return tree_map(_copied, answer) if index == entry.index else answer

    def fault(self, run: Callable[[], Any]) -> str:
        """Run the model on a batch as it is, and say where answers from memory change what it computes.

        Whenever a block, a part of one or another layer is called, the model runs to the same place once more with
        answers from memory: the inputs have to be equal, bit for bit. Empty if all are.
        """
        reasons: list[str] = []
        seen: set[nn.Module] = set()
        place: tuple[nn.Module, Any] | None = None  # where the inner run ends, and the inputs there

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal place
            if place is not None:
                if module is place[0]:
                    difference = _difference(place[1], (args, kwargs))
                    if difference:
                        reasons.append(difference)
                    raise Reached
                return
            if reasons or module in seen or not any(e.answers for e in self._entries.values()):
                return
            seen.add(module)
            place = module, (args, kwargs)
            try:
                run()
                reasons.append("it is not called")
            except Reached:
                pass
            except Exception as error:  # of the model, which lacks what a block leaves behind
                reasons.append(f"{type(error).__name__}: {error}")
            finally:
                place = None
            if reasons:
                reasons[0] = f"at '{self._names[module]}': {reasons[0]}"

        outside = [layer for layer in self._layers if layer not in self.block_of]
        self.batch = 0
        try:
            with self.answering(), ExitStack() as stack:
                for module in dict.fromkeys([*self._entries, *outside]):
                    handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                    stack.callback(handle.remove)
                run()
        finally:
            self.forget()
        return reasons[0] if reasons else ""


class Reached(Exception):
    """The model ran as far as is needed."""


def _parts(module: nn.Module) -> list[nn.Module]:
    """The children of a module that hold matrices; those of a list in its place, because nobody calls a list."""
    found = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _parts(child)
        elif any(
            parameter.dim() > 1 and not isinstance(part, nn.Embedding)
            for part in child.modules()
            for parameter in part.parameters(recurse=False)
        ):
            found.append(child)
    return found


def _parts_around(model: nn.Module, each: BlockList) -> list[nn.Module]:
    """The parts of the modules that hold a list, but for those with its blocks."""
    holders = [model]
    for name in each.name.split(".")[:-1]:
        holders.append(getattr(holders[-1], name))
    blocks = set(each.blocks)
    return [
        part for holder in holders for part in _parts(holder) if blocks.isdisjoint(part.modules())
    ]


def _restore(attributes: dict[str, Any], forward: Any) -> None:
    if forward is None:
        del attributes["forward"]
    else:
        attributes["forward"] = forward


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _difference(first: Any, second: Any) -> str:
    """How the inputs of two calls differ; empty if they are equal."""
    leaves, spec = tree_flatten(first)
    others, other_spec = tree_flatten(second)
    if spec != other_spec:
        return "its arguments are others when the modules before it answer from memory"
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            if not _equal(leaf, other):
                return "its inputs are others when the modules before it answer from memory"
        elif leaf is other and callable(leaf):
            continue  # a function, or a module
        elif not isinstance(leaf, _PLAIN):
            return f"its arguments hold a {type(leaf).__name__}, which blocks may change"
        elif type(leaf) is not type(other) or leaf != other:
            return (
                f"its argument {leaf!r} is {other!r} when the modules before it answer from memory"
            )
    return ""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.layout != torch.strided or first.is_nested:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # As bits, so that a value that is not a number equals itself.
    one, two = (x.detach().contiguous().flatten().view(torch.uint8) for x in (first, second))
    return torch.equal(one, two)
