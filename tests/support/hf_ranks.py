"""What the processes of tests/integrations/test_hf_processes.py run."""

from transformers import TrainerCallback

from lightning_nm import MVUE
from lightning_nm.integrations import NMTrainerCallback
from tests.support.hf_models import llama, new, trainer

NAME = "model.layers.0.self_attn.q_proj"


def trained(folder, resumed):
    """The weights of a training by all ranks."""
    model = new(llama)
    callback = NMTrainerCallback("2:4", "sr-ste", MVUE(), show_tables=False, resume_from=resumed)
    run = trainer(model, folder, [callback], save_strategy="steps", save_steps=1, max_steps=3)
    assert run.args.world_size == 2
    run.train(resume_from_checkpoint=resumed)
    return {name: value.clone() for name, value in model.state_dict().items()}


class Tamper(TrainerCallback):
    """Moves a mask in the second process."""

    def __init__(self, callback):
        self.callback = callback

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1:
            layer = self.callback.sparsifier.layers[NAME]
            layer.set_masks(layer.forward_mask.flip(1))


def differing_masks(folder):
    """The error that the training ends with."""
    callback = NMTrainerCallback("2:4", "sr-ste", show_tables=False)
    try:
        trainer(new(llama), folder, [callback, Tamper(callback)]).train()
    except RuntimeError as error:
        return str(error)
    return ""
