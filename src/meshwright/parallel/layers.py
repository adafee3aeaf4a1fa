"""What techniques find in a model by name: its layers, and parts of them."""

from __future__ import annotations

from typing import Any

from torch import nn


def layers_of(model: nn.Module) -> nn.ModuleDict:
    """Number → layer, of those that are on this rank; what is taken out of it is taken out of the model."""
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleDict)
    return layers


def part_of(layer: nn.Module, path: str) -> Any:
    """A module of a layer, for example `mlp.experts`, whose attributes techniques read and set by name."""
    return layer.get_submodule(path)
