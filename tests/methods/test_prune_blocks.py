"""prune() block by block: the results of running the whole model for each layer, at a linear cost."""

import copy
import io
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.prune_depth import ModelProducts, counted_calls, watched_memory
from lightning_nm import prune

WIDTH = 16


class Block(nn.Module):
    """Two layers with one input, and two in a row; the others do not see what it gets by name."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask=None):
        h = self.norm(x)
        h = self.gate(h).sigmoid() * self.value(h)
        if mask is not None:
            h = h * mask
        x = x + h
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Layers before and after the blocks, and a mask made from the inputs."""

    def __init__(self, depth=3, kind=Block):
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(depth)])
        self.neck = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mask = (x[:, :1] > 0).to(x)
        x = self.stem(x)
        for block in self.blocks:
            x = self.step(block, x, mask)
        return self.head(self.neck(x).relu())

    def step(self, block, x, mask):
        return block(x, mask=mask)


class Reversed(Stack):
    """Blocks are called in another order than they are registered in."""

    def forward(self, x):
        x = self.stem(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.neck(x).relu())


class Tuples(Stack):
    """Blocks hand on a nested tuple, whose second part only the first one makes."""

    class Kind(Block):
        def forward(self, state):
            x, (bias,) = state
            bias = self.gate(x).tanh() if bias is None else bias
            return super().forward(x + bias), (bias,)

    def __init__(self):
        super().__init__(kind=self.Kind)

    def forward(self, x):
        state = (self.stem(x), (None,))
        for block in self.blocks:
            state = block(state)
        return self.head(self.neck(state[0] + state[1][0]))


class InPlace(Stack):
    """Blocks change their input, and the model what they return."""

    class Kind(Block):
        def forward(self, x, mask=None):
            x += self.gate(x)
            return super().forward(x).relu_()

    def __init__(self):
        super().__init__(kind=self.Kind)

    def step(self, block, x, mask):
        return block(x, mask).mul_(0.5).add_(mask) if block is self.blocks[-1] else block(x, mask)


