"""A saved state that was found to fit a selection of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.state import (
    by_plain_name,
    latent_loaded,
    load_layer_state,
    refuse_others,
)
from lightning_nm.nn.selection.selection import Selection


class FittingState(NamedTuple):
    """The state of a sparsifier, and the layers that it is of.

    Args:
        selection: All layers.
        state: The state.
        saved: The states of its layers, by name.
        layers: Those layers.
        waiting: The ones among them that wait here.
        latent: W_F of the layers whose latent values were loaded with the weights, by name.
    """

    selection: Selection
    state: Mapping[str, Any]
    saved: Mapping[str, dict[str, Any]]
    layers: Mapping[str, NMLayer]
    waiting: list[NMLayer]
    latent: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, selection: Selection, state: Mapping[str, Any], short_names: Mapping[str, str]
    ) -> FittingState:
        """Check that a state fits; nothing is changed. `short_names` are those of classes, for an error.

        Raises:
            ValueError: If it is of other layers, patterns, methods, estimators or shapes, or of other weights.
        """
        saved = by_plain_name(state["layers"])
        waited = set(state.get("waiting", ()))  # masked here since then
        waiting = [layer for layer in selection.waiting if layer.name in saved]
        masked = [
            layer for layer in selection.layers if layer.name in saved or layer.name not in waited
        ]
        layers = {layer.name: layer for layer in (*masked, *waiting)}
        refuse_others(layers, saved, short_names)
        return cls(selection, state, saved, layers, waiting, latent_loaded(layers, saved))

    def load(self) -> None:
        """Set all layers to the state."""
        for layer in (*self.selection.layers, *self.selection.waiting):
            layer.noise.reseed(self.state["seed"])
            if layer.name not in self.saved:  # it waited
                layer.progress.load(0, 0, False, layer.schedule)
                layer.costs.charge_dense(self.state["clock"])
        for name, layer in self.layers.items():
            if name in self.latent:
                layer.local_weight.copy_(layer.local_shard(self.latent[name]))
            load_layer_state(layer, self.saved[name])
            layer.forget_replaced_state()
