"""The settings of a sparse training: presets, rules for layers, and SparsityConfig, which holds them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal, TypedDict

from typing_extensions import Required

from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import BAME, Dense, MaskMethod, Method
from lightning_nm.nn.selection import Rule, SkipFirstLast, as_globs, parse_skip_first_last
from lightning_nm.nn.weight import ConvLayout
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.schedule import Schedule, ScheduleSpec, check_narrower, shown_name
from lightning_nm.short_names import (
    METHODS,
    DgradName,
    EstimatorName,
    MethodName,
    resolve_dgrad,
    resolve_estimator,
    resolve_method,
)
from lightning_nm.spelling import (
    check_interval,
    check_keys,
    check_option,
    did_you_mean,
    not_given,
)
from lightning_nm.training.scale import Scale, check_scale
from lightning_nm.training.watch import OnDirectRead

PresetName = Literal["paper", "fst"]
"""``"paper"``: the code of the paper that proposed the method. ``"fst"``: transposable masks in FST's transformers."""

Frozen = Literal["dense", "mask"]
"""What happens to weights that no optimizer trains."""


@dataclass(frozen=True)
class Preset:
    """Settings of the authors' code for one method, which fill in the arguments that are not given.

    Attributes:
        source: Where the settings are from.
        settings: Arguments of the method.
        conv_layout: How the blocks of convolutions lie.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        grad_estimator: The estimator of output gradients.

    Example:
        >>> print(Preset("arXiv 2102.04010", {"decay": 2e-4}, skip_first=False))
        arXiv 2102.04010: decay=0.0002, conv_layout=channels, skip_first=False, skip_last=True
    """

    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    conv_layout: ConvLayout = "channels"
    skip_first: bool = True
    skip_last: bool = True
    grad_estimator: EstimatorName | None = None

    def __str__(self) -> str:
        """Return the source and all settings, on one line."""
        own = {
            name: value for name, value in vars(self).items() if name not in ("source", "settings")
        }
        if not self.grad_estimator:
            del own["grad_estimator"]
        listed = ", ".join(f"{name}={value}" for name, value in {**self.settings, **own}.items())
        return f"{self.source}: {listed}"


# Of layers that stay dense, and where no preset is asked for: the package's defaults.
_NEUTRAL = Preset()

# By preset, then by the method's short name. Arguments that are not listed keep the method's own default.
_PRESETS: dict[PresetName, dict[str, Preset]] = {
    "paper": {
        "sr-ste": Preset(
            # Its code masks the first convolution, too, and leaves the last linear layer dense.
            "arXiv 2102.04010",
            # The code adds the decay in every process, and then sums the gradients of all.
            {"decay": 2e-4, "decay_scale": "world-size"},
            skip_first=False,
        ),
        "bi-mask": Preset(
            "arXiv 2302.06058",
            {
                # The code counts forward passes from 1: rows keep their own order for 99 of them.
                "permute_every": 100,
                "first_search": 99,
                "candidates": 100,
                "search": "redraw",  # the permutation in use does not compete with the new ones
                "criterion": "retained",
                "decay": 2e-4,
                "decay_scale": "world-size",
            },
            conv_layout="flat",
        ),
        # Its code is for transformers: the layout of convolutions is the default one.
        "s-ste": Preset("arXiv 2409.09099", grad_estimator="approx-mvue"),
        "asp": Preset(
            # NVIDIA's code chooses layers by their sizes, wherever they are in the model.
            "arXiv 2104.08378",
            {"start": 0, "init": "magnitude"},
            skip_first=False,
            skip_last=False,
        ),
        "slope": Preset(
            "arXiv 2405.16325",
            # The code selects the backward masks after every step whose number leaves 99 when divided by 100.
            {"refresh_every": 100, "first_refresh": 99, "start": 0, "init": "magnitude"},
        ),
        "transposable": Preset(
            "arXiv 2102.08124",
            # Masks change before the 40th forward pass: after 39 steps.
            {"update_every": 40, "first_update": 39, "decay": 0.0},
            conv_layout="flat",
            skip_first=False,
        ),
        "lbc": Preset(
            "arXiv 2206.06662",
            # The command of the code: 60 of 120 epochs.
            {"stop": 0.5},
        ),
        "maxq": Preset(
            "arXiv 2312.07061",
            # The scripts of the code: 30 of 120 epochs. Stems of 7x7 cannot be given to its convolutions.
            {"start": 0, "stop": 0.25, "ramp": "linear", "decay": 2e-4, "temperature": 0.01},
        ),
        "mask-logits": Preset(
            # The numbers of the script. Pairs go from the first to the last value over the whole training.
            "arXiv 2409.17481",
            {
                "temperature": (4.0, 0.05),
                "scale": (1e2, 5e2),
                "prior_strength": 3.0,
                "weight_reg": 1e-5,
                "stop": 1.0,
            },
        ),
    },
    "fst": {
        "transposable": Preset(
            # The decay is that of the README for GPT-2 of 124M and 774M. Of 300k steps the last 50k are dense.
            "arXiv 2404.01847",
            {"update_every": 40, "decay": 6e-5, "decay_at": "after-clipping", "dense_end": 1 / 6},
            grad_estimator="approx-mvue",
        ),
    },
}


