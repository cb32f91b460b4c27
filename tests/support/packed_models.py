"""N:M models for the tests of packed layers and files."""

import copy
import json

import torch
from torch import nn

from lightning_nm.functional import nm_prune
from lightning_nm.packed.module import places_of


def prune(model, pattern):
    """Make the weights of a model N:M that can be packed, where M divides their axis."""
    m = int(pattern.partition(":")[2])
    with torch.no_grad():
        for place in places_of(model)[0].values():
            dim = 0 if place.axes == "transposed" else 1
            if place.weight.shape[dim] % m == 0:
                place.weight.copy_(nm_prune(place.weight, pattern, dim))
    return model.eval()


ARGUMENTS = ((16, 32, 3, 1, 1), (32,), (), (), (512, 64), (64, 32, False), (32, 3))
"""Of the layers of :func:`small`."""


def small(pattern="2:4", dtype=torch.float32, seed=0):
    """A convolution, batch norm and linear layers, the last of which is dense."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
    ]
    model = prune(
        nn.Sequential(*layers, nn.Linear(64, 32, bias=False), nn.Linear(32, 3)).to(dtype), pattern
    )
    model[6].reset_parameters()
    return model


def held(model):
    """Bytes of the parameters and buffers of a model."""
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def copied(model):
    return copy.deepcopy(model)


def clones(model):
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def assert_equal_states(a, b):
    assert set(a) == set(b)
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def header_of(path):
    """The header of a safetensors file, and its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def without_checksums(path):
    """Rewrite a packed file as lightning_nm 0.3 wrote it: its damage is found by the content of tensors alone."""
    header, content = header_of(path)
    del header["__metadata__"]["crc32"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def on_meta(dense):
    """The model of :func:`small` without memory."""
    with torch.device("meta"):
        return nn.Sequential(
            *[type(layer)(*args) for layer, args in zip(dense, ARGUMENTS, strict=True)]
        )


def mutated(rng, content, start):
    """A file with damage: bits, cuts, insertions, or numbers and words of the header replaced."""
    content = bytearray(content)
    kind = rng.randrange(6)
    place = rng.randrange(start if rng.random() < 0.7 else len(content))
    if kind == 0:
        content[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        content[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 3:
        content[:8] = rng.choice(
            [0, 1, start - 9, start - 7, 1 << 20, 1 << 34, (1 << 64) - 1]
        ).to_bytes(8, "little")
    elif kind == 4:
        digits = [i for i in range(8, start) if chr(content[i]).isdigit()]
        content[rng.choice(digits)] = rng.choice(b"0123456789-e.")
    else:
        other = rng.randrange(start)
        length = rng.randrange(1, 40)
        content[place : place + length] = content[other : other + length]
    return bytes(content)
