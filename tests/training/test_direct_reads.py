"""A masked weight that other code reads is an error before its first step; a layer that is not used is none."""

import copy
import itertools
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import NMSparsifier, NMSparsityCallback, SparsityConfig
from lightning_nm.nn import Adapter
from tests.support.kinds import KINDS, make
from tests.support.processes import in_processes

ERROR = (
    r"these masked layers have a gradient, but were not called: {}\. Other code reads their weights"
)
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


def started(model, method="sr-ste", make_optimizer=torch.optim.AdamW, **options):
    sparsifier = NMSparsifier(
        model, "2:4", method, planned_steps=20, skip_first_last="last", **options
    )
    sparsifier.attach()
    optimizer = make_optimizer(model.parameters(), 0.01)
    sparsifier.register(optimizer)
    return sparsifier, optimizer


def step(model, sparsifier, optimizer, announced=True, penalty=0.0):
    loss = model(torch.randn(8, 16)).square().mean()
    if penalty is not None:
        loss = loss + penalty * sum(p.sum() for p in model.parameters())
    loss.backward()
    if announced:
        sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("read", [("a",), ("b",), ("a", "b")], ids=",".join)
def test_an_error_before_the_first_step_of_a_plain_loop(method, announced, read):
    model = Net(**dict.fromkeys(read, "read"))
    before = copy.deepcopy(model.state_dict())
    sparsifier, optimizer = started(model, method)
    names = ", ".join(map(repr, read))
    with pytest.raises(ValueError, match=ERROR.format(names)):
        step(model, sparsifier, optimizer, announced)
    assert sparsifier.clock == 0
    assert not optimizer.state
    sparsifier.detach()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ways", [*itertools.product(["call", "forward", "unused"], repeat=2)])
def test_what_is_called_or_not_used_is_no_error(method, ways):
    """`0 * weight.sum()` is how DistributedDataParallel is told of unused layers."""
    model = Net(a=ways[0], b=ways[1])
    sparsifier, optimizer = started(model, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, sparsifier, optimizer, penalty=None)
        assert sparsifier.training.unseen() == [
            name for name in "ab" if model.ways[name] == "unused"
        ]
        for penalty in (0.0, None):
            step(model, sparsifier, optimizer, penalty=penalty)
    unused = [name for name, way in zip("ab", ways, strict=True) if way == "unused"]
    hooked = [name for name in "abc" if getattr(model, name).weight._post_accumulate_grad_hooks]
    assert hooked == unused, "only what may still be read is watched"


@pytest.mark.parametrize("later", ["read", "call"])
def test_a_layer_that_is_first_used_later_is_looked_at_then(later):
    model = Net(a="unused")
    sparsifier, optimizer = started(model)
    for _ in range(3):
        step(model, sparsifier, optimizer)
    model.ways["a"] = later
    if later == "read":
        with pytest.raises(ValueError, match=ERROR.format("'a'")):
            step(model, sparsifier, optimizer)
    else:
        step(model, sparsifier, optimizer)
    assert sparsifier.layers["a"].step == 3 + (later == "call")


def test_one_warning_where_it_is_allowed():
    model = Net(a="read")
    sparsifier, optimizer = started(model, direct_reads="warn")
    with pytest.warns(UserWarning, match=ERROR.format("'a'")):
        step(model, sparsifier, optimizer)
    for _ in range(2):
        step(model, sparsifier, optimizer)  # a second warning would be an error
    assert sparsifier.training.unseen() == []
    assert sparsifier.layers["a"].step == 3


def test_the_setting_is_checked():
    assert SparsityConfig().direct_reads == "error"
    with pytest.raises(ValueError, match="direct_reads='allow' is unknown: use 'error' or 'warn'"):
        SparsityConfig(direct_reads="allow")


def test_accumulated_gradients_and_a_frozen_layer():
    model = Net(a="read")
    model.a.requires_grad_(False)
    sparsifier, optimizer = started(model, include=["a", "b"])
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            sparsifier.step()
        step(model, sparsifier, optimizer)
    model.a.requires_grad_(True)
    step(model, sparsifier, optimizer)  # its gradients are watched from the next step on
    with pytest.raises(ValueError, match=ERROR.format("'a'")):
        step(model, sparsifier, optimizer)


def test_a_gradient_that_somebody_else_assigns_is_no_read():
    """As DistributedDataParallel does for a layer that another process alone used."""
    model = Net(a="unused")
    sparsifier, optimizer = started(model)
    for _ in range(2):
        model(torch.randn(8, 16)).square().mean().backward()
        model.a.weight.grad = torch.randn(16, 16)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
    assert sparsifier.layers["a"].step == 2