def preset_of(preset: PresetName, method: MethodName | Method) -> Preset:
    """Return the preset for a method, which is given by its short name or as an object.

    Raises:
        ValueError: If there is none.

    Example:
        >>> preset_of("paper", "bi-mask").source
        'arXiv 2302.06058'
    """
    check_option("preset", preset, PresetName)
    known = _PRESETS[preset]
    # For its error alone: a name that no method has is not the preset's fault.
    resolve_method(method)
    # `dense` goes with every preset: rules may leave layers out, or mask some of a dense model.
    for name, found in {**known, "dense": _NEUTRAL}.items():
        # The exact class: the papers' settings say nothing about a user's subclass.
        if method == name or type(method) is METHODS[name]:
            return found
    wanted = repr(method) if isinstance(method, str) else f"{type(method).__name__} objects"
    names = ", ".join(map(repr, known))
    raise ValueError(
        f"preset={preset!r} has no settings for method {wanted}: it has them for {names}"
    )


def preset_method(method: MethodName, preset: PresetName = "paper", **changes: Any) -> Method:
    """Return a method with the settings of a paper's code and some changes.

    ``preset="paper"`` alone uses the settings as they are; this is for experiments that depart from them.

    Args:
        method: The short name.
        preset: Whose settings, see docs/recipes.md.
        changes: Arguments of the method's class that are to be others.

    Raises:
        ValueError: If there is no such preset, or for a bad argument of the method.
        TypeError: If the method has no such argument.

    Example:
        >>> from lightning_nm import NMSparsityCallback
        >>> callback = NMSparsityCallback("2:4", preset_method("bi-mask", permute_every=50), preset="paper")
        >>> preset_method("bi-mask").search
        'redraw'
    """
    arguments = {**preset_of(preset, method).settings, **changes}
    return METHODS[method](**arguments)


