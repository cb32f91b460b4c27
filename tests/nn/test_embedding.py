"""Embeddings, alone and tied to a head, gather rows of W_F and route their gradients as the method does."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_nm import NMSparsifier, pack, prune
from lightning_nm import functional as nmf
from lightning_nm.nn.adapters import Adapter
from lightning_nm.nn.products import estimated
from lightning_nm.training.macs import OTHERS, can_watch
from tests.support.contract import METHODS, sgd_or_adam

VOCABULARY, DIM = 24, 16


class Body(nn.Module):
    """A block of a GPT."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(8, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM) for _ in range(3)])

    def forward(self, x):
        x = x + self.position(torch.arange(x.shape[-2]))
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.norms[2](x + self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.body = Body()
        self.head = nn.Linear(DIM, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


class Head(torch.autograd.Function):
    """A linear layer with a backward weight and an estimate of dY, by plain torch."""

    @staticmethod
    def forward(ctx, x, forward_weight, bias, backward_weight, estimate):
        ctx.save_for_backward(x, backward_weight)
        ctx.estimate = estimate
        return F.linear(x, forward_weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, backward_weight = ctx.saved_tensors
        grad_weight = ctx.estimate(grad.flatten(0, -2)).t() @ x.flatten(0, -2)
        return grad @ backward_weight, grad_weight, grad.flatten(0, -2).sum(0), None, None


def made(*, tied=True, seed=0):
    torch.manual_seed(seed)
    return GPT(tied).double()


def attach(model, method="sr-ste", **options):
    options = {"include": "head", "pattern": "2:4"} | options
    return NMSparsifier(model, method=METHODS[method](), **options).attach()


def batch(step=0):
    return torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))


@torch.no_grad()
def used_in(layer):
    """What products read in the layer's present mode."""
    return layer.values_of("forward", layer.weight.detach())


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten())


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", METHODS)
def test_a_tied_weight_gets_the_sum_of_both_gradients_routed(method, estimator):
    model = made()
    sparsifier = attach(model, method, grad_estimator=estimator)
    (layer,) = sparsifier.layers.values()
    optimizer = sgd_or_adam(method, model.parameters(), 0.3, momentum=0.9)
    sparsifier.register(optimizer)
    for step in range(4):
        tokens, body = batch(step), copy.deepcopy(model.body)
        body.zero_grad()
        used, bias = (
            used_in(layer).clone().requires_grad_(),
            model.head.bias.detach().clone().requires_grad_(),
        )
        words = layer.noise.words

        def estimate(grad, words=words):
            return grad if estimator is None else estimated(layer, grad, words)

        hidden = body(F.embedding(tokens[:, :-1], used))
        with torch.no_grad():
            used_backward = layer.values_of("dgrad", layer.weight.detach())
        expected = Head.apply(hidden, used, bias, used_backward, estimate)
        loss_of(expected, tokens).backward()
        found = model(tokens[:, :-1])
        optimizer.zero_grad()
        loss_of(found, tokens).backward()
        torch.testing.assert_close(found, expected)
        routed, *others = layer.spec.method.weight_gradient(
            layer, model.head.weight.detach(), used.grad.clone()
        )
        torch.testing.assert_close(model.head.weight.grad, routed)
        for parameter, grad in zip(layer.parameters.values(), others, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        torch.testing.assert_close(model.head.bias.grad, bias.grad)
        for mine, twin in zip(model.body.parameters(), body.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, twin.grad)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    sparsifier.bake()
    sparsifier.detach()
    assert model.head.weight is model.embed.weight
    assert method == "dense" or nmf.is_nm(model.head.weight, "2:4")


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_an_embedding_alone(method, options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM, **options, dtype=torch.float64), nn.Linear(DIM, 4).double()
    )
    sparsifier = attach(model, method, include="0", grad_estimator="mvue")
    layer = sparsifier.layers["0"]
    assert layer.spec.estimator is None
    assert layer.masks.backward is None
    twin = nn.Embedding(VOCABULARY, DIM, **options, _weight=used_in(layer).clone())
    for tokens in (batch(), batch()[0].int(), torch.tensor(3)):
        model.zero_grad()
        twin.zero_grad()
        found, expected = model[0](tokens), twin(tokens)
        assert torch.equal(found, expected)
        grad = torch.randn_like(found)
        found.backward(grad)
        expected.backward(grad)
        routed, *others = layer.spec.method.weight_gradient(
            layer, model[0].weight.detach(), twin.weight.grad.clone()
        )
        torch.testing.assert_close(model[0].weight.grad, routed)
        for parameter, one in zip(layer.parameters.values(), others, strict=True):
            torch.testing.assert_close(parameter.grad, one)
            parameter.grad = None


