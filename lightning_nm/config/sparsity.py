"""SparsityConfig: which weights a training masks, and how."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

from lightning_nm.config.presets import PresetName
from lightning_nm.config.rules import ResolvedRules, RuleSpec, resolve_rules
from lightning_nm.estimators import DgradName, EstimatorName, GradientEstimator
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.schedule import ScheduleSpec
from lightning_nm.functional.spelling import did_you_mean, not_given
from lightning_nm.methods import Method, MethodName
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.selection.first_last import SkipFirstLast
from lightning_nm.training.direct_reads import OnDirectRead
from lightning_nm.training.scale import Scale, check_scale


@dataclass(frozen=True)
class SparsityConfig:
    """Which weights a training masks, and how.

    :class:`~lightning_nm.NMSparsityCallback`, :class:`~lightning_nm.NMSparsifier` and the callback for the Trainer of
    transformers take these settings as keyword arguments, or all together as ``config=``.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: A short name, such as ``bi-mask``, ``sr-ste``, ``bame`` or ``asp``, of those in docs/which-method.md, or
            a :class:`Method`
            by ``class_path``.
        grad_estimator: The estimator that replaces the output gradient dY in the weight-gradient GEMM: ``mvue``,
            ``approx-mvue``, ``top-n``, or a :class:`GradientEstimator` by ``class_path``; ``dense`` keeps dY, and so
            does ``None`` unless the preset has an estimator. By short name, ``mvue`` and ``top-n`` use each layer's own
            pattern, and ``approx-mvue`` always 2:4.
        include: Globs over names of modules to mask; all maskable layers by default. A name without wildcards must be
            maskable.
        exclude: Globs over names of modules to keep dense.
        rules: Exceptions for some layers: mappings with ``include`` and any of ``pattern``, ``method``,
            ``grad_estimator``, ``conv_layout``, ``dgrad``, ``schedule``; the first match wins.
        preset: ``paper``: settings of the code of the method's paper, for the methods that docs/papers.md lists, also
            those of ``rules``. ``fst``: those of FST (arXiv 2404.01847), for ``transposable``.
            They fill in what is not given: ``conv_layout``, ``skip_first_last`` and ``grad_estimator``, and all
            arguments of a method that is given by its short name. A method that is an object is taken as it is, see
            :func:`~lightning_nm.preset_method`. docs/papers.md has the settings.
        skip_first_last: Which of the first convolution and the last linear layer stay dense: ``True`` both, ``first``
            or ``last`` one of them, ``False`` none; by default as the preset says, else both. They are the first and
            the last one of the trained layers that the model registers, whatever the order in which ``forward`` calls
            them. A resumed run keeps its choice. The table of layers gives the reason.
        conv_layout: ``channels``, the default: convolution blocks along the input channels for a fixed kernel tap, as
            hardware reads them, and as in the code of SR-STE and ASP. ``flat``: along the flattened filter, as in the
            code of Bi-Mask and transposable masks.
        seed: Base of all random choices; equal on all ranks.
        frozen: ``dense``: weights that no optimizer trains, such as those of a teacher, stay dense; a layer that is
            unfrozen later is masked from then on. Layers that ``include`` names are masked in any case. ``mask``: all
            are masked.
        grad_snr_every: Training steps between two comparisons of estimated weight gradients with exact ones: one more
            GEMM in each of four layers, which take turns. A resumed training compares four in its first step, too.
            0 for none. Compiled layers are never compared.
        scale: ``supar``: weights that are not trained yet get initial values that make up for the pruned entries, and
            masked weights the learning rate times ``base_density / density`` (arXiv 2405.15743, docs/scale.md).
            ``supar-lr``: the learning rate alone, for weights that were trained before.
        base_density: The density that the learning rate and the initial values suit: 1 if they were found for the dense
            model.
        dgrad: ``mvue``: the input gradient is made with a random draw of the forward weight, N:M along the outputs and
            equal to it in the mean, by the estimator of arXiv 2203.10991, as layers of the repository
            huyz2023/2by4-pretrain do. It is drawn anew for every backward pass. For methods whose own dgrad uses the
            forward weight. ``None`` leaves the backward weight to the method.
        schedule: A dense start, a ramp of patterns and a dense end, for all methods: a mapping with any of
            ``dense_start``, ``ramp``, ``ramp_ends`` and ``dense_end``, such as ``{dense_start: 0.1, ramp: [8:16, 4:16],
            dense_end: 0.1}``. Moments are training steps (an integer) or shares of the training (a float). ``ramp`` has
            the patterns before ``pattern``; each has an equal share of the time between the dense phases, or lasts
            until its moment of ``ramp_ends``. The dense phases hold for ``grad_estimator``, too. With ``dense_end``
            **the trained model is dense**. Methods refuse what they cannot follow. See docs/which-method.md.

        direct_reads: What happens before the first optimizer step of a masked weight that has a gradient though its
            layer was not called: other code reads it, for example by ``F.linear(x, layer.weight)``, gets the dense
            values, and the weight would be pruned at the end. ``error`` or ``warn``. A layer that is not used has no
            gradient and is accepted. Calls in compiled functions are not seen: after ``torch.compile`` there are
            warnings at most.

    Raises:
        ValueError: For an impossible pattern, an unknown method or estimator, a bad rule or an argument out of range.
        TypeError: For an argument of another type.

    Example:
        >>> config = SparsityConfig("1:4", "sr-ste", exclude="head")
        >>> SparsityConfig.from_dict(config.to_dict()) == config
        True
    """

    pattern: PatternLike = "2:4"
    method: MethodName | Method = "bi-mask"
    grad_estimator: EstimatorName | GradientEstimator | None = None
    include: str | list[str] | None = None
    exclude: str | list[str] | None = None
    rules: list[RuleSpec] | None = None
    preset: PresetName | None = None
    skip_first_last: SkipFirstLast | None = None
    conv_layout: ConvLayout | None = None
    seed: int = 0
    frozen: Literal["dense", "mask"] = "dense"
    grad_snr_every: int = 100
    scale: Scale | None = None
    base_density: float = 1.0
    dgrad: DgradName | None = None
    schedule: ScheduleSpec | None = None
    direct_reads: OnDirectRead = "error"

    def __post_init__(self) -> None:
        # Mistakes are refused here, where the user wrote them, and not when a fit starts.
        if self.frozen not in ("dense", "mask"):
            raise ValueError(f"frozen={self.frozen!r} is unknown: use 'dense' or 'mask'")
        if self.direct_reads not in ("error", "warn"):
            raise ValueError(
                f"direct_reads={self.direct_reads!r} is unknown: use 'error' or 'warn'"
            )
        every = self.grad_snr_every
        # bool is a subclass of int: grad_snr_every=True would mean every step.
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(
                f"grad_snr_every={every} must be a number of training steps, or 0 for never"
            )
        check_scale(self.scale, self.base_density)
        # For its errors, too: patterns, names and rules are checked while they are resolved.
        self.resolve()

    def resolve(self) -> ResolvedRules:
        """Return the rules of the layers, with objects in place of short names.

        Each call makes new methods from short names, so two trainings with one configuration share none.
        """
        return resolve_rules(
            self.pattern,
            self.method,
            self.grad_estimator,
            self.include,
            self.exclude,
            self.rules,
            self.preset,
            self.skip_first_last,
            self.conv_layout,
            self.dgrad,
            self.schedule,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are not the default, as primitives that JSON and YAML hold.

        Methods and estimators that are objects become ``{"class_path": ..., "init_args": ...}``.
        """
        # Defaults are left out, so that a file shows what was chosen.
        settings = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "pattern":
                # Of its several notations this is the one of the default, "2:4".
                value = str(NMPattern.parse(value))
            if value != field.default:
                settings[field.name] = _as_primitive(value)
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SparsityConfig:
        """Return the configuration of :meth:`to_dict`, or of the same keys in YAML.

        Raises:
            TypeError: For a key that is no setting; the message has the closest one.
        """
        refuse_unknown(settings, cls)
        arguments = {name: _from_primitive(value) for name, value in settings.items()}
        return cls(**arguments)


