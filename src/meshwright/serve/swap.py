"""Swapping: keys and values of preempted sequences in the memory of the host, and when that pays.

    cache of a layer [.., blocks, ..] ──the blocks of all that leave, one gather──▶ host [.., blocks, ..] ──▶ and back

Source: Kwon et al. 2023, §4.5; techniques, §11.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from meshwright.serve.batch import Batch

SAMPLE_BLOCKS = 8
"""Blocks whose copies are timed at the start."""


class HostTier:
    """Room on the host for blocks of one rank's cache.

    Args:
        cache: of each layer: keys and values [2, slots, heads, d], or latents [slots, width].
        num_blocks: that the host holds.
        block_size: slots of one.
    """

    def __init__(self, cache: Sequence[torch.Tensor], num_blocks: int, block_size: int) -> None:
        self._sides = [side for layer in cache for side in (layer if layer.dim() == 4 else (layer,))]
        self._sides = [side.view(-1, block_size * side[0].numel()) for side in self._sides]
        pinned = self._sides[0].is_cuda
        self._host = [torch.empty(num_blocks, s.shape[1], dtype=s.dtype, pin_memory=pinned) for s in self._sides]
        self.moved_bytes = 0
        """Since the start, both ways, on this rank."""

    @property
    def nbytes(self) -> int:
        """That it takes of the host."""
        return sum(side.nbytes for side in self._host)

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers of this rank."""
        return sum(side[0].nbytes for side in self._host)

    def move(self, batch: Batch) -> None:
        """Carry out a step's moves: what leaves, then what comes back."""
        out, back = batch.out.reshape(-1, 2), batch.back.reshape(-1, 2)
        if len(out):
            self._copy(self._host, out[:, 1].tolist(), self._sides, out[:, 0].tolist())
        if len(back):
            self._copy(self._sides, back[:, 0].tolist(), self._host, back[:, 1].tolist())
        self.moved_bytes += (len(out) + len(back)) * self.block_bytes

    def seconds_per_block(self) -> float:
        """Of a block's way out, measured; its way back takes the same. The cache keeps what it holds."""
        count = min(SAMPLE_BLOCKS, len(self._host[0]), len(self._sides[0]))
        some, times = list(range(count)), []
        for _ in range(3):
            began_s = perf_counter()
            self._copy(self._host, some, self._sides, some)
            times.append(perf_counter() - began_s)
        return min(times) / count

    def _copy(self, into: Sequence[torch.Tensor], to: list[int], source: Sequence[torch.Tensor], at: list[int]) -> None:
        for target, origin in zip(into, source, strict=True):
            rows = origin[torch.tensor(at, device=origin.device)].to(target.device)
            target[torch.tensor(to, device=target.device)] = rows


class Pace:
    """What computing a token of a prompt takes, beside what else a step does, and whether swapping takes less.

        swap        2 · blocks · seconds of a block's copy
        recompute   tokens · (seconds of a step with prompts − seconds of one that only decodes) / tokens of its prompts

    Args:
        block_s: seconds of a block's copy, one way.
        block_size: tokens of a block.
    """

    SHARE, LEAST_TOKENS = 0.2, 8
    """Of a new observation in the mean, and tokens of prompts from which on a step is one."""

    def __init__(self, block_s: float, block_size: int) -> None:
        self._block_s, self._block_size = block_s, block_size
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def saw(self, num_prompt: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long."""
        if num_prompt == 0:
            self._decode_s = self._mean(self._decode_s, seconds)
        elif num_prompt >= self.LEAST_TOKENS:
            beside = min(self._decode_s or 0.0, seconds)
            self._token_s = self._mean(self._token_s, (seconds - beside) / num_prompt)

    def _mean(self, before: float | None, now: float) -> float:
        return now if before is None else before + self.SHARE * (now - before)

    def swap_pays(self, num_tokens: int) -> bool:
        """Whether so many tokens come back sooner from the host; before any prompt was timed they do."""
        num_blocks = -(-num_tokens // self._block_size)
        return self._token_s is None or 2 * num_blocks * self._block_s < num_tokens * self._token_s
