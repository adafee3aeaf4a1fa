"""Attention as one device computes it, and the parts that other kinds of it share.

Shapes: b sequences, s tokens, h hidden, a query heads, g key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.batch import Places
from meshwright.core.model import ModelSpec
from meshwright.models.documents import document_mask
from meshwright.models.functions import rms_norm, rotate
from meshwright.models.rope import Rope

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v) → what attention gives, of sequences whose places it knows."""


class RMSNorm(nn.Module):
    """Parameter `weight` [size]."""

    def __init__(self, size: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Linear(nn.Linear):
    """Weights are set from outside; a default initialisation would only take time, on the meta device most."""

    def reset_parameters(self) -> None:
        return


def linear(into: int, out: int, bias: bool, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    """A linear layer whose weight [out, in] is set from outside."""
    return _Linear(into, out, bias, device=device, dtype=dtype)


class Projections(nn.Module):
    """Several linear layers of one input: x [b, s, h] → their outputs. Another one may compute them together."""

    def forward(self, x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in layers)


class AttentionCore(nn.Module):
    """What attention does without weights: softmax(q·kᵀ/√d)·v under the causal mask. Other cores may take its place.

    q [b, a, s, d] and k, v [b, g, s, d] → [b, a, s, d]. Of several documents in a sequence each sees itself alone.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        if places is None or places.documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        mask = document_mask(places.documents).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class Attend(nn.Module):
    """Attention behind its projections: the core, heads joined, o. Another one may keep less of it for backward.

    q [b, a, s, d] and k, v [b, g, s, d] → [b, s, h].
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: Core, o: nn.Module) -> torch.Tensor:
        return o(core(q, k, v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads. [b, s, h] → [b, s, h]."""

    def __init__(self, spec: ModelSpec, rope: Rope | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rope = rope
        self.q = linear(spec.hidden_size, spec.heads_size, spec.qkv_bias, device, dtype)
        self.k = linear(spec.hidden_size, spec.kv_size, spec.qkv_bias, device, dtype)
        self.v = linear(spec.hidden_size, spec.kv_size, spec.qkv_bias, device, dtype)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, device, dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, device, dtype) if spec.qk_norm else None
        self.project = Projections()
        self.core = AttentionCore()
        self.attend = Attend()
        self.o = linear(spec.heads_size, spec.hidden_size, spec.out_bias, device, dtype)

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x, self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            at = () if places is None else (places.positions,)
            cos, sin = self.rope(q.shape[1], q.device, q.dtype, *at)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        core = self.core if places is None else partial(self.core, places=places)
        return self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core, self.o)