def with_schedules(rules: Sequence[Rule]) -> list[Rule]:
    """The rules with the dense phases of their schedules in their estimators and in methods that plan by them.

    Rules without masks, such as those of the method ``dense``, have a schedule for their estimator alone.

    Raises:
        ValueError: If a method refuses a part of its schedule, a moment is given twice, or the ramp does not lead to
            the rule's pattern; if a part is given that no rule follows.
    """
    scheduled = []
    for rule in rules:
        try:
            scheduled.append(_with_schedule(rule))
        except ValueError as error:
            # The general rule has no layers to name: the message is about the setting `schedule` itself.
            if rule.include is None:
                raise
            names = ", ".join(rule.include)
            raise ValueError(
                f"{error}. This is the rule of {names}: give it a `schedule` of its own, or null"
            ) from error
    # Parts that no rule follows are refused.
    followed: dict[str, bool] = {}
    for rule in rules:
        for part in [] if rule.schedule is None else rule.schedule.parts:
            # An estimator has dense phases of its own, and no ramp.
            follows = rule.method.uses_masks or (rule.estimator is not None and part != "ramp")
            followed[part] = followed.get(part, False) or follows
    unused = [part for part in followed if not followed[part]]
    if unused:
        needs = "masks" if unused == ["ramp"] else "masks or a gradient estimator"
        raise ValueError(
            f"schedule has {', '.join(unused)}, but no layer gets {needs}: leave that out, or use another method"
        )
    return scheduled


def _with_schedule(rule: Rule) -> Rule:
    schedule = rule.schedule
    if schedule is None:
        return rule
    method = rule.method
    estimator = rule.estimator
    if estimator is not None:
        estimator = schedule.handed_to(estimator)
    if not method.uses_masks:
        if method.sparse_forward:
            raise ValueError(
                f"method {shown_name(method)} makes its zeros without the layers' masks, so that a schedule cannot "
                "begin or end them: leave `schedule` out, or use another method"
            )
        # There are no masks that stages could begin or end.
        return replace(rule, estimator=estimator, schedule=None)
    method = method.follow(schedule)
    # The layers' pattern ends the ramp. Each rule may have another one, so only here both are known.
    if schedule.ramp:
        check_narrower(schedule.ramp[-1], rule.pattern)
    return replace(rule, method=method, estimator=estimator)


class RuleSpec(TypedDict, total=False):
    """One of the ``rules`` of :class:`~lightning_nm.SparsityConfig`, as users write it.

    Keys that are left out take the value of the setting of the same name.

    Example:
        >>> rule: RuleSpec = {"include": "encoder.*", "pattern": "1:4"}
    """

    include: Required[str | list[str]]
    pattern: PatternLike
    method: MethodName | Method
    grad_estimator: EstimatorName | GradientEstimator | None
    conv_layout: ConvLayout
    dgrad: DgradName | None
    schedule: ScheduleSpec | None


@dataclass(frozen=True)
class ResolvedRules:
    """The settings that decide which layers are masked and how, with objects in place of short names.

    Attributes:
        rules: The first one that matches a layer decides; the last one is the general one.
        exclude: Globs over names of modules to keep dense.
        skip_first: Whether the first convolution is dense.
        skip_last: Whether the last linear layer is dense.
        presets: The presets of the rules' methods, each once; empty without a preset.
        scale: The scale of initial values and learning rates; ``None`` for that of a dense weight.

    Example:
        >>> from lightning_nm import SparsityConfig
        >>> settings = SparsityConfig("2:4", "ste", rules=[{"include": "head", "pattern": "1:4"}]).resolve()
        >>> [str(rule.pattern) for rule in settings.rules]
        ['1:4', '2:4']
    """

    rules: list[Rule]
    exclude: tuple[str, ...]
    skip_first: bool
    skip_last: bool
    presets: list[Preset]
    scale: Scale | None


def _check_dgrad(rule: Rule) -> None:
    """Refuse to draw the backward weight of a method that makes its own, by a ``ValueError``."""
    method = rule.method
    if rule.dgrad is None:
        return
    if method.sparse_dgrad:
        made = "gives dgrad a mask of its own"
    elif method.transposable:
        made = "makes the forward weight N:M along `out`, too"
    # These two give dgrad the forward weight where there is no backward mask: that is what the draw replaces.
    elif type(method).backward_weight not in (Method.backward_weight, MaskMethod.backward_weight):
        made = "makes a backward weight of its own"
    else:
        return
    name = method.short_name or type(method).__name__
    place = "" if rule.include is None else f" of the layers {', '.join(rule.include)}"
    raise ValueError(
        f"dgrad='mvue' draws the backward weight{place}, but method '{name}' {made}: leave dgrad out (in "
        "one of the `rules`: dgrad: null), or use a method whose dgrad takes the forward weight, such as 'sr-ste'"
    )


_PARSERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("pattern", "pattern", NMPattern.parse),
    ("grad_estimator", "estimator", resolve_estimator),
    ("dgrad", "dgrad", resolve_dgrad),
    ("schedule", "schedule", Schedule.parse),
)
"""Key of a rule as users write it, the field of :class:`Rule`, and what makes it of the value."""


@dataclass(frozen=True)
class SparsityConfig:
    """Which weights a training masks, and how.

    :class:`~lightning_nm.NMSparsityCallback`, :class:`~lightning_nm.NMSparsifier` and the callback for the Trainer of
    transformers take these settings as keyword arguments, or all together as ``config=``.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: A short name, such as ``bame``, ``asp``, ``sr-ste`` or ``bi-mask``, of those in docs/which-method.md, or
            a :class:`Method` by ``class_path``.
        grad_estimator: The estimator that replaces the output gradient dY in the weight-gradient GEMM: ``mvue``,
            ``approx-mvue``, ``top-n``, or a :class:`GradientEstimator` by ``class_path``; ``dense`` keeps dY, and so
            does ``None`` unless the preset has an estimator. By short name, ``mvue`` and ``top-n`` use each layer's own
            pattern, and ``approx-mvue`` always 2:4.
        include: Globs over names of modules to mask; all maskable layers by default. A name without wildcards must be
            maskable.
        exclude: Globs over names of modules to keep dense.
        rules: Exceptions for some layers: mappings with ``include`` and any of ``pattern``, ``method``,
            ``grad_estimator``, ``conv_layout``, ``dgrad``, ``schedule``; the first match wins.
        preset: ``paper``: settings of the code of the method's paper, for the methods that docs/recipes.md lists, also
            those of ``rules``. ``fst``: those of FST (arXiv 2404.01847), for ``transposable``.
            They fill in what is not given: ``conv_layout``, ``skip_first_last`` and ``grad_estimator``, and all
            arguments of a method that is given by its short name. A method that is an object is taken as it is, see
            :func:`~lightning_nm.preset_method`. docs/recipes.md has the settings.
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
            masked weights the learning rate times ``base_density / density`` (arXiv 2405.15743, docs/recipes.md).
            ``supar-lr``: the learning rate alone, for weights that were trained before. ``auto``: ``supar`` where
            ``method``, not that of a rule, is ``bame``, else ``None``: neither. A resumed training keeps its own.
        base_density: The density that the learning rate and the initial values suit: 1 if they were found for the dense
            model.
        dgrad: ``mvue``: the input gradient is made with a random draw of the forward weight, N:M along the outputs and
            equal to it in the mean, by the estimator of arXiv 2203.10991, as layers of the repository
            huyz2023/2by4-pretrain do. It is drawn again for every backward pass. For methods whose own dgrad uses the
            forward weight. ``None`` leaves the backward weight to the method.
        schedule: A dense start, a ramp of patterns and a dense end, for all methods: a mapping with any of
            ``dense_start``, ``ramp``, ``ramp_ends`` and ``dense_end``, such as ``{dense_start: 0.1, ramp: [8:16, 4:16],
            dense_end: 0.1}``. Moments are training steps (an integer) or fractions of the training (a float). ``ramp``
            has the patterns before ``pattern``; each has an equal fraction of the time between the dense phases, or
            lasts until its moment of ``ramp_ends``. The dense phases hold for ``grad_estimator``, too. With
            ``dense_end`` **the trained model is dense**. Methods refuse what they cannot follow: docs/which-method.md.

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
    method: MethodName | Method = "bame"
    grad_estimator: EstimatorName | GradientEstimator | None = None
    include: str | list[str] | None = None
    exclude: str | list[str] | None = None
    rules: list[RuleSpec] | None = None
    preset: PresetName | None = None
    skip_first_last: SkipFirstLast | None = None
    conv_layout: ConvLayout | None = None
    seed: int = 0
    frozen: Frozen = "dense"
    grad_snr_every: int = 100
    scale: Scale | Literal["auto"] | None = "auto"
    base_density: float = 1.0
    dgrad: DgradName | None = None
    schedule: ScheduleSpec | None = None
    direct_reads: OnDirectRead = "error"

    def __post_init__(self) -> None:
        # Mistakes are refused here, where the user wrote them, and not when a fit starts.
        check_option("frozen", self.frozen, Frozen)
        check_option("direct_reads", self.direct_reads, OnDirectRead)
        check_interval("grad_snr_every", self.grad_snr_every, "training steps")
        check_scale(self.scale, self.base_density)
        # For its errors, too: patterns, names and rules are checked while they are resolved.
        self.resolve()

    def resolve(self) -> ResolvedRules:
        """Return the rules of the layers, with objects in place of short names.

        What is given comes first, then what the preset says, then the package's defaults. Each call makes new methods
        from short names, so two trainings with one configuration share none.
        """
        specs: Sequence[Mapping[str, Any]] = () if self.rules is None else self.rules
        # One mapping alone is a likely slip in YAML: iterating over it would give its keys.
        is_list = isinstance(specs, (list, tuple))
        if not is_list or not all(isinstance(rule, Mapping) for rule in specs):
            example = "[{'include': 'encoder.*', 'pattern': '1:4'}]"
            raise TypeError(
                f"`rules` takes a list of mappings, for example {example}, not {self.rules!r}"
            )
        keys = list(RuleSpec.__annotations__)
        for place, spec in enumerate(specs):
            check_keys(f"rules[{place}]", spec, keys)
            if "include" not in spec:
                raise ValueError(f"rules[{place}]={dict(spec)!r} has no 'include'")
        # Every key of a rule is also the name of a setting.
        general_spec = {key: getattr(self, key) for key in keys}
        # None means "not given". "dense" is given: it keeps dY even where the preset has an estimator.
        if self.grad_estimator is None:
            del general_spec["grad_estimator"]
        # Something to replace: pattern and method always come from the settings.
        default = Rule(None, NMPattern(2, 4), Dense())
        general = self._rule(general_spec, default, takes_own_estimator=True)

        # Where the general method is dense, the masked layers are those of the rules, so the presets of the rules
        # decide in place of the general one.
        general_preset = self._preset(self.method)
        is_neutral = general_preset is _NEUTRAL
        takes_own_estimator = is_neutral and self.grad_estimator is None
        rules = [self._rule(spec, general, takes_own_estimator) for spec in specs]

        methods = [self.method, *(spec["method"] for spec in specs if "method" in spec)]
        # In the order of use, each once: the table of layers prints them.
        presets: list[Preset] = []
        for preset in map(self._preset, methods):
            if preset is not _NEUTRAL and preset not in presets:
                presets.append(preset)

        scheduled = with_schedules([*rules, general])
        if self.skip_first_last is not None:
            skip_first, skip_last = parse_skip_first_last(self.skip_first_last)
        else:
            # Without a preset both stay dense. A layer that one of several presets leaves dense stays dense.
            deciding = (presets if is_neutral else [general_preset]) or [_NEUTRAL]
            skip_first = any(preset.skip_first for preset in deciding)
            skip_last = any(preset.skip_last for preset in deciding)
        scale = self.scale
        if scale == "auto":
            # Best at the learning rate of dense training: docs/benchmarks.md, "The default".
            scale = "supar" if isinstance(general.method, BAME) else None
        return ResolvedRules(
            # The first match decides: the general rule comes last, because it may match every layer.
            rules=scheduled,
            exclude=as_globs(self.exclude, "exclude") or (),
            skip_first=skip_first,
            skip_last=skip_last,
            presets=presets,
            scale=scale,
        )

    def _preset(self, method: MethodName | Method) -> Preset:
        return _NEUTRAL if self.preset is None else preset_of(self.preset, method)

    def _rule(self, spec: Mapping[str, Any], base: Rule, takes_own_estimator: bool) -> Rule:
        """Read one of the ``rules``, or the settings of all other layers; keys that it lacks are those of ``base``.

        With ``takes_own_estimator``, the preset of the rule's method precedes the estimator of ``base``.

        Raises:
            ValueError: For a bad value.
        """
        values: dict[str, Any] = {"include": as_globs(spec["include"], "include")}
        # A method of the rule's own comes with a preset of its own.
        if "method" in spec:
            preset = self._preset(spec["method"])
            values["method"] = resolve_method(spec["method"], **preset.settings)
            # What the user gave for all layers precedes what a preset says.
            values["conv_layout"] = self.conv_layout or preset.conv_layout
            if takes_own_estimator:
                values["estimator"] = resolve_estimator(preset.grad_estimator)
        # What the rule says precedes everything. In YAML a key may be there with the value null: as an estimator it
        # keeps dY, as a layout it counts as not given.
        for key, part, parse in _PARSERS:
            if key in spec:
                values[part] = parse(spec[key])
        if spec.get("conv_layout") is not None:
            check_option("conv_layout", spec["conv_layout"], ConvLayout)
            values["conv_layout"] = spec["conv_layout"]
        rule = replace(base, **values)
        _check_dgrad(rule)
        return rule

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are not the default, as primitives that JSON and YAML hold.

        Methods and estimators that are objects become ``{"class_path": ..., "init_args": ...}``. The prior of
        :class:`~lightning_nm.methods.MaskLogits` is tensors, and is left out.
        """
        # Defaults are left out, so that a file shows what was chosen.
        settings = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "pattern":
                # Of its several notations this is the one of the default, "2:4".
                value = str(NMPattern.parse(value))
            if value != setting.default:
                settings[setting.name] = _as_primitive(value)
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


