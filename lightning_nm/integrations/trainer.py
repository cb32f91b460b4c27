"""NMTrainerCallback: N:M sparse training with the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import Self

from lightning_nm.callbacks.fit_checks import warn_after_first_batch, warn_at_start
from lightning_nm.callbacks.tables import print_layers
from lightning_nm.config import SparsityConfig, chosen_config
from lightning_nm.estimators import GradientEstimator
from lightning_nm.export.atomic_write import replacing
from lightning_nm.export.sources import STATE_FILE, model_file, read_checkpoint, read_file
from lightning_nm.methods import Method
from lightning_nm.nn.weight import is_sharded
from lightning_nm.pattern import PatternLike
from lightning_nm.short_names import EstimatorName, MethodName
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.checkpoint import check_schema
from lightning_nm.training.optimizers import unwrapped
from lightning_nm.training.ranks import compare_ranks
from lightning_nm.training.statistics import violations_of

_UNSUPPORTED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Accelerate's distributed types whose processes share a weight or step without a torch optimizer."""

_MARK = "_nm_trainer_callback"

_OTHER_FOLDER = (
    "if the training resumes from another folder, name it: NMTrainerCallback(resume_from=...)"
)


class _Mark:
    """Tells, as an attribute of a model, which callback masks it; a copy of the model has none."""

    def __init__(self, callback: NMTrainerCallback | None = None) -> None:
        self.callback = callback

    def __reduce__(self) -> Any:
        return _Mark, ()


