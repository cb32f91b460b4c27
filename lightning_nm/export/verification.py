"""Check that every block of a checkpoint's weights holds at most N nonzeros in M."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from lightning_nm.export.coreml import SPARSE, SUFFIX, CoreMLPackage
from lightning_nm.export.graphs import onnx_weights, program_weights
from lightning_nm.export.packed_file import PackedFile, is_packed, no_checksums
from lightning_nm.export.packed_model import matches
from lightning_nm.export.patterns import (
    Verdict,
    classify,
    comparable,
    is_matrix,
    judge,
    masked_layers,
    matrices_in,
)
from lightning_nm.export.sources import (
    ONNX,
    PROGRAM,
    Source,
    kind_of_graph,
    named_as_in_model,
    read_checkpoint,
)
from lightning_nm.nn.state import State, saved_stages
from lightning_nm.nn.weight import Layout, misfit, plain_name
from lightning_nm.packed.tensor import EVERY_ENTRY, blocks_last
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.schedule import DENSE, FINAL
from lightning_nm.spelling import grouped, quoted, some_of


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Args:
        verdicts: One result for each weight.
        problems: Messages; empty if every masked weight is N:M, and at least one weight is that is not all zero.
        matrices: The number of entries of every weight of two or more dimensions, floating-point, complex or in 8 bits,
            by key.
        notes: Messages about the file as a whole.
    """

    verdicts: list[Verdict]
    problems: list[str]
    matrices: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        """The number of matrices with a verdict; those that the sparsifier state does not name are dense."""
        found = sum(v.verdict == verdict for v in self.verdicts if v.key in self.matrices)
        if verdict == "dense":
            found += len(self.matrices.keys() - {v.key for v in self.verdicts})
        return found

    @property
    def share(self) -> float:
        """The fraction of the matrices' entries that is in N:M matrices."""
        sparse = sum(self.matrices.get(v.key, 0) for v in self.verdicts if v.verdict == "N:M")
        # A file without matrices has no fraction.
        return sparse / sum(self.matrices.values()) if sparse else 0.0

    @property
    def warnings(self) -> list[str]:
        """Messages about the file, and about weights that are all zero, or have entries that are NaN or infinite."""
        zero = [v.key for v in self.verdicts if v.verdict == "N:M" and not v.density]
        fate = "is all zero, which is N:M in every pattern: its layer was not loaded, or died"
        nonfinite = [v.key for v in self.verdicts if v.nonfinite]
        return [
            *self.notes,
            *(f"{key} {fate}" for key in _grouped_keys(zero)),
            *(f"{key} has entries that are NaN or infinite" for key in _grouped_keys(nonfinite)),
        ]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(
    checkpoint: str | Path,
    pattern: PatternLike | None = None,
    include: str | Sequence[str] = (),
    min_share: float | None = None,
    *,
    allow_dense: bool = False,
    base: str | Path | None = None,
) -> Verification:
    """Check that every block of a checkpoint's masked weights holds at most N nonzeros in M.

    A file without sparsifier state does not tell which of its weights are dense by intention. With a pattern, dense
    matrices are therefore a problem, unless `allow_dense`, `min_share` or `base` says which may be.

    Matrices are all tensors of two or more dimensions in floating point or 8 bits, also those in dictionaries and lists
    within the state dict; a dictionary whose name begins with "optim" is the state of an optimizer.

    Args:
        checkpoint: A Lightning checkpoint, a saved state dict, a safetensors file, a packed model,
            the folder of a transformers model, an ONNX file (extra ``onnx``), a program of ``torch.export``, or a Core
            ML package (extra ``coreml``).
        pattern: Classify every weight against this pattern. By default the masked layers and their patterns are those
            of the sparsifier state in the file, of the header of a packed model, or of the metadata of a Core ML
            package that :func:`~lightning_nm.export.export_coreml` wrote.
        include: Globs over keys or module names of weights that must be N:M.
        min_share: The least fraction of the entries of all matrices that must be in N:M matrices, from 0 to 1.
        allow_dense: With a pattern, allow matrices that are dense.
        base: The checkpoint that this one was made from, for example by merging adapters. Every matrix that is N:M
            there must be N:M here, the others may be dense. It needs a pattern.

    Raises:
        ValueError: If a file cannot be read, positions of a packed model are damaged, it has no sparsifier state and
            no pattern is given, or `base` is given without a pattern or has no N:M matrix.

    Example::

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from lightning_nm.functional import nm_prune
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"weight": nm_prune(torch.randn(8, 8), "2:4")}, Path(folder) / "model.pt")
        ...     verify(Path(folder) / "model.pt", "2:4").ok
        True
    """
    parsed = None if pattern is None else NMPattern.parse(pattern)
    if min_share is not None and not 0 <= min_share <= 1:
        raise ValueError(f"min_share={min_share} must be a fraction from 0 to 1")
    if base is not None and parsed is None:
        raise ValueError(
            f"the base '{base}' is compared with a pattern: give one, for example --pattern 2:4"
        )
    result = _verify_file(checkpoint, parsed)
    verdicts, problems = result.verdicts, result.problems
    problems += _problems(verdicts, [include] if isinstance(include, str) else include)
    # The base tells which matrices must be N:M, so that dense ones are no problem by themselves.
    if base is not None:
        problems += _lost(verdicts, _verify_file(base, parsed).verdicts, base)
    # A file with other problems fails already; its dense matrices would only hide them.
    elif parsed is not None and min_share is None and not allow_dense and not problems:
        dense = [v.key for v in verdicts if v.verdict == "dense"]
        if dense:
            problems.append(
                f"{len(dense)} of {len(verdicts)} matrices are dense: {some_of(_grouped_keys(dense), separator=', ')}; "
                "allow that by --allow-dense (allow_dense=True), or say how much must be N:M by --min-share (min_share)"
            )
    if min_share is not None and result.share < min_share:
        problems.append(
            f"only {result.share:.1%} of the matrices' entries are in N:M matrices, less than {min_share:.1%}"
        )
    return result