def chosen_config(owner: type, config: SparsityConfig | None, /, **options: Any) -> SparsityConfig:
    """Return the ``config`` that ``owner`` got, or the configuration of the single settings that it got instead.

    Raises:
        TypeError: If ``config`` is something else, and what :func:`refuse_unknown` and :class:`SparsityConfig` raise.
        ValueError: If both are given, or for an impossible setting.

    Example:
        >>> chosen_config(SparsityConfig, None, pattern="1:4").pattern
        '1:4'
    """
    refuse_unknown(options, owner)
    given = SparsityConfig(**options)
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
    parameters = inspect.signature(owner).parameters.values()
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
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
        # Constructors keep an argument that is a primitive under its own name; other attributes are derived from these.
        arguments = inspect.signature(owner).parameters
        init_args = {
            name: _as_primitive(setting)
            for name, setting in vars(value).items()
            if name in arguments
        }
        # The notation of LightningCLI.
        return {"class_path": f"{owner.__module__}.{owner.__qualname__}", "init_args": init_args}
    if isinstance(value, Mapping):
        return {key: _as_primitive(entry) for key, entry in value.items()}
    # JSON has neither tuples nor sets.
    if isinstance(value, (list, tuple, set)):
        return [_as_primitive(entry) for entry in value]
    return value


def _from_primitive(value: Any) -> Any:
    """The inverse of :func:`_as_primitive`; patterns stay text, which every setting takes."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            # pkgutil.resolve_name would hide why a module of a package cannot be imported.
            module, _, name = value["class_path"].rpartition(".")
            owner = getattr(import_module(module), name)
            return owner(**value.get("init_args", {}))
        return {key: _from_primitive(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_primitive(entry) for entry in value]
    return value
