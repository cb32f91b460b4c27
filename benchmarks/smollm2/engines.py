"""A language model loaded by one runtime: it generates with a cache of keys and values, and scores a text.

========================  ==================================================================================
``torch ...``             ``generate()`` of transformers; compiled ones by ``cache_implementation="static"``, which
                          compiles the step of one token and leaves the prompt eager
``torch.ao int8``         ``quantize_dynamic`` of linear layers, in float32
``torchao int8``          ``Int8DynamicActivationInt8WeightConfig``, in bfloat16; ``weights``: ``Int8WeightOnlyConfig``
``onnxruntime ...``       onnxruntime-genai and the graph of its own builder: int8 and int4 are ``MatMulNBits`` in
                          blocks of 32 inputs, whose GEMMs are of int8 tokens; embeddings stay float32.
                          optimum-onnx, the other way to a cache, needs transformers below 4.58
``openvino ...``          an export of :mod:`benchmarks.smollm2.files`, made stateful; int8 weights by NNCF. The
                          newest optimum-intel that installs next to transformers 5 is 1.15, too old for it
``llama.cpp ...``         llama-cpp-python's interface to the library; files by its own ``llama_model_quantize`` from
                          the dense model in float32
``packed ...``            ``load_packed`` under ``generate()``; int8 in a float32 model, bf16 in a bfloat16 one
========================  ==================================================================================
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.smollm2 import files

Ids = list[list[int]]

KERNELS: Literal["sparse"] = "sparse"
"""``load_packed``'s choice: in ``"auto"`` a prompt for which dense is faster makes a layer dense for good."""

CONTEXT = 1024
"""Tokens of the longest prompt and answer."""


class Settings(NamedTuple):
    """What a worker is told: the folders of the models, where files are made, and the number of threads."""

    dense: Path
    sparse: dict[str, Path]
    folder: Path
    threads: int


class Engine:
    """A model that is ready to answer.

    Attributes:
        bytes: Of the files that it needs, without those of the tokenizer.
        one_batch: Why it answers one prompt at a time; empty if it takes more.
    """

    bytes: int
    one_batch = ""

    def generate(self, ids: Ids, new: int) -> list[float]:
        """Answer prompts of equal length greedily: the seconds after the start at which each token was there."""
        raise NotImplementedError

    def logits(self, ids: list[int]) -> Tensor:
        """The scores ``[tokens, vocabulary]`` of a text."""
        raise NotImplementedError

    def loss(self, ids: list[int]) -> float:
        """The sum of the negative log likelihoods of all tokens but the first."""
        scores = self.logits(ids)[:-1].float()
        return float(F.cross_entropy(scores, torch.tensor(ids[1:]), reduction="sum"))


# ------------------------------------------------------------------------------------------------ transformers


