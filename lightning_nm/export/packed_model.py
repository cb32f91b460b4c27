"""Packed models: made of a model in memory, measured, saved, loaded, and given back as a dense state dict.

A file is loaded one tensor at a time, after it and the model are known to fit each other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_nm.export.atomic_write import FilePath, Weights
from lightning_nm.export.packed_file import PackedFile, bytes_of, no_checksums, write_packed
from lightning_nm.export.patterns import Found, count_nonfinite, pattern_of
from lightning_nm.functional.int8 import INT8_DTYPES
from lightning_nm.nn.weight import Layout, parameter_key, plain_name
from lightning_nm.packed.kernel_choice import (
    BUDGET_S,
    KernelChoice,
    Kernels,
    return_freed_memory,
)
from lightning_nm.packed.module import (
    PackedLayer,
    PackedWeight,
    Place,
    call_packed_children,
    embeddings_of,
    packed_weights,
    places_and_reasons,
    places_of,
    put,
    refuse_to_fit,
)
from lightning_nm.packed.tensor import EVERY_ENTRY, PackedTensor, int8_fault
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import some_of

Model = TypeVar("Model", bound=nn.Module)


def pack(
    model: Model,
    pattern: PatternLike | None = None,
    *,
    dtype: Literal["int8"] | None = None,
    int8_embeddings: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    kernels: Kernels = "auto",
    budget_s: float = BUDGET_S,
) -> Model:
    """Replace the N:M weights of a model by packed ones, one layer at a time.

    The modules stay the same objects; their classes change, and a
    :class:`~lightning_nm.packed.module.PackedWeight` takes the place
    of each N:M parameter of a linear layer, convolution, ``Conv1D`` of ``transformers`` or projection of
    ``nn.MultiheadAttention``. Other weights stay as they are. On a CPU a weight takes the layout of a kernel of this
    package, if there is one for it. :func:`packed_summary` tells what each layer holds.

    Packed models are for inference: the model is put in evaluation mode, and no parameter requires gradients. Gradients
    of inputs are computed; training raises a RuntimeError.

    Args:
        model: Any module whose masks, if it had any, are baked in and removed.
        pattern: The N:M pattern; weights that are not of it stay dense. By default each weight has its own: the one
            that takes the least memory.
        dtype: ``"int8"`` rounds the values to int8, with a scale for each output (of each expert), see
            :func:`lightning_nm.functional.quantise_weight`. On a CPU the GEMMs round each token to int8 as well
            (:func:`lightning_nm.functional.quantise_tokens`), convolutions the inputs of each output position: sums are
            exact, and multiplied by both scales. By default weights keep their values.
        int8_embeddings: With `dtype`, globs over module names and keys of ``nn.Embedding`` that are rounded to int8,
            too, with a scale for each row; rows are dequantised when they are looked up. They need not be N:M. A linear
            head that shares the weight multiplies by the same int8 rows, with tokens that are rounded to 16 bits. This
            is not measured, and slower than a dense head of many tokens.
        exclude: Globs over module names and keys that stay dense.
        kernels: ``"auto"``: as fast as the dense model or faster, as measured. A layer keeps its kernel's layout while
            the kernel is no slower than the dense GEMM, and holds the dense weight from the first GEMM on for
            which that is not so, or at once if there is no kernel for it. Numbers of tokens are rounded up to powers
            of two; each is measured once, and kept in ``~/.cache/lightning_nm/packed.json``. :func:`warm_up` measures
            before the first request. ``"sparse"``: never holds a dense weight; GEMMs run on the kernel,
            or unpack the weight where there is none. ``"reference"``: GEMMs always unpack the weight; takes the
            least memory, and is slower than the dense model.
        budget_s: Seconds in which the GEMMs of the model are measured in ``"auto"``, while it answers; the last
            measurement may exceed them. After that, the nearest measured GEMM decides for a new size, without one
            the kernel takes it. 0 measures nothing.

    Returns:
        The model.

    Raises:
        ValueError: If no weight is N:M: the message lists why. The model is then unchanged. Also if masks are
            installed, an argument is unknown, `dtype` is ``"int8"`` and a weight has no int8 form, or a glob of
            `int8_embeddings` matches no embedding whose weight is its own, or that of linear heads, too.

    Example::

        >>> import torch
        >>> from lightning_nm.functional import nm_prune
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> model[0].weight.data = nm_prune(model[0].weight.data, "1:16")
        >>> pack(model)[0].weight.pattern
        NMPattern(n=1, m=16)
        >>> model(torch.randn(2, 64)).shape
        torch.Size([2, 4])
    """
    # What is wrong with the arguments is found before the first layer changes.
    choice = KernelChoice(kernels, budget_s)
    if dtype not in (None, "int8"):
        raise ValueError(f"dtype={dtype!r} is unknown: use 'int8', or None for the weight's own")
    given = None if pattern is None else NMPattern.parse(pattern)
    globs = [exclude] if isinstance(exclude, str) else list(exclude)
    places, reasons = places_of(model)  # refuses installed masks
    wanted = [int8_embeddings] if isinstance(int8_embeddings, str) else int8_embeddings
    if wanted and dtype != "int8":
        raise ValueError("`int8_embeddings` needs dtype='int8'")
    possible = embeddings_of(model)
    embeddings: dict[str, list[Place]] = {}
    for glob in wanted:
        matched = {key: places for key, places in possible.items() if matches(key, glob)}
        if not matched:
            raise ValueError(
                f"`int8_embeddings` '{glob}' matches no nn.Embedding whose weight is its own, or that of linear heads, "
                f"too: there are {', '.join(map(repr, possible)) or 'none'}"
            )
        embeddings |= matched
    found: dict[str, tuple[Place, Found]] = {}
    for key, place in places.items():
        if any(matches(key, glob) for glob in globs):
            reasons[key] = "in `exclude`"
            continue
        if place.weight.is_meta:
            raise ValueError(
                f"'{key}' has no values, it is on the meta device: use load_packed(model, file)"
            )
        if place.axes is Layout.EXPERTS:
            # Each expert is a matrix, so that no block may lie across its rows.
            rows = place.weight.flatten(0, 1)  # [experts * out, in]
            each = pattern_of(rows, given, [Layout.PLAIN])._replace(layout=place.layouts[0])
        else:
            each = pattern_of(place.weight, given, place.layouts)
        if each.pattern is None:
            reasons[key] = each.reason
        else:
            found[key] = place, each
    # Before embeddings are added: they need not be N:M, and would not make the model N:M.
    if not found:
        shown = some_of([f"'{key}': {reason}" for key, reason in reasons.items()])
        raise ValueError(f"{type(model).__name__} has no weight to pack: {shown}")
    rounded = {key: (each[0], Found(EVERY_ENTRY)) for key, each in embeddings.items()}
    found = rounded | found
    # A pass of its own: a weight without an int8 form must leave all others as they were.
    for key, (place, each) in found.items():
        fault = int8_fault(place.weight) if dtype else ""
        if fault:
            other_dtype = place.weight.dtype not in INT8_DTYPES
            remedy = "convert the model by model.to(torch.bfloat16), or " if other_dtype else ""
            option = "`int8_embeddings`" if each.pattern == EVERY_ENTRY else "`exclude`"
            raise ValueError(
                f"'{key}' has no int8 form, {fault}: {remedy}leave the layer out by {option}"
            )
    # A place looks its parameter up and does not hold it, so that each dense weight is freed in its turn.
    for key, (place, (own, layout, _)) in found.items():
        assert own is not None
        experts = place.axes.has_experts
        tensor = PackedTensor.of(place.weight, own, layout, int8=dtype == "int8", experts=experts)
        # An embedding has further places: the heads that share its weight.
        put(embeddings.get(key, [place]), tensor, key, choice)
    return _for_inference(model)


def matches(key: str, glob: str) -> bool:
    """Whether a glob over module names and keys matches a weight."""
    return fnmatchcase(key, glob) or fnmatchcase(key.rpartition(".")[0], glob)


def save_packed(model: nn.Module, path: FilePath) -> None:
    """Save a packed model, as :func:`load_packed` reads it.

    Args:
        model: A model with packed layers.
        path: The file, which is replaced when the new one is complete.

    Raises:
        ValueError: If no layer is packed.
        OSError: If the file cannot be written.
    """
    _required_weights(model)  # refuses a model without any
    state = _state_of(model, lambda weight: weight.packed())
    # Without what else a state dict may hold; dense tensors come first in the file.
    tensors = {
        plain_name(key): each
        for kind in (Tensor, PackedTensor)
        for key, each in state.items()
        if isinstance(each, kind)
    }
    write_packed(path, tensors)


def _required_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """The packed weights of a model by key; one without any is refused by a ``ValueError``."""
    found = dict(packed_weights(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no packed layer: call lightning_nm.pack(model) first"
        )
    return found


def unpacked_state_dict(model: nn.Module) -> Weights:
    """The dense state dict of a packed model, with zeros, under the keys that the model had before.

    It has the memory of the dense model: keys of one module, which the model holds under several names, have one
    tensor. ``model.state_dict()`` has the packed tensors.
    """
    return _state_of(model, lambda weight: weight.unpack())


def _state_of(model: nn.Module, form: Callable[[PackedWeight], Any]) -> dict[str, Any]:
    """The state dict of a packed model under the keys of the dense one, with a form of each packed weight.

    It is made once for all keys of a weight.
    """
    packed = dict(packed_weights(model, all_names=True))
    # By weight: keys that share one get one tensor, which a file then holds once.
    once = {weight: form(weight) for weight in dict.fromkeys(packed.values())}
    found = {}
    for key, value in model.state_dict().items():
        owner = key.rpartition(".")[0]
        if owner in packed:
            # K.values, K.positions and K.scales all become the one key K.
            key, value = owner, once[packed[owner]]
        found[key] = value
    return found


def _for_inference(model: Model) -> Model:
    """Make a model whose weights were packed ready: evaluation mode, no gradients of parameters."""
    # After the last layer, because which modules read packed children is known only now.
    call_packed_children(model)
    refuse_to_fit(model)
    return_freed_memory()
    return model.eval().requires_grad_(False)


def warm_up(
    model: Model,
    batch: Sequence[int] = (1,),
    tokens: Sequence[int] = (1,),
    *,
    example: Tensor | tuple[Tensor, ...] | None = None,
) -> Model:
    """Choose between kernel and dense GEMM for the sizes that a packed model will meet, however long that takes.

    It changes models that are packed with ``kernels="auto"`` alone: each layer chooses for ``b * t`` tokens, for each
    ``b`` of `batch` and ``t`` of `tokens`, as it would at its first GEMM of that size, see :func:`pack`. Choices
    are kept in ``~/.cache/lightning_nm/packed.json``, and made for the number of threads that torch has now.

    Args:
        model: A model with packed layers.
        batch: Numbers of inputs of one call.
        tokens: Lengths of an input: 1 for a layer without a token axis, or for generating with a cache.
        example: An input of the model, or a tuple of its positional ones, each ``[1, ...]``. The model is called with
            it, repeated to each size of `batch`. Convolutions need it, because their sizes depend on the image, and
            attention whose queries, keys and values differ.

    Returns:
        The model.

    Raises:
        ValueError: If no layer is packed, a size is not a positive integer, or an example is needed or is not of one
            input. Nothing is measured then.

    Example::

        >>> from lightning_nm import pack, prune
        >>> layer = nn.Linear(64, 32)
        >>> _ = prune(layer, "1:16", skip_first_last=False)
        >>> model = warm_up(pack(layer, kernels="sparse"), batch=[1, 8], tokens=[1, 128])
    """
    weights = _required_weights(model)
    for name, sizes in (("batch", batch), ("tokens", tokens)):
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"{name}={sizes!r} must be positive integers, such as {name}=[1, 16]")
    inputs = (example,) if isinstance(example, Tensor) else example or ()
    for each in inputs:
        if each.dim() == 0 or len(each) != 1:
            raise ValueError(
                f"an example has the shape {list(each.shape)}: it must be one input, [1, ...]"
            )
    chosen = {name: weight for name, weight in weights.items() if weight.choice.kernels == "auto"}
    for name, weight in chosen.items():
        if weight.convolves and weight.operand is not None and not inputs:
            raise ValueError(
                f"'{name}' is of a convolution, whose sizes depend on the image: pass example=image[None]"
            )
    # Weights that were packed in one call share a budget.
    budgets = {weight.choice: weight.choice.left_s for weight in chosen.values()}
    try:
        for budget in budgets:
            budget.left_s = math.inf  # whatever is asked for is measured
        with torch.inference_mode():
            for weight in chosen.values():
                if weight.convolves:
                    # The example is to measure again: a remembered choice would be taken as it is.
                    weight.forget()
                    continue
                for size in sorted({b * t for b in batch for t in tokens}):
                    weight.measure(size)
            if inputs and chosen:
                for size in batch:
                    # expand() repeats the input without copying it.
                    model(*(each.expand(size, *each.shape[1:]) for each in inputs))
    finally:
        for budget, left_s in budgets.items():
            # Also after an error: requests keep the time that they had.
            budget.left_s = left_s
    return model


def load_packed(
    model: Model,
    path: FilePath,
    *,
    kernels: Kernels = "auto",
    budget_s: float = BUDGET_S,
) -> Model:
    """Load a packed model into a model of the same architecture, whose layers become packed, see :func:`pack`.

    Tensors are read one at a time, and the dense weight of a packed layer is never made. A model that
    was built under ``torch.device("meta")`` takes no memory before. Tensors have the file's dtype and, unless they are
    on the meta device, the model's device. Every tensor is compared with its checksum before the model is changed;
    there is a warning if the file has no checksums (lightning_nm 0.3 and older), or if a weight has entries that are
    NaN or infinite.

    Args:
        model: A module with the keys and shapes of the one that was exported, in its dtype or in torch's default one.
            A weight that is packed in the file, and that no packed layer takes, is unpacked.
        path: A file of ``lightning-nm export --to packed`` or :func:`save_packed`.
        kernels: As :func:`pack`'s.
        budget_s: As :func:`pack`'s.

    Returns:
        The model.

    Raises:
        ValueError: If the file is damaged or is no packed model, or the model does not fit it: the message names
            both. The model is then unchanged.
        OSError: If the file cannot be opened.
    """
    choice = KernelChoice(kernels, budget_s)
    if any(packed_weights(model)):
        raise ValueError(f"{type(model).__name__} is packed already: load into a new model")
    file = PackedFile(path)
    # All is compared before anything changes: keys and shapes, dtypes, then the bytes.
    owners = _owners(model, file)
    _refuse_other_model(model, file, owners, path)
    found_places, _ = places_of(model)  # refuses a masked model
    # N:M embeddings, and dense matrices of other layers, are unpacked.
    # By id, because the loop has tensors without names. `owners` holds each until it is looked up, so no id is used
    # again.
    places = {id(place.weight): (name, [place]) for name, place in found_places.items()}
    rows = {id(each[0].weight): (name, each) for name, each in embeddings_of(model).items()}
    _refuse_other_tensors(file, owners, rows | places)
    if file.checksums is None:
        warnings.warn(no_checksums(path), stacklevel=2)
    nonfinite = []
    while owners:  # the list alone holds the dense weights, each until it is replaced
        owner = owners.pop(0)
        # Any of its keys in the file: their tensors were compared and are equal.
        key = next(iter(owner.stored))
        found = file.read(key)
        tensor = owner.tensor
        is_parameter = isinstance(tensor, nn.Parameter)
        values = found.values if isinstance(found, PackedTensor) else found
        # A buffer may be a mask of -inf.
        count = count_nonfinite(values, infinite=is_parameter)
        if count:
            nonfinite.append(f"'{key}' ({count})")
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        if isinstance(found, PackedTensor):
            fitting = rows if found.kind.pattern == EVERY_ENTRY else places
            if id(tensor) in fitting:
                name, where = fitting[id(tensor)]
                # The module then has the last reference, and put() frees the dense weight.
                del owner, tensor
                put(where, found.to(device), name, choice)
                continue
            # Such as a layer with a forward of its own.
            found = found.unpack()
        if not tensor.is_meta:
            # In place, so that all modules which share the tensor get the values.
            tensor.data = found.to(device)  # its dtype, too
            continue
        # A meta tensor takes no data: another object replaces it under each of its keys.
        new = nn.Parameter(found, requires_grad=False) if is_parameter else found
        for own_key in owner.keys:
            prefix, _, name = own_key.rpartition(".")
            setattr(model.get_submodule(prefix), name, new)
    _for_inference(model)
    if nonfinite:
        warnings.warn(
            f"tensors of '{path}' have entries that are NaN or infinite, so outputs of the model may be NaN: "
            f"{some_of(nonfinite, separator=', ')}",
            stacklevel=2,
        )
    return model


@dataclass(eq=False)
class _Owner:
    """A tensor of the state dict, and its keys: several if modules share it, or the model holds one twice.

    Args:
        tensor: The tensor.
        keys: In the model.
        stored: The keys of those that the file has, without wrappers, by the key of a tensor in the file.
    """

    tensor: Tensor
    keys: list[str] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)


def _owners(model: nn.Module, file: PackedFile) -> list[_Owner]:
    """The tensors of a model's state dict."""
    in_file = {plain_name(key): file.aliases.get(key, key) for key in file.names()}
    found: dict[int, _Owner] = {}
    # keep_vars gives the parameters themselves, by whose ids shared ones are known.
    for key, tensor in model.state_dict(keep_vars=True).items():
        # A state dict may also hold what get_extra_state() of a module returns.
        if isinstance(tensor, Tensor):
            owner = found.setdefault(id(tensor), _Owner(tensor))
            owner.keys.append(key)
            plain = plain_name(key)
            if plain in in_file:
                owner.stored.setdefault(in_file[plain], plain)
    return list(found.values())


