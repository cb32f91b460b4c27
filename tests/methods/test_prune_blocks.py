"""prune() block by block: the results of running the whole model for each layer, at a linear cost."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.prune_depth import ModelProducts, counted_calls, watched_memory
from lightning_nm import prune
from lightning_nm.functional import is_nm
from tests.support.method_loop import mlp
from tests.support.tiny import tiny

# The pooler of BERT has a token a text; WithExperts a few tokens for an expert.
few_tokens = pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
WIDTH = 16


class Block(nn.Module):
    """Two layers with one input, and two in a row; the others do not see what it gets by name."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask=None):
        h = self.norm(x)
        h = self.gate(h).sigmoid() * self.value(h)
        x = x + (h if mask is None else h * mask)
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Layers before and after the blocks, and a mask made from the inputs."""

    Kind, depth = Block, 3

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.Kind() for _ in range(self.depth)])
        self.neck = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mask = (x[:, :1] > 0).to(x)
        return self.head(self.neck(self.body(self.stem(x), mask)).relu())

    def body(self, x, mask):
        for block in self.blocks:
            x = self.step(block, x, mask)
        return x

    def step(self, block, x, mask):
        return block(x, mask=mask)


class Reversed(Stack):
    """Blocks are called in another order than they are registered in."""

    def body(self, x, mask):
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Tuples(Stack):
    """Blocks hand on a nested tuple, whose second part only the first one makes."""

    class Kind(Block):
        def forward(self, state):
            x, (bias,) = state
            bias = self.gate(x).tanh() if bias is None else bias
            return super().forward(x + bias), (bias,)

    def body(self, x, mask):
        state = (x, (None,))
        for block in self.blocks:
            state = block(state)
        return state[0] + state[1][0]


class InPlace(Stack):
    """Blocks change their input, and the model what they return."""

    class Kind(Block):
        def forward(self, x, mask=None):
            x += self.gate(x)
            return super().forward(x).relu_()

    def step(self, block, x, mask):
        x = block(x, mask)
        return x.mul_(0.5).add_(mask) if block is self.blocks[-1] else x


class TwoLists(Stack):
    """An encoder and a decoder, which reads what the encoder returned in each of its blocks."""

    class Kind(Block):
        def forward(self, x, given=0):
            return super().forward(x + given)

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList([self.Kind() for _ in range(4)])

    def forward(self, x):
        given, x = self.neck(self.body(x, 0)), self.stem(x)
        for block in self.decoder:
            x = block(x, given)
        return self.head(x)

    def step(self, block, x, mask):
        return block(x)


class Tied(Stack):
    """The weight of the last layer is that of a layer before all blocks."""

    def __init__(self):
        super().__init__()
        self.neck.weight = self.stem.weight

    def forward(self, x):
        return super().forward(x) + self.neck(x)[:, :8]


class WithExperts(Stack):
    """Each block has a list of more experts than there are blocks, of which a batch calls some."""

    class Kind(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

        def forward(self, x, mask=None):
            x = super().forward(x, mask)
            chosen, out = x[:, :5].argmax(1), torch.zeros_like(x)
            for number in chosen.unique().tolist():
                out[chosen == number] = self.experts[number](x[chosen == number])
            return x + out


class Deep(Stack):
    """Deep enough for a warning."""

    depth = 4


class FewerSelected(Deep):
    """The first and the last block hold no layers that are pruned."""

    options = {"include": ["blocks.1.*", "blocks.2.*", "head"]}


def chain():
    """Layers of one class."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def encoder():
    """Torch's, in which ``out_proj`` bypasses its module."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model.options = {"exclude": "*.out_proj"}
    return model


MODELS = [Stack, Reversed, Tuples, InPlace, TwoLists, Tied, WithExperts, FewerSelected]


def batches(number=3, tokens=24):
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(number, tokens, WIDTH, generator=generator, dtype=torch.float64))


def llama(depth=4):
    return tiny("llama", width=32, layers=depth, heads=4)


def bert(depth=4):
    return tiny("bert", width=32, layers=depth, heads=4)


def texts(number=4):
    ids = torch.randint(32, (number, 2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for k in range(number):
        mask[k, 0, 12 - k :] = 0
    pairs = zip(ids, mask, strict=True)
    return [{"input_ids": each, "attention_mask": own} for each, own in pairs]


def compare(make, data=None, call=None, blocks=None, **options):
    """Two copies of a model, pruned block by block and with the whole model for each layer, end equal."""
    torch.manual_seed(0)
    one = make().double()
    two = copy.deepcopy(one)
    data = batches() if data is None else data
    options = {"score": "sparsegpt", **getattr(one, "options", {}), **options}
    if "budget" not in options and "max_error" not in options:
        options["pattern"] = "2:4"
    found = prune(one, data=data, call=call, blocks=blocks, **options)
    expected = prune(two, data=data, call=call, blocks=[], **options)
    assert (found.layers, found.patterns) == (expected.layers, expected.patterns)
    assert found.errors == pytest.approx(expected.errors, rel=1e-9)
    for key, value in two.state_dict().items():
        assert torch.equal(one.state_dict()[key] != 0, value != 0), key
        torch.testing.assert_close(one.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@few_tokens
@pytest.mark.parametrize(
    ("make", "choice"),
    [
        *((make, {}) for make in [*MODELS, chain]),
        *((make, {"budget": 0.8}) for make in [*MODELS, chain]),
        *((make, {"max_error": 0.4}) for make in (Tuples, TwoLists)),
    ],
)
def test_the_results_are_those_of_the_whole_model(make, choice):
    choice = choice and {"candidates": ["1:4", "2:4", "3:4"], **choice}
    compare(make, skip_first_last=False, **choice)


@few_tokens
@pytest.mark.parametrize("make", [llama, bert])
def test_models_of_transformers(make):
    compare(make, texts())


@few_tokens
def test_experts_of_transformers():
    errors = []
    for score in ("magnitude", "sparsegpt"):
        torch.manual_seed(0)
        model = tiny("mixtral")
        result = prune(model, "2:4", score, texts())
        assert not result.uncalibrated
        for layer in model.model.layers:
            assert is_nm(layer.mlp.experts.gate_up_proj, "2:4", dim=2)
            assert is_nm(layer.mlp.experts.down_proj, "2:4", dim=2)
        errors.append([error for name, error in result.errors.items() if ".experts." in name])
    assert len(errors[0]) == 2 * len(model.model.layers)
    assert all(fitted < plain for plain, fitted in zip(*errors, strict=True))


def test_the_encoder_of_torch_and_inference_mode():
    compare(encoder, [x.view(2, 12, WIDTH) for x in batches()], score="wanda")
    # Inference tensors do not tell when they are changed.
    compare(InPlace, call=torch.inference_mode()(lambda model, batch: model(batch)))


# ----------------------------------------------------------------------------------------------------------------- cost


@few_tokens
def test_the_cost_is_linear_in_depth():
    """At most three forward passes, and equally many calls of each block that are not answered from memory."""

    def passes(depth, number, **options):
        model, data = llama(depth).eval(), texts(number)
        with torch.no_grad(), ModelProducts(model) as once:
            for batch in data:
                model(**batch)
        kind = type(model.model.layers[0])
        with ModelProducts(model) as products, counted_calls(kind) as calls:
            prune(model, "2:4", "sparsegpt", data, **options)
        return products.macs / once.macs, calls[0] / depth

    # One pass for the order, one for each of the four inputs of layers, one for the result, and a check of one batch.
    for depth in (2, 6):
        of_model, of_a_block = passes(depth, 6)
        assert of_model < 3
        assert of_a_block <= 6 * (1 + 4 + 1) + 3
    whole = [passes(depth, 1, blocks=[])[0] for depth in (2, 6)]
    assert whole[1] > 2 * whole[0] > 6, "what this test must be able to see"


def test_the_memory_is_that_of_one_block():
    data = texts()
    with watched_memory() as most:
        prune(llama(9), "2:4", "wanda", data)
    hidden = 4 * 32 * sum(batch["input_ids"].numel() for batch in data)
    # What the last block returned, its attention, and for one batch the block after it.
    assert hidden < most[0] <= (2 + 1 / len(data)) * hidden


def test_data_are_read_once_also_if_they_come_in_another_order_each_time():
    shuffled = Stack().double()
    plain, data, drawn = copy.deepcopy(shuffled), torch.cat(batches(6)), []
    collate = lambda rows: drawn.append(1) or torch.stack(rows)  # noqa: E731
    loader = DataLoader(data, 32, shuffle=True, collate_fn=collate)
    found = prune(shuffled, "2:4", "sparsegpt", loader)
    assert len(drawn) == len(loader)
    # Sums over batches do not depend on their order, but for rounding.
    expected = prune(plain, "2:4", "sparsegpt", iter([data]), blocks=[])
    assert found.errors == pytest.approx(expected.errors, rel=1e-6)


# ----------------------------------------------------------------------------------------------- models without blocks


class Twice(Deep):
    """Each block is called twice."""

    message = "'blocks' .4 Block. cannot .*: a batch calls module 0 of it 2 times, not once"

    def step(self, block, x, mask):
        return block(block(x, mask), mask)


class Residual(Deep):
    """The model adds up what the blocks return."""

    message = "they do not hand a tensor from one to the next. Name the blocks if"

    def step(self, block, x, mask):
        return x + block(x, mask)


class Skips(Deep):
    """The last block gets a tensor that the first one returned, too."""

    message = "cannot be calibrated .*: at 'blocks.3': its inputs are others"

    def body(self, x, mask):
        x = first = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x, mask=first)


class Means(Deep):
    """The layers after the blocks read what all of them returned."""

    message = "at 'head': its inputs are others"

    def body(self, x, mask):
        given = [x]
        for block in self.blocks:
            given.append(block(given[-1]))
        return sum(given)


class Leaves(Deep):
    """A block leaves in a dictionary what the next one reads."""

    message = "at 'blocks.1': its arguments are others"

    class Kind(Block):
        def forward(self, x, left):
            left[len(left)] = x
            return super().forward(x + left[0])

    def body(self, x, mask):
        left = {}
        for block in self.blocks:
            x = block(x, left)
        return x


class Holds(Deep):
    """Blocks get an object that they may change."""

    message = "at 'blocks.0': its arguments hold a SimpleNamespace, which blocks may change"

    class Kind(Block):
        def forward(self, x, cache):
            cache.sum = cache.sum + x
            return super().forward(cache.sum)

    def body(self, x, mask):
        cache = SimpleNamespace(sum=0)
        for block in self.blocks:
            x = block(x, cache)
        return x


class Random(Deep):
    """Blocks get noise, which is another one in every pass."""

    message = "at 'blocks.0': its inputs are others"

    def step(self, block, x, mask):
        return block(x, torch.rand_like(x))


@pytest.mark.parametrize(
    "make", [Twice, Residual, Skips, Means, Leaves, Holds], ids=lambda make: make.__name__
)
def test_other_models_run_as_a_whole_and_the_reason_is_said_once(make):
    with pytest.warns(UserWarning, match=make.message) as caught:
        compare(make)
    (warning,) = caught
    assert "the whole model runs up to it" in str(warning.message)


def test_a_random_input_and_a_cache_are_no_reason_to_remember():
    with pytest.warns(UserWarning, match=Random.message):
        prune(Random().double(), "2:4", "wanda", batches())
    cached = lambda model, batch: model(**batch, use_cache=True)  # noqa: E731
    with pytest.warns(UserWarning, match="its arguments hold a DynamicCache"):
        compare(llama, texts(), cached)


class Scaled(Stack):
    """The model computes with what the last block returned."""

    def step(self, block, x, mask):
        return 0.9 * block(x, mask)


@pytest.mark.parametrize(
    ("make", "blocks"), [(Scaled, "blocks"), (TwoLists, ["decoder", "blocks"])]
)
def test_blocks_may_be_named(make, blocks):
    counts = []
    for named in (blocks, []):
        with counted_calls(Block) as calls:
            prune(make().double(), "2:4", "sparsegpt", batches(), blocks=named)
        counts.append(calls[0])
    assert counts[0] < counts[1]
    compare(make, blocks=blocks)


@pytest.mark.parametrize(
    ("make", "blocks", "message"),
    [
        (Stack, "layers", r"'layers' names no module of Stack .*: 'blocks' \(3 Block\)"),
        (Stack, "stem", "'stem' names no module of Stack of which two modules or more hold"),
        (Stack, 3, "blocks=3 must be the name of the module"),
        (Twice, "blocks", "'blocks'.*: a batch calls module 0 of it 2 times, not once"),
        (Skips, "blocks", "'blocks': at 'blocks.3': its inputs are others"),
        (Residual, "blocks", "'blocks': at 'blocks.2': its inputs are others"),
        (Stack, "", "'': a batch calls module 2 of it 0 times"),
        (TwoLists, ["blocks", "blocks"], "'blocks': overlaps with other named blocks"),
    ],
)
def test_wrong_names_are_refused_before_anything_changes(make, blocks, message):
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        prune(model, "2:4", "wanda", batches(), blocks=blocks)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert_untouched(model)


# -------------------------------------------------------------------------------------------------------- what is left


def assert_untouched(model):
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__
        assert module.training


def test_nothing_is_left_in_the_model():
    model, data = llama(), texts()
    prune(model, "2:4", "wanda", texts())
    assert_untouched(model)
    data[1]["input_ids"][0, 0] = 1000  # no token
    with pytest.raises(IndexError):
        prune(model, "1:4", "wanda", data)
    assert_untouched(model)
    assert model.config.use_cache


def test_a_forward_of_an_instance_stays():
    model = Stack().double()
    plain = copy.deepcopy(model)
    own = []
    for block in model.blocks:
        block.forward = lambda *args, own=block.forward, **kwargs: own(*args, **kwargs)
        own.append(block.forward)
    prune(model, "2:4", "wanda", batches())
    prune(plain, "2:4", "wanda", batches())
    assert [block.forward for block in model.blocks] == own
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_progress_is_shown_on_request(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    prune(mlp(WIDTH, 16, 16).double(), "2:4", "wanda", batches())
    assert not stderr.getvalue()
    options = {"progress": True, "skip_first_last": False}
    prune(mlp(WIDTH, 16, 16).double(), "2:4", "wanda", batches(), **options)
    assert "calibrating layers" in stderr.getvalue()
    assert "2/2" in stderr.getvalue()


class Changes(nn.Module):
    """Two layers with one input, which is another one once it is changed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.relu(x)
        return self.first(x) + self.second(x.mul_(torch.linspace(0, 1, WIDTH).to(x)))


class Convolutions(nn.Module):
    """Two layers with one input, but not the same patches of it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 4, 3)
        self.second = nn.Conv1d(WIDTH, 4, 3, stride=2, padding=1)

    def forward(self, x):
        x = x.view(2, WIDTH, -1)
        return self.first(x).sum() + self.second(x).sum()


@pytest.mark.parametrize("make", [Changes, Convolutions])
def test_other_inputs_have_moments_of_their_own(make):
    model = make().double()
    alone = nn.Sequential(copy.deepcopy(model.second))
    inputs = []
    note = model.second.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    for x in batches():
        model(x)
    note.remove()
    for each, data in ((model, batches()), (alone, inputs)):
        prune(each, "2:4", "wanda", data, skip_first_last=False)
    assert torch.equal(model.second.weight, alone[0].weight)