@pytest.mark.parametrize("include", ["embed", "head", ["*", "embed"], ["embed", "head"]], ids=str)
def test_either_name_masks_both(include):
    model = made()
    sparsifier = attach(model, include=include)
    assert "head" in sparsifier.layers
    assert "embed" not in sparsifier.layers
    assert {"embed", "head"}.isdisjoint(sparsifier.skipped)
    assert isinstance(model.embed, Adapter)
    assert isinstance(model.head, Adapter)
    assert "embed" not in sparsifier.selection.sizes  # one weight
    state = model.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert nmf.is_nm(state["embed.weight"], "2:4")
    sparsifier.detach()
    assert (type(model.embed), type(model.head)) == (nn.Embedding, nn.Linear)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_state_dict_holds_a_tied_weight_once(tmp_path, method):
    """As that of the dense model: both keys are one tensor, which files store once."""
    torch.manual_seed(0)
    model = GPT()
    dense = tmp_path / "dense.pt"
    torch.save(model.state_dict(), dense)
    sparsifier = NMSparsifier(model, "2:4", METHODS[method](), include="head", seed=1).attach()
    layer = sparsifier.layers["head"]
    for _ in range(2):
        for order in (model, nn.ModuleList([model.head, model.embed])):
            state = order.state_dict()
            first, second = (state[key] for key in state if state[key].shape == (VOCABULARY, DIM))
            assert first.data_ptr() == second.data_ptr()
            assert torch.equal(first, layer.forward_weight())
        with torch.no_grad():
            model.head.weight.mul_(2)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert abs((tmp_path / "a.pt").stat().st_size - dense.stat().st_size) < 1000
    again = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(again["embed.weight"], layer.forward_weight())
    assert again["embed.weight"].data_ptr() == again["head.weight"].data_ptr()
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(tmp_path / "a.safetensors"))
    assert len(safetensors.load_file(tmp_path / "a.safetensors")) == len(again) - 1


def test_a_state_dict_that_is_filled_again_is_new():
    model = GPT()
    sparsifier = NMSparsifier(model, "2:4", "ste", include="head").attach()
    destination = model.embed.state_dict(prefix="embed.")
    with torch.no_grad():
        model.embed.weight.mul_(3)
    model.head.state_dict(destination=destination, prefix="head.")
    assert torch.equal(destination["head.weight"], sparsifier.layers["head"].forward_weight())
    assert not torch.equal(destination["head.weight"], destination["embed.weight"])


def test_neither_is_masked_by_default():
    model = made()
    sparsifier = attach(model, include=None, skip_first_last=False)
    assert "shares its weight with 'head.weight'" in sparsifier.skipped["embed"]
    assert "shared with 'embed.weight'" in sparsifier.skipped["head"]
    assert "a lookup" in sparsifier.skipped["body.position"]
    with pytest.raises(
        ValueError, match=r"'body.position': .* if `include` has its exact name, without wildcards"
    ):
        attach(made(), include="*position")
    assert "body.up" in sparsifier.layers


def test_copies_pickles_and_loads_keep_the_tie():
    model = made()
    sparsifier = attach(model)
    tokens = batch()
    expected = model(tokens[:, :-1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens[:, :-1]), expected)
        assert other.head.weight is other.embed.weight
        assert other.head.nm_layers["weight"] is other.embed.nm_layers["weight"]
    plain = made(seed=1)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(tokens[:, :-1]), expected)
    latent = model.head.weight.detach().clone()
    model.load_state_dict(model.state_dict())  # weights that come back find their latent values
    assert torch.equal(model.head.weight, latent)
    model.load_state_dict(made(seed=2).state_dict())
    assert nmf.is_nm(sparsifier.layers["head"].forward_weight(), "2:4")
    assert torch.equal(
        model.state_dict()["embed.weight"], sparsifier.layers["head"].forward_weight()
    )