def _refuse_other_tensors(
    file: PackedFile, owners: Sequence[_Owner], places: Mapping[int, tuple[str, list[Place]]]
) -> None:
    """Refuse tensors that are damaged or do not fit, and different values of what is one tensor in the model."""
    if file.checksums is not None:
        for key in file.dense:
            file.read_stored(key)  # compares
    # Packed tensors are compared with their checksums when they are read here.
    for owner in owners:
        for key in owner.stored.keys() & file.packed.keys():
            packed = file.read_packed(key)
            try:
                if id(owner.tensor) in places:
                    _, where = places[id(owner.tensor)]
                    # A file does not tell experts from a convolution in one dimension: the shape of the scales does.
                    packed.check_scales(where[0].axes.has_experts)
            except ValueError as error:
                raise ValueError(
                    f"'{key}' of '{file.path}' does not fit the model: {error}"
                ) from None
        if len(owner.stored) < 2:
            continue
        first, *others = owner.stored
        expected = file.read_dense(first)
        for other in others:
            values = file.read_dense(other)
            # By bits: NaN is equal to itself.
            if values.dtype != expected.dtype or not torch.equal(
                bytes_of(values), bytes_of(expected)
            ):
                raise ValueError(
                    f"'{owner.stored[first]}' and '{owner.stored[other]}' are one tensor in the model, and different "
                    f"ones in '{file.path}': load the file into a model that does not share them"
                )


