"""Packed layers compute what the dense ones do, hold less, and go through compile, export, copies and pickles."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import lightning_nm
from lightning_nm import (
    NMPattern,
    NMSparsifier,
    load_packed,
    pack,
    save_packed,
    unpacked_state_dict,
)
from lightning_nm.functional import nm_prune
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.kernels import dense_matrix
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.kernel_choice import lay_out
from lightning_nm.packed.module import PackedWeight, packed_weights
from lightning_nm.packed.tensor import PackedTensor
from tests.support.cpu_products import LEVELS, at_level, needs_library
from tests.support.kinds import KINDS, make
from tests.support.packed_models import assert_equal_states, clones, copied, held, prune, small


def close(found, expected):
    limit = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[expected.dtype]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    with torch.no_grad():
        assert (found - expected).double().norm() <= limit * expected.double().norm()


def linear(pattern="1:16", **options):
    return prune(nn.Linear(64, 64, **options), pattern)


def images():
    """An input of :func:`small`."""
    return torch.randn(2, 16, 4, 4)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("experts")])
def test_every_kind(kind, dtype):
    for pattern in ("2:4", "1:8"):
        module, x = make(kind, dtype)
        prune(module, pattern)
        expected, state = module(x).detach(), clones(module)
        by_unpacking = pack(copied(module), kernels="reference")
        by_kernels = pack(module, kernels="sparse")
        if "attention" not in kind and "encoder" not in kind:  # which add in another order
            assert torch.equal(by_unpacking(x), expected)
        for model in (by_unpacking, by_kernels):
            close(model(x), expected)
            close(pickle.loads(pickle.dumps(model))(x), expected)
            assert torch.equal(copied(model)(x), model(x))
            assert_equal_states(unpacked_state_dict(model), state)
            assert any(isinstance(part, PackedWeight) for part in model.modules())


@needs_library
@given(st.data())
def test_layouts_of_kernels_keep_every_bit(data):
    patterns = ["2:4", "1:4", "1:16", "3:8", "1:32", "1:3"]
    pattern = NMPattern.parse(data.draw(st.sampled_from(patterns)))
    rows, depth = data.draw(st.integers(1, 70)), pattern.m * data.draw(st.integers(1, 20))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    matrix = nm_prune(torch.randn(rows, depth, generator=generator), pattern)
    special = torch.tensor([1.0, -0.0, 0.0, float("inf"), 1e-42])
    factors = special[torch.randint(5, matrix.shape, generator=generator)]
    matrix = torch.where(matrix != 0, matrix * factors, 0).to(dtype)
    with at_level(data.draw(st.sampled_from(LEVELS))), pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_nm.packed.kernel_choice.LARGEST", 99)
        patch.setattr("lightning_nm.kernels.cpu.kernels._CHUNK", 512)
        kernel_choice.registry_of.cache_clear()
        operand = lay_out(matrix, pattern, convolution=data.draw(st.booleans()))
        dense = dense_matrix(operand.tensors, *matrix.shape, dtype)
    kernel_choice.registry_of.cache_clear()
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(dense.view(integers), matrix.view(integers))
    size = sum(tensor.nbytes for tensor in operand.tensors)
    assert size <= 8 * matrix.numel() + 4 * rows + 4 or operand.kernel == "cpu-permute"


@pytest.mark.parametrize(
    ("pattern", "dtype", "kernels", "most"),
    [
        ("2:4", torch.float32, "sparse", 0.66),
        ("1:16", torch.float32, "sparse", 0.10),
        ("2:4", torch.bfloat16, "reference", 0.57),
        ("1:4", torch.bfloat16, "reference", 0.30),
        ("1:16", torch.bfloat16, "reference", 0.10),
    ],
)
def test_memory_is_that_of_the_packed_weights(pattern, dtype, kernels, most):
    # A block of 1:16 is one register of AVX-512, and two of AVX2, of which one is empty.
    has_8_lanes = not library.unavailable() and library.load().nm_lanes(library.level()) == 8
    if kernels == "sparse" and pattern == "1:16" and has_8_lanes:
        most = 0.16
    dense = prune(nn.Linear(256, 256, bias=False).to(dtype), pattern)
    size = held(dense)
    model = pack(dense, kernels=kernels)
    assert held(model) <= most * size
    weight = model.weight
    assert (weight.dtype, weight.shape, weight.dim(), weight.numel()) == (
        dtype,
        (256, 256),
        2,
        2**16,
    )
    assert weight.device.type == "cpu"
    assert f"{pattern}, plain, (256, 256)" in repr(weight)


def test_what_has_no_kernel_is_unpacked():
    dense, x = linear(), torch.randn(4, 64)
    model = pack(copied(dense), kernels="sparse")
    assert model(x[:0]).shape == (0, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), dense(x))
    half = copied(model).half()
    assert half.weight.dtype == torch.float16
    assert half.weight.operand is None
    assert torch.equal(half(x.half()), copied(dense).half()(x.half()))
    assert torch.equal(half.float().weight.unpack(), copied(dense).half().float().weight)
    x.requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.weight.sum(0).expand(4, -1))
    for wrong, message in ((x[:, :60], "shape"), (x.double(), "dtype")):
        with pytest.raises(RuntimeError, match=message):
            model(wrong)
    with torch.no_grad():
        dense.weight[0][dense.weight[0] != 0] = torch.nan
    assert pack(dense, kernels="sparse").weight.operand is None


class Packable(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = small()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("square", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer():
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    return pl.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("how", ["load", "pickle"])
def test_a_trainer_refuses_to_fit(tmp_path, how):
    """Lightning leaves the layers in evaluation mode, in which they run; torch's own error would come at backward."""
    model = pack(Packable(), kernels="reference")
    if how == "load":
        save_packed(model, tmp_path / "model.safetensors")
        model = load_packed(Packable(), tmp_path / "model.safetensors")
    else:
        model = pickle.loads(pickle.dumps(model))
    loader = DataLoader(torch.randn(4, 16, 4, 4), batch_size=2)
    expected = r"^'net.0.weight' is packed and cannot be trained: call model.eval\(\)"
    with pytest.raises(RuntimeError, match=expected):
        trainer().fit(model, loader)
    (found,) = trainer().test(model, loader, verbose=False)
    assert found["square"] > 0
    # What is dense can be trained.
    head = model.net[6].requires_grad_()
    before = head.weight.clone()
    trainer().fit(model, loader)
    assert not torch.equal(head.weight, before)


