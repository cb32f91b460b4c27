"""Weights that several modules hold, such as that of an embedding and of the head that is tied to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_nm.nn.adapters import Adapter, WeightSpec
from lightning_nm.nn.layer.layout import ConvLayout
from lightning_nm.nn.layer.names import layer_name, parameter_key, plain_name
from lightning_nm.nn.layer.sharding import is_sharded


@dataclass(frozen=True)
class Candidate:
    """A weight of a module of a known kind.

    Example:
        >>> from lightning_nm.nn import NMLinear
        >>> Candidate("head", "head", nn.Linear(8, 4), NMLinear, WeightSpec("weight")).weight.shape
        torch.Size([4, 8])
    """

    name: str
    module_name: str
    module: nn.Module
    adapter: type[Adapter]
    spec: WeightSpec

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as the module's attribute."""
        return getattr(self.module, self.spec.parameter)

    def spec_in(self, conv_layout: ConvLayout) -> WeightSpec:
        """:attr:`spec` with the blocks of convolutions in another order."""
        specs = {spec.parameter: spec for spec in self.adapter.specs(self.module, conv_layout)}
        return specs[self.spec.parameter]

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are looked up."""
        return self.adapter.role == "embedding"


@dataclass(frozen=True)
class _Holder:
    """A module that holds a parameter under a name; no candidate if no adapter knows how to mask it there."""

    module_name: str
    parameter: str
    candidate: Candidate | None

    @property
    def names(self) -> tuple[str, str]:
        """The names by which globs find it."""
        return self.module_name, layer_name(self.module_name, self.parameter)

    @property
    def key(self) -> str:
        """The parameter's key in the state dict."""
        return parameter_key(self.module_name, self.parameter)


class Ties:
    """Which modules of a model hold the same weight.

    Embeddings and one layer with a product may be masked together, as one layer, if one of them is named. It has the
    name of the layer with the product, whichever was named.

    Args:
        model: The model.
        candidates: Its weights of known kinds.
        named: Names in ``include``.

    Example:
        >>> from lightning_nm.nn import NMEmbedding, NMLinear
        >>> model = nn.ModuleDict({"tokens": nn.Embedding(4, 8), "head": nn.Linear(8, 4)})
        >>> model["head"].weight = model["tokens"].weight
        >>> tokens = Candidate("tokens", "tokens", model["tokens"], NMEmbedding, WeightSpec("weight"))
        >>> head = Candidate("head", "head", model["head"], NMLinear, WeightSpec("weight"))
        >>> ties = Ties(model, [tokens, head], ["tokens"])
        >>> ties.joins(tokens), ties.joins(head)
        (True, False)
    """

    def __init__(
        self, model: nn.Module, candidates: Sequence[Candidate], named: Collection[str]
    ) -> None:
        known = {(id(each.module), each.spec.parameter): each for each in candidates}
        self._named = set(named)
        # id of a parameter -> every module that holds it, in the model's order
        self._holders: dict[int, list[_Holder]] = {}
        for name, module in model.named_modules():
            for parameter, weight in module._parameters.items():
                if weight is None:
                    continue
                candidate = known.get((id(module), parameter))
                holder = _Holder(plain_name(name), parameter, candidate)
                self._holders.setdefault(id(weight), []).append(holder)

    def _holders_of(self, candidate: Candidate) -> list[_Holder]:
        """Return every module that holds a candidate's weight; none if the weight is not stored."""
        weight = candidate.module._parameters.get(candidate.spec.parameter)
        return self._holders.get(id(weight), [])

    def _others(self, candidate: Candidate) -> list[_Holder]:
        """Return the other modules that hold a candidate's weight."""
        holders = self._holders_of(candidate)
        return [holder for holder in holders if holder.candidate is not candidate]

    def names(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the names by which globs find a candidate: also the others' if one of them is in ``include``."""
        own = (candidate.module_name, candidate.name)
        # Who names one of the modules in `include` means the weight, and so every module that holds it.
        every = [*own]
        for holder in self._others(candidate):
            every += holder.names
        return own if self._named.isdisjoint(every) else tuple(every)

    def is_named(self, candidate: Candidate) -> bool:
        """Whether ``include`` names it, or a module that holds its weight, too."""
        return not self._named.isdisjoint(self.names(candidate))

    def tied(self, candidate: Candidate) -> list[Candidate]:
        """Return the other candidates that are masked with it."""
        if not self.is_named(candidate) or self._fault(candidate):
            return []
        return _candidates_in(self._others(candidate))

    def joins(self, candidate: Candidate) -> bool:
        """Whether it is masked as a part of another candidate: the one with the product, else the first."""
        if not self.tied(candidate):
            return False
        members = _candidates_in(self._holders_of(candidate))
        for member in members:
            if not member.is_embedding:
                return member is not candidate
        # Embeddings alone.
        return members[0] is not candidate

    def why_not(self, candidate: Candidate) -> str:
        """Return why a shared weight is not masked; empty if it may be."""
        others = self._others(candidate)
        fault = self._fault(candidate)
        # Whoever names one of them knows of both; then only a fault counts.
        if not others or self.is_named(candidate):
            return fault
        reason = f"its weight is shared with '{others[0].key}', which would change with it"
        if not fault:
            reason += ": if `include` has the exact name of one, both are masked"
        return reason

    def why_dense(self, candidate: Candidate) -> str:
        """Return why an embedding that is not named stays dense; empty for other candidates."""
        if not candidate.is_embedding or self.is_named(candidate):
            return ""
        others = self._others(candidate)
        shared = f", and shares its weight with '{others[0].key}'" if others else ""
        return f"a lookup, not a product{shared}: it is masked only if `include` has its exact name, without wildcards"

    def _fault(self, candidate: Candidate) -> str:
        """Why a shared weight cannot be masked even if it is named; empty if it can, or is not shared."""
        others = self._others(candidate)
        if not others:
            return ""
        # A module that no adapter knows would go on to read the dense weight.
        for holder in others:
            if holder.candidate is None:
                return f"its weight is shared with '{holder.key}', which cannot be masked"
        members = _candidates_in(self._holders_of(candidate))
        # Any number of embeddings may join a layer with a product, but no second such layer.
        if sum(not member.is_embedding for member in members) > 1:
            return f"its weight is shared with '{others[0].key}', which would change with it"
        # An embedding looks up plain rows of the whole weight.
        if is_sharded(candidate.weight):
            return f"its weight is sharded, and shared with '{others[0].key}'"
        if any(member.spec.layout != "plain" for member in members):
            return f"its weight is shared with '{others[0].key}', along whose rows other blocks lie"
        return ""


def _candidates_in(holders: Sequence[_Holder]) -> list[Candidate]:
    """Return the candidates among the modules that hold a weight."""
    return [holder.candidate for holder in holders if holder.candidate is not None]