class TorchEngine(Engine):
    """A model of transformers under ``generate()``."""

    def __init__(self, model: Any, size: int, compiled: bool) -> None:
        self.model, self.bytes, self.compiled = model.eval(), size, compiled
        if compiled:
            self.one_batch = "each batch size is compiled by itself: only one prompt was measured"

    def generate(self, ids: Ids, new: int) -> list[float]:
        """By ``generate()``; each token is stamped where it looks whether to stop."""
        import transformers

        stamps: list[float] = []

        class Stamp(transformers.StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                stamps.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        options: dict[str, Any] = {}
        if self.compiled:
            compilation = transformers.CompileConfig(fullgraph=False, mode="default", dynamic=False)
            compilation._compile_all_devices = True  # by default on GPUs alone
            options = {"cache_implementation": "static", "compile_config": compilation}
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0, **options
        )
        prompt = torch.tensor(ids)
        with torch.inference_mode():
            start = time.perf_counter()
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                stopping_criteria=[Stamp()],
            )
        return [stamp - start for stamp in stamps]

    def logits(self, ids: list[int]) -> Tensor:
        """By one forward pass without a cache."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0]


def by_torch(settings: Settings, form: str, compiled: bool) -> Engine:
    """The dense model in float32, bfloat16 or int8."""
    dtype = torch.float32 if form in ("float32", "torch.ao int8") else torch.bfloat16
    model = files.read_model(settings.dense, dtype)
    if form == "torch.ao int8":
        quantise = torch.ao.quantization.quantize_dynamic
        model = quantise(model, {nn.Linear}, torch.qint8)
    elif form.startswith("torchao"):
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )

        only_weights = form.endswith("weights")
        config = Int8WeightOnlyConfig if only_weights else Int8DynamicActivationInt8WeightConfig
        quantize_(model, config())
    return TorchEngine(model, files.saved_size(model.state_dict()), compiled)


def by_packed(settings: Settings, form: str, compiled: bool) -> Engine:
    """A packed file, loaded as a server would."""
    from lightning_nm import load_packed

    pattern, dtype = form.split()
    if pattern not in settings.sparse:
        raise ValueError(f"no sparse model of {pattern} was given")
    file = files.packed_file(settings.sparse[pattern], pattern, dtype, settings.folder)
    # With int8 weights little is computed in the dtype of the rest, and attention to one token is faster in float32.
    rest = torch.float32 if dtype == "int8" else torch.bfloat16
    model = files.empty_model(settings.sparse[pattern], rest)
    model = load_packed(model, file, kernels=KERNELS)
    return TorchEngine(model, file.stat().st_size, compiled)


# ------------------------------------------------------------------------------------------------ ONNX Runtime


class OnnxEngine(Engine):
    """A graph of onnxruntime-genai's builder, by its generator."""

    def __init__(self, settings: Settings, precision: str) -> None:
        import onnxruntime_genai

        self.library, self.settings, self.precision = onnxruntime_genai, settings, precision
        folder = self._built(prune_lm_head=True)
        self.bytes = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
        self.model = onnxruntime_genai.Model(str(folder))
        self.scoring: Any = None

    def _built(self, *, prune_lm_head: bool) -> Path:
        folder = files.onnx_folder(
            self.settings.dense,
            self.precision,
            self.settings.folder,
            prune_lm_head=prune_lm_head,
        )
        file = folder / "genai_config.json"
        config = json.loads(file.read_text())
        config["model"]["decoder"]["session_options"] |= {
            "intra_op_num_threads": self.settings.threads,
            # Waiting threads would slow the rows that take turns with this one.
            "session.intra_op.allow_spinning": "0",
        }
        file.write_text(json.dumps(config))
        return folder

    def _generator(self, model: Any, batch: int, length: int) -> Any:
        options = self.library.GeneratorParams(model)
        options.set_search_options(
            do_sample=False, batch_size=batch, min_length=length, max_length=length
        )
        return self.library.Generator(model, options)

    def generate(self, ids: Ids, new: int) -> list[float]:
        """The library computes a step when it is asked for the next token."""
        import numpy

        stamps = []
        start = time.perf_counter()
        generator = self._generator(self.model, len(ids), len(ids[0]) + new)
        generator.append_tokens(numpy.array(ids, dtype=numpy.int32))
        for _ in range(new):
            generator.generate_next_token()
            stamps.append(time.perf_counter() - start)
        return stamps

    def logits(self, ids: list[int]) -> Tensor:
        """By a second graph: the first one computes the scores of the last token alone."""
        import numpy

        if self.scoring is None:
            self.scoring = self.library.Model(str(self._built(prune_lm_head=False)))
        generator = self._generator(self.scoring, 1, len(ids) + 1)
        generator.append_tokens(numpy.array([ids], dtype=numpy.int32))
        return torch.from_numpy(generator.get_output("logits"))[0]


# -------------------------------------------------------------------------------------------------- OpenVINO


class OpenVinoEngine(Engine):
    """A stateful graph, whose runtime keeps the cache."""

    def __init__(self, settings: Settings, precision: str) -> None:
        import openvino

        int8 = precision == "int8"
        graph = files.openvino_file(settings.dense, settings.folder, int8=int8)
        self.bytes = graph.stat().st_size + graph.with_suffix(".bin").stat().st_size
        options = {
            "INFERENCE_NUM_THREADS": settings.threads,
            # Where the CPU has no bfloat16, OpenVINO takes float32.
            "INFERENCE_PRECISION_HINT": {"float32": "f32"}.get(precision, "bf16"),
        }
        self.request = (
            openvino.Core().compile_model(str(graph), "CPU", options).create_infer_request()
        )

    def _step(self, ids: Tensor, kept: Tensor) -> Tensor:
        lines = torch.arange(len(ids), dtype=torch.int32)
        inputs = {"ids": ids.numpy(), "lines": lines.numpy(), "kept": kept.numpy()}
        return torch.from_numpy(self.request.infer(inputs, share_outputs=True)[0])

    def generate(self, ids: Ids, new: int) -> list[float]:
        """Greedily, by a step for each token."""
        stamps = []
        start = time.perf_counter()
        self.request.reset_state()
        step = torch.tensor(ids)
        for _ in range(new):
            scores = self._step(step, torch.tensor([step.shape[1] - 1]))
            step = scores[:, -1].argmax(-1, keepdim=True)
            stamps.append(time.perf_counter() - start)
        return stamps

    def logits(self, ids: list[int]) -> Tensor:
        """By one step with an empty cache."""
        self.request.reset_state()
        return self._step(torch.tensor([ids]), torch.arange(len(ids)))[0].clone()