def _refuse_other_model(
    model: nn.Module, file: PackedFile, owners: Sequence[_Owner], path: FilePath
) -> None:
    kind = type(model).__name__
    own = {plain_name(key): owner for owner in owners for key in owner.keys}
    entries = {plain_name(key): file.entry(key) for key in file.names()}
    shared = [(key, own[key].tensor, each) for key, each in entries.items() if key in own]
    missing = [key for key, owner in own.items() if not owner.stored]
    others = [key for key in entries if key not in own]
    faults = []
    for what, keys in (("the file lacks", missing), ("the model lacks", others)):
        if keys:
            faults.append(f"{what} {some_of([*map(repr, keys)], separator=', ')}")
    for key, tensor, entry in shared:
        shape = tuple(tensor.shape)
        if shape != entry.shape:
            faults.append(f"'{key}' is {shape} in the model and {entry.shape} in the file")
    # Before dtypes are compared, which says something only of the right model.
    if faults:
        raise ValueError(f"the model {kind} does not fit '{path}': {some_of(faults)}")
    for key, tensor, entry in shared:
        own_dtype, dtype = tensor.dtype, entry.dtype
        # A model in torch's default dtype takes the file's; inputs of one that was converted would have the wrong one.
        is_chosen = own_dtype.is_floating_point and own_dtype != torch.get_default_dtype()
        if is_chosen and own_dtype != dtype and not tensor.is_meta:
            raise ValueError(
                f"'{key}' is {own_dtype} in the model {kind} and {dtype} in '{path}', and a loaded "
                f"model has the dtypes of its file: load into model.to({dtype}), and convert the packed model by "
                f".to({own_dtype})"
            )
    # Such as rotary tables: the meta device left them without values, and no file has any.
    empty = [
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
        if (tensor := module._buffers.get(buffer)) is not None and tensor.is_meta
    ]
    if empty:
        raise ValueError(
            f"{some_of([*map(repr, empty)], separator=', ')} of {kind} on the meta device has no values, and "
            "no state dict holds it: build the model on the CPU, or under accelerate.init_empty_weights()"
        )