def _verify_file(checkpoint: str | Path, pattern: NMPattern | None) -> Verification:
    """The verdicts of a file, and what is said of it as a whole; problems are not told yet."""
    result = Verification([], [])
    path = Path(checkpoint)
    # The header decides: ordinary safetensors files have the same suffix.
    if is_packed(path):
        file = PackedFile(path)
        if file.checksums is None:
            result.notes.append(no_checksums(path))
        _verify_packed(file, pattern, result)
    elif path.suffix == SUFFIX and path.is_dir():
        _verify_coreml(CoreMLPackage(path), pattern, result)
    else:
        _verify_dense(path, pattern, result)
    return result


def _verdict(
    key: str,
    weight: Tensor,
    noted: tuple[NMPattern, Layout] | None,
    pattern: NMPattern | None,
    form: str = "",
    *remarks: str,
) -> Verdict:
    """Judge a weight in the pattern and the layout that its file tells of it, if it does, or in another pattern."""
    # The file tells where blocks of its own pattern lie. Those of another pattern may lie along any axis.
    if noted is not None and pattern in (None, noted[0]):
        own_pattern, layout = noted
        rows = blocks_last(weight, layout)
        verdict = judge(key, rows, own_pattern, layout, masked=True)
    else:
        # Callers judge a weight that the file tells nothing of only if a pattern is given.
        assert pattern is not None
        verdict = classify(key, weight, pattern)
    return replace(verdict, note=", ".join(filter(None, (form, verdict.note, *remarks))))


def _lost(verdicts: Sequence[Verdict], of_base: Sequence[Verdict], base: str | Path) -> list[str]:
    """What is N:M in the base alone.

    Raises:
        ValueError: If the base has no N:M matrix.
    """
    # Keys of either file may have the wrappers of torch.compile or FSDP in them.
    wanted = {plain_name(v.key) for v in of_base if _is_sparse(v)}
    if not wanted:
        raise ValueError(f"no matrix of the base '{base}' is N:M in this pattern")
    found = {plain_name(v.key): v.verdict for v in verdicts}
    rows = [
        (key, f"{found[key]} here" if key in found else "not in the file")
        for key in sorted(wanted)
        if found.get(key) != "N:M"
    ]
    lost = [f"{quoted(key)} is N:M in the base, but {fate}" for key, fate in grouped(rows)]
    if lost:
        kept = len(wanted) - len(rows)
        lost.insert(0, f"only {kept} of the base's {len(wanted)} N:M matrices are N:M")
    return lost


