"""Attention over the paged cache, in the place of the model's own core, and rotary positions of a ragged step.

    k, v of this step ─write─▶ cache [slots, g, d] ─read by block table─▶ softmax(q·kᵀ/√d)·v per sequence

Compiled kernels read the cache in place (`serve.layers`). The plain way gathers keys and values of the rows that decode
into one padded batch; chunks of prompts attend one by one, and gather only what earlier steps wrote.

Shapes: T tokens of the step, a query heads, g key/value heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.serve.batch import Batch
from meshwright.serve.native import NativeStep


class Step:
    """What all layers of a rank look at while a step runs: the batch as tensors, made once."""

    def __init__(self) -> None:
        self.slots = torch.empty(0, dtype=torch.int64)
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self.decode_rows: torch.Tensor | None = None
        self.decode_slots = self.decode_mask = torch.empty(0)
        self.prompts: list[tuple[slice, torch.Tensor | None, torch.Tensor | None]] = []
        """Of each chunk of several tokens: its rows, the slots of its context, and its mask [count, context]; None
        where its first token is the first of the prompt."""
        self.native: tuple[int, int, int, int] | None = None
        """Query heads, key/value heads, head dim and block size, where kernels attend."""
        self.arrays: NativeStep | None = None
        """What the kernels read."""

    def begin(self, batch: Batch, device: torch.device) -> None:
        """Take over the next batch; with kernels, after the rotary positions."""
        self.slots = torch.from_numpy(batch.slots).to(device)
        self.decode_rows = None
        if self.native is not None:
            self.arrays = native_step(batch, self.rotary, self.slots, self.native)
            return
        single = np.flatnonzero(batch.counts == 1)
        if len(single):
            slots, counted = batch.padded_slots(single)
            self.decode_rows = torch.from_numpy(batch.first_rows[single]).to(device)
            self.decode_slots = torch.from_numpy(slots).to(device)
            self.decode_mask = torch.from_numpy(counted).to(device)[:, None, None, :]
        self.prompts = [self._prompt(batch, int(chunk), device) for chunk in np.flatnonzero(batch.counts > 1)]

    def _prompt(
        self, batch: Batch, chunk: int, device: torch.device
    ) -> tuple[slice, torch.Tensor | None, torch.Tensor | None]:
        row, count, start = int(batch.first_rows[chunk]), int(batch.counts[chunk]), int(batch.starts[chunk])
        if not start:
            return slice(row, row + count), None, None
        slots = torch.from_numpy(batch.context_slots(chunk)).to(device)
        mask = torch.ones(count, start + count, dtype=torch.bool, device=device).tril_(start)
        return slice(row, row + count), slots, mask


def native_step(
    batch: Batch,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    shape: tuple[int, int, int, int],
) -> NativeStep:
    """A batch as the kernels read it. Arguments as of :class:`~meshwright.serve.native.NativeStep`."""
    single, several = np.flatnonzero(batch.counts == 1), np.flatnonzero(batch.counts > 1)
    of_chunks = batch.first_rows, batch.counts, batch.contexts, batch.first_blocks
    chunks = np.stack([of[several] for of in of_chunks], axis=1)
    of_rows = batch.first_rows[single], batch.contexts[single], batch.first_blocks[single]
    arrays = (torch.from_numpy(array) for array in (*of_rows, chunks, batch.wanted, batch.blocks))
    fields: list[Any] = [rotary, slots, *arrays, shape]
    return NativeStep(*fields)


class StepRope(nn.Module):
    """In the place of the model's rotary tables: those of the step's own positions, the same for all layers."""

    def __init__(self, plain: nn.Module, step: Step) -> None:
        super().__init__()
        self.plain = plain
        self._step = step

    def begin(self, positions: torch.Tensor, longest: int, dtype: torch.dtype) -> None:
        """Before the layers run.

        Args:
            positions: [T] of the step's tokens.
            longest: more than any of them.
            dtype: of queries and keys.
        """
        cos, sin = self.plain(longest, positions.device, dtype)
        self._step.rotary = cos[positions], sin[positions]

    def forward(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, d] and sin [T, 1, d/2]."""
        assert self._step.rotary is not None
        return self._step.rotary


class PagedCore(nn.Module):
    """One layer's attention over its part of the cache. q [1, a, T, d] and k, v [1, g, T, d] → [1, a, T, d].

    Args:
        cache: [2, slots, g, d], keys and values.
        step: what runs.
    """

    def __init__(self, cache: torch.Tensor, step: Step) -> None:
        super().__init__()
        self.keys, self.values = cache[0], cache[1]
        self._step = step

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step = self._step
        self.keys.index_copy_(0, step.slots, k[0].transpose(0, 1))
        self.values.index_copy_(0, step.slots, v[0].transpose(0, 1))
        grouped = q.shape[1] != k.shape[1]
        rows = q.new_empty(q.shape[2], q.shape[1], q.shape[3])
        if step.decode_rows is not None:
            rows[step.decode_rows] = self._decode(q, grouped)
        own_q, own_k, own_v = (y[0].transpose(0, 1) for y in (q, k, v))
        attend_prompts(step, own_q, own_k, own_v, rows, self.keys, self.values)
        return rows.transpose(0, 1)[None]

    def _decode(self, q: torch.Tensor, grouped: bool) -> torch.Tensor:
        """[n, a, d] of the rows that are one token of their sequence."""
        step = self._step
        queries = q[0].transpose(0, 1)[step.decode_rows].unsqueeze(2)
        keys, values = (side[step.decode_slots].transpose(1, 2) for side in (self.keys, self.values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=step.decode_mask, enable_gqa=grouped)
        return out.squeeze(2)


def attend_prompts(
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Attention of the step's chunks of prompts, whose keys and values are in the cache already.

    Args:
        q: [T, a, d], turned; k and v: [T, g, d].
        out: [T, a, d]; the chunks' rows are written.
        keys: the layer's cache [slots, g, d], and values.
    """
    for at, slots, mask in step.prompts:
        own = (k[at], v[at]) if slots is None else (keys[slots], values[slots])
        queries, seen_k, seen_v = (y.transpose(0, 1)[None] for y in (q[at], *own))
        rows = F.scaled_dot_product_attention(
            queries, seen_k, seen_v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[at] = rows[0].transpose(0, 1)
