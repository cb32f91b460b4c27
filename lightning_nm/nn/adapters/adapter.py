"""The base class of adapters, and the registry of adapters.

A module is adapted by swapping its ``__class__`` for a subclass that mixes an adapter in. The module object, its
parameters and its state-dict keys stay the same: an optimizer made earlier still trains the parameters. At the end of a
fit the class is swapped back, with W_F in the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import keep_replaced, take_loaded
from lightning_nm.nn.weight import Layout, as_sharded

Args = tuple[Any, ...]
"""The positional arguments of a module's call."""

Kwargs = dict[str, Any]
"""Its arguments by name."""


class WeightSpec(NamedTuple):
    """A weight that an adapter can mask.

    Attributes:
        parameter: Name of the parameter in its module.
        layout: How its blocks lie: a :class:`~lightning_nm.nn.weight.Layout`, or its text.
        groups: Groups of output rows that no dgrad block may cross.
    """

    parameter: str
    layout: Layout | str = Layout.PLAIN
    groups: int = 1


class Adapter(nn.Module):
    """Mixed into a module's class while its weights are masked; ``nm_layers`` maps parameter names to their layers.

    A subclass sets :attr:`handles` and defines :meth:`macs` and ``forward``, which runs the GEMMs by
    :func:`~lightning_nm.nn.products.nm_linear` or :func:`~lightning_nm.nn.products.nm_conv`; and :meth:`specs`, if its
    weights are others than one ``[out, in]``.
    :func:`register_adapter` makes it known. The state dict, loading, copies and devices are handled here.
    """

    handles: ClassVar[type[nn.Module]]
    """The class whose forward this adapter replaces."""

    role: ClassVar[Literal["linear", "convolution", "embedding", ""]] = ""
    """What ``skip_first_last`` takes it for. An embedding is a lookup, not a product: it is masked by name
    alone, and has neither a dgrad GEMM nor an estimator."""

    tensor_parallel: ClassVar[bool] = False
    """Whether forward can run while tensor parallelism shards the weight."""

    reads_children: ClassVar[tuple[str, ...]] = ()
    """Children whose weights the handled class reads without calling them."""

    wraps_forward: ClassVar[bool] = False
    """Whether the class's own forward runs; :meth:`macs` then knows only the GEMMs of masked weights."""

    nm_base: ClassVar[type[nn.Module]]
    """The class that the module had before the swap."""

    nm_layers: dict[str, NMLayer]
    """Parameter name -> layer, for the weights of this module that are masked."""

    @classmethod
    def handled(cls, kind: type[nn.Module]) -> type[nn.Module] | None:
        """Return the class that the adapter handles, if a module class is derived from it; else ``None``."""
        return cls.handles if issubclass(kind, cls.handles) else None

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Why this module of the handled class cannot be masked; empty if it can."""
        return ""

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Yield the weights of a module of the handled class; ``conv_layout`` is ``"channels"`` or ``"flat"``.

        By default the one weight is called ``weight``, and is ``[out, in]``.
        """
        yield WeightSpec("weight")

    @classmethod
    def macs(
        cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any
    ) -> int | None:
        """Return the multiply-adds of a weight's dense forward GEMM in one call; ``None`` if operators must be counted.

        Args:
            module: The module.
            parameter: Which of its weights.
            args: The call's positional arguments.
            kwargs: Its arguments by name.
            output: Its result.
        """
        raise NotImplementedError

    @classmethod
    def macs_of_child(cls, module: Any, child: str, output: Any) -> int:
        """Return the multiply-adds of a child in :attr:`reads_children`, in one call of a module that was not adapted.

        Such a module reads the child's weight without calling the child. ``output`` is the result of the module.
        """
        raise NotImplementedError

    @classmethod
    def inputs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return what a call multiplies by a weight, ``[tokens, in]`` for each of its groups of output rows.

        :func:`lightning_nm.prune` needs it for calibration. The columns are those of a row of the weight,
        ``rows.flatten(1)``; the arguments are those of :meth:`macs`.
        """
        raise NotImplementedError(f"{cls.__name__} defines no inputs(), which calibration needs")

    @classmethod
    def needed_around(cls, module: Any) -> bool:
        """Whether a module of the handled class must be adapted though none of its own weights is masked."""
        children = [getattr(module, child, None) for child in cls.reads_children]
        return any(isinstance(child, Adapter) for child in children)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # The state dict is the model's function: it holds W_F under the dense model's keys.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parameter, layer in self.nm_layers.items():
            key = prefix + parameter
            destination[key] = _saved_weight(layer, destination, key)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded = [layer for name, layer in self.nm_layers.items() if prefix + name in state_dict]
        # First, because the state of the layer belongs to the weights that torch is about to replace.
        for layer in loaded:
            keep_replaced(layer)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for layer in loaded:
            take_loaded(layer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The way of torch to move and cast a module: the layers' tensors follow its parameters.
        result = super()._apply(fn, recurse)
        for layer in self.nm_layers.values():
            layer.to_weight_device()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The swapped class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


# Layers with a tied weight -> W_F as one of its modules put it into a state dict last, the weight's version then, and
# the key that it was made for.
_TIED: WeakKeyDictionary[NMLayer, tuple[ref[Tensor], int, str]] = WeakKeyDictionary()


def _saved_weight(layer: NMLayer, destination: dict[str, Any], key: str) -> Tensor:
    """W_F for a key of a state dict: of a tied weight the tensor that another of its modules put there."""
    version = layer.param._version
    # One tensor under two keys, as the dense model has it: files then hold it once.
    if layer in _TIED:
        saved, saved_version, saved_key = _TIED[layer]
        tensor = saved()
        # Perhaps it was put into another state dict than this one. Its own key comes again when a state dict is filled
        # a second time, after masks may have moved.
        is_here = any(tensor is value for value in destination.values())
        if tensor is not None and is_here and saved_version == version and saved_key != key:
            return tensor
    made = as_sharded(layer.forward_weight(local=True), layer.param)
    if layer.spec.tied:
        # Weak, so that its memory ends with the state dict.
        _TIED[layer] = ref(made), version, key
    return made


# Every adapter, the last one that was registered first.
_ADAPTERS: list[type[Adapter]] = []

# Module class -> the adapted class that was made of it.
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def register_adapter(adapter: type[Adapter]) -> type[Adapter]:
    """Make an adapter known, so that modules of the class it handles can be masked; usable as a decorator.

    Adapters that are registered later are asked first.

    Args:
        adapter: A subclass of :class:`Adapter`.

    Raises:
        TypeError: If it is none, or handles no class.

    Example::

        >>> from lightning_nm.nn import NMLinear
        >>> class Scaled(nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> @register_adapter
        ... class NMScaled(NMLinear):
        ...     handles = Scaled
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> from lightning_nm import NMSparsifier
        >>> list(NMSparsifier(Scaled(8, 4), "2:4", "ste", skip_first_last=False).attach().layers)
        ['weight']
    """
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise TypeError(
            f"register_adapter takes a subclass of lightning_nm.nn.Adapter, not {adapter!r}"
        )
    # An adapter that overrides handled() may do without `handles`.
    inherits = getattr(adapter.handled, "__func__", None) is Adapter.handled.__func__  # type: ignore[attr-defined]
    if inherits and not isinstance(getattr(adapter, "handles", None), type):
        raise TypeError(
            f"{adapter.__name__} handles no class: set `handles` to the module class that it adapts"
        )
    if adapter not in _ADAPTERS:
        _ADAPTERS.insert(0, adapter)
        # The new adapter may fit classes better than the one that they were made with.
        _CLASSES.clear()
    return adapter


def find_adapter(kind: type[nn.Module]) -> tuple[type[Adapter], type[nn.Module]] | None:
    """Return the adapter for a module class, and the class it handles, from which ``kind`` may be derived."""
    if issubclass(kind, Adapter):
        # An adapted class has the forward of its adapter, and handled() may look at the class's own.
        kind = kind.nm_base
    for adapter in _ADAPTERS:
        handled = adapter.handled(kind)
        if handled is not None:
            return adapter, handled
    return None


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has, or had before it was adapted."""
    return type(module).nm_base if isinstance(module, Adapter) else type(module)


def adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class that mixes the fitting adapter into ``base``; one per base class, made at first use.

    Example::

        >>> adapted_class(nn.Linear).__mro__[1].__name__, adapted_class(nn.Linear).nm_base.__name__
        ('NMLinear', 'Linear')
    """
    if base in _CLASSES:
        return _CLASSES[base]
    found = find_adapter(base)
    assert found is not None
    attributes = {"nm_base": base, "__module__": __name__}
    # The adapter first: its forward replaces that of the class, whose other methods it reaches by super().
    made = type(f"NM{base.__name__}", (found[0], base), attributes)
    _CLASSES[base] = made
    return made


def _new(base: type[nn.Module]) -> nn.Module:
    """Return an empty module of the adapted class, for pickle and deepcopy to fill."""
    # Pickles name this function: it keeps its name and place.
    cls = adapted_class(base)
    return cls.__new__(cls)
