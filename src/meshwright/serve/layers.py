"""A model's layers with compiled kernels between their products, in the place of the plain modules.

    norm ─▶ q,k,v as one product ─▶ turn, write cache, attend by block table ─▶ o ─▶ norm ─▶ gate,up ─▶ silu·up ─▶ down

The plain modules with `attention.PagedCore` are what runs where there are no kernels, and the oracle of the tests.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.attention import Attention, RMSNorm
from meshwright.models.decoder import MLP
from meshwright.parallel.layers import layers_of, part_of
from meshwright.serve.attention import Step
from meshwright.serve.native import NAMES, Kernels


class NativeNorm(nn.Module):
    """In the place of an RMSNorm."""

    def __init__(self, plain: RMSNorm, kernels: Kernels) -> None:
        super().__init__()
        self.weight = plain.weight.detach()
        self.eps = plain.eps
        self._norm = kernels.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps)


class NativeMLP(nn.Module):
    """In the place of an MLP with a gate and silu."""

    def __init__(self, plain: MLP, kernels: Kernels) -> None:
        super().__init__()
        self.plain = plain
        self._gated = kernels.gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.plain
        out: torch.Tensor = plain.down(self._gated(*plain.project(x, plain.gate, plain.up)))
        return out


class NativeAttention(nn.Module):
    """In the place of a layer's attention. [1, T, h] → [1, T, h].

    Args:
        plain: what it stands for.
        cache: [2, slots, g, d], keys and values.
        step: what runs.
        kernels: compiled.
    """

    def __init__(self, plain: Attention, cache: torch.Tensor, step: Step, kernels: Kernels) -> None:
        super().__init__()
        self.plain = plain
        self.keys, self.values = cache[0], cache[1]
        self._step = step
        self._kernels = kernels

    def forward(self, x: torch.Tensor, places: None = None) -> torch.Tensor:
        plain, step = self.plain, self._step
        q, k, v = plain.project(x, plain.q, plain.k, plain.v)
        if plain.q_norm is not None and plain.k_norm is not None:
            q, k = (norm(y.unflatten(-1, (-1, plain.head_dim))).flatten(-2) for norm, y in
                    ((plain.q_norm, q), (plain.k_norm, k)))  # fmt: skip
        q, k, v = q[0], k[0], v[0]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        assert step.arrays is not None
        self._kernels.attention(step.arrays, q, k, v, self.keys, self.values, out)
        return plain.o(out[None])


def can_run(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels know what they would do."""
    attentions = [part_of(layer, "attention") for layer in layers_of(model).values()]
    if device.type != "cpu" or dtype not in NAMES or not attentions:
        return False
    return all(type(attention) is Attention for attention in attentions)


def install(model: nn.Module, caches: list[torch.Tensor], step: Step, kernels: Kernels) -> None:
    """Replace modules in place.

    Args:
        model: divided already, with paged caches.
        caches: of each layer.
    """
    for layer, cache in zip(layers_of(model).values(), caches, strict=True):
        layer.attention = NativeAttention(part_of(layer, "attention"), cache, step, kernels)
    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if isinstance(module, RMSNorm):
            setattr(model.get_submodule(parent), child, NativeNorm(module, kernels))
        elif type(module) is MLP and module.gate is not None and module.activation == "silu":
            setattr(model.get_submodule(parent), child, NativeMLP(module, kernels))
