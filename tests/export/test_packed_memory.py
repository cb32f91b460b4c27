"""The resident memory of a process that holds a model, dense or packed."""

import subprocess
import sys

import pytest
from torch import nn

from lightning_nm import pack, save_packed
from lightning_nm.export.packed_file import write_safetensors
from lightning_nm.functional import nm_prune

WIDTH, LAYERS = (
    1536,
    48,
)  # 453 MB dense: next to it the memory of code that is used first here, about 20 MB, is small

CHILD = f"""
import sys, torch
from torch import nn
import lightning_nm
from lightning_nm.export.packed_file import SafetensorsFile

def memory(name):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

def new():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))

torch.set_num_threads(1)
x = torch.randn(4, {WIDTH})
with torch.no_grad():
    small = nn.Linear(64, 64).apply(lambda m: m.weight.zero_())
    lightning_nm.pack(small, kernels="sparse")(x[:, :64])
    nn.Linear({WIDTH}, 16)(x)
    before = memory("VmRSS")
    for kernels in ("reference", "sparse"):
        model = lightning_nm.load_packed(new(), sys.argv[2], kernels=kernels)
        model(x)
        print(memory("VmRSS") - before, memory("VmHWM") - before)
    file, model = SafetensorsFile(sys.argv[1]), new()
    model.load_state_dict({{name: file.read_stored(name) for name in file.entries}}, assign=True)
    model(x)
    print(memory("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory(tmp_path):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        layer.weight.data = nm_prune(layer.weight.data, "1:16")
    state = model.state_dict()
    write_safetensors(tmp_path / "dense", state, {})
    save_packed(pack(model), tmp_path / "packed")
    dense = sum(value.nbytes for value in state.values())
    words = [sys.executable, "-c", CHILD, str(tmp_path / "dense"), str(tmp_path / "packed")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    *packed, (by_dense,) = [[int(word) for word in line.split()] for line in said.splitlines()]
    assert by_dense > 0.9 * dense
    for now, most in packed:
        # The packed weights are 0.08 of the dense ones.
        assert now < 0.25 * dense, said
        assert most < 0.4 * dense, said