def _verify_dense(path: Path, pattern: NMPattern | None, result: Verification) -> None:
    """Judge a file of dense tensors."""
    kind = kind_of_graph(path) if path.is_file() else ""
    if kind == ONNX:
        source = Source(path, onnx_weights(path), [])
    elif kind == PROGRAM:
        source = Source(path, program_weights(path), [])
    else:
        # Also dictionaries and lists within the state dict: a dense matrix in one must not pass unseen.
        source = read_checkpoint(path, nested=True)
    weights, states = source.weights, source.states
    if pattern is None and states:
        # A state has the model's names. Where a folder has others, transformers builds the model, which takes time: so
        # only here.
        weights = named_as_in_model(source)
    matrices = matrices_in(weights)
    result.matrices.update((key, matrix.numel()) for key, matrix in matrices.items())
    if pattern is not None:
        verdicts = [classify(key, weight, pattern) for key, weight in matrices.items()]
    elif states:
        verdicts = [verdict for state in states for verdict in verify_state(weights, state)]
    else:
        raise ValueError(
            f"'{path}' has no sparsifier state that names its masked layers: give a pattern, for example "
            "--pattern 2:4"
        )
    result.verdicts.extend(_with_adapter(verdict, weights) for verdict in verdicts)


def _verify_packed(file: PackedFile, pattern: NMPattern | None, result: Verification) -> None:
    """Judge a packed file, whose header has the patterns; tensors are read one at a time.

    Raises:
        ValueError: If a tensor is damaged.
    """
    for name in file.names():
        # An alias is a key of the model, and is judged like the tensor that it stands for.
        own_name, of_dense = file.aliases.get(name, name), file.entry(name)
        if is_matrix(of_dense.dtype, len(of_dense.shape)):
            result.matrices[name] = math.prod(of_dense.shape)
        entry = file.packed.get(own_name)
        noted, notes = None, []
        if entry is not None:
            noted = entry.pattern, entry.layout
            notes = ["packed", "int8" if entry.int8 else ""]
            if pattern not in (None, entry.pattern):
                notes.append(f"stored as {entry.pattern}")
            if own_name != name:
                notes.append(f"the same tensor as '{own_name}'")
        # Damage is found even where a weight has no verdict: a dense one without a pattern.
        weight = file.read_dense(own_name)
        if pattern is not None:
            is_judged = entry is not None or name in result.matrices
        else:
            # A dense matrix in int8 is packed as well, and has no pattern to be judged by.
            is_judged = entry is not None and entry.pattern != EVERY_ENTRY
        if is_judged:
            result.verdicts.append(_verdict(name, weight, noted, pattern, *notes))


def _verify_coreml(package: CoreMLPackage, pattern: NMPattern | None, result: Verification) -> None:
    """Judge a Core ML package; a weight that was exported has the model's key.

    Raises:
        ValueError: If the package is damaged, or tells no patterns and none is given.
    """
    if pattern is None and not package.exported:
        raise ValueError(
            f"'{package.path}' does not tell which weights are N:M, because lightning-nm did not write it: give a "
            "pattern, for example --pattern 2:4"
        )
    for name, weight in package.weights.items():
        key, noted = name, None
        if name in package.exported:
            key, text, layout = package.exported[name].values()
            noted = NMPattern.parse(text), Layout(layout)
        result.matrices[key] = math.prod(weight.shape)
        if noted is not None or pattern is not None:
            forms = {"const": "dense", SPARSE: "nonzeros and bit mask"}
            notes = forms.get(weight.storage, weight.storage), *weight.operators
            verdict = _verdict(key, package.read(name), noted, pattern, "", *notes)
            result.verdicts.append(verdict)


