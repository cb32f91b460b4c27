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
    """A weight of a module of a known kind."""

    name: str
    module_name: str
    module: nn.Module
    adapter: type[Adapter]
    spec: WeightSpec

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        return getattr(self.module, self.spec.parameter)

    def spec_in(self, conv_layout: ConvLayout) -> WeightSpec:
        """:attr:`spec` with the blocks of convolutions in another order."""
        return next(
            spec
            for spec in self.adapter.specs(self.module, conv_layout)
            if spec.parameter == self.spec.parameter
        )

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are looked up."""
        return self.adapter.role == "embedding"


@dataclass(frozen=True)
class _Holder:
    module_name: str
    parameter: str
    candidate: Candidate | None

    @property
    def names(self) -> tuple[str, str]:
        return self.module_name, layer_name(self.module_name, self.parameter)

    @property
    def key(self) -> str:
        return parameter_key(self.module_name, self.parameter)


class Ties:
    """Which modules of a model hold the same weight.

    Embeddings and one layer with a product may be masked together, as one layer, if one of them is named. It has the
    name of the layer with the product, whichever was named.

    Args:
        model: The model.
        candidates: Its weights of known kinds.
        named: Names in ``include``.
    """

    def __init__(
        self, model: nn.Module, candidates: Sequence[Candidate], named: Collection[str]
    ) -> None:
        known = {(id(c.module), c.spec.parameter): c for c in candidates}
        self._named = set(named)
        self._holders: dict[int, list[_Holder]] = {}
        for name, module in model.named_modules():
            for parameter, weight in module._parameters.items():
                if weight is not None:
                    holder = _Holder(
                        plain_name(name), parameter, known.get((id(module), parameter))
                    )
                    self._holders.setdefault(id(weight), []).append(holder)

    def _group(self, candidate: Candidate) -> list[_Holder]:
        return self._holders.get(id(candidate.module._parameters.get(candidate.spec.parameter)), [])

    def _others(self, candidate: Candidate) -> list[_Holder]:
        return [holder for holder in self._group(candidate) if holder.candidate is not candidate]

    def names(self, candidate: Candidate) -> tuple[str, ...]:
        """The names by which globs find a candidate: also the others' if one of them is in ``include``."""
        own = (candidate.module_name, candidate.name)
        others = tuple(name for holder in self._others(candidate) for name in holder.names)
        return own if self._named.isdisjoint((*own, *others)) else own + others

    def is_named(self, candidate: Candidate) -> bool:
        """Whether ``include`` names it, or a module that holds its weight, too."""
        return not self._named.isdisjoint(self.names(candidate))

    def tied(self, candidate: Candidate) -> list[Candidate]:
        """The other candidates that are masked with it."""
        if not self.is_named(candidate) or self._fault(candidate):
            return []
        return [
            holder.candidate for holder in self._others(candidate) if holder.candidate is not None
        ]

    def joins(self, candidate: Candidate) -> bool:
        """Whether it is masked as a part of another candidate: the one with the product, else the first."""
        tied = self.tied(candidate)
        group = [holder.candidate for holder in self._group(candidate)]
        return bool(tied) and candidate is not next(
            (c for c in group if c and not c.is_embedding), group[0]
        )

    def why_not(self, candidate: Candidate) -> str:
        """Why a shared weight is not masked; empty if it may be."""
        others, fault = self._others(candidate), self._fault(candidate)
        if not others or self.is_named(candidate):
            return fault
        way = "" if fault else ": if `include` has the exact name of one, both are masked"
        return f"its weight is shared with '{others[0].key}', which would change with it{way}"

    def why_dense(self, candidate: Candidate) -> str:
        """Why an embedding that is not named stays dense; empty for other candidates."""
        if not candidate.is_embedding or self.is_named(candidate):
            return ""
        others = self._others(candidate)
        shared = f", and shares its weight with '{others[0].key}'" if others else ""
        return f"a lookup, not a product{shared}: it is masked only if `include` has its exact name, without wildcards"

    def _fault(self, candidate: Candidate) -> str:
        others = self._others(candidate)
        if not others:
            return ""
        for holder in others:
            if holder.candidate is None:
                return f"its weight is shared with '{holder.key}', which cannot be masked"
        members = [
            holder.candidate for holder in self._group(candidate) if holder.candidate is not None
        ]
        if sum(not member.is_embedding for member in members) > 1:
            return f"its weight is shared with '{others[0].key}', which would change with it"
        if is_sharded(candidate.weight):
            return f"its weight is sharded, and shared with '{others[0].key}'"
        if any(member.spec.layout != "plain" for member in members):
            return f"its weight is shared with '{others[0].key}', along whose rows other blocks lie"
        return ""
