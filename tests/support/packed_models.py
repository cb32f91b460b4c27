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
            dim = {"transposed": 0, "experts": 2}.get(place.axes, 1)
            if place.weight.shape[dim] % m == 0:
                place.weight.copy_(nm_prune(place.weight, pattern, dim))
    return model.eval()


def small_layers():
    """A convolution, batch norm and linear layers, all dense."""
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.Linear(64, 32, bias=False),
        nn.Linear(32, 3),
    )


def small(pattern="2:4", dtype=torch.float32, seed=0):
    """These layers, all N:M but the last one."""
    torch.manual_seed(seed)
    model = prune(small_layers().to(dtype), pattern)
    model[6].reset_parameters()
    return model


class Tied(nn.Module):
    """A head that shares the weight of an embedding, and a layer between them."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(24, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids)))


class Scaled(nn.Embedding):
    """As of Gemma."""

    def forward(self, input):
        return super().forward(input) * 3


class Embeddings(Tied):
    """Also an embedding of its own, and one with a forward of its own, both with 40 rows."""

    def __init__(self):
        super().__init__()
        self.words, self.scaled = nn.Embedding(40, 32, padding_idx=3), Scaled(40, 32)

    def forward(self, ids):
        return self.head(self.middle(self.words(ids) + self.scaled(ids)) + self.embed(ids % 24))


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


def with_length(text):
    """The header of a safetensors file, after its length."""
    return len(text).to_bytes(8, "little") + text


def edit_header(path, change):
    """Rewrite a packed file after ``change(header, packed)``; `packed` is what the header tells of packed weights."""
    header, content = header_of(path)
    packed = json.loads(header["__metadata__"]["packed"])
    change(header, packed)
    header["__metadata__"]["packed"] = json.dumps(packed)
    path.write_bytes(with_length(json.dumps(header).encode()) + content)


def without_checksums(path):
    """Rewrite a packed file as lightning_nm 0.3 wrote it: its damage is found by the content of tensors alone."""
    edit_header(path, lambda header, packed: header["__metadata__"].pop("crc32"))


def on_meta(make=small_layers):
    """A model without memory."""
    with torch.device("meta"):
        return make()


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
