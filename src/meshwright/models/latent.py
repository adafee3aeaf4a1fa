"""Multi-head latent attention: keys and values come out of a small latent that all heads share.

    x [b,s,h] ─ latents ─▶ c_q, c_kv, k_rope ─ q, kv ─▶ of each head q = [nope | rope], k_nope, v
              k = [k_nope | k_rope turned],  q turned likewise ─▶ attention ─▶ o

Values are narrower than keys: they are filled up with zeros, and what attention makes of these is dropped, so that any
core takes them. Rotary dims lie in pairs (2i, 2i + 1).

Shapes: b sequences, s tokens, h hidden, a heads, n and r dims of a head that do not turn and do, v of its values.

Source: DeepSeek-AI 2024 (V2), §2.1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshwright.core.batch import Places
from meshwright.core.latent import YarnScaling
from meshwright.core.model import ModelSpec
from meshwright.models.attention import Attend, AttentionCore, Projections, RMSNorm, linear
from meshwright.models.rope import Rope


class HeadShape(NamedTuple):
    """How the heads of latent attention are made up."""

    nope: int
    rope: int
    v: int
    scale: float
    """What queries are multiplied by, so that scores are."""


def turned_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """Dims (2i, 2i + 1) of x [.., s, m, r] turned, or turned back; cos [s, 1, r] or more, sin [s, 1, r/2]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., : sin.shape[-1]], sin * sign
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


class _Heads(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        k_rope: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.tables, ctx.shape = (cos, sin), shape  # constants of the model, not activations
        n = shape.nope
        queries, keys, values = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(q)
        queries[..., :n], queries[..., n:] = q[..., :n], turned_pairs(q[..., n:], cos, sin)
        if shape.scale != 1.0:
            queries.mul_(shape.scale)
        keys[..., :n], keys[..., n:] = kv[..., :n], turned_pairs(k_rope.unsqueeze(-2), cos, sin)
        values[..., : shape.v] = kv[..., n:]
        return queries, keys, values

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        shape: HeadShape = ctx.shape
        n, (cos, sin) = shape.nope, ctx.tables
        q = torch.cat((dq[..., :n], turned_pairs(dq[..., n:], cos, sin, -1)), -1)
        if shape.scale != 1.0:
            q.mul_(shape.scale)
        kv = torch.cat((dk[..., :n], dv[..., : shape.v]), -1)
        k_rope = turned_pairs(dk[..., n:].sum(-2, keepdim=True), cos, sin, -1).squeeze(-2)
        return q, kv, k_rope, None, None, None


class Latents(nn.Module):
    """Down to the latents. x [b, s, h] → c_q [b, s, q_lora_rank] or None, c_kv [b, s, kv_lora_rank], k_rope [b, s, r].

    c_q and c_kv are normed, k_rope is not turned yet.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.latent is not None
        latent, h = spec.latent, spec.hidden_size
        self.widths = [latent.kv_lora_rank, latent.qk_rope_head_dim]
        self.q = linear(h, latent.q_lora_rank, False, device, dtype) if latent.q_lora_rank else None
        self.kv = linear(h, latent.kv_down_size, False, device, dtype)
        self.project = Projections()
        self.q_norm = RMSNorm(latent.q_lora_rank, latent.norm_eps, device, dtype) if latent.q_lora_rank else None
        self.kv_norm = RMSNorm(latent.kv_lora_rank, latent.norm_eps, device, dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        layers = [self.kv] if self.q is None else [self.q, self.kv]
        *q, kv = self.project(x, *layers)
        c_kv, k_rope = kv.split(self.widths, dim=-1)
        c_q = self.q_norm(q[0]) if self.q_norm is not None else None
        return c_q, self.kv_norm(c_kv), k_rope


class LatentAttention(nn.Module):
    """Causal multi-head latent attention. [b, s, h] → [b, s, h].

    `core` is given q, k and v [b, a, s, n + r], v filled up with zeros.
    """

    def __init__(self, spec: ModelSpec, rope: Rope | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.latent is not None
        assert rope is not None
        latent, scaling = spec.latent, spec.rope_scaling
        scale = scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0
        self.shape = HeadShape(latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim, scale)
        self.rope: nn.Module = rope
        self.latents = Latents(spec, device, dtype)
        self.q = linear(latent.q_lora_rank or spec.hidden_size, spec.heads_size, False, device, dtype)
        self.kv = linear(latent.kv_lora_rank, spec.num_heads * latent.kv_up_size, False, device, dtype)
        self.project = Projections()
        self.enter = nn.Identity()
        """What k_rope passes on its way to the heads."""
        self.core = AttentionCore()
        self.attend = Attend()
        self.o = linear(spec.values_size, spec.hidden_size, spec.out_bias, device, dtype)

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        c_q, c_kv, k_rope = self.latents(x)
        shape = self.shape
        (q,) = self.project(x if c_q is None else c_q, self.q)
        (kv,) = self.project(c_kv, self.kv)
        q, kv = q.unflatten(-1, (-1, shape.nope + shape.rope)), kv.unflatten(-1, (-1, shape.nope + shape.v))
        at = () if places is None else (places.positions,)
        tables = self.rope(q.shape[1], q.device, q.dtype, *at)
        queries, keys, values = _Heads.apply(q, kv, self.enter(k_rope), *tables, shape)
        core = self.core if places is None else partial(self.core, places=places)
        if shape.v < shape.nope + shape.rope:
            core = partial(_narrowed, core, shape.v)
        return self.attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), core, self.o)


def _narrowed(core: Any, width: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What attention makes of the values themselves."""
    out: torch.Tensor = core(q, k, v)
    return out[..., :width]