# ------------------------------------------------------------------------------------------------- llama.cpp


class LlamaEngine(Engine):
    """A GGUF file, by the library's own calls."""

    def __init__(self, settings: Settings, kind: str) -> None:
        import llama_cpp

        self.library, self.threads = llama_cpp, settings.threads
        file = files.gguf_file(settings.dense, kind, settings.folder)
        self.bytes = file.stat().st_size
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {file.name}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.entries = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.contexts: dict[int, Any] = {}

    def _context(self, batch: int) -> Any:
        if batch not in self.contexts:
            options = self.library.llama_context_default_params()
            options.n_ctx = batch * CONTEXT
            options.n_batch = options.n_ubatch = CONTEXT
            options.n_seq_max = batch
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[batch] = self.library.llama_init_from_model(self.model, options)
        context = self.contexts[batch]
        self.library.llama_memory_clear(self.library.llama_get_memory(context), True)
        return context

    def _decode(self, context: Any, ids: Ids, first: int, every: bool) -> list[Any]:
        """Append tokens to each sequence: addresses of the scores of the last one of each, or of all."""
        width = len(ids[0])
        batch = self.library.llama_batch_init(len(ids) * width, 0, 1)
        batch.n_tokens = len(ids) * width
        wanted = []
        for place in range(batch.n_tokens):
            line, column = divmod(place, width)
            batch.token[place] = ids[line][column]
            batch.pos[place] = first + column
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = line
            is_wanted = every or column == width - 1
            batch.logits[place] = is_wanted
            if is_wanted:
                wanted.append(place)
        status = self.library.llama_decode(context, batch)
        self.library.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self.library.llama_get_logits_ith(context, place) for place in wanted]

    def _scores(self, address: Any) -> Any:
        import numpy

        return numpy.ctypeslib.as_array(address, shape=(self.entries,))

    def generate(self, ids: Ids, new: int) -> list[float]:
        """Greedily, by a batch of one token of each sequence."""
        stamps = []
        context = self._context(len(ids))
        start = time.perf_counter()
        step, first = ids, 0
        for _ in range(new):
            found = self._decode(context, step, first, every=False)
            first += len(step[0])
            step = [[int(self._scores(address).argmax())] for address in found]
            stamps.append(time.perf_counter() - start)
        return stamps

    def logits(self, ids: list[int]) -> Tensor:
        """By one batch with all scores."""
        found = self._decode(self._context(1), [ids], 0, every=True)
        return torch.stack([torch.from_numpy(self._scores(address).copy()) for address in found])


# ------------------------------------------------------------------------------------------------------- rows

PATTERNS = ("2:4", "1:4", "1:8")


def _row(make: Callable[..., Engine], *arguments: Any) -> Callable[[Settings], Engine]:
    return lambda settings: make(settings, *arguments)


def _rows() -> dict[str, Callable[[Settings], Engine]]:
    rows: dict[str, Callable[[Settings], Engine]] = {}
    for dtype in ("float32", "bfloat16"):
        rows[f"torch {dtype}"] = _row(by_torch, dtype, False)
        rows[f"torch {dtype}, compiled"] = _row(by_torch, dtype, True)
    rows["torch.ao int8"] = _row(by_torch, "torch.ao int8", False)
    for form in ("torchao int8 weights", "torchao int8"):
        rows[form] = _row(by_torch, form, False)
        rows[f"{form}, compiled"] = _row(by_torch, form, True)
    for form in ("float32", "int8", "int4"):
        rows[f"onnxruntime {form}"] = _row(OnnxEngine, form)
    for form in ("float32", "bfloat16", "int8"):
        rows[f"openvino {form}"] = _row(OpenVinoEngine, form)
    for form in ("BF16", "Q8_0", "Q4_0"):
        rows[f"llama.cpp {form}"] = _row(LlamaEngine, form)
    for pattern in PATTERNS:
        for dtype in ("bf16", "int8"):
            name = f"packed {pattern} {dtype}"
            rows[name] = _row(by_packed, f"{pattern} {dtype}", False)
            rows[f"{name}, compiled"] = _row(by_packed, f"{pattern} {dtype}", True)
    return rows


ROWS = _rows()
"""How each row of the table loads its model."""


def perplexity(losses: list[float], tokens: int) -> float:
    """Of sums of negative log likelihoods.

    Example:
        >>> round(perplexity([math.log(8), math.log(2)], 2), 6)
        4.0
    """
    return math.exp(sum(losses) / tokens)
