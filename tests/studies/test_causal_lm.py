"""The pretrained language model of studies, and text for it, on a tiny decoder."""

import hashlib
import re

import pytest
import torch
import torch.nn.functional as F

from lightning_nm import prune
from studies.data import TextFiles
from studies.models import CausalLM
from tests.docs.blocks import QuietTrainer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{number}" for number in range(30)]


def saved_model(folder, seed, vocabulary=32):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    model = tokenizers.models.WordLevel(
        {word: n for n, word in enumerate([*WORDS, "?", "end"])}, "?"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end")
    student = saved_model(root / "student", 0)
    fast.save_pretrained(student)
    return student, saved_model(root / "teacher", 1), saved_model(root / "other", 2, 40)


@pytest.fixture
def text(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(" ".join([f"w{number}"] * 40))
    return tmp_path


@pytest.mark.parametrize("labels", [1.0, 0.3, 0.0])
def test_the_loss_by_its_formula(folders, labels):
    student, teacher, _ = folders
    module = CausalLM(student, None if labels == 1 else teacher, labels)
    module.log = lambda *_, **__: None
    tokens = torch.randint(0, 32, (2, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    log_p = module(inputs).double().log_softmax(-1)
    expected = -labels * log_p.gather(-1, targets[..., None]).mean()
    if labels < 1:
        with torch.no_grad():
            log_q = module.teacher(input_ids=inputs).logits.double().log_softmax(-1)
        expected += (1 - labels) * (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    found = module.training_step((inputs, targets), 0)
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    found.backward()
    assert all(p.grad is not None for p in module.model.parameters())
    assert labels == 1 or all(p.grad is None for p in module.teacher.parameters())


def test_a_fit_leaves_the_teacher_and_its_perplexity_is_that_of_the_text(folders, text):
    student, teacher, _ = folders
    module = CausalLM(student, teacher, 0.5, lr=1e-2)
    before = {key: value.clone() for key, value in module.teacher.state_dict().items()}
    data = TextFiles(str(text), student, context=8, val_size=5, batch_size=4)
    trainer = QuietTrainer(max_steps=3, logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="eval mode"):
        trainer.fit(module, data)
    assert not module.teacher.training
    assert module.model.training
    assert all(
        torch.equal(value, before[key]) for key, value in module.teacher.state_dict().items()
    )
    (measured,) = trainer.test(module, data)
    inputs, targets = data.test_set.__getitems__(list(range(5)))
    with torch.no_grad():
        loss = F.cross_entropy(module.eval()(inputs).flatten(0, 1), targets.flatten())
    assert measured["test_perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)


def test_whole_files_are_held_out(folders, text):
    data = TextFiles(str(text), folders[0], context=8, val_fraction=0.25, val_size=10**6)
    data.setup("fit")
    order = sorted(range(10), key=lambda n: hashlib.sha256(f"{n}.txt".encode()).digest())
    seen = [set(part.windows.flatten().tolist()) - {31} for part in (data.train_set, data.val_set)]
    assert seen == [set(order[:7]), set(order[7:])]
    contents = [(text / f"{number}.txt").read_bytes() for number in order[7:]]
    assert data.held_out() == b"\n".join(contents)
    # Each file ends with the end token.
    tokens = data.train_set.windows[:, :-1].flatten().tolist()
    assert tokens[:82] == [order[0]] * 40 + [31] + [order[1]] * 40 + [31]


def test_ignored_targets_have_no_loss(folders):
    """Nor do they count in the mean of the tests. A batch of nothing else is refused; a teacher needs no labels."""
    module, distilled = CausalLM(folders[0]), CausalLM(folders[0], folders[1], 0.0)
    module.log = distilled.log = lambda *_, **__: None
    tokens, targets = torch.randint(0, 32, (2, 2, 8))
    targets[:, 2:] = -100
    module.test_step((tokens, targets), 0)
    log_p = module(tokens)[:, :2].log_softmax(-1)
    expected = -log_p.gather(-1, targets[:, :2, None]).mean()
    torch.testing.assert_close(module.held_out.compute(), expected)
    torch.testing.assert_close(module.training_step((tokens, targets), 0), expected)
    targets[:] = -100
    assert distilled.training_step((tokens, targets), 0).isfinite()
    for step in ("training", "validation", "test"):
        words = f"all 16 targets of {step} batch 3 are -100.*: leave the batch out, or label"
        with pytest.raises(ValueError, match=words):
            getattr(module, f"{step}_step")((tokens, targets), 3)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([b""], "all 1 files of .* are empty: give some with text"),
        (
            [b"w1 w2"] * 4,
            "the 3 files for training have 9 tokens, no more than context=9: give more",
        ),
        (
            [b"x" * 99, b"w1 " * 99],
            "the 1 files for validation and test have 2 tokens, no more than",
        ),
        ([b"w1 " * 99, b"\xff\xfe"], r"1\.txt' is no text in UTF-8 .*: leave it out by `pattern`"),
    ],
)
def test_texts_that_make_no_windows(folders, tmp_path, contents, message):
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TextFiles(str(tmp_path), folders[0], context=9).setup("fit")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, t, o: CausalLM(s, labels=2.0), "labels=2.0 must be a weight from 0 to 1"),
        (lambda s, t, o: CausalLM(s, labels=0.5), "with teacher=None"),
        (lambda s, t, o: CausalLM(s, t), "labels=1.0 with teacher="),
        (lambda s, t, o: CausalLM(s, o, 0.5), "has 40 tokens and the student in .* has 32"),
        (lambda s, t, o: CausalLM(s, warmup=1.0), "warmup=1.0"),
        (lambda s, t, o: TextFiles(s, s, "*.none").setup("fit"), "has no files that match"),
        (
            lambda s, t, o: TextFiles(s, s, "*.json", digest="0").setup("fit"),
            "SHA-256 [0-9a-f]{64}, not",
        ),
        (lambda s, t, o: TextFiles(s, s, context=0), "context must be at least 1"),
        (lambda s, t, o: TextFiles(s, "none", "*.json").setup("fit"), "no folder tokenizer='none'"),
    ],
)
def test_bad_arguments(folders, make, message):
    with pytest.raises(ValueError, match=message):
        make(*folders)


def test_a_tokenizer_that_does_not_fit_is_refused(folders, text, tmp_path):
    """One without an end token, and that of a model with more tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="endless' has no end token, which ends each file: set"):
        TextFiles(str(text), str(tmp_path / "endless"), context=8).setup("fit")
    smaller = CausalLM(saved_model(tmp_path / "small", 3, vocabulary=8))
    trainer = QuietTrainer(max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"32 tokens.*the model has 8"):
        trainer.fit(smaller, TextFiles(str(text), folders[0], context=8))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # read by peft
@pytest.mark.parametrize("way", ["lora", "asp"])
def test_a_pruned_decoder_stays_so_by_adapters_and_by_asp(folders, text, tmp_path, capsys, way):
    pytest.importorskip("peft")
    from benchmarks import lora

    sparse = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    prune(sparse, "2:4")
    sparse.save_pretrained(tmp_path / "sparse")
    for path in text.glob("*.txt"):  # so that what is learned holds for the held-out file
        path.write_text(" ".join(WORDS))
    options = ["--folder", tmp_path / "sparse", "--text", text, "--tokenizer", folders[0]]
    options += ["--context", "8", "--seconds", "0.5", "--lr", "0.01", "--way", way]
    lora.main([str(each) for each in options])
    printed = capsys.readouterr().out
    steps, before, after = re.search(
        rf"{way}, (\d+) steps: perplexity ([\d.]+), then ([\d.]+)\n", printed
    ).groups()
    assert int(steps) > 1
    assert float(after) < float(before)
    assert "all matrices of the layers are 2:4: True" in printed