class HeldWeight(NamedTuple):
    """A weight of a packed layer.

    Attributes:
        name: Its key in the dense state dict.
        pattern: Its pattern; ``"dense"`` of an embedding in int8.
        form: What is held: ``"packed"`` as in files, the layout of a kernel by the kernel's name, or ``"dense"``. Of
            values in int8: ``"packed int8"``, ``"cpu-int8"``, or ``"dense, of int8"``, in the dtype of the inputs.
        bytes: Bytes that are held.
        dense_bytes: Bytes of the dense weight.
    """

    name: str
    pattern: str
    form: str
    bytes: int
    dense_bytes: int


class NotPacked(NamedTuple):
    """A weight, or a module with weights, that no packed layer holds.

    Attributes:
        name: Its key in the dense state dict, or the module's name.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class PackedSummary:
    """The weights of a packed model; ``str()`` gives a table.

    Attributes:
        weights: Those of packed layers.
        not_packed: The others of layers that could be N:M.
        not_int8: Those of `weights` whose values are not int8, and why, if others are.
    """

    weights: tuple[HeldWeight, ...]
    not_packed: tuple[NotPacked, ...] = ()
    not_int8: tuple[NotPacked, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that all of them hold."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense weights."""
        return sum(weight.dense_bytes for weight in self.weights)

    def __str__(self) -> str:
        total = HeldWeight(f"{len(self.weights)} weights", "", "", self.bytes, self.dense_bytes)
        rows = [("weight", "pattern", "held as", "bytes", "of dense")]
        for each in (*self.weights, total):
            rows.append((*each[:3], f"{each.bytes}", f"{each.bytes / each.dense_bytes:.3f}"))
        left = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([*map(str.ljust, row[:3], left), *map(str.rjust, row[3:], left[3:])]).rstrip()
            for row in rows
        ]
        lines += [f"{name}  not int8: {reason}" for name, reason in self.not_int8]
        lines += [f"{name}  not packed: {reason}" for name, reason in self.not_packed]
        return "\n".join(lines)


