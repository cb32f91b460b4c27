"""The measurements of a language model by several runtimes, on a tiny one: they compute it, or say why not."""

import importlib.util
import io
import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks.smollm2 import __main__ as benchmark
from benchmarks.smollm2 import files, worker
from benchmarks.smollm2.engines import ROWS, Engine, Settings

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

IDS = torch.randint(3, 128, (600,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    # A builder of graphs asks for one.
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(128)}, "w0")
    tokenizer = tokenizers.Tokenizer(words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    sparse = {"1:4": files.pruned_folder(dense, "1:4", folder)}
    return Settings(dense, sparse, folder, 1)


def loss_of(folder, ids):
    model = files.read_model(folder, torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0, :-1]
    return float(F.cross_entropy(scores, torch.tensor(ids[1:]), reduction="sum"))


def check(engine, expected, tolerance):
    """It answers one prompt and, if it can, several, and the loss of a text is that of the model."""
    for batch in (1,) if engine.one_batch else (1, 3):
        stamps = engine.generate([IDS[:16]] * batch, 4)
        assert len(stamps) == 4
        assert stamps == sorted(stamps)
    assert engine.loss(IDS[:40]) == pytest.approx(expected, rel=tolerance)
    assert engine.bytes > 10_000


@pytest.mark.slow
def test_torch_and_packed_models_answer(settings):
    expected = loss_of(settings.dense, IDS[:40])
    check(ROWS["torch float32"](settings), expected, 1e-4)
    check(ROWS["torch bfloat16"](settings), expected, 0.03)
    of_pruned = loss_of(settings.sparse["1:4"], IDS[:40])
    packed = ROWS["packed 1:4 int8"](settings)
    check(packed, of_pruned, 0.05)
    assert packed.bytes == (settings.folder / "packed-1-4-int8.safetensors").stat().st_size
    assert packed.bytes < ROWS["packed 1:4 bf16"](settings).bytes
    with pytest.raises(ValueError, match=r"no sparse model of 2:4 was given"):
        ROWS["packed 2:4 bf16"](settings)


def test_the_exported_model_is_the_model(dense):
    """First a prompt with an empty cache, then a token with what was kept of it, lines exchanged."""
    # Two computations, which float32 would round differently.
    model = files.read_model(dense, torch.float64)
    exported = files.WithCache(model)
    ids = torch.tensor(IDS[:24]).view(2, 12)
    empty = [torch.zeros(2, 1, 0, 64, dtype=torch.float64)] * 4
    lines = torch.arange(2)
    with torch.inference_mode():
        expected = model(ids).logits
        first, *cache = exported(ids[:, :8], lines, torch.arange(8), *empty)
        torch.testing.assert_close(first, expected[:, :8])
        rest, *_ = exported(ids.flip(0)[:, 8:], lines.flip(0), torch.tensor([3]), *cache)
    torch.testing.assert_close(rest, expected.flip(0)[:, 11:])


def test_a_worker_answers_by_lines_and_says_why_it_cannot(settings, monkeypatch):
    class Fake(Engine):
        bytes = 7

        def generate(self, ids, new):
            raise RuntimeError("no cache\nmore")

        def logits(self, ids):
            return torch.zeros(len(ids), 8)

    monkeypatch.setitem(ROWS, "fake", lambda settings: Fake())
    requests = [{"do": "loss", "ids": [1, 2, 3]}, {"do": "generate", "ids": [[1]], "new": 1}]
    replies = io.StringIO()
    worker.serve("fake", settings, io.StringIO("\n".join(map(json.dumps, requests))), replies)
    loaded, loss, failed = map(json.loads, replies.getvalue().splitlines())
    assert loaded == {"bytes": 7, "one_batch": ""}
    assert loss["found"] == pytest.approx(2 * torch.tensor(8.0).log().item())
    assert failed == {"reason": "RuntimeError: no cache"}
    replies = io.StringIO()
    worker.serve("packed 2:4 int8", settings, io.StringIO(), replies)
    assert json.loads(replies.getvalue()) == {
        "reason": "ValueError: no sparse model of 2:4 was given"
    }


@pytest.mark.slow
def test_the_benchmark_measures_rows_in_turn_and_writes_them(dense, tmp_path, monkeypatch, capsys):
    """Each in a process; one whose package is missing has the reason."""
    monkeypatch.setattr(benchmark, "SHORT", 8)
    monkeypatch.setattr(benchmark, "LONG", 24)
    monkeypatch.setattr(benchmark, "NEW", 3)
    ids = IDS[:48]
    monkeypatch.setattr(benchmark, "text_ids", lambda *_: ids)
    output = tmp_path / "a.json"
    text = tmp_path / "text.txt"
    options = ["--dense", dense, "--folder", tmp_path, "--json", output, "--text", text]
    trained = files.pruned_folder(dense, "1:4", tmp_path)
    names = ["torch float32", "packed 1:4 int8", "packed 1:8 int8"]
    if importlib.util.find_spec("llama_cpp") is None:
        names.append("llama.cpp Q4_0")
    options += ["--sparse", f"1:4={trained}", "--rounds", "2", "--threads", "1", "--rows", *names]
    benchmark.main([str(option) for option in options])
    found = json.loads(output.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == set(names)
    for name in names[:3]:
        assert set(rows[name]["ms"]) == {"first 64", "first 512", "token", "step of 8"}
        assert all(len(each) == 2 for each in rows[name]["seconds"].values())
        assert "reason" not in rows[name]
    mean = (loss_of(dense, ids[:24]) + loss_of(dense, ids[24:])) / 46
    assert rows["torch float32"]["perplexity"] == pytest.approx(
        float(torch.tensor(mean).exp()), rel=1e-3
    )
    assert rows["packed 1:4 int8"]["perplexity"] is not None
    assert rows["packed 1:8 int8"]["perplexity"] is None
    assert found["settings"]["sparse"] == {"2:4": "magnitude", "1:4": "trained", "1:8": "magnitude"}
    printed = capsys.readouterr().out
    assert "| packed 1:8 int8 |" in printed
    for name in names[3:]:
        assert rows[name]["reason"] == "ModuleNotFoundError: No module named 'llama_cpp'"
        assert "llama.cpp Q4_0: ModuleNotFoundError" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporters' and the runtimes' own
@pytest.mark.parametrize(
    ("name", "package", "tolerance"),
    [
        ("torch.ao int8", "torch", 0.05),
        ("torchao int8 weights", "torchao", 0.05),
        ("openvino float32", "nncf", 1e-3),
        ("openvino int8", "nncf", 0.05),
        ("llama.cpp BF16", "llama_cpp", 0.03),
        ("llama.cpp Q8_0", "llama_cpp", 0.05),
        ("packed 1:4 bf16, compiled", "torch", None),
    ],
)
def test_runtimes_compute_the_model(settings, name, package, tolerance):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    engine = ROWS[name](settings)
    if tolerance is None:
        expected, tolerance = loss_of(settings.sparse["1:4"], IDS[:40]), 0.03
    else:
        expected = loss_of(settings.dense, IDS[:40])
    check(engine, expected, tolerance)
