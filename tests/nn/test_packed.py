"""Packed layers compute what the dense ones do, hold less, and go through compile, export, copies and pickles."""

import io
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


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()


def close(found, expected):
    limit = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[expected.dtype]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert float((found - expected).detach().double().norm()) <= limit * float(
        expected.detach().double().norm()
    )


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith("experts")]
)  # those stay dense
def test_every_kind(kind, dtype):
    for pattern in ("2:4", "1:8"):
        module, x = make(kind, dtype)
        prune(module, pattern)
        expected, state = module(x).detach(), clones(module)
        by_unpacking = pack(copied(module), kernels="reference")
        by_kernels = pack(module, kernels="sparse")
        if (
            "attention" not in kind and "encoder" not in kind
        ):  # torch's own attention adds in another order
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
    pattern = NMPattern.parse(
        data.draw(st.sampled_from(["2:4", "1:4", "1:16", "3:8", "1:32", "1:3"]))
    )
    rows, depth = data.draw(st.integers(1, 70)), pattern.m * data.draw(st.integers(1, 20))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    matrix = nm_prune(torch.randn(rows, depth, generator=generator), pattern).to(dtype)
    special = torch.tensor([1.0, -0.0, 0.0, float("inf"), 1e-42])[
        torch.randint(5, matrix.shape, generator=generator)
    ]
    matrix = torch.where(matrix != 0, matrix * special.to(dtype).nan_to_num(1), 0)
    with at_level(data.draw(st.sampled_from(LEVELS))), pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_nm.packed.kernel_choice.LARGEST", 99)
        patch.setattr("lightning_nm.kernels.cpu.kernels._CHUNK", 512)
        kernel_choice.registry_of.cache_clear()
        operand = lay_out(matrix, pattern, convolution=data.draw(st.booleans()))
        assert operand is not None
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        dense = dense_matrix(operand.tensors, *matrix.shape, dtype)
        assert torch.equal(dense.view(integers), matrix.view(integers))
        size = sum(tensor.nbytes for tensor in operand.tensors)
    kernel_choice.registry_of.cache_clear()
    assert size <= 8 * matrix.numel() + 4 * rows + 4 or operand.kernel == "cpu-permute"


@needs_library
def test_a_projection_by_parts_is_on_the_kernel():
    module, x = make("cross-attention", torch.float32)
    prune(module, "1:16")
    expected = module(x)
    module = pack(module, kernels="sparse")
    operand = module.mha.in_proj_weight.operand
    close(module(x), expected)
    assert len(operand._parts) == 3
    storage = operand.tensors[0].untyped_storage().data_ptr()
    assert all(
        part.tensors[0].untyped_storage().data_ptr() == storage for part in operand._parts.values()
    )
    assert operand.part((8, 32)) is None


def test_memory_is_that_of_the_packed_weights():
    # A block of 1:16 is one register of AVX-512, and two of AVX2, of which one is empty.
    has_8_lanes = not library.unavailable() and library.load().nm_lanes(library.level()) == 8
    most_of_1_16 = 0.16 if has_8_lanes else 0.10
    for pattern, dtype, most in (
        ("2:4", torch.float32, 0.66),
        ("1:16", torch.float32, most_of_1_16),
    ):
        linear = prune(nn.Linear(256, 256, bias=False).to(dtype), pattern)
        dense = held(linear)
        assert held(pack(linear, kernels="sparse")) <= most * dense
    for pattern, most in (("2:4", 0.57), ("1:4", 0.30), ("1:16", 0.10)):
        linear = prune(nn.Linear(256, 256, bias=False).bfloat16(), pattern)
        dense = held(linear)
        assert held(pack(linear, kernels="reference")) <= most * dense


def test_what_has_no_kernel_is_unpacked():
    x = torch.randn(4, 64)
    linear = prune(nn.Linear(64, 64), "1:16")
    model = pack(copied(linear), kernels="sparse")
    assert model(torch.randn(0, 64)).shape == (0, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), linear(x))
    half, packed = copied(linear).half(), copied(model).half()
    assert packed.weight.dtype == torch.float16
    assert packed.weight.operand is None
    assert torch.equal(packed(x.half()), half(x.half()))
    assert torch.equal(packed.float().weight.unpack(), half.float().weight)
    x.requires_grad_()
    model(x).sum().backward()
    assert torch.allclose(x.grad, linear.weight.sum(0).expand(4, -1), atol=1e-5)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(4, 60))
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(4, 64, dtype=torch.float64))
    nan = prune(nn.Linear(64, 64), "1:16")
    nan.weight.data[0, int(nan.weight[0].count_nonzero()) and int(nan.weight[0].nonzero()[0])] = (
        float("nan")
    )
    assert pack(nan, kernels="sparse").weight.operand is None