def packed_summary(model: nn.Module) -> PackedSummary:
    """What each packed layer of a model holds now, its fraction of the dense weight's memory, and what is not packed.

    With ``kernels="auto"`` a layer whose dense GEMM is faster holds the dense weight from then on, see
    :func:`lightning_nm.pack`: look again after the model has run.

    Raises:
        ValueError: If no layer is packed.

    Example::

        >>> import torch
        >>> from lightning_nm import pack
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        >>> model[0].weight.data.zero_()[:, ::16] = 1
        >>> print(packed_summary(pack(model, kernels="reference")))
        weight     pattern  held as  bytes  of dense
        0.weight   1:16     packed     576     0.070
        1 weights                      576     0.070
    """
    held = {plain_name(name): weight for name, weight in _required_weights(model).items()}
    rows = tuple(
        HeldWeight(name, str(weight.pattern), weight.form, weight.nbytes, weight.dense_nbytes)
        for name, weight in held.items()
    )
    # Those that keep their values while others are int8.
    some_int8 = any(weight.is_int8 for weight in held.values())
    not_int8 = tuple(
        NotPacked(name, f"it was packed in {str(weight.dtype).removeprefix('torch.')}")
        for name, weight in held.items()
        if some_int8 and not weight.is_int8
    )
    return PackedSummary(rows, tuple(_not_packed(model)), not_int8)


