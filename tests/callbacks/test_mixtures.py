"""Mixtures of experts trained by the callback: own ones, and those of transformers."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_nm import NMSparsifier, TransposableMask
from lightning_nm.callbacks.tables import layer_rows
from lightning_nm.demo import ResumableDataModule
from lightning_nm.export import verify
from lightning_nm.training.macs import OTHERS, can_watch
from tests.support.experts import EXPERTS, HIDDEN, WIDTH, Experts, TransposedExperts
from tests.support.lightning_models import (
    assert_equal_models,
    callback,
    is_plain,
    new_model,
    whole_and_resumed,
)
from tests.support.tiny import VOCABULARY, tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed in a `val_dataloader` but have no `validation_step`",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
METHODS = ("sr-ste", "asp", "transposable", "bi-mask", "bame")
MODELS = ("own", "mixtral", "qwen3-moe")
TOKENS = 8


class Whole(TensorDataset):
    def __getitems__(self, indices):
        return [tensor[indices] for tensor in self.tensors]


class Tokens(ResumableDataModule):
    def __init__(self):
        super().__init__(batch_size=8)
        generator = torch.Generator().manual_seed(0)
        self.train_set = Whole(torch.randint(0, VOCABULARY, (64, TOKENS), generator=generator))


class Own(nn.Module):
    """An embedding, a routed mixture, a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.first, self.second = Experts(), TransposedExperts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        weight, experts = self.router(x).softmax(-1).max(-1)
        x = x + weight[:, None] * self.first(x, experts)
        return self.head(x + self.second(x, experts)).view(*tokens.shape, VOCABULARY)


