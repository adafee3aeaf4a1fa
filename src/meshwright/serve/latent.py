"""Multi-head latent attention over the paged cache, which keeps a latent for each token instead of keys and values.

    cache [slots, c + r] = [c_kv | k_rope turned], whole on every rank of tp

    rows that decode   q·W_kᵀ ─▶ [c | r] ·cache ─▶ softmax ─▶ Σ of latents [c] ─▶ ·W_vᵀ ─▶ heads' values
    chunks of prompts  cache·Wᵀ ─▶ k, v of each head ─▶ attention as in training

A row that decodes meets its whole context with one query of c + r dims per head: the projection of keys is applied to
the query, that of values to the sum, and neither to the context (DeepSeek-AI 2024, V2, §2.1.2). A chunk has so many
queries that projecting the context once is cheaper.

Shapes: T tokens of the step, a heads of this rank, n and r dims of a head that do not turn and do, v of its values, c
width of the latent.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.batch import Places
from meshwright.models.latent import LatentAttention, turned_pairs
from meshwright.serve.attention import Step


class PagedLatentAttention(nn.Module):
    """In the place of a layer's attention. x [1, T, h] → [1, T, h].

    Args:
        plain: divided already, with its weights; `rope` is that of the step.
        cache: [slots, c + r].
        step: what runs.
    """

    def __init__(self, plain: LatentAttention, cache: torch.Tensor, step: Step) -> None:
        super().__init__()
        self.latents, self.rope, self.q, self.o = plain.latents, plain.rope, plain.q, plain.o
        self.shape = plain.shape
        self.cache, self.rank = cache, plain.kv.weight.shape[1]
        self.up = plain.kv.weight.detach().unflatten(0, (-1, self.shape.nope + self.shape.v))
        """[a, n + v, c]."""
        self.scale = self.shape.scale * (self.shape.nope + self.shape.rope) ** -0.5
        self._step = step

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        assert places is None
        n, step = self.shape.nope, self._step
        c_q, c_kv, k_rope = self.latents(x)
        q = self.q(x if c_q is None else c_q)[0].unflatten(-1, (-1, n + self.shape.rope))
        cos, sin = self.rope(len(q), q.device, q.dtype)
        q = torch.cat((q[..., :n], turned_pairs(q[..., n:], cos, sin)), -1)
        turned = turned_pairs(k_rope[0].unsqueeze(1), cos, sin).squeeze(1)
        rows = torch.cat((c_kv[0], turned), -1)
        self.cache.index_copy_(0, step.slots, rows)
        out = q.new_empty(len(q), q.shape[1], self.shape.v)
        if step.decode_rows is not None:
            out[step.decode_rows] = self._decode(q[step.decode_rows])
        for at, slots, mask in step.prompts:
            out[at] = self._prompt(q[at], rows[at] if slots is None else self.cache[slots], mask)
        return self.o(out.flatten(1)[None])

    def _decode(self, q: torch.Tensor) -> torch.Tensor:
        """[m, a, v] of rows [m, a, n + r] that are one token of their sequence each."""
        n = self.shape.nope
        queries = torch.cat((torch.einsum("man,anc->mac", q[..., :n], self.up[:, :n]), q[..., n:]), -1)
        context = self.cache[self._step.decode_slots].unsqueeze(1)  # [m, 1, s, c + r], the keys of all heads
        sums = F.scaled_dot_product_attention(
            queries.unsqueeze(2), context, context, self._step.decode_mask, scale=self.scale, enable_gqa=True
        )
        return torch.einsum("mac,avc->mav", sums[:, :, 0, : self.rank], self.up[:, n:])

    def _prompt(self, q: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[T, a, v] of a chunk's rows [T, a, n + r] and what the cache has of their context [s, c + r]."""
        n, a = self.shape.nope, q.shape[1]
        up = F.linear(context[:, : self.rank], self.up.flatten(0, 1)).unflatten(-1, (a, -1))
        keys = torch.cat((up[..., :n], context[:, None, self.rank :].expand(-1, a, -1)), -1)
        values = F.pad(up[..., n:], (0, q.shape[-1] - self.shape.v))  # as wide as keys, for the fused kernel
        queries, keys, values = (y.transpose(0, 1)[None] for y in (q, keys, values))
        rows = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, scale=self.scale)
        return rows[0].transpose(0, 1)[..., : self.shape.v]