def chosen_config(config: SparsityConfig | None, given: SparsityConfig) -> SparsityConfig:
    """Return ``config``, or the configuration ``given`` by single arguments instead.

    Raises:
        TypeError: If ``config`` is something else.
        ValueError: If both are given.

    Example:
        >>> chosen_config(SparsityConfig("1:4"), given=SparsityConfig()).pattern
        '1:4'
    """
    if config is None:
        return given
    if not isinstance(config, SparsityConfig):
        raise TypeError(f"config must be a SparsityConfig{not_given(config)}")
    # An argument with its default value cannot be told from one that was not given, and changes nothing.
    arguments = given.to_dict()
    if arguments:
        raise ValueError(
            f"both config and {', '.join(arguments)} are given: put them into the SparsityConfig"
        )
    return config


def refuse_unknown(options: Mapping[str, Any], owner: type) -> None:
    """Refuse names that are neither arguments of ``owner`` nor settings of :class:`SparsityConfig`.

    Raises:
        TypeError: With the closest name that exists.

    Example:
        >>> refuse_unknown({"includ": "encoder.*"}, SparsityConfig)
        Traceback (most recent call last):
            ...
        TypeError: SparsityConfig has no argument 'includ'; did you mean 'include'?
    """
    # Constructors take these options as **options, so Python itself refuses none.
    known = arguments_of(owner)
    for name in options:
        if name not in known:
            raise TypeError(f"{owner.__name__} has no argument {name!r}{did_you_mean(name, known)}")


def arguments_of(owner: type) -> list[str]:
    """Return the names of a constructor's arguments, with the settings of :class:`SparsityConfig` where it takes them.

    Example:
        >>> arguments_of(SparsityConfig)[:3]
        ['pattern', 'method', 'grad_estimator']
    """
    names = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    # Who takes config= also takes its settings one by one, by **options.
    if "config" in names:
        names += [field.name for field in fields(SparsityConfig) if field.name not in names]
    return names


def _as_primitive(value: Any) -> Any:
    """The value as JSON and YAML hold it: patterns as text, methods and estimators as ``class_path`` and arguments."""
    if isinstance(value, NMPattern):
        return str(value)
    if isinstance(value, (Method, GradientEstimator)):
        owner = type(value)
        # Constructors keep each argument under its own name; other attributes are derived from these.
        arguments = inspect.signature(owner).parameters
        init_args = {}
        for name, setting in vars(value).items():
            if name in arguments:
                init_args[name] = _as_primitive(setting)
        # The notation of LightningCLI.
        return {"class_path": f"{owner.__module__}.{owner.__qualname__}", "init_args": init_args}
    if isinstance(value, Mapping):
        return {key: _as_primitive(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_as_primitive(entry) for entry in value]
    return value


def _from_primitive(value: Any) -> Any:
    """The inverse of :func:`_as_primitive`; patterns stay text, which every setting takes."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            module, _, name = value["class_path"].rpartition(".")
            owner = getattr(import_module(module), name)
            return owner(**value.get("init_args", {}))
        return {key: _from_primitive(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_primitive(entry) for entry in value]
    return value