def test_training_is_refused():
    model = pack(small())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    model.train()
    with pytest.raises(RuntimeError, match=r"'0.weight' is packed and cannot be trained: call mod"):
        model(images())
    with torch.no_grad():
        model(images())
    model = nn.Sequential(pack(linear()), nn.Linear(64, 64))
    assert list(NMSparsifier(model, method="bi-mask", skip_first_last=False).attach().layers) == [
        "1"
    ]
    with pytest.raises(ValueError, match="layer '1' is masked by a sparsifier"):
        pack(model)


def test_packed_layers_are_named_as_such():
    """Where layers are masked, pruned or packed again, they are no layers with a forward of their own."""
    attention, _ = make("attention", torch.float32)
    way = r"packed already, for inference: .* load lightning_nm.unpacked_state_dict\(model\) into a model"
    for model in (small(), prune(attention, "2:4")):
        pack(model, "2:4")
        for use in (lambda m: NMSparsifier(m, "2:4", "bi-mask").attach(), lightning_nm.prune, pack):
            with pytest.raises(ValueError, match=way) as raised:
                use(model)
            assert "forward of its own" not in str(raised.value)
    named = "layer '4' is named by `include` but cannot be masked: packed already"
    with pytest.raises(ValueError, match=named):
        lightning_nm.prune(pack(small()), include="4")


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    """A linear layer with a forward of its own, and one that shares its weight with an embedding."""
    model = nn.ModuleDict({"own": Own(16, 8), "embedding": nn.Embedding(8, 16)})
    model["tied"] = nn.Linear(16, 8, bias=False)
    model["tied"].weight = model["embedding"].weight
    with torch.no_grad():
        for name in ("own", "tied"):
            model[name].weight.copy_(nm_prune(model[name].weight, "1:4"))
    return model


def on_meta():
    with torch.device("meta"):
        return nn.Linear(16, 8)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            small,
            {"pattern": "1:4"},
            r"no weight to pack: .*'6.weight': 24 of 24 blocks hold more than 1 of 4",
        ),
        (small, {"kernels": "fast"}, "kernels='fast' is unknown"),
        (
            tied,
            {},
            "'own': .*test_packed.Own has a forward of its own; .*'tied.weight': its weight is",
        ),
        (on_meta, {}, "it is on the meta device"),
    ],
)
def test_what_is_not_packed(make, options, message):
    with pytest.raises(ValueError, match=message):
        pack(make(), **options)


def test_what_is_packed():
    model = small()
    own = model[4]
    assert pack(model, exclude="5") is model
    assert list(dict(packed_weights(model))) == ["0.weight", "4.weight"]
    assert model[4] is own
    assert isinstance(own, nn.Linear)
    pack(model, "2:4")
    assert list(dict(packed_weights(model))) == ["0.weight", "4.weight", "5.weight"]