def test_dtype_and_shape_of_a_packed_weight_are_the_dense_ones():
    weight = pack(prune(nn.Linear(64, 32).bfloat16(), "1:4")).weight
    assert (weight.dtype, weight.shape, weight.dim(), weight.numel()) == (
        torch.bfloat16,
        (32, 64),
        2,
        2048,
    )
    assert weight.device.type == "cpu"
    assert "1:4, plain, (32, 64)" in repr(weight)


def test_training_is_refused():
    model = pack(small())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    model.train()
    with pytest.raises(
        RuntimeError, match=r"'0.weight' is packed and cannot be trained: call model.eval\(\)"
    ):
        model(torch.randn(2, 16, 4, 4))
    with torch.no_grad():
        model(torch.randn(2, 16, 4, 4))
    linear = nn.Sequential(pack(prune(nn.Linear(64, 64), "1:16")), nn.Linear(64, 64))
    assert list(NMSparsifier(linear, skip_first_last=False).attach().layers) == ["1"]
    with pytest.raises(ValueError, match="layer '1' is masked by a sparsifier"):
        pack(linear)


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
    return pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("how", ["pack", "load", "deepcopy", "pickle"])
def test_a_trainer_refuses_to_fit(tmp_path, how):
    """Lightning leaves the layers in evaluation mode, in which they run; torch's own error would come at backward."""
    model = pack(Packable(), kernels="reference")
    if how == "load":
        save_packed(model, tmp_path / "model.safetensors")
        model = load_packed(Packable(), tmp_path / "model.safetensors")
    elif how != "pack":
        model = copied(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert isinstance(model, Packable)
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


def test_packed_layers_are_named_as_such():
    """Where layers are masked, pruned or packed again, they are no layers with a forward of their own."""
    attention, _ = make("attention", torch.float32)
    for model in (small(), prune(attention, "2:4")):
        pack(model, "2:4")
        way = r"packed already, for inference: .* load lightning_nm.unpacked_state_dict\(model\) into a model"
        for use in (
            lambda m: NMSparsifier(m, "2:4").attach(),
            lightning_nm.prune,
            lambda m: pack(m, "2:4"),
        ):
            with pytest.raises(ValueError, match=way) as raised:
                use(model)
            assert "forward of its own" not in str(raised.value)
    model = pack(small())
    with pytest.raises(
        ValueError, match="layer '4' is named by `include` but cannot be masked: packed already"
    ):
        lightning_nm.prune(model, include="4")


def test_what_is_packed_and_what_not():
    model = small()
    own = model[4]
    assert pack(model, exclude="5") is model
    assert list(dict(packed_weights(model))) == ["0.weight", "4.weight"]
    assert model[4] is own
    assert isinstance(own, nn.Linear)
    pack(model, "2:4")
    assert list(dict(packed_weights(model))) == ["0.weight", "4.weight", "5.weight"]
    with pytest.raises(
        ValueError,
        match=r"has no weight to pack: .*'6.weight': 24 of 24 blocks hold more than 1 of 4",
    ):
        pack(model, "1:4")
    with pytest.raises(ValueError, match="kernels='fast' is unknown"):
        pack(model, kernels="fast")

    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    embedding, tied = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
    tied.weight = embedding.weight
    with torch.no_grad():
        tied.weight.copy_(nm_prune(tied.weight, "1:4"))
    own = Own(16, 8)
    own.weight.data.zero_()
    with pytest.raises(
        ValueError,
        match=r"'own': .*test_packed.Own has a forward of its own; .*'tied.weight': its weight is shared",
    ):
        pack(nn.ModuleDict({"own": own, "embedding": embedding, "tied": tied}))
    with torch.device("meta"):
        model = nn.Linear(16, 8)
    with pytest.raises(ValueError, match="it is on the meta device"):
        pack(model)


def test_a_dense_attention_calls_its_packed_projection():
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    attention.out_proj.weight.data = nm_prune(attention.out_proj.weight.data, "1:8")
    x = torch.randn(2, 5, 32)
    expected = attention.eval()(x, x, x)[0]
    close(pack(attention)(x, x, x)[0], expected)
    assert list(dict(packed_weights(attention))) == ["out_proj.weight"]


def test_state_dicts():
    dense = small("1:16")
    model = pack(copied(dense))
    state = model.state_dict()
    assert {"4.weight.values", "4.weight.positions", "4.bias", "6.weight"} <= set(state)
    assert "4.weight" not in state
    other = pack(small("1:16", seed=1))
    other.load_state_dict(state)
    assert_equal_states(unpacked_state_dict(other), dense.state_dict())
    state["4.weight.positions"] = torch.full_like(state["4.weight.positions"], 255)[:-1]
    with pytest.raises(RuntimeError, match=r"'4.weight': .*has positions of"):
        other.load_state_dict(state)
    del state["4.weight.values"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)
    assert_equal_states(unpacked_state_dict(other), dense.state_dict())
    dense.load_state_dict(unpacked_state_dict(other))


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_a_packed_model_on_the_meta_device_is_loaded(kernels):
    dense = small("1:16")
    model = pack(copied(dense), kernels=kernels)
    empty = copied(model).to("meta")
    with (
        pytest.raises(RuntimeError, match=r"'4.weight' is on the meta device: pass assign=True"),
        pytest.warns(
            UserWarning, match="copying from a non-meta parameter"
        ),  # torch's, of the other parameters
    ):
        empty.load_state_dict(model.state_dict())
    for loaded, assign in ((empty, True), (copied(empty).to_empty(device="cpu"), False)):
        loaded.load_state_dict(model.state_dict(), assign=assign)
        x = torch.randn(2, 16, 4, 4)
        assert {tensor.device.type for tensor in (*loaded.parameters(), *loaded.buffers())} == {
            "cpu"
        }
        assert_equal_states(unpacked_state_dict(loaded), dense.state_dict())
        close(loaded(x), dense(x))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float64)]
)
def test_a_state_dict_of_another_dtype_is_converted_or_assigned(ours, theirs, kernels):
    """Weights and biases have one dtype, as after torch's own loading."""
    dense, other = small("1:16", ours), small("1:16", theirs, seed=1)
    model, state = pack(copied(dense), kernels=kernels), pack(copied(other)).state_dict()
    x = torch.randn(2, 16, 4, 4)
    model.load_state_dict(state)
    dense.load_state_dict(other.state_dict())
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    close(model(x.to(ours)), dense(x.to(ours)))
    model.load_state_dict(state, assign=True)
    assert_equal_states(unpacked_state_dict(model), other.state_dict())
    assert model(x.to(theirs)).dtype == theirs


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_a_dtype_that_is_not_packed_is_refused(kernels):
    linear = prune(nn.Linear(64, 64, bias=False), "1:16")
    model, x = pack(copied(linear), kernels=kernels), torch.randn(2, 64)
    with pytest.raises(
        TypeError,
        match=r"'weight' is packed, and cannot be converted to torch\.float8_e4m3fn: it can",
    ):
        model.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"cannot be converted to torch\.int8"):
        model.type(torch.int8)
    assert model.weight.dtype == torch.float32
    close(model(x), linear(x))
    close(model.type(torch.float64)(x.double()), linear.double()(x.double()))