class NMTrainerCallback(TrainerCallback):
    """Trains the weights of a model N:M sparse in a ``transformers.Trainer``.

    Masks are installed when training begins and are updated after each optimizer step. While they are installed,
    ``state_dict()`` of the model returns the sparse weights, and so every ``model.safetensors`` holds them. What
    training needs beyond that is in the file ``nm_sparsifier.pt`` of each checkpoint folder:
    ``trainer.train(resume_from_checkpoint=...)`` continues exactly, and refuses a folder without it. After training the
    parameters are the sparse weights and the modules are ordinary ones. A second ``train()`` starts with new masks.

    Statistics such as ``nm/density`` are added to every log of the training loss, and so to ``state.log_history``. Of
    the other callbacks, those after this one get them, too: list a logger such as ``TensorBoardCallback`` behind it.

    The Trainer clips gradients before it calls any callback, so methods change them after clipping: SR-STE's decay is
    not clipped, and is not in ``grad_norm``.

    The Trainer tells callbacks nothing of exceptions. After one, the model computes and saves as before, but keeps its
    masks until the next ``train()`` or :meth:`finish`, or leaves them at once within ``with callback:``.

    Args:
        pattern: The N:M pattern.
        method: A short name (``"bi-mask"``) or a :class:`~lightning_nm.Method`. Fractions of the training refer to the
            Trainer's ``state.max_steps``.
        grad_estimator: A short name (``"mvue"``) or a :class:`~lightning_nm.GradientEstimator`; ``None`` keeps dY.
        config: All settings as one object, instead of the other ones.
        show_tables: Print the table of layers before training.
        log_layers: Log every statistic per layer, too, as ``nm/<statistic>/<layer>``.
        resume_from: The checkpoint folder that a training resumes from. By default ``args.resume_from_checkpoint`` if
            that is a folder, else ``checkpoint-<step>`` in ``args.output_dir``.
        options: The other settings of :class:`~lightning_nm.SparsityConfig`, by name.

    Raises:
        ValueError: For a bad argument, at once. When training begins, and before the model is changed: for layers that
            cannot be masked, a second callback, a checkpoint without its state or of another sparse model,
            ``nn.DataParallel``, FSDP, DeepSpeed, and methods that own parameters.

    Example::

        >>> from transformers import Trainer
        >>> callback = NMTrainerCallback("2:4", "sr-ste", exclude="*lm_head*")
        >>> # Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    """

    def __init__(
        self,
        pattern: PatternLike = "2:4",
        method: MethodName | Method = "bame",
        grad_estimator: EstimatorName | GradientEstimator | None = None,
        *,
        config: SparsityConfig | None = None,
        show_tables: bool = True,
        log_layers: bool = False,
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        self.config = chosen_config(
            NMTrainerCallback,
            config,
            pattern=pattern,
            method=method,
            grad_estimator=grad_estimator,
            **options,
        )
        self.show_tables = show_tables
        self.log_layers = log_layers
        self.resume_from = resume_from
        self.sparsifier: NMSparsifier | None = None
        """The sparsifier of the current training; ``None`` before and after it."""
        self._state: TrainerState | None = None  # that of the current training
        # Whether weights were trained under these masks, now or before a resume.
        self._trained = False
        self._first_batch = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.finish()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Install the masks, new or as saved."""
        _check_setting(args, model, optimizer)
        folder = saved = None
        # The Trainer has loaded its own state by now: a training that begins is at step 0.
        if state.global_step:
            # The folder that the training resumes from, which the Trainer does not tell.
            given = self.resume_from
            if given is None:
                given = args.resume_from_checkpoint
                if not given or not Path(given).is_dir():
                    given = _saved_folder(args, state)
            folder = Path(given)
            saved = _read_state(folder, state.global_step)
        self._release(model, state, folder)
        if folder is not None and any(parameter.dim() == 3 for parameter in model.parameters()):
            _load(model, folder)  # weights of experts, which the Trainer does not load
        sparsifier = NMSparsifier(
            model,
            config=self.config,
            planned_steps=state.max_steps,
            data_rank=args.process_index,
            managed=True,
        )
        # This changes the model: an error below has to take the masks off again.
        sparsifier.attach(saved, [optimizer])
        try:
            for layer in sparsifier.layers.values():
                if layer.parameters:
                    # The Trainer restores the optimizer before a callback can add them to it.
                    raise ValueError(
                        f"{type(layer.spec.method).__name__} owns parameters at layer '{layer.name}', whose optimizer "
                        "state a transformers Trainer cannot resume: use another method"
                    )
            if saved is not None:
                try:
                    sparsifier.load_state_dict(saved)
                except ValueError as error:
                    raise ValueError(
                        f"cannot resume with the state in '{folder}': {error}"
                    ) from error
            sparsifier.register(optimizer)
            # Now, because the Trainer has restored the optimizer before this event.
            sparsifier.training.check_optimizer_states()
        except BaseException:
            sparsifier.detach()
            raise
        self.sparsifier, self._state = sparsifier, state
        self._trained, self._first_batch = saved is not None, True
        vars(model)[_MARK] = _Mark(self)
        warn_at_start(sparsifier, continues=saved is not None)
        if self.show_tables and state.is_world_process_zero:
            print_layers(sparsifier)

    def _release(self, model: nn.Module, state: TrainerState, folder: Path | None) -> None:
        """Remove masks that a training left when an exception ended it; refuse a second callback."""
        other = vars(model).get(_MARK, _Mark()).callback
        if other is None or other.sparsifier is None:
            return
        if other is not self and other._state is state:
            other.finish()
            raise ValueError("this Trainer has two NMTrainerCallbacks: use one with `rules`")
        other.finish()
        if folder is not None:  # the Trainer loaded its weights under those masks
            _load(model, folder)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Compare the masks of all processes before the first backward pass after an update."""
        if self.sparsifier is not None:
            compare_ranks(self.sparsifier.selection.layers)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Let the methods change the complete gradients, which are clipped already."""
        if self.sparsifier is None:
            return
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            with suppress(RuntimeError):  # clipping has unscaled them
                scaler.unscale_(unwrapped(optimizer))
        try:
            self.sparsifier.before_step(optimizer)
        except ValueError:
            # A mistake that shows in the first batch: the Trainer would leave the masks in the model.
            if not self._trained:
                self.finish()
            raise

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Update the masks, while the gradients are still there."""
        # The optimizer has stepped; the Trainer zeroes the gradients after this event.
        self._end_batch()
        # This step is not counted yet. Steps that a gradient scaler skips are, and the sparsifier's plan is not at its
        # end then.
        if self.sparsifier is not None and state.global_step + 1 >= state.max_steps:
            self.sparsifier.finish()

    def _end_batch(self, *_: Any, **__: Any) -> None:
        """Update the masks if the optimizer stepped, and draw new random numbers for the next batch."""
        if self.sparsifier is None:
            return
        if self._first_batch:
            warn_after_first_batch(self.sparsifier)
            self._first_batch = False
        self._trained |= self.sparsifier.step()

    on_substep_end: Any = _end_batch  # of a batch that only accumulates gradients

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the statistics to a log of the training loss."""
        logs = logs or {}
        if self.sparsifier is None or "loss" not in logs or not state.is_world_process_zero:
            return
        scalars = {f"nm/{name}": value for name, value in self.sparsifier.stats().items()}
        for layer, values in self.sparsifier.layer_stats().items() if self.log_layers else ():
            scalars |= {f"nm/{name}/{layer}": value for name, value in values.items()}
        logs.update(scalars)
        # The history has a copy of `logs` already, which the Trainer made before this event.
        state.log_history[-1].update(scalars)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the state into the checkpoint folder, in the process that writes the model."""
        folder = _saved_folder(args, state)
        if self.sparsifier is not None and args.should_save and folder.is_dir():
            saved = {**self.sparsifier.state_dict(), "global_step": state.global_step}
            with replacing(folder / STATE_FILE) as new:
                torch.save(saved, new)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remove the masks; the parameters become the sparse weights, of the best model if the Trainer loaded it."""
        sparsifier = self.sparsifier
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        self.finish()
        if sparsifier is None:
            return
        if best:  # the Trainer loaded it under the masks of the last step
            _load(sparsifier.model, Path(best))
        # Layers whose method masks the forward weight at other times.
        dense = [
            layer.name
            for layer in sparsifier.layers.values()
            if violations_of(layer, layer.param.detach())
        ]
        if dense:
            which = f"'{best}'" if best else f"step {state.global_step}"
            rank_zero_warn(
                f"the weights of {len(dense)} masked layers, such as '{dense[0]}', are not N:M sparse: they are those "
                f"of {which}, in a dense phase"
            )

    def finish(self) -> None:
        """Give the model ordinary modules that hold the sparse weights; does nothing if no training has begun.

        The end of training calls it. Weights that were not trained yet stay dense.
        """
        # Forgotten first: a second call does nothing, also after an error in this one.
        sparsifier, self.sparsifier, self._state = self.sparsifier, None, None
        if sparsifier is not None:
            vars(sparsifier.model).pop(_MARK, None)
            if self._trained:
                sparsifier.bake()
            sparsifier.detach()


def _check_setting(args: TrainingArguments, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse settings in which masks cannot be installed, or their state not be saved, by a ``ValueError``."""
    if args.n_gpu > 1:
        raise ValueError(
            f"with {args.n_gpu} GPUs in one process the Trainer uses nn.DataParallel: start one process per GPU with "
            "torchrun or `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one"
        )
    kind = getattr(getattr(optimizer, "accelerator_state", None), "distributed_type", "NO")
    name = str(getattr(kind, "value", kind))
    if name in _UNSUPPORTED:
        raise ValueError(
            f"NMTrainerCallback does not work under {name}: use DDP, or a Lightning Trainer for FSDP2"
        )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"NMTrainerCallback does not save the masks of sharded weights such as '{name}': use DDP"
            )


