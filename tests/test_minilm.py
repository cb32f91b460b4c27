"""The measurement of a sentence encoder, on a tiny one with random weights."""

import doctest
import json

import pytest
import torch
from torch.nn.functional import normalize

from benchmarks import minilm
from lightning_nm.functional import is_nm

transformers = pytest.importorskip("transformers")

WORDS = [*"abcdefgh", "the", "one", "is", "there", "it", "was", "and"]
TEXTS = [f"The {a} one is {b} and it was {c} there." for a in "abcd" for b in "efg" for c in "abh"]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    vocabulary = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    return tmp_path


def test_sentences_have_no_marks_of_the_text():
    assert doctest.testmod(minilm).attempted
    text = (
        "A list::\n\nOn :ref:`the\npage <a>`, *all* is well. No.\n\n* An item of one is left out."
    )
    assert list(minilm.sentences(text)) == ["On the page, all is well."]


def test_correlation_is_that_of_the_ranks_of_pairs():
    """It is one for any embedding that orders the pairs alike, and minus one for the other order."""
    dense = normalize(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    turn, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    turned = minilm.compare(dense @ turn, dense)
    assert turned["spearman"] == pytest.approx(1)
    assert turned["cosine"] == pytest.approx(float(((dense @ turn) * dense).sum(-1).mean()))
    assert turned["cosine"] < 0.9
    circle = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])  # similarities 0.8, 0 and 0.6
    other = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])  # 0, 0.6 and 0.8: ranks 2 0 1, 0 1 2
    assert minilm.compare(other, circle)["spearman"] == pytest.approx(-0.5)


@pytest.mark.parametrize("method", ["asp", "bame"])
def test_a_pruned_model_learns_the_dense_embeddings(folder, method):
    dense = minilm.Embedder(folder).eval()
    pruned, layers = minilm.sparse(dense, "1:4", [TEXTS])
    assert len(layers) == 12
    expected = minilm.embed(dense, TEXTS)
    before = minilm.compare(minilm.embed(pruned, TEXTS), expected)
    batches = [(TEXTS, expected)] * 20
    trained = minilm.distilled(pruned, layers, "1:4", method, batches, lr=1e-3)
    after = minilm.compare(minilm.embed(trained, TEXTS), expected)
    assert after["cosine"] > before["cosine"]
    assert minilm.compare(minilm.embed(pruned, TEXTS), expected) == before
    assert all(is_nm(trained.get_submodule(name).weight, "1:4") for name in layers)


def test_the_benchmark_writes_what_it_measured(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "minilm_folder", lambda: folder)
    text = tmp_path / "text"
    text.mkdir()
    for number, sentence in enumerate(TEXTS):
        text.joinpath(f"{number}.txt").write_text(sentence)
    options = ["--text", text, "--patterns", "6:8", "1:8", "--bame", "1:8", "--steps", "1"]
    minilm.main([str(each) for each in [*options, "--json", tmp_path / "a.json"]])
    found = json.loads((tmp_path / "a.json").read_text())
    runs = {(run["pattern"], run["method"]): run for run in found["runs"]}
    assert list(runs) == [("6:8", ""), ("6:8", "asp"), ("1:8", ""), ("1:8", "asp"), ("1:8", "bame")]
    assert runs["6:8", ""]["cosine"] > runs["1:8", ""]["cosine"]
    assert found["setting"]["lr"] == 6e-4
    assert "32 sentences for training, 4 held out" in capsys.readouterr().out