def test_a_dense_attention_calls_its_packed_projection():
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    attention.out_proj.weight.data = nm_prune(attention.out_proj.weight.data, "1:8")
    x = torch.randn(2, 5, 32)
    expected = attention(x, x, x)[0]
    close(pack(attention)(x, x, x)[0], expected)
    assert list(dict(packed_weights(attention))) == ["out_proj.weight"]


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_state_dicts(kernels):
    """Into another model, or one on the meta device; what does not fit changes nothing."""
    dense, x = small("1:16"), images()
    state = pack(copied(dense), kernels=kernels).state_dict()
    assert {"4.weight.values", "4.weight.positions", "4.bias", "6.weight"} <= set(state)
    assert "4.weight" not in state
    other = pack(small("1:16", seed=1), kernels=kernels)
    meta = copied(other).to("meta")
    with (
        pytest.raises(RuntimeError, match=r"'4.weight' is on the meta device: pass assign=True"),
        pytest.warns(UserWarning, match="copying from a non-meta parameter"),  # torch's
    ):
        meta.load_state_dict(state)
    for model, assign in (
        (other, False),
        (meta, True),
        (copied(meta).to_empty(device="cpu"), False),
    ):
        model.load_state_dict(state, assign=assign)
        assert_equal_states(unpacked_state_dict(model), dense.state_dict())
        close(model(x), dense(x))
    damaged = {
        **state,
        "4.weight.positions": torch.full_like(state["4.weight.positions"], 255)[:-1],
    }
    with pytest.raises(RuntimeError, match=r"'4.weight': .*has positions of"):
        other.load_state_dict(damaged)
    del damaged["4.weight.values"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(damaged)
    assert_equal_states(unpacked_state_dict(other), dense.state_dict())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float64)]
)
def test_a_state_dict_of_another_dtype_is_converted_or_assigned(ours, theirs, kernels):
    """Weights and biases have one dtype, as after torch's own loading."""
    dense, other = small("1:16", ours), small("1:16", theirs, seed=1)
    model, state = pack(copied(dense), kernels=kernels), pack(copied(other)).state_dict()
    model.load_state_dict(state)
    dense.load_state_dict(other.state_dict())
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    x = images()
    close(model(x.to(ours)), dense(x.to(ours)))
    model.load_state_dict(state, assign=True)
    assert_equal_states(unpacked_state_dict(model), other.state_dict())
    assert model(x.to(theirs)).dtype == theirs


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_a_dtype_that_is_not_packed_is_refused(kernels):
    dense, x = linear(bias=False), torch.randn(2, 64)
    model = pack(copied(dense), kernels=kernels)
    for change, dtype in ((model.to, torch.float8_e4m3fn), (model.type, torch.int8)):
        with pytest.raises(
            TypeError, match=rf"'weight' is packed, and cannot be converted to {dtype}"
        ):
            change(dtype)
    assert model.weight.dtype == torch.float32
    close(model(x), dense(x))
    close(model.type(torch.float64)(x.double()), dense.double()(x.double()))


@pytest.mark.parametrize("layout", ["plain", "flat", "transposed"])
def test_a_packed_tensor_of_every_layout(layout):
    weight = torch.randn(8, 16, 3)
    pruned = {
        "plain": nm_prune(weight, "1:8", 1),
        "flat": nm_prune(weight.flatten(1), "1:8").view_as(weight),
        "transposed": nm_prune(weight[..., 0], "1:8", 0),
    }[layout]
    packed = PackedTensor.of(pruned, NMPattern(1, 8), layout)
    assert torch.equal(packed.unpack(), pruned)
    assert packed.nbytes == pruned.numel() // 8 * 4 + pruned.numel() // 8 * 3 // 8
    if layout == "transposed":
        with pytest.raises(ValueError, match="has no layout 'transposed'"):
            PackedTensor.of(weight, NMPattern(1, 8), layout)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.parametrize("kind", ["linear", "conv2d", "hugging-face-conv1d", "cross-attention"])
def test_compiled_and_exported(kind, kernels, tmp_path):
    module, x = make(kind, torch.float32)
    model = pack(prune(module, "1:16"), kernels=kernels)
    expected = model(x)
    close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    program = torch.export.export(model, (x,))
    assert not [node for node in program.graph.nodes if "lightning" in str(node.target)]
    torch.export.save(program, tmp_path / "a.pt2")
    close(torch.export.load(tmp_path / "a.pt2").module()(x), expected)