def _saved_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint folder of the present step; it may not exist."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    # A search for hyperparameters saves each trial in a folder of its own, output_dir/run-<number> by default.
    trials = folder.parent.glob(f"*/{folder.name}") if state.is_hyper_param_search else ()
    found = [each for each in (folder, *trials) if each.is_dir()]
    # Several trials reach this step: the last one that was saved is the present one.
    return max(found, key=lambda each: each.stat().st_mtime, default=folder)


def _read_state(folder: Path, global_step: int) -> dict[str, Any]:
    """Read the state of a checkpoint folder.

    Raises:
        ValueError: If the folder holds none, or one that is damaged, of another schema or of another step.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"there is no '{path}', which holds the masks and the weights of pruned entries: {_OTHER_FOLDER}; if it "
            "was saved without NMTrainerCallback, to train sparse from its weights, load them into the model and train "
            "without resume_from_checkpoint"
        )
    state: dict[str, Any] = read_file(path)
    check_schema(state)
    if state["global_step"] != global_step:
        raise ValueError(
            f"'{path}' was saved at step {state['global_step']}, but the training resumes at step {global_step}: "
            f"{_OTHER_FOLDER}"
        )
    return state


def _load(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint folder; those of adapters are loaded already.

    transformers saves the weights of experts under other names, one by one. The Trainer does not load those.
    """
    if model_file(folder) is None:
        return
    weights = read_checkpoint(folder).weights
    needed = dict(model.named_parameters()).keys()
    if isinstance(model, PreTrainedModel) and needed - weights.keys():
        weights = type(model).from_pretrained(folder, dtype="auto").state_dict()
    missing = [name for name in needed if name not in weights]
    if missing:
        raise ValueError(f"'{folder}' holds no weights '{missing[0]}' ({len(missing)} are missing)")
    # Buffers that are not saved, and second names of tied weights, may be missing: every parameter is there.
    model.load_state_dict(weights, strict=False)
