"""A masked weight that other code reads is an error before its first step; a layer that is not used is none."""

import itertools
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import NMSparsityCallback, SparsityConfig
from lightning_nm.nn import Adapter
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import make_trainer
from tests.support.loop import Loop, adamw, same
from tests.support.processes import in_processes

ERROR = (
    r"these masked layers have a gradient, but were not called: {}\. Other code reads their weights"
)
DOUBT = "unless compiled functions call them"
METHODS = ["sr-ste", "bi-mask", "asp", "transposable", "bame"]


class Net(nn.Module):
    """Three masked layers and a head; a way for each of the masked ones to be used."""

    def __init__(self, **ways):
        super().__init__()
        self.ways = {"a": "call", "b": "call", "c": "call"} | ways
        self.a = nn.Linear(16, 16)
        self.b = nn.Conv1d(16, 16, 1)
        self.c = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for name, way in self.ways.items():
            x = self.use(way, getattr(self, name), x)
        return self.head(x)

    def use(self, way, layer, x):
        if way == "unused":
            return x
        if isinstance(layer, nn.Conv1d):
            x = x.unsqueeze(-1)
        if way == "forward":
            x = layer.forward(x)
        elif way == "read":
            weight = layer.weight
            x = F.linear(x, weight) if weight.dim() == 2 else F.conv1d(x, weight)
        else:
            x = layer(x)
        return x.flatten(1).relu()


def started(model, method="sr-ste", **options):
    return Loop(model, method, optimizer=adamw, planned_steps=20, skip_first_last="last", **options)


def refused(names):
    return pytest.raises(ValueError, match=ERROR.format(names))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("announced", [True, False])
def test_an_error_before_the_first_step_of_a_plain_loop(method, announced):
    loop = started(Net(a="read", b="read"), method)
    before = loop.weights()
    loop.backward()
    with refused("'a', 'b'"):
        if announced:
            loop.sparsifier.before_step(loop.optimizer)
        loop.optimizer.step()
    assert loop.sparsifier.clock == 0
    assert not loop.optimizer.state
    loop.sparsifier.detach()
    assert same(loop.weights(), before)
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())


@pytest.mark.parametrize("method", ["sr-ste", "bame"])
@pytest.mark.parametrize("ways", [*itertools.product(["call", "forward", "unused"], repeat=2)])
def test_what_is_called_or_not_used_is_no_error(method, ways):
    """`0 * weight.sum()` is how DistributedDataParallel is told of unused layers."""
    loop = started(Net(a=ways[0], b=ways[1]), method)
    unused = [name for name, way in zip("ab", ways, strict=True) if way == "unused"]
    loop.train([0])
    assert loop.sparsifier.training.unseen() == unused
    loop.backward()
    (0.0 * sum(p.sum() for p in loop.model.parameters())).backward()
    loop.step()
    loop.train([1])
    weights = {name: getattr(loop.model, name).weight for name in "abc"}
    hooked = [name for name, weight in weights.items() if weight._post_accumulate_grad_hooks]
    assert hooked == unused, "only what may still be read is watched"


@pytest.mark.parametrize("later", ["read", "call"])
def test_a_layer_that_is_first_used_later_is_looked_at_then(later):
    loop = started(Net(a="unused"))
    loop.train(range(3))
    loop.model.ways["a"] = later
    if later == "read":
        with refused("'a'"):
            loop.train([3])
    else:
        loop.train([3])
    assert loop.layers["a"].step == 3 + (later == "call")


def test_one_warning_where_it_is_allowed():
    loop = started(Net(a="read"), direct_reads="warn")
    with pytest.warns(UserWarning, match=ERROR.format("'a'")):
        loop.train([0])
    loop.train([1, 2])  # a second warning would be an error
    assert loop.sparsifier.training.unseen() == []
    assert loop.layers["a"].step == 3


def test_the_setting_is_checked():
    with pytest.raises(ValueError, match="direct_reads='allow' is unknown: use 'error' or 'warn'"):
        SparsityConfig(direct_reads="allow")


def test_accumulated_gradients_and_a_frozen_layer():
    model = Net(a="read")
    model.a.requires_grad_(False)
    loop = started(model, include=["a", "b"])
    for number in range(2):
        for _ in range(2):
            loop.backward()
            loop.sparsifier.step()
        loop.train([number])
    model.a.requires_grad_(True)
    loop.train([2])  # its gradients are watched from the next step on
    with refused("'a'"):
        loop.train([3])


def test_a_gradient_that_somebody_else_assigns_is_no_read():
    """As DistributedDataParallel does for a layer that another process alone used."""
    loop = started(Net(a="unused"))
    for number in range(2):
        loop.backward(number)
        loop.model.a.weight.grad = torch.randn(16, 16)
        loop.step()
    assert loop.layers["a"].step == 2