def test_torch_save_and_load():
    model, x, file = pack(small("1:16")), torch.randn(2, 16, 4, 4), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_a_packed_tensor_of_every_layout():
    weight = torch.randn(8, 16, 3)
    for layout, pruned in (
        ("plain", nm_prune(weight, "1:8", 1)),
        ("flat", nm_prune(weight.flatten(1), "1:8").view_as(weight)),
        ("transposed", nm_prune(weight[..., 0], "1:8", 0)),
    ):
        packed = PackedTensor.of(pruned, NMPattern(1, 8), layout)
        assert torch.equal(packed.unpack(), pruned)
        assert packed.nbytes == pruned.numel() // 8 * 4 + pruned.numel() // 8 * 3 // 8
    with pytest.raises(ValueError, match="has no layout 'transposed'"):
        PackedTensor.of(weight, NMPattern(1, 8), "transposed")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.parametrize(
    "kind", ["linear", "conv2d", "conv1d", "hugging-face-conv1d", "cross-attention"]
)
def test_compiled_and_exported(kind, kernels, tmp_path):
    module, x = make(kind, torch.float32)
    model = pack(prune(module, "1:16"), kernels=kernels)
    expected = model(x)
    close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    program = torch.export.export(model, (x,))
    assert not [node for node in program.graph.nodes if "lightning" in str(node.target)]
    torch.export.save(program, tmp_path / "a.pt2")
    close(torch.export.load(tmp_path / "a.pt2").module()(x), expected)


def test_names_are_public():
    for name in ("pack", "load_packed", "save_packed", "unpacked_state_dict"):
        assert name in lightning_nm.__all__
    assert lightning_nm.load_packed is load_packed
    assert lightning_nm.save_packed is save_packed