@pytest.mark.parametrize("reads", [False, True])
def test_two_optimizers_take_turns(reads):
    """As in a GAN: each layer is looked at before the step of its own optimizer."""
    first, second = Net(), Net(a="read" if reads else "call")
    model = nn.ModuleDict({"first": first, "second": second})
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (first, second)]
    for optimizer in optimizers:
        sparsifier.register(optimizer)
    for turn in range(6):
        which = turn % 3 == 2  # two steps of the first, then one of the second
        part = (first, second)[which]
        if reads and which:
            with pytest.raises(ValueError, match=ERROR.format("'second.a'")):
                step(part, sparsifier, optimizers[which])
            return
        step(part, sparsifier, optimizers[which])


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_layer_tells_that_it_was_called(kind):
    module, x = make(kind)
    sparsifier = NMSparsifier(module, "2:4", "sr-ste", skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    module(x).square().mean().backward()
    sparsifier.before_step(optimizer)
    assert all(layer.progress.trained_by_layer for layer in sparsifier.layers.values())


@pytest.mark.parametrize("how", ["module", "function", "whole"])
@pytest.mark.parametrize("reads", [False, True])
def test_calls_in_compiled_code_are_accepted(how, reads):
    torch._dynamo.reset()
    model = Net(a="read" if reads else "call")
    run = model
    sparsifier, optimizer = started(model)
    if how == "module":
        model.b.compile(backend="aot_eager")
    elif how == "function":
        layer = model.b
        call = torch.compile(lambda x: layer(x.unsqueeze(-1)), backend="aot_eager")
        model.use = lambda way, part, x: (
            call(x).flatten(1).relu() if part is layer else Net.use(model, way, part, x)
        )
    else:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(torch.randn(8, 16)).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
            optimizer.zero_grad()
    told = [str(each.message) for each in caught if "were not called" in str(each.message)]
    torch._dynamo.reset()
    # Compiled modules are known. A layer that a compiled function calls is told, as one that is read: which of the two
    # it is, cannot be seen, so it is no error. Where nothing is seen, nothing is told.
    assert bool(told) == {"module": reads, "function": True, "whole": False}[how]
    assert all("unless compiled functions call them" in message for message in told)


class Fitted(pl.LightningModule):
    def __init__(self, **ways):
        super().__init__()
        self.net = Net(**ways)

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def trainer_of(tmp_path, callback, **options):
    return pl.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    )


def loader():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 16, generator=generator), torch.randint(0, 4, (48,), generator=generator)
    return DataLoader(TensorDataset(x, y), 8)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask"])
def test_a_fit_ends_before_its_first_step(tmp_path, method, accumulate):
    model = Fitted(a="read")
    before = copy.deepcopy(model.state_dict())
    callback = NMSparsityCallback("2:4", method, show_tables=False)
    trainer = trainer_of(tmp_path, callback, accumulate_grad_batches=accumulate)
    with pytest.raises(ValueError, match=ERROR.format("'net.a'")):
        trainer.fit(model, loader(), loader())
    assert trainer.global_step == 0
    assert callback.sparsifier is None
    assert not any(isinstance(module, Adapter) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    # The way out that the message names.
    again = NMSparsityCallback("2:4", method, show_tables=False, exclude="net.a")
    trainer_of(tmp_path, again, accumulate_grad_batches=accumulate).fit(model, loader(), loader())


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_fit_that_allows_it_is_warned_once(tmp_path):
    callback = NMSparsityCallback("2:4", "sr-ste", show_tables=False, direct_reads="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(tmp_path, callback).fit(Fitted(a="read"), loader())
    told = [str(each.message) for each in caught if "not called" in str(each.message)]
    assert len(told) == 1
    assert "'net.a'" in told[0]


def raised(wrap, ways):
    """The beginning of the error in the first step of this process, or which weights had a gradient in the second."""
    torch.manual_seed(0)
    model = Net(**ways)
    wrapped = wrap(model)
    sparsifier, optimizer = started(model)
    for _ in range(2):
        wrapped(torch.randn(8, 16)).square().mean().backward()
        gradients = {name: getattr(model, name).weight.grad for name in "abc"}
        try:
            sparsifier.before_step(optimizer)
        except ValueError as error:
            return str(error).partition(".")[0]
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_second_training_with_a_compiled_function_is_not_refused():
    """Its graph is there already, so that nothing is compiled, and the layer is called all the same."""
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    block = torch.compile(lambda x: model["b"](x).relu(), backend="aot_eager")
    for _ in range(2):
        sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        sparsifier.register(optimizer)
        block(model["a"](torch.randn(8, 16))).square().mean().backward()
        with pytest.warns(UserWarning, match="unless compiled functions call them"):
            sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        sparsifier.bake()
        sparsifier.detach()


def test_a_second_attach_looks_again():
    net = Net()
    sparsifier = NMSparsifier(net, "2:4", "ste", skip_first_last=False)

    def train():
        sparsifier.attach()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        sparsifier.register(optimizer)
        for _ in range(2):
            net(torch.randn(8, 16)).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        sparsifier.bake()
        sparsifier.detach()

    train()
    net.ways["c"] = "read"
    with pytest.raises(ValueError, match=ERROR.format("'c'")):
        train()
