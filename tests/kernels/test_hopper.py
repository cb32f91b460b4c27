"""The packed form of Hopper: against what an H200 wrote, in Triton's interpreter, and compiled for an H100."""

import hashlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import simulated
from lightning_nm.functional import nm_mask
from lightning_nm.kernels.gpu import hopper, triton_use
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps, two_four
from tests.support.triton_kernels import assembly, needs_compiler, needs_interpreter

CPU = torch.device("cpu")

# By rows and depth: the beginning of the SHA-256 of what torch._cslt_compress wrote on an H200 (torch 2.11, cuSPARSELt
# 0.8.0), in bfloat16 as in float16, for groups of two nonzeros, and of two, one or none.
WRITTEN = {
    (64, 64): ("15b10c8c3366a147", "0cf2e429cd0d876a"),
    (64, 128): ("9231607c9d9abff2", "2f0e476cad4e5906"),
    (128, 64): ("fb745c112dd462db", "deff0e76e861910f"),
    (128, 128): ("d7c5063d5fdb2623", "bca1f140d45d05b0"),
    (128, 256): ("68ad4bcf10d10690", "1e54a48bfd92fd66"),
    (256, 128): ("d6540428ede774d5", "9becd05414876091"),
    (192, 320): ("c372eb32543adbd8", "3c77556eaaf122bc"),
    (256, 512): ("41ce6078793ffd44", "af6d30a4ba6cea73"),
    (128, 1024): ("cf92cf7d47b013e5", "06e1f63522af5dd0"),
    (512, 128): ("862c6c84e5d99877", "8ec313644e2350a0"),
    (320, 192): ("dd05e14deef309c8", "e6bb6e6aece171bb"),
    (1024, 64): ("c85c4901b8ab8b20", "a704fa81e9bf0986"),
}


def named_places(rows, depth):
    """A matrix whose values name their places, and the same with some nonzeros fewer; as on the H200."""
    generator = torch.Generator().manual_seed(rows * 10000 + depth)
    scores = torch.rand(rows, depth // 4, 4, generator=generator)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept = kept.scatter_(2, scores.topk(2, 2).indices, True).view(rows, depth)
    fewer = kept & (torch.rand(rows, depth, generator=generator) < 0.5)
    names = (torch.arange(rows * depth) % 30000 + 128).to(torch.int16).view(rows, depth)
    return torch.where(kept, names, 0), torch.where(fewer, names, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", WRITTEN, ids=str)
def test_the_bits_that_an_h200_wrote(shape, dtype):
    for matrix, written in zip(named_places(*shape), WRITTEN[shape], strict=True):
        packed = hopper.compress(matrix.view(dtype))
        assert packed.shape == (shape[0], shape[1] * 9 // 16)
        assert packed.dtype == dtype
        numbers = packed.view(torch.int16).flatten().numpy()
        assert hashlib.sha256(numbers.tobytes()).hexdigest().startswith(written)


@needs_interpreter
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**32))
def test_one_pass_is_the_torch_operations(rows, depth, seed):
    """For any bits: NaN, infinities and -0, which is a nonzero."""
    generator = torch.Generator().manual_seed(seed)
    shape = 64 * rows, 64 * depth
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator)
    bits[::7] = -(1 << 15)  # -0
    mask = nm_mask(torch.rand(shape, generator=generator), "2:4")
    mask &= torch.rand(shape, generator=generator) < 0.7
    matrix = torch.where(mask, bits, 0).to(torch.int16).view(torch.bfloat16)
    found = hopper.compress(matrix).view(torch.int16)
    assert torch.equal(found, hopper.compress_reference(matrix).view(torch.int16))


@pytest.mark.slow
@needs_compiler
def test_it_compiles_for_an_h100():
    """Groups are read and values written by vectors, and nothing goes to local memory."""
    kernels = triton_use.kernels("hopper_triton")
    types = {"groups": "*i64", "values": "*i32", "words": "*i16", "groups_of_row": "i32"}
    ptx = assembly(kernels._compress, types, {"TILES": kernels.TILES}, aligned=True)
    assert set(re.findall(r"ld\.global[.\w]*", ptx)) == {"ld.global.v2.b64"}
    assert "st.global.v4.b32" in ptx
    assert not re.findall(r"\b(?:ld|st)\.local", ptx)


class Alike(KernelOnCpu):
    """Packs in software as its library does, and counts how often."""

    def __init__(self, spoil=lambda packed: packed, **arguments):
        super().__init__(**arguments)
        self.passes = 0
        if self.one_pass is None:
            return

        def one_pass(matrix):
            self.passes += 1
            return spoil(simulated.compress(matrix))

        self.one_pass = one_pass


@pytest.fixture
def tile(monkeypatch):
    """Devices that may pack, in tiles of 16: the probe of software finds a multiple of 16."""
    monkeypatch.setattr(hopper, "may_pack", lambda device: True)
    return lambda size=16: monkeypatch.setattr(hopper, "TILE", size)


def one_bit(packed):
    packed = packed.clone()
    packed.view(torch.int16)[-1, -1] ^= 1 << 13
    return packed


def raises(packed):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("spoil", "alike"),
    [
        (lambda packed: packed, True),
        (lambda packed: packed.roll(1, 0), False),
        (lambda packed: packed[:1], False),
        (raises, False),
        (one_bit, False),
    ],
    ids=["equal bits", "other rows", "another size", "an error", "one bit"],
)
def test_equal_bits_replace_the_librarys_packing(tile, spoil, alike):
    tile()
    kernel, matrix = Alike(spoil), two_four(64, 128)
    assert kernel.probe(CPU) == ""
    assert kernel.device_probe.packs_alike(CPU) == alike
    compared = kernel.passes
    assert compared == (6 if alike else compared), "three sizes, two dtypes"
    kernel.ops.calls.clear()
    assert torch.equal(kernel.pack(matrix), simulated.compress(matrix))
    assert kernel.passes == compared + alike
    assert [call[0] for call in kernel.ops.calls] == ([] if alike else ["compress"])


def test_sizes_that_are_not_whole_tiles_are_the_librarys(tile):
    kernel = Alike()
    assert kernel.multiple(CPU) == 16
    assert not kernel.device_probe.packs_alike(CPU)
    assert kernel.passes == 0


def test_a_checked_kernel_packs_by_the_library(tile):
    tile()
    kernel = Alike(check=True)
    assert kernel.probe(CPU) == ""
    with pytest.raises(ValueError, match="prune it by a select"):
        kernel.pack(torch.ones(64, 128, dtype=torch.bfloat16))


def test_hopper_alone(monkeypatch):
    monkeypatch.setattr(triton_use, "runs_on", lambda device: True)
    for capability, expected in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert hopper.may_pack(torch.device("cuda", 0)) == expected
    monkeypatch.setattr(triton_use, "runs_on", lambda device: False)
    assert not hopper.may_pack(torch.device("cuda", 0))


def test_software_of_another_form_is_found_out(tile, monkeypatch):
    """The kernel of this form against a library that has another one."""
    monkeypatch.setattr("lightning_nm.kernels.gpu.probe.RUNGS", ((64, (192, 320, 136)),))
    kernel = KernelOnCpu(TrappingOps())
    assert kernel.multiple(CPU) == 64
    assert not kernel.device_probe.packs_alike(CPU)
