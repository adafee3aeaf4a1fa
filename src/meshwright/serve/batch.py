"""What one step computes, as the numbers that every rank needs: tokens of many sequences in one row.

    rows       | seq 0: 1 token | seq 1: 1 token | seq 2: a chunk of 5 tokens ... |     T of them
    per chunk  start position, number of tokens, its blocks in order
    moves      blocks that are copied to the host before it, and blocks that are copied back

All of it travels as one vector of whole numbers. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.serve.scheduler import Chunk, Moves

Ints = np.ndarray
HEADER = 8
"""Numbers before a vector: tokens, chunks, blocks, wanted rows, numbers of moves out and back, replicas that share
experts, block size."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One step. Rows are tokens."""

    tokens: Ints
    """[T] token ids."""
    starts: Ints
    """[C] position of each chunk's first token."""
    counts: Ints
    """[C] tokens of each chunk."""
    num_blocks: Ints
    """[C] blocks of each chunk's sequence."""
    blocks: Ints
    """[Σ num_blocks] of the cache, sequence by sequence."""
    wanted: Ints
    """[W] rows whose logits are wanted."""
    out: Ints
    """[2 · n] pairs (block of the cache, block of the host) that leave before the step."""
    back: Ints
    """[2 · m] likewise, that come back; after those that leave."""
    shared: Ints
    """[e] tokens of each replica that shares experts with this one, which computes its own part of them in every step,
    also where it has no token; empty where none does."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def contexts(self) -> Ints:
        """[C] tokens that the last row of each chunk looks at, itself included."""
        return self.starts + self.counts

    @cached_property
    def first_rows(self) -> Ints:
        """[C] row of each chunk's first token."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def first_blocks(self) -> Ints:
        """[C] where each chunk's blocks begin in `blocks`."""
        return np.cumsum(self.num_blocks) - self.num_blocks

    @cached_property
    def chunk_of(self) -> Ints:
        """[T] chunk of each row."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> Ints:
        """[T] position of each row in its sequence."""
        return np.arange(self.num_tokens) + (self.starts - self.first_rows)[self.chunk_of]

    @cached_property
    def slots(self) -> Ints:
        """[T] where in the cache the keys and values of each row go."""
        return self._slots(self.chunk_of, self.positions)

    def _slots(self, chunks: Ints, positions: Ints) -> Ints:
        blocks = self.blocks[self.first_blocks[chunks] + positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def context_slots(self, chunk: int) -> Ints:
        """[context] slots of all tokens that a chunk looks at, in order."""
        return self._slots(np.full(self.contexts[chunk], chunk), np.arange(self.contexts[chunk]))

    def padded_slots(self, chunks: Ints) -> tuple[Ints, Ints]:
        """Slots [n, longest context] of several chunks, slot 0 where one is shorter, and which of them count (bool)."""
        positions = np.arange(self.contexts[chunks].max())[None, :]
        counted = positions < self.contexts[chunks][:, None]
        at = np.where(counted, self.first_blocks[chunks][:, None] + positions // self.block_size, 0)
        return np.where(counted, self.blocks[at] * self.block_size + positions % self.block_size, 0), counted

    def to_vector(self) -> Ints:
        """All of it as int64 [HEADER + T + 3C + blocks + W + moves + replicas]."""
        each = (self.tokens, self.counts, self.blocks, self.wanted, self.out, self.back, self.shared)
        sizes = [*map(len, each), self.block_size]
        parts = (self.tokens, self.starts, self.counts, self.num_blocks, *each[2:])
        return np.concatenate([sizes, *parts]).astype(np.int64)

    @classmethod
    def from_vector(cls, vector: Ints) -> Batch:
        """Inverse of :meth:`to_vector`."""
        tokens, chunks, blocks, wanted, out, back, shared, block_size = (int(size) for size in vector[:HEADER])
        ends = np.cumsum([HEADER, tokens, chunks, chunks, chunks, blocks, wanted, out, back, shared])
        fields: list[Any] = [*(vector[start:end] for start, end in pairwise(ends)), block_size]
        return cls(*fields)


def make_batch(chunks: Sequence[Chunk], block_size: int, moves: Moves | None = None) -> Batch:
    """The step of these chunks, after these moves. The last row of a chunk is wanted if a token is chosen after it; all
    rows of a prompt whose log probabilities are asked for."""
    tokens: list[int] = []
    wanted: list[int] = []
    for chunk in chunks:
        first = len(tokens)
        tokens += chunk.sequence.tokens(chunk.start, chunk.start + chunk.count)
        if wants_all(chunk):
            wanted += range(first, len(tokens))
        elif chunk.is_last:
            wanted.append(len(tokens) - 1)
    tables = [chunk.sequence.blocks for chunk in chunks]
    return Batch(
        np.array(tokens, dtype=np.int64),
        np.array([chunk.start for chunk in chunks], dtype=np.int64),
        np.array([chunk.count for chunk in chunks], dtype=np.int64),
        np.array([len(table) for table in tables], dtype=np.int64),
        np.array([block for table in tables for block in table], dtype=np.int64),
        np.array(wanted, dtype=np.int64),
        np.array(moves.out if moves else (), dtype=np.int64).reshape(-1),
        np.array(moves.back if moves else (), dtype=np.int64).reshape(-1),
        np.empty(0, dtype=np.int64),
        block_size,
    )


def wants_all(chunk: Chunk) -> bool:
    """Whether the logits of all rows of a chunk are wanted: it is of a prompt whose log probabilities are asked for."""
    return chunk.sequence.params.prompt_logprobs and not chunk.sequence.output