class TwoLists(Stack):
    """An encoder and a decoder, which reads what the encoder returned in each of its blocks."""

    class Kind(Block):
        def forward(self, x, given):
            return super().forward(x + given)

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList([self.Kind() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        given, x = self.neck(x), self.stem(x)
        for block in self.decoder:
            x = block(x, given)
        return self.head(x)


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
            chosen = x[:, :5].argmax(1)
            out = torch.zeros_like(x)
            for number in chosen.unique().tolist():
                out[chosen == number] = self.experts[number](x[chosen == number])
            return x + out

    def __init__(self):
        super().__init__(kind=self.Kind)


class FewerSelected(Stack):
    """The first and the last block hold no layers that are pruned."""

    options = {"include": ["blocks.1.*", "blocks.2.*", "head"]}

    def __init__(self):
        super().__init__(depth=4)


def perceptron():
    """A plain chain of layers of one class."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


MODELS = [
    *(Stack, Reversed, Tuples, InPlace, TwoLists, Tied, WithExperts, FewerSelected),
    perceptron,
]


def batches(number=3, tokens=48):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64) for _ in range(number)
    ]


def both(make, data=None, call=None, **options):
    """Two copies of a model, pruned block by block and with the whole model for each layer, and both results."""
    torch.manual_seed(0)
    one = make().double()
    two = copy.deepcopy(one)
    data = batches() if data is None else data
    options = {"skip_first_last": False, **getattr(one, "options", {}), **options}
    found = prune(one, data=data, call=call, **options)
    expected = prune(two, data=data, call=call, blocks=[], **options)
    return one, two, found, expected


def assert_same(one, two, found, expected):
    assert found.layers == expected.layers
    assert found.patterns == expected.patterns
    assert {name: choice.pattern for name, choice in found.choices.items()} == {
        name: choice.pattern for name, choice in expected.choices.items()
    }
    assert found.errors == pytest.approx(expected.errors, rel=1e-9)
    for key, value in two.state_dict().items():
        assert torch.equal(one.state_dict()[key] != 0, value != 0), key
        torch.testing.assert_close(one.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_results_are_those_of_the_whole_model(make, score):
    assert_same(*both(make, pattern="2:4", score=score))


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
@pytest.mark.parametrize("choice", [{"budget": 0.6}, {"max_error": 0.4}], ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_choices_are_those_of_the_whole_model(make, choice):
    candidates = ["1:4", "2:4", "3:4"]
    options = {"score": "sparsegpt", "candidates": candidates}
    if make is FewerSelected and "budget" in choice:
        choice = {"budget": 0.8}  # weights outside of the selection count whole
    assert_same(*both(make, **options, **choice))


def llama(depth=4):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": depth}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))


def bert(depth=4):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": depth}
    config = transformers.BertConfig(vocab_size=64, num_attention_heads=4, **sizes)
    return transformers.BertForSequenceClassification(config)


def texts(number=4):
    generator = torch.Generator().manual_seed(1)
    found = []
    for k in range(number):
        ids = torch.randint(64, (2, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 12 - k :] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


@pytest.mark.parametrize("make", [llama, bert])
def test_models_of_transformers(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "score='sparsegpt' has fewer"
        )  # the pooler: a token a text
        assert_same(*both(make, texts(), pattern="2:4", score="sparsegpt", skip_first_last=True))


def inference(model, batch):
    with torch.inference_mode():
        return model(batch)


def test_inference_mode():
    """Its tensors do not tell when they are changed."""
    results = both(InPlace, call=inference, pattern="2:4", score="sparsegpt")
    assert_same(*results)


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def test_the_encoder_of_torch():
    data = [x.view(4, 12, WIDTH) for x in batches()]
    assert_same(*both(encoder, data, pattern="2:4", score="wanda", exclude="*.out_proj"))


# ----------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
@pytest.mark.parametrize("make", [llama, bert])
def test_the_cost_is_linear_in_depth(make):
    """At most three forward passes, and equally many calls of each block that are not answered from memory."""
    calls_of_a_block, passes = [], []
    for depth in (2, 4, 8):
        model, data = make(depth).eval(), texts(8)
        _, layers = max(
            (len(module), module) for module in model.modules() if isinstance(module, nn.ModuleList)
        )
        with torch.no_grad(), ModelProducts(model) as once:
            for batch in data:
                model(**batch)
        with ModelProducts(model) as products, counted_calls(type(layers[0])) as calls:
            prune(model, "2:4", "sparsegpt", data)
        passes.append(products.macs / once.macs)
        calls_of_a_block.append(calls[0] / depth)
    assert max(passes) < 3
    # One pass for the order, one for each of the four inputs of layers, one for the result, and a check of one batch.
    assert max(calls_of_a_block) <= 8 * (1 + 4 + 1) + 3


def test_the_whole_model_costs_more_the_deeper_it_is():
    """What the test before this one must be able to see."""
    passes = []
    for depth in (2, 8):
        model, data = llama(depth).eval(), texts(2)
        with torch.no_grad(), ModelProducts(model) as once:
            for batch in data:
                model(**batch)
        with ModelProducts(model) as products:
            prune(model, "2:4", "sparsegpt", data, blocks=[])
        passes.append(products.macs / once.macs)
    assert passes[1] > 3 * passes[0] > 9


@pytest.mark.parametrize("depth", [3, 9])
def test_the_memory_is_that_of_one_block(depth):
    data = texts()
    with watched_memory() as most:
        prune(llama(depth), "2:4", "wanda", data)
    hidden = 4 * 32 * sum(batch["input_ids"].numel() for batch in data)
    # What the last block returned, its attention, and for one batch the block after it.
    assert hidden < most[0] <= (2 + 1 / len(data)) * hidden


def test_data_are_read_once_also_if_they_come_in_another_order_each_time():
    data = torch.cat(batches(6))
    torch.manual_seed(0)
    shuffled, plain = Stack().double(), Stack().double()
    plain.load_state_dict(shuffled.state_dict())
    drawn = []
    loader = DataLoader(
        data, 32, shuffle=True, collate_fn=lambda rows: drawn.append(1) or torch.stack(rows)
    )
    found = prune(shuffled, "2:4", "sparsegpt", loader)
    assert len(drawn) == len(loader)
    # Sums over batches do not depend on their order, but for rounding.
    expected = prune(plain, "2:4", "sparsegpt", [data], blocks=[])
    assert found.errors == pytest.approx(expected.errors, rel=1e-6)


def test_runs_are_equal_bit_for_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = llama()
        prune(model, "2:4", "sparsegpt", texts())
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


# ----------------------------------------------------------------------------------------------- models without blocks


class Twice(Stack):
    """Each block is called twice."""

    message = "'blocks' .4 Block. cannot .*: a batch calls module 0 of it 2 times, not once"

    def __init__(self):
        super().__init__(depth=4)

    def step(self, block, x, mask):
        return block(block(x, mask), mask)


class Residual(Twice):
    """The model adds up what the blocks return."""

    message = "they do not hand a tensor from one to the next. Name the blocks if"

    def step(self, block, x, mask):
        return x + block(x, mask)


class Skips(Twice):
    """The last block gets a tensor that the first one returned, too."""

    message = "cannot be calibrated .*: at 'blocks.3': its inputs are others"

    def forward(self, x):
        x = first = self.blocks[0](self.stem(x))
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.head(self.neck(self.blocks[-1](x, mask=first)))


class Means(Twice):
    """The layers after the blocks read what all of them returned."""

    message = "at 'neck': its inputs are others"

    def forward(self, x):
        given = [self.stem(x)]
        for block in self.blocks:
            given.append(block(given[-1]))
        return self.head(self.neck(sum(given)))


class Leaves(Twice):
    """A block leaves in a dictionary what the next one reads."""

    message = "at 'blocks.1': its arguments are others"

    class Kind(Block):
        def forward(self, x, left, number):
            x = super().forward(x) + (left[number - 1] if number else 0)
            left[number] = x
            return x

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Kind() for _ in range(4)])

    def forward(self, x):
        x, left = self.stem(x), {}
        for number, block in enumerate(self.blocks):
            x = block(x, left, number)
        return self.head(self.neck(x))


class Holds(Twice):
    """Blocks get an object that they may change."""

    message = "at 'blocks.0': its arguments hold a SimpleNamespace, which blocks may change"

    class Kind(Block):
        def forward(self, x, cache):
            cache.sum = cache.sum + x
            return super().forward(cache.sum)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Kind() for _ in range(4)])

    def forward(self, x):
        x, cache = self.stem(x), SimpleNamespace(sum=0)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.neck(x))


class Random(Twice):
    """Blocks get noise, which is another one in every pass."""

    message = "at 'blocks.0': its inputs are others"

    def step(self, block, x, mask):
        return block(x, torch.rand_like(x))


@pytest.mark.parametrize(
    "make", [Twice, Residual, Skips, Means, Leaves, Holds], ids=lambda make: make.__name__
)
def test_other_models_run_as_a_whole_and_the_reason_is_said_once(make):
    with pytest.warns(UserWarning, match=make.message) as caught:
        results = both(make, pattern="2:4", score="sparsegpt")
    assert_same(*results)
    (warning,) = caught
    assert "the whole model runs up to it" in str(warning.message)


def test_a_random_input_is_no_reason_to_remember():
    with pytest.warns(UserWarning, match=Random.message):
        prune(Random().double(), "2:4", "wanda", batches())


def test_a_cache_that_a_user_asks_for():
    def call(model, batch):
        return model(**batch, use_cache=True)

    with pytest.warns(UserWarning, match="its arguments hold a DynamicCache"):
        assert_same(*both(llama, texts(), call, pattern="2:4", skip_first_last=True))


class Scaled(Stack):
    """The model computes with what the last block returned."""

    def __init__(self):
        super().__init__(depth=6)

    def step(self, block, x, mask):
        return 0.9 * block(x, mask)


def test_blocks_may_be_named():
    assert_same(*_named(Scaled, "blocks"))
    assert_same(*_named(TwoLists, ["decoder", "blocks"]))


def _named(make, blocks):
    torch.manual_seed(0)
    one = make().double()
    two = copy.deepcopy(one)
    with counted_calls(Block) as calls:
        found = prune(one, "2:4", "sparsegpt", batches(), blocks=blocks)
    with counted_calls(Block) as whole:
        expected = prune(two, "2:4", "sparsegpt", batches(), blocks=[])
    assert calls[0] < whole[0]
    return one, two, found, expected


@pytest.mark.parametrize(
    ("make", "blocks", "message"),
    [
        (Stack, "layers", r"'layers' names no module of Stack .*: 'blocks' \(3 Block\)"),
        (Stack, "stem", "'stem' names no module of Stack of which two modules or more hold"),
        (Stack, "blocks.0.norm", "'blocks.0.norm' names no module of Stack"),
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
    with pytest.raises(ValueError, match=message):
        prune(model, "2:4", "wanda", batches(), blocks=blocks)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert_untouched(model)


def test_blocks_are_a_name_and_need_data():
    with pytest.raises(TypeError, match="blocks=3 must be the name of the module"):
        prune(Stack().double(), "2:4", "wanda", batches(), blocks=3)
    with pytest.raises(ValueError, match="blocks='blocks' needs calibration batches"):
        prune(Stack(), blocks="blocks")


# -------------------------------------------------------------------------------------------------------- what is left


def assert_untouched(model):
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__
        assert module.training


def test_nothing_is_left_in_the_model():
    model = llama()
    prune(model, "2:4", "wanda", texts())
    assert_untouched(model)
    assert model.config.use_cache
    data = texts()
    data[1]["input_ids"][0, 0] = 1000  # no token
    with pytest.raises(IndexError):
        prune(model, "1:4", "wanda", data)
    assert_untouched(model)
    assert model.config.use_cache


def test_a_forward_of_an_instance_stays():
    torch.manual_seed(0)
    model = Stack().double()
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.forward = lambda *args, own=block.forward, **kwargs: own(*args, **kwargs)
    own = [block.forward for block in model.blocks]
    prune(model, "2:4", "wanda", batches())
    prune(plain, "2:4", "wanda", batches())
    assert [block.forward for block in model.blocks] == own
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_progress_is_shown_on_request(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    prune(Stack().double(), "2:4", "wanda", batches())
    assert not stderr.getvalue()
    prune(Stack().double(), "2:4", "wanda", batches(), progress=True, skip_first_last=False)
    assert "calibrating layers" in stderr.getvalue()
    assert "15/15" in stderr.getvalue()


def test_layers_with_one_input_have_one_moment():
    """Also if one of them changes it in place for the next one: then it is another input."""

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = F.relu(x)
            y = self.first(x)
            return y + self.second(x.mul_(torch.linspace(0, 1, WIDTH).to(x)))

    model = Changes().double()
    alone = nn.Sequential(copy.deepcopy(model.second))
    prune(model, "2:4", "wanda", batches(), skip_first_last=False)
    scaled = [F.relu(x) * torch.linspace(0, 1, WIDTH) for x in batches()]
    prune(alone, "2:4", "wanda", scaled, skip_first_last=False)
    assert torch.equal(model.second.weight, alone[0].weight)


def test_convolutions_with_one_input_have_moments_of_their_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Conv1d(8, 4, 3)
            self.strided = nn.Conv1d(8, 4, 3, stride=2, padding=1)

        def forward(self, x):
            return self.wide(x).sum() + self.strided(x).sum()

    model, data = Two().double(), [x.view(2, 8, 48) for x in batches()]
    alone = [nn.Sequential(copy.deepcopy(module)) for module in (model.wide, model.strided)]
    prune(model, "2:4", "sparsegpt", data, skip_first_last=False)
    for one, module in zip(alone, (model.wide, model.strided), strict=True):
        prune(one, "2:4", "sparsegpt", data, skip_first_last=False)
        assert torch.equal(one[0].weight, module.weight)