class LanguageModel(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.model = Own() if kind == "own" else tiny(kind)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        made = self.model(tokens)
        logits = getattr(made, "logits", made)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def experts_of(model):
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


def sparse(model, method="sr-ste", *estimator, **options):
    return NMSparsifier(model, "2:4", method, *estimator, **options).attach()


def dense_again(sparsifier):
    sparsifier.bake()
    sparsifier.detach()


@pytest.mark.parametrize(
    ("kind", "method", "estimator"),
    [  # all pairs of a model and a method
        pytest.param(
            kind,
            method,
            (None, "mvue")[(row + column) % 2],
            marks=() if row == column else pytest.mark.slow,
        )
        for row, kind in enumerate(MODELS)
        for column, method in enumerate(METHODS)
    ],
)
def test_a_resume_is_bit_exact_and_verified(tmp_path, kind, method, estimator):
    def callbacks():
        made = TransposableMask(update_every=2) if method == "transposable" else method
        return [callback(made, grad_estimator=estimator)]

    def new(seed):
        return new_model(seed, LanguageModel, kind=kind)

    straight, resumed = whole_and_resumed(
        tmp_path, callbacks, 5, new=new, data=Tokens, max_epochs=1
    )
    assert_equal_models(straight, resumed)
    assert is_plain(straight)
    result = verify(tmp_path / "mid.ckpt")
    assert result.ok
    keys = {verdict.key for verdict in result.verdicts if verdict.verdict == "N:M"}
    assert keys >= set(experts_of(straight))


@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_masked_experts_of_transformers_are_its_own_with_sparse_weights(kind, implementation):
    model, (tokens,) = new_model(of=LanguageModel, kind=kind), Tokens().train_set[:4]
    if implementation is not None:
        model.model.set_experts_implementation(implementation)
    sparsifier = sparse(model)
    masked = {name: layer for name, layer in sparsifier.layers.items() if layer.param.dim() == 3}
    layout = "experts-transposed" if kind == "gpt-oss" else "experts"
    assert {layer.spec.layout for layer in masked.values()} == {layout}
    assert set(masked) == set(experts_of(model))
    loss = model.training_step((tokens,), 0)
    loss.backward()
    grads = {name: layer.param.grad.clone() for name, layer in masked.items()}
    if can_watch(model):
        assert sparsifier.macs[OTHERS] == 2 * tokens.numel() * 4 * 16  # the routers alone
    for name, layer in masked.items():
        assert sparsifier.macs[name] == 2 * tokens.numel() * layer.param[0].numel()
    dense_again(sparsifier)
    model.zero_grad()
    other = model.training_step((tokens,), 0)
    other.backward()
    torch.testing.assert_close(loss, other)
    for name, grad in grads.items():  # the straight-through gradient is that of the sparse model
        torch.testing.assert_close(grad, experts_of(model)[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "name", "config"),
    [
        ("nemotron_h", "NemotronHExperts", {"moe_latent_size": None, "mlp_hidden_act": "relu2"}),
        ("muse_spark", "MuseSparkExperts", {"moe_hidden_size": WIDTH, "post_norm_eps": 1e-5}),
    ],
)
def test_experts_without_a_gate_and_with_a_norm(family, name, config):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config |= {"num_local_experts": 4, "n_routed_experts": 4, "hidden_size": WIDTH}
    config |= {"moe_intermediate_size": HIDDEN, "hidden_act": "silu"}
    torch.manual_seed(0)
    made = getattr(modeling, name)(SimpleNamespace(_experts_implementation="eager", **config))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    chosen = torch.tensor([[0, 1], [3, 1], [1, 0], [3, 0], [4, 1]])  # 4: an expert elsewhere
    x, weights = torch.randn(5, WIDTH), torch.rand(5, 2) * (chosen < 4)
    sparsifier = sparse(nn.ModuleDict({"experts": made}))
    assert len(sparsifier.layers) == 2
    found = made(x, chosen, weights)
    dense_again(sparsifier)
    torch.testing.assert_close(found, made(x, chosen.clamp(max=3), weights))


def test_numbers_past_the_last_expert_give_zero_in_spite_of_biases():
    model = tiny("gpt-oss")
    experts = next(each for each in model.modules() if hasattr(each, "down_proj_bias"))
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        nn.init.normal_(bias)
    sparse(model)
    number, _, hidden = experts.down_proj.shape
    chosen = torch.tensor([[0, number], [number, number + 1]])
    found = experts(torch.randn(2, hidden), chosen, torch.ones(2, 2))
    assert found[0].any()
    assert not found[1].any()


def test_experts_that_do_not_run_by_the_interface_are_named_with_the_way_out():
    model = tiny("llama4")
    sparsifier = sparse(model)
    name = "model.layers.0.feed_forward.experts"
    assert sparsifier.skipped[name].startswith("no adapter for Llama4TextExperts; if it holds ")
    sparsifier.detach()
    with pytest.raises(ValueError, match="cannot be masked: no adapter for Llama4TextExperts"):
        sparse(model, include=[f"{name}.down_proj"])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # read at a graph break
@pytest.mark.parametrize("kind", ["own", "mixtral"])
def test_compiled_models_run_their_experts_eagerly(kind):
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = new_model(of=LanguageModel, kind=kind)
        sparsifier = sparse(model, "bi-mask", "mvue")
        if compiled:
            model.model.compile(backend="aot_eager")
        loss = model.training_step(Tokens().train_set[:4], 0)
        loss.backward()
        assert not sparsifier.training.unseen()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not can_watch(nn.Identity()), reason="this torch counts no GEMMs of experts that stay dense"
)
@pytest.mark.parametrize("exclude", [None, "first*", "router"])
def test_products_are_counted_by_tokens_and_once(exclude):
    model = Own()
    sparsifier = sparse(model, exclude=exclude)
    tokens = torch.zeros(3, TOKENS, dtype=torch.int64)  # all of one kind, so all at one expert
    model(tokens).sum().backward()
    each = 3 * TOKENS * WIDTH
    expected = {"embed": 0, "router": each * EXPERTS, "head": each * VOCABULARY}
    names = [f"{name}.{weight}" for name in ("first", "second") for weight in ("up", "down")]
    expected |= dict.fromkeys(names, each * HIDDEN)
    assert sparsifier.macs == expected
    masked = sum(expected[name] for name in sparsifier.layers)
    assert sparsifier.shares()["flops"] == pytest.approx(masked / sum(expected.values()))


def test_the_table_shows_experts():
    rows = {row[0]: row[1:-1] for row in layer_rows(sparse(Own(), "bi-mask"))}
    for name, shape in (("first.up", "4x32x16"), ("second.up", "4x16x32")):
        assert rows[name] == (shape, "2:4", "bi-mask", "2:4", "2:4", "dense")


def test_frozen_experts_wait_and_wake():
    model, names = Own(), {"first.up", "first.down"}
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach(optimizers=[optimizer])
    sparsifier.register(optimizer)
    assert names <= set(sparsifier.skipped)
    model.first.requires_grad_(True)
    for _ in range(2):
        model(torch.arange(2 * TOKENS).view(2, -1)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert names <= set(sparsifier.layers)
    assert sparsifier.violations() == 0
    assert not sparsifier.training.unseen()