@pytest.mark.parametrize("include", ["head", ["embed", "body.*"], ["body.position"]], ids=str)
def test_a_resume_is_exact(include):
    def trained(model, sparsifier, optimizer, steps):
        sparsifier.register(optimizer)
        for step in steps:
            tokens = batch(step)
            optimizer.zero_grad()
            loss_of(model(tokens[:, :-1]), tokens).backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()

    def start(seed):
        model = made(seed=seed)
        sparsifier = attach(model, "bi-mask", include=include, grad_estimator="mvue")
        return model, sparsifier, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)

    whole = start(0)
    trained(*whole, range(3))
    state = copy.deepcopy([part.state_dict() for part in whole])
    trained(*whole, range(3, 6))
    resumed = start(1)
    resumed[1].register(resumed[2])
    for part, saved in zip(resumed, (state[0], state[1], state[2]), strict=True):
        part.load_state_dict(saved)
    trained(*resumed, range(3, 6))
    for name, value in whole[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name
    assert torch.equal(whole[0].head.weight, resumed[0].head.weight)


class Scaled(nn.Embedding):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        (
            lambda: nn.Embedding(VOCABULARY, DIM, sparse=True),
            "sparse=True: no method takes a sparse gradient",
        ),
        (lambda: nn.Embedding(VOCABULARY, DIM, max_norm=1.0), "max_norm: it renormalises rows"),
        (lambda: Scaled(VOCABULARY, DIM), f"{__name__}.Scaled has a forward of its own"),
        (lambda: nn.Embedding(VOCABULARY, 18), "in 18 % 4 != 0"),
    ],
    ids=["sparse", "max-norm", "subclass", "size"],
)
def test_what_cannot_be_masked_is_refused_by_name(embedding, reason):
    model = nn.Sequential(embedding(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    with pytest.raises(
        ValueError, match=f"layer '0' is named by `include` but cannot be masked: {reason}"
    ):
        attach(model, include=["0", "1"])
    tied = GPT()
    tied.embed = embedding()
    tied.head = nn.Linear(tied.embed.embedding_dim, VOCABULARY)
    tied.head.weight = tied.embed.weight
    with pytest.raises(
        ValueError, match=r"'head' is named .*(shared with 'embed.weight', which cannot|in 18 % 4)"
    ):
        attach(tied, include="head")
    assert not any(isinstance(module, Adapter) for module in (*model.modules(), *tied.modules()))


def test_two_products_may_not_share_a_weight():
    model = GPT()
    model.other = nn.Linear(DIM, VOCABULARY)
    model.other.weight = model.embed.weight
    with pytest.raises(
        ValueError, match=r"its weight is shared with '.*', which would change with it"
    ):
        attach(model)


def test_autocast():
    model = made().float()
    sparsifier = attach(model)
    tokens = batch()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss_of(logits.float(), tokens).backward()
    assert logits.dtype is torch.bfloat16
    assert model.embed.weight.grad.dtype is torch.float32
    assert sparsifier.training.unseen() == []


@pytest.mark.slow
def test_compiled():
    model = made().float()
    attach(model)
    tokens = batch()
    eager = model(tokens[:, :-1])
    loss_of(eager, tokens).backward()
    grad, model.embed.weight.grad = model.embed.weight.grad, None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens[:, :-1])
    loss_of(compiled, tokens).backward()
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(model.embed.weight.grad, grad)


def test_globs_leave_a_tied_weight_dense_and_say_why():
    """In a training and in `prune`; an error names it before what the user left out."""
    shared = "its weight is shared with 'embed.weight', which would change with it: if `include` has the exact name"
    for use in (attach, prune):
        with pytest.raises(
            ValueError, match=f"'embed': a lookup.*'head': {shared}.*not in `include`"
        ):
            use(made(), include="he*", skip_first_last=False)
    model = made()
    result = prune(model, "2:4", include="*", skip_first_last=False)
    assert result.layers
    assert result.skipped["head"].startswith(shared)
    assert model.head.weight.all()
    packed = pack(model.float(), dtype="int8", int8_embeddings="embed")
    assert packed.head.weight is packed.embed.weight


def test_one_shot_pruning():
    model = made()
    assert prune(model, include=["embed", "body.position"]).layers == ["body.position", "head"]
    assert nmf.is_nm(model.head.weight, "2:4")
    with pytest.raises(
        ValueError, match=r"layer 'body.position' is an embedding, whose inputs are tokens"
    ):
        prune(made(), include=["body.up", "body.position"], data=[batch()[:, :-1]])
    model = made()
    prune(model, include="embed", data=[batch()[:, :-1]])  # by the inputs of the head
    assert nmf.is_nm(model.embed.weight, "2:4")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")
@pytest.mark.parametrize("include", ["head", "body.up"])
def test_a_lookup_costs_nothing_and_hides_no_product_behind_it(include):
    model = made()
    model.body.norms[0] = Experts().double()  # reads what the embedding made
    sparsifier = attach(model, include=include)
    model(batch()[:, :-1])
    assert sparsifier.macs["embed"] == 0
    assert sparsifier.macs["head"] == 4 * 8 * DIM * VOCABULARY
    assert sparsifier.macs[OTHERS] == 4 * 8 * DIM * DIM