def _with_adapter(verdict: Verdict, weights: Mapping[str, Tensor]) -> Verdict:
    """A verdict that tells of a low-rank adapter that the file holds for the weight."""
    # peft wraps a layer X: its weight becomes X.base_layer.weight, next to X.lora_A and X.lora_B.
    module, separator, _ = verdict.key.rpartition(".base_layer.")
    has_adapter = separator and any(key.startswith(f"{module}.lora_") for key in weights)
    if verdict.verdict != "N:M" or not has_adapter:
        return verdict
    note = "a low-rank adapter lies on it; merged, it is N:M only if mask_adapters() masked the adapter"
    return replace(verdict, note="; ".join(filter(None, (verdict.note, note))))


def verify_state(weights: Mapping[str, Tensor], state: State) -> list[Verdict]:
    """Check the weights of all layers of a sparsifier state against their patterns.

    Raises:
        ValueError: If the weights of a layer are missing.
    """
    verdicts = []
    for key, layer in masked_layers(weights, state):
        pattern, layout = NMPattern.parse(layer["pattern"]), Layout(layer["layout"])
        if layer["masked"]:
            rows = blocks_last(comparable(key, weights[key]), layout)
            verdict = judge(key, rows, pattern, layout, masked=True)
        else:
            # Whether the layer ever has a forward mask.
            _, inputs = layout.row_sizes(weights[key].shape)
            reason = misfit("in", inputs, pattern.m)
            note = f"trained dense: {reason}, so only GEMMs of the backward pass were N:M"
            if not reason:
                note = "forward weight not masked"
            verdict = Verdict(key, "dense", str(pattern), note=note)
        verdicts.append(replace(verdict, stage=_other_stage(layer, state["clock"])))
    return verdicts


def _other_stage(layer: State, clock: int) -> str:
    """The stage of a layer's schedule, and when its pattern's own is; empty if that is the present one."""
    stage = layer.get("stage", FINAL)
    if stage == FINAL:
        return ""
    pattern = layer["pattern"]
    # A name that occurs twice, as dense stages at both ends do, keeps its last beginning.
    begins = {name: begin for begin, name in saved_stages(layer)}
    # The last of two dense stages.
    if stage == DENSE and clock >= begins[DENSE] > begins[FINAL]:
        return (
            f"the dense end of its schedule: weights were {pattern} before training step {begins[DENSE]}, and are with "
            "a `schedule` without `dense_end`"
        )
    part = "the dense start" if stage == DENSE else f"the stage {stage}"
    return f"{part} of its schedule: weights are {pattern} from training step {begins[FINAL]}"


def _is_sparse(verdict: Verdict) -> bool:
    """Whether a weight is N:M, and not only because it is all zero."""
    return verdict.verdict == "N:M" and verdict.density > 0


def _grouped_keys(keys: Sequence[str]) -> list[str]:
    """Quoted keys; those that differ in numbers alone as one."""
    return [quoted(key) for (key,) in grouped((key,) for key in keys)]


def _problems(verdicts: Sequence[Verdict], include: Sequence[str]) -> list[str]:
    broken = [
        (v.key, v.pattern, f"{v.violations} of {v.blocks}")
        for v in verdicts
        if v.verdict == "broken"
    ]
    problems = []
    for key, pattern, count in grouped(broken):
        problems.append(f"{quoted(key)} is not {pattern}: {count} blocks hold more")
    if not any(v.verdict == "N:M" for v in verdicts):
        problems.append("no weight is N:M sparse")
        for other, number in Counter(v.own_pattern for v in verdicts if v.own_pattern).items():
            what = "1 weight is" if number == 1 else f"{number} weights are"
            problems.append(
                f"{what} {other}, not {verdicts[0].pattern}: --pattern {other} checks that"
            )
    elif not any(map(_is_sparse, verdicts)):
        problems.append("every weight that is N:M is all zero")
    # A dict has each stage once, in their order.
    stages = {v.stage: None for v in verdicts if v.stage and v.verdict != "N:M"}
    problems += [f"the checkpoint was saved in {stage}" for stage in stages]
    for glob in include:
        named = [v for v in verdicts if matches(v.key, glob)]
        if not named:
            problems.append(f"`include` '{glob}' matches no weight")
        # Broken ones have a message above.
        dense = [v.key for v in named if v.verdict == "dense"]
        problems += [f"{key} is named by `include` but is dense" for key in _grouped_keys(dense)]
    return problems