def _not_packed(model: nn.Module) -> Iterator[NotPacked]:
    places, reasons = places_and_reasons(model)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    packed = {name: module for name, module in modules.items() if isinstance(module, PackedLayer)}
    partly: dict[str, nn.Module] = dict(packed)  # layers that may hold dense weights, too
    for name, reason in reasons.items():
        parent = name.rpartition(".")[0]
        # Its reason is that it is packed already.
        if name in packed:
            continue
        if parent not in packed:
            yield NotPacked(name, reason)
        elif name in modules:
            # Such as `out_proj` of an attention whose other projections are packed.
            partly[name] = modules[name]
    for name, module in partly.items():
        for parameter, tensor in module._parameters.items():
            # bias_k and bias_v of attention have three axes, and are no matrices.
            if tensor is not None and tensor.dim() > 1 and not parameter.startswith("bias_"):
                yield NotPacked(parameter_key(name, parameter), _why_dense(tensor, [Layout.PLAIN]))
    for name, place in places.items():
        yield NotPacked(name, _why_dense(place.weight, place.layouts))


def _why_dense(weight: nn.Parameter, layouts: list[Layout]) -> str:
    """Why a weight is dense that a packed layer could hold."""
    if weight.is_meta:
        return "it has no values, it is on the meta device"
    found = pattern_of(weight, None, layouts)
    if found.pattern is None:
        return found.reason
    return f"it is {found.pattern}, but was left dense by `exclude` or `pattern`, or is dense in the file"
