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
from tests.support.method_loop import Loop

VOCABULARY, DIM = 24, 16


class GPT(nn.Module):
    """An embedding, a layer with a lookup of its own, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Embedding(8, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.head.weight = self.embed.weight

    def body(self, x):
        return self.up(x + self.position(torch.arange(8))).tanh()

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


def made(seed=0):
    torch.manual_seed(seed)
    return GPT().double()


def attach(model, method="sr-ste", **options):
    options = {"include": "head", "pattern": "2:4"} | options
    return NMSparsifier(model, method=METHODS[method](), **options).attach()


def batch(step=0):
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))


class Tokens(Loop):
    def batch(self, step):
        return batch(step)


@torch.no_grad()
def used_in(layer, gemm="forward"):
    """What a GEMM reads in the layer's present mode."""
    return layer.values_of(gemm, layer.weight.detach()).clone()


def compare_routed(layer, grad):
    """The weight and the method's own parameters have the gradients that it makes of dL/dW_F."""
    routed, *others = layer.spec.method.weight_gradient(layer, layer.weight.detach(), grad.clone())
    torch.testing.assert_close(layer.weight.grad, routed)
    for parameter, other in zip(layer.parameters.values(), others, strict=True):
        torch.testing.assert_close(parameter.grad, other)


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", METHODS)
def test_a_tied_weight_gets_the_sum_of_both_gradients_routed(method, estimator):
    model = made()
    sparsifier = attach(model, method, grad_estimator=estimator)
    (layer,) = sparsifier.layers.values()
    optimizer = sgd_or_adam(method, model.parameters(), 0.3, momentum=0.9)
    sparsifier.register(optimizer)
    for step in range(4):
        tokens = batch(step)
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        for value in plain.values():
            value.requires_grad_()
        used = used_in(layer).requires_grad_()
        words = layer.noise.words

        def estimate(grad, words=words):
            return grad if estimator is None else estimated(layer, grad, words)

        hidden = F.embedding(tokens, used) + plain["position.weight"]
        hidden = F.linear(hidden, plain["up.weight"], plain["up.bias"]).tanh()
        backward = used_in(layer, "dgrad")
        expected = Head.apply(hidden, used, plain["head.bias"], backward, estimate)
        expected.square().mean().backward()
        found = model(tokens)
        optimizer.zero_grad()
        found.square().mean().backward()
        torch.testing.assert_close(found, expected)
        compare_routed(layer, used.grad)
        for name in ("head.bias", "position.weight", "up.weight", "up.bias"):
            torch.testing.assert_close(model.get_parameter(name).grad, plain[name].grad)
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
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM, **options), nn.Linear(DIM, 4)).double()
    layer = attach(model, method, include="0", grad_estimator="mvue").layers["0"]
    assert layer.spec.estimator is None
    assert layer.masks.backward is None
    twin = nn.Embedding(VOCABULARY, DIM, **options, _weight=used_in(layer))
    for tokens in (batch(), batch()[0].int(), torch.tensor(3)):
        model.zero_grad()
        twin.zero_grad()
        for parameter in layer.parameters.values():
            parameter.grad = None
        found, expected = model[0](tokens), twin(tokens)
        assert torch.equal(found, expected)
        grad = torch.randn_like(found)
        found.backward(grad)
        expected.backward(grad)
        compare_routed(layer, twin.weight.grad)


@pytest.mark.parametrize("include", ["embed", "head", ["*", "embed"]], ids=str)
def test_either_name_masks_both(include):
    model = made()
    sparsifier = attach(model, include=include)
    assert "head" in sparsifier.layers
    assert "embed" not in sparsifier.layers
    assert {"embed", "head"}.isdisjoint(sparsifier.skipped)
    assert isinstance(model.embed, Adapter)
    assert isinstance(model.head, Adapter)
    assert "embed" not in sparsifier.selection.sizes  # one weight
    sparsifier.detach()
    assert (type(model.embed), type(model.head)) == (nn.Embedding, nn.Linear)


@pytest.mark.parametrize("method", ["bi-mask", "scaled-mask"])
def test_a_state_dict_holds_a_tied_weight_once(tmp_path, method):
    """As that of the dense model: both keys are one tensor, which files store once."""
    model = made()
    torch.save(model.state_dict(), tmp_path / "dense.pt")
    layer = attach(model, method).layers["head"]
    for order in (model, nn.ModuleList([model.head, model.embed])):
        state = order.state_dict()
        first, second = (state[key] for key in state if state[key].shape == (VOCABULARY, DIM))
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(first, layer.forward_weight())
        with torch.no_grad():
            model.head.weight.mul_(2)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("a.pt", "dense.pt")]
    assert abs(sizes[0] - sizes[1]) < 1000
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(tmp_path / "a.safetensors"))
    assert len(safetensors.load_file(tmp_path / "a.safetensors")) == len(model.state_dict()) - 1
    # One that is filled again is new.
    destination = model.embed.state_dict(prefix="embed.")
    with torch.no_grad():
        model.embed.weight.mul_(3)
    model.head.state_dict(destination=destination, prefix="head.")
    assert torch.equal(destination["head.weight"], layer.forward_weight())
    assert not torch.equal(destination["head.weight"], destination["embed.weight"])


