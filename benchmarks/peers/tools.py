"""The tools, each behind the same four calls: prune a model, follow a step, save, and load into a new model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_nm import NMPattern, NMSparsifier
from lightning_nm import prune as prune_trained


class Tool:
    """One tool, for one model and its optimizer, used as its documentation says.

    Attributes:
        name: Its column in the table.
        module: The module that must be installed.
    """

    name: ClassVar[str]
    module: ClassVar[str] = "torch"

    @classmethod
    def installed(cls) -> bool:
        """Whether it can run here."""
        return importlib.util.find_spec(cls.module) is not None

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Prune the model by magnitude before a training."""
        raise NotImplementedError

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer after a backward pass, and choose masks again where the tool can."""
        optimizer.step()

    def state(self) -> Any:
        """What must be saved besides the model's and the optimizer's state dicts."""
        return None

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Load a training into a new model, before the optimizer's state."""
        raise NotImplementedError

    def calibrate(self, model: nn.Module, batches: list[Tensor]) -> None:
        """Prune a trained model to 2:4 by what calibration data show."""
        raise NotImplementedError(f"{self.name} has no such option")


def weight(module: nn.Module) -> Tensor:
    """The weight that the module's forward multiplies by, pruned entries included."""
    found: Tensor = module.weight  # type: ignore[assignment]
    layer = getattr(module, "nm_layers", {}).get("weight")
    if layer is not None:
        found = layer.forward_weight()
    return found.detach()


class Ours(Tool):
    """This package in a plain loop, with the method whose masks move."""

    name = "lightning_nm"

    def __init__(self, method: str = "sr-ste") -> None:
        self.method: Any = method

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Attach a sparsifier."""
        self.sparsifier = NMSparsifier(model, pattern, self.method, skip_first_last=False).attach()
        self.sparsifier.register(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the gradients, step, update the masks."""
        self.sparsifier.before_step(optimizer)
        optimizer.step()
        self.sparsifier.step()

    def state(self) -> Any:
        """The sparsifier's state."""
        return self.sparsifier.state_dict()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Load the weights, attach, load the state."""
        model.load_state_dict(saved["model"])
        self.apply(model, optimizer, pattern)
        self.sparsifier.load_state_dict(saved["tool"])

    def calibrate(self, model: nn.Module, batches: list[Tensor]) -> None:
        """SparseGPT."""
        prune_trained(model, "2:4", "sparsegpt", batches, skip_first_last=False)


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers that the tools prune."""
    return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


class TorchPrune(Tool):
    """``torch.nn.utils.prune``: it has no N:M pruning, so the fraction of N:M is pruned by magnitude."""

    name = "torch.nn.utils.prune"

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Prune each layer."""
        self.model = model
        for module in layers(model):
            prune.l1_unstructured(module, "weight", 1 - NMPattern.parse(pattern).density)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prune again; what it prunes is added to what is pruned already."""
        optimizer.step()
        for module in layers(self.model):
            prune.l1_unstructured(module, "weight", 1)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Register masks of ones, which the state dict replaces."""
        self.model = model
        for module in layers(model):
            prune.identity(module, "weight")
        model.load_state_dict(saved["model"])


class TorchAO(Tool):
    """``torch.ao.pruning.WeightNormSparsifier``."""

    name = "torch.ao.pruning"

    def prepare(self, model: nn.Module, pattern: str) -> None:
        """Register the parametrizations."""
        n, m = (getattr(NMPattern.parse(pattern), name) for name in "nm")
        sparsifier = torch.ao.pruning.WeightNormSparsifier(1.0, (1, m), m - n)  # type: ignore[attr-defined]
        names = {module: name for name, module in model.named_modules()}
        sparsifier.prepare(
            model, [{"tensor_fqn": f"{names[module]}.weight"} for module in layers(model)]
        )
        self.sparsifier = sparsifier

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Prepare, and choose the masks."""
        self.prepare(model, pattern)
        self.sparsifier.step()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose the masks again."""
        optimizer.step()
        self.sparsifier.step()

    def state(self) -> Any:
        """The masks, which the model's state dict leaves out."""
        return self.sparsifier.state_dict()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Prepare, load the weights without the masks, then the masks."""
        self.prepare(model, pattern)
        model.load_state_dict(saved["model"], strict=False)
        self.sparsifier.load_state_dict(saved["tool"])


class ModelOpt(Tool):
    """NVIDIA's Model Optimizer."""

    name = "modelopt"
    module = "modelopt"

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Sparsify by magnitude."""
        import modelopt.torch.sparsity as mts

        self.model = model
        config = {"verbose": False} | (
            {} if pattern == "2:4" else {"pattern": f"{pattern} sparsity"}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mts.sparsify(model, "sparse_magnitude", config=config)

    def state(self) -> Any:
        """How the model was changed."""
        import modelopt.torch.opt as mto

        return mto.modelopt_state(self.model)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Change the new model in the same way, then load weights and masks."""
        import modelopt.torch.opt as mto

        self.model = model
        mto.restore_from_modelopt_state(model, saved["tool"])
        model.load_state_dict(saved["model"])

    def calibrate(self, model: nn.Module, batches: list[Tensor]) -> None:
        """SparseGPT."""
        import modelopt.torch.sparsity as mts

        config = {"data_loader": batches, "collect_func": lambda batch: batch, "verbose": False}
        mts.sparsify(model, "sparsegpt", config=config)


class PAT(Tool):
    """torchao's pruning-aware training: an optimizer around another, which prunes in its step."""

    name = "torchao PAT"
    module = "torchao"

    def __init__(self, warmup_steps: int = 0) -> None:
        self.warmup_steps = warmup_steps

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> None:
        """Give the weights a group of their own, whose settings PAT reads, and wrap the optimizer."""
        from torchao.prototype.pat.optim import PruneOptimizer

        (group,) = optimizer.param_groups
        weights = [module.weight for module in layers(model)]
        pruned = {id(parameter) for parameter in weights}
        group["params"] = [p for p in group["params"] if id(p) not in pruned]
        n, m = (getattr(NMPattern.parse(pattern), name) for name in "nm")
        kept = {"prox_type": "NMSparseConstraint", "n_nonzero": n}
        blocks = {"group_type": "KElementGrouper", "k": m}
        optimizer.add_param_group({"params": weights, **kept, **blocks})
        self.wrapped = PruneOptimizer(optimizer, warmup_steps=self.warmup_steps)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the latent weights, and prune them again."""
        self.wrapped.step()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pattern: str,
        saved: Mapping[str, Any],
    ) -> None:
        """Load the weights and wrap; the optimizer's own state has the latent weights."""
        model.load_state_dict(saved["model"])
        self.apply(model, optimizer, pattern)


IN_A_LOOP: tuple[type[Tool], ...] = (Ours, TorchPrune, TorchAO, ModelOpt, PAT)
"""The tools that work in any training loop."""
