"""NMSparsifier in a loop with Accelerate."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from lightning_nm import BAME, MVUE, NMSparsifier
from tests.support.hf_models import data, gpt2, new


@pytest.fixture(autouse=True)
def _own_state():
    """Accelerate keeps its settings in the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare(method, estimator, seed=0, **options):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, **options)
    torch.manual_seed(seed)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = torch.utils.data.DataLoader(data(model), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    sparsifier = NMSparsifier(
        accelerator.unwrap_model(model), "2:4", method, estimator, planned_steps=6
    ).attach()
    sparsifier.register(optimizer)
    accelerator.register_for_checkpointing(sparsifier)
    return accelerator, model.train(), optimizer, batches, sparsifier


def train(accelerator, model, optimizer, batches, sparsifier):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                sparsifier.before_step(optimizer)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sparsifier.step()


def result(model, optimizer, sparsifier):
    state = sparsifier.state_dict()
    masks = {
        name: (layer["forward_mask"], layer["latent"], layer["draws"])
        for name, layer in state["layers"].items()
    }
    moments = [
        value for entry in optimizer.state_dict()["state"].values() for value in entry.values()
    ]
    return model.state_dict(), masks, moments


@pytest.mark.parametrize(
    ("method", "estimator", "options"),
    [
        ("sr-ste", MVUE(), {}),
        pytest.param(BAME(every=1), None, {"mixed_precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_a_loaded_state_continues_exactly(tmp_path, method, estimator, options):
    accelerator, model, optimizer, batches, sparsifier = prepare(method, estimator, **options)
    train(accelerator, model, optimizer, batches, sparsifier)
    assert sparsifier.clock == 3
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, batches, sparsifier)
    expected = result(model, optimizer, sparsifier)

    accelerator, model, optimizer, batches, sparsifier = prepare(method, estimator, 7, **options)
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, batches, sparsifier)
    torch.testing.assert_close(result(model, optimizer, sparsifier), expected, rtol=0, atol=0)


def test_the_loop_is_a_plain_one():
    """A loop without Accelerate trains the same weights."""
    accelerator, model, optimizer, batches, sparsifier = prepare("sr-ste", None)
    torch.manual_seed(5)
    train(accelerator, model, optimizer, batches, sparsifier)
    twin = new(gpt2).train()
    plain = NMSparsifier(twin, "2:4", "sr-ste").attach()
    adamw = torch.optim.AdamW(twin.parameters(), 1e-2)
    plain.register(adamw)
    torch.manual_seed(5)
    for number, batch in enumerate(torch.utils.data.DataLoader(data(twin), batch_size=4)):
        (twin(**batch).loss / 2).backward()
        if number % 2:
            plain.before_step(adamw)
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
        plain.step()
    torch.testing.assert_close(twin.state_dict(), dict(model.state_dict()), rtol=0, atol=0)