def test_copies_pickles_and_loads_keep_the_tie():
    model, tokens = made(), batch()
    layer = attach(model).layers["head"]
    expected = model(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens), expected)
        assert other.head.weight is other.embed.weight
        assert other.head.nm_layers["weight"] is other.embed.nm_layers["weight"]
    plain = made(seed=1)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(tokens), expected)
    latent = model.head.weight.detach().clone()
    model.load_state_dict(model.state_dict())  # weights that come back find their latent values
    assert torch.equal(model.head.weight, latent)
    model.load_state_dict(made(seed=2).state_dict())
    assert nmf.is_nm(layer.forward_weight(), "2:4")
    assert torch.equal(model.state_dict()["embed.weight"], layer.forward_weight())


@pytest.mark.parametrize("include", ["head", ["embed", "up"], "position"], ids=str)
def test_a_resume_is_exact(include):
    def loop(seed):
        options = {"include": include, "grad_estimator": "mvue"}
        return Tokens("bi-mask", model=made(seed), **options)

    whole = loop(0).train(3)
    states = whole.states()
    resumed = loop(1).load(states).train(3)
    for one, other in zip(
        whole.train(3).model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


class Scaled(nn.Embedding):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        (nn.Embedding(9, DIM, sparse=True), "sparse=True: no method takes a sparse gradient"),
        (nn.Embedding(9, DIM, max_norm=1.0), "max_norm: it renormalises rows"),
        (Scaled(9, DIM), f"{__name__}.Scaled has a forward of its own"),
        (nn.Embedding(9, 18), "in 18 % 4 != 0"),
    ],
    ids=["sparse", "max-norm", "subclass", "size"],
)
def test_what_cannot_be_masked_is_refused_by_name(embedding, reason):
    model = nn.Sequential(embedding, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    named = "is named by `include` but cannot be masked"
    with pytest.raises(ValueError, match=f"layer '0' {named}: {reason}"):
        attach(model, include=["0", "1"])
    tied = GPT()
    tied.embed = embedding
    tied.head = nn.Linear(embedding.embedding_dim, 9)
    tied.head.weight = embedding.weight
    shared = f"'head' {named}: .*(shared with 'embed.weight', which cannot|in 18 % 4)"
    with pytest.raises(ValueError, match=shared):
        attach(tied)
    assert not any(isinstance(module, Adapter) for module in (*model.modules(), *tied.modules()))


def test_two_products_may_not_share_a_weight():
    model = GPT()
    model.other = nn.Linear(DIM, VOCABULARY)
    model.other.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"its weight is shared with '.*', which would"):
        attach(model)


def test_globs_leave_a_tied_weight_dense_and_say_why():
    """In a training and in `prune`; an error names it before what the user left out."""
    shared = "its weight is shared with 'embed.weight', which would change with it: if `include` has the exact name"
    message = f"'embed': a lookup.*'head': {shared}.*not in `include`"
    for use in (attach, prune):
        with pytest.raises(ValueError, match=message):
            use(made(), include="he*", skip_first_last=False)
    with pytest.raises(ValueError, match=r"'position': .* has its exact name, without wildcards"):
        attach(made(), include="posi*")
    model = made()
    result = prune(model, "2:4", include="*", skip_first_last=False)
    assert result.layers == ["up"]
    assert result.skipped["head"].startswith(shared)
    assert model.head.weight.all()
    packed = pack(model.float(), dtype="int8", int8_embeddings="embed")
    assert packed.head.weight is packed.embed.weight


def test_one_shot_pruning():
    assert prune(made(), include=["embed", "position"]).layers == ["position", "head"]
    with pytest.raises(ValueError, match="layer 'position' is an embedding, whose inputs are tok"):
        prune(made(), include=["up", "position"], data=[batch()])
    model = made()
    prune(model, include="embed", data=[batch()])  # by the inputs of the head
    assert nmf.is_nm(model.embed.weight, "2:4")


def test_autocast():
    model = made().float()
    sparsifier = attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch())
    logits.float().square().mean().backward()
    assert logits.dtype is torch.bfloat16
    assert model.embed.weight.grad.dtype is torch.float32
    assert sparsifier.training.unseen() == []


@pytest.mark.slow
def test_compiled():
    model, tokens = made(), batch()
    attach(model)
    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        logits = call(tokens)
        logits.square().mean().backward()
        found.append((logits, model.embed.weight.grad.clone()))
    torch.testing.assert_close(*found)


class Multiply(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.skipif(not can_watch(nn.Identity()), reason="this torch has no such modes")
@pytest.mark.parametrize("include", ["head", "up.1"])
def test_a_lookup_costs_nothing_and_hides_no_product_behind_it(include):
    model = made()
    model.up = nn.Sequential(Multiply().double(), model.up)  # reads what the embedding made
    sparsifier = attach(model, include=include)
    model(batch())
    assert sparsifier.macs["embed"] == 0
    assert sparsifier.macs["head"] == 4 * 8 * DIM * VOCABULARY
    assert sparsifier.macs[OTHERS] == 4 * 8 * DIM * DIM