@pytest.mark.parametrize("way", ["read", "call"])
def test_two_optimizers_take_turns(way):
    """As in a GAN: each layer is looked at before the step of its own optimizer."""
    model = nn.ModuleDict({"first": Net(), "second": Net(a=way)})
    loop = Loop(model, "bi-mask", optimizer=lambda _: adamw(model["first"].parameters()))
    other = adamw(model["second"].parameters())
    loop.sparsifier.register(other)

    def step(part, optimizer):
        optimizer.zero_grad()
        model[part](loop.batch()).square().mean().backward()
        loop.sparsifier.before_step(optimizer)
        optimizer.step()
        loop.sparsifier.step()

    for _ in range(2):
        step("first", loop.optimizer)
        step("first", loop.optimizer)
        if way == "read":
            with refused("'second.a'"):
                step("second", other)
            return
        step("second", other)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_layer_tells_that_it_was_called(kind):
    module, x = make(kind)
    loop = Loop(module, shape=x.shape)
    loop.backward()
    loop.sparsifier.before_step(loop.optimizer)
    assert all(layer.progress.trained_by_layer for layer in loop.layers.values())


@pytest.mark.parametrize("how", ["module", "function", "whole"])
@pytest.mark.parametrize("way", ["call", "read"])
def test_calls_in_compiled_code_are_accepted(how, way):
    torch._dynamo.reset()
    model = Net(a=way)
    loop = started(model)
    if how == "module":
        model.b.compile(backend="aot_eager")
    elif how == "function":
        layer = model.b
        call = torch.compile(lambda x: layer(x.unsqueeze(-1)), backend="aot_eager")
        model.use = lambda way, part, x: (
            call(x).flatten(1).relu() if part is layer else Net.use(model, way, part, x)
        )
    else:
        loop.model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.train(range(2))
    torch._dynamo.reset()
    told = [str(each.message) for each in caught if "were not called" in str(each.message)]
    # Compiled modules are known. A layer that a compiled function calls is told, as one that is read: which of the two
    # it is, cannot be seen, so it is no error. Where nothing is seen, nothing is told.
    assert bool(told) == {"module": way == "read", "function": True, "whole": False}[how]
    assert all(DOUBT in message for message in told)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_second_training_with_a_compiled_function_is_not_refused():
    """Its graph is there already, so that nothing is compiled, and the layer is called all the same."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    block = torch.compile(lambda x: model[1](x).relu(), backend="aot_eager")
    model.forward = lambda x: block(model[0](x))
    for _ in range(2):
        loop = Loop(model, optimizer=adamw)
        with pytest.warns(UserWarning, match=DOUBT):
            loop.train([0])
        loop.end()


def test_a_second_attach_looks_again():
    loop = started(Net(), "ste")
    loop.train(range(2))
    loop.end()
    loop.model.ways["c"] = "read"
    loop.sparsifier.attach()
    loop.sparsifier.register(loop.optimizer)
    with refused("'c'"):
        loop.train([2])


class Fitted(pl.LightningModule):
    def __init__(self, **ways):
        super().__init__()
        self.net = Net(**ways)

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        x, y = torch.randn(48, 16), torch.randint(0, 4, (48,))
        return DataLoader(TensorDataset(x, y), 8)

    def configure_optimizers(self):
        return adamw(self.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_ends_before_its_first_step(tmp_path, accumulate):
    def fit(**options):
        trainer = make_trainer(
            tmp_path,
            [NMSparsityCallback("2:4", "bi-mask", show_tables=False, **options)],
            max_epochs=1,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(model)
        return trainer

    model = Fitted(a="read")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=ERROR.format("'net.a'")):
        fit()
    assert not any(isinstance(module, Adapter) for module in model.modules())
    assert same(list(model.parameters()), before)
    fit(exclude="net.a")  # the way out that the message names
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(direct_reads="warn")
    assert sum("not called: 'net.a'" in str(each.message) for each in caught) == 1


def raised(wrap, ways):
    """The beginning of the error in the first step of this process, or which weights had a gradient in the second."""
    torch.manual_seed(0)
    model = Net(**ways)
    wrapped = wrap(model)
    loop = started(model)
    for number in range(2):
        loop.optimizer.zero_grad()
        wrapped(loop.batch(number)).square().mean().backward()
        gradients = {name: getattr(model, name).weight.grad for name in "abc"}
        try:
            loop.step()
        except ValueError as error:
            return str(error).partition(".")[0]
    return f"no error, gradients of {[name for name in gradients if gradients[name] is not None]}"


def in_two_processes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def parallel(model):
        return DistributedDataParallel(model, find_unused_parameters=True)

    def sharded(model):
        fully_shard(model.a, mesh=init_device_mesh("cpu", (2,)))
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    other = {"a": "call", "b": "unused"} if dist.get_rank() else {"a": "unused", "b": "call"}
    return [
        raised(parallel, other),
        raised(parallel, {"b": "read"}),
        raised(sharded, {}),
        raised(sharded, {"b": "unused"}),
        raised(sharded, {"b": "read"}),
    ]


@pytest.mark.slow
def test_in_two_processes_a_layer_that_another_one_used_is_no_error(tmp_path):
    for found in in_processes(2, tmp_path / "run", in_two_processes):
        error = "these masked layers have a gradient, but were not called: 'b'"
        everything, without_b = (f"no error, gradients of {list(names)}" for names in ("abc", "ac"))
        assert found == [everything, error, everything, without_b, error]
