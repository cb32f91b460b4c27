"""The dense model in int8 by other runtimes, for ``python -m benchmarks.inference --rivals``.

========================  ==================================================================================
``onnxruntime int8``      ``quantize_dynamic``: weights per channel, activations as they come
``openvino int8``         NNCF's compressed weights, activations quantised as they come (groups of OpenVINO's choice)
``openvino int8 weights`` the same weights, GEMMs in floating point
``torchao int8``          ``Int8DynamicActivationInt8WeightConfig``; also compiled
``torch.ao int8``         ``quantize_dynamic`` of linear layers
========================  ==================================================================================

None of them is N:M, and all round: a row of its own says by how much the output differs from the dense model's. A
runtime that is not installed, or that fails, is left out with a message.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]
Variant = tuple[str, Run, Path]

WORST = 0.25
"""A larger relative difference of the outputs is no quantisation of the same model: such a variant is left out."""


def is_rival(name: str) -> bool:
    """Whether a variant of the benchmark is one of this module.

    Example:
        >>> is_rival("openvino int8 weights"), is_rival("openvino bf16"), is_rival("packed 2:4 int8")
        (True, False, False)
    """
    return "int8" in name.split(",")[0].split() and not name.startswith("packed")


def variants(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[Variant]:
    """Name, run and file of every rival that works here, for one shape of the input.

    Args:
        model: The dense model in float32.
        folder: Where files are written, and found again.
        ids: ``[batch, tokens]``.
    """
    with torch.inference_mode():
        expected = model(ids)
    for needed, make in (
        (("onnxruntime", "onnx", "onnxscript"), by_onnxruntime),
        (("openvino", "nncf", "onnx", "onnxscript"), by_openvino),
        (("torchao",), by_torchao),
        ((), by_torch_ao),
    ):
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        kind = make.__name__.removeprefix("by_")
        if missing:
            _say(f"{kind} int8 is left out: pip install {' '.join(missing)}")
            continue
        try:
            with _quiet():
                made = list(make(model, folder, ids))
            # The first run compiles, where a variant does.
            found = {name: difference(run, ids, expected) for name, run, _ in made}
        except Exception as error:  # of any of these packages: the benchmark goes on without it
            reason = str(error).strip().partition("\n")[0]
            _say(f"{kind} int8 is left out: {type(error).__name__}: {reason}")
            continue
        for name, run, file in made:
            # Not a number is no difference, either.
            if not found[name] <= WORST:
                _say(f"{name} is left out: its output differs by {found[name]:.2f} of dense fp32's")
                continue
            yield name, run, file


def by_onnxruntime(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[Variant]:
    """Dynamic quantisation by ONNX Runtime."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    dense = _onnx_file(model, folder, ids)
    file = dense.with_name(f"{dense.stem}-int8.onnx")
    if not file.exists():
        # Without VNNI the runtime adds pairs of 8-bit products in 16 bits, which saturate: 7 bits of a weight do not.
        cpu = Path("/proc/cpuinfo")
        has_vnni = not cpu.exists() or "vnni" in cpu.read_text()
        quantize_dynamic(
            dense,
            file,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=not has_vnni,
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Waiting threads would slow the variants that take turns with this one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    yield (
        "onnxruntime int8",
        lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]),
        file,
    )


def by_openvino(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[Variant]:
    """Weights that NNCF compressed, with and without quantised activations."""
    import nncf
    import openvino

    dense = _onnx_file(model, folder, ids)
    graph = dense.with_name(f"{dense.stem}-int8.xml")
    core = openvino.Core()
    if not graph.exists():
        mode = nncf.CompressWeightsMode.INT8_SYM
        compressed = nncf.compress_weights(core.read_model(dense), mode=mode)
        openvino.save_model(compressed, graph, compress_to_fp16=False)
    for name, group in (("openvino int8", None), ("openvino int8 weights", 0)):
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        # Without a size OpenVINO chooses the groups of activations that share a scale; zero leaves them unquantised.
        if group is not None:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
        network = core.compile_model(str(graph), "CPU", settings)

        def run(x: Tensor, network: Any = network) -> Tensor:
            return torch.from_numpy(network([x.numpy()])[0])

        yield name, run, graph.with_suffix(".bin")


def by_torchao(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[Variant]:
    """Weights and activations in int8 by torchao, eager and compiled."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantised = copy.deepcopy(model)
    quantize_(quantised, Int8DynamicActivationInt8WeightConfig())
    file = _saved(quantised, folder / "torchao-int8.pt")
    yield "torchao int8", quantised, file
    yield "torchao int8, compiled", compiled(quantised), file


def by_torch_ao(model: nn.Module, folder: Path, ids: Tensor) -> Iterator[Variant]:
    """Linear layers in int8 by torch itself, which has marked this as old."""
    quantised = torch.ao.quantization.quantize_dynamic(
        copy.deepcopy(model), {nn.Linear}, torch.qint8
    )
    yield "torch.ao int8", quantised, _saved(quantised, folder / "torch-ao-int8.pt")


def difference(run: Run, ids: Tensor, expected: Tensor) -> float:
    """The norm of the difference of two outputs over the norm of the expected one.

    Example:
        >>> expected = torch.tensor([3.0, 4.0])
        >>> round(difference(lambda x: x + 0.5, expected, expected), 3)
        0.141
    """
    with torch.inference_mode(), _quiet():
        found = run(ids)
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def differences(runs: Mapping[str, Run], ids: Tensor) -> dict[str, float]:
    """How much the output of each rival differs from that of ``dense fp32``."""
    with torch.inference_mode():
        expected = runs["dense fp32"](ids)
    return {name: difference(run, ids, expected) for name, run in runs.items() if is_rival(name)}


def sizes(files: Mapping[str, Path]) -> dict[str, tuple[int, None]]:
    """Bytes of the rivals' files; their memory is not measured."""
    return {
        name: (file.stat().st_size, None)
        for name, file in files.items()
        if is_rival(name) and not name.endswith("compiled")
    }


def fastest(ms: Mapping[str, float]) -> float | None:
    """Milliseconds of the fastest rival; ``None`` without one."""
    return min((time for name, time in ms.items() if is_rival(name)), default=None)


def _onnx_file(model: nn.Module, folder: Path, ids: Tensor) -> Path:
    """The dense model as ONNX, for this shape; the benchmark's own variants may have written it."""
    file = folder / f"dense-{'x'.join(map(str, ids.shape))}.onnx"
    if not file.exists():
        torch.onnx.export(model, (ids,), str(file), dynamo=True, verbose=False)
    return file


def _saved(model: nn.Module, file: Path) -> Path:
    if not file.exists():
        torch.save(model.state_dict(), file)
    return file


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars, tables and notes on old interfaces of these packages from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def compiled(model: nn.Module) -> Any:
    """A compiled model with graphs of its own: models of one class would share torch's limit of them."""
    isolated: Any = {"isolate_recompiles": True}  # the types of torch 2.13 do not know it
    return torch.compile(model, dynamic=False, **isolated)
