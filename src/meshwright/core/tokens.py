"""Which tokens of a sequence a context-parallel rank has, and which of them see which.

    8 tokens on 2 ranks    contiguous  0 0 0 0 1 1 1 1
                           zigzag      0 0 1 1 1 1 0 0
                           striped     0 1 0 1 0 1 0 1

A rank's tokens are one or two *runs*, arithmetic progressions in ascending order. What a run of queries sees of a run
of keys, under the causal mask and within a document, is at most two *pieces*: a rectangle of scores, and a triangle.
Every rule of ring attention (which blocks are skipped, which are halved, where the diagonal is exclusive) follows from
that, for all balances, and with documents too.

Sources: Liu et al. 2023 (contiguous); Zhu 2024, ring-flash-attention (zigzag); Brandon et al. 2023 (striped).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.core.layouts import Balance

Range = tuple[int, int]
"""[start, stop)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens start, start + step, ...: `count` of them, of which the first is the rank's token number `first`."""

    start: int
    step: int
    count: int
    first: int

    def within(self, low: int, high: int) -> Run:
        """Those of positions [low, high)."""
        skipped = min(self.count, max(0, -(-(low - self.start) // self.step)))
        end = min(self.count, max(skipped, -(-(high - self.start) // self.step)))
        return Run(self.start + skipped * self.step, self.step, end - skipped, self.first + skipped)


@dataclass(frozen=True, slots=True)
class Piece:
    """Scores of a range of a rank's queries with a range of a rank's keys, by their numbers on these ranks."""

    queries: Range
    keys: Range
    causal: bool
    """Query i of the range sees keys 0 to i of the range; otherwise each sees all."""

    @property
    def pairs(self) -> int:
        """Scores that are not masked."""
        rows, columns = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if not self.causal:
            return rows * columns
        square = min(rows, columns)
        return square * (square + 1) // 2 + (rows - square) * columns


@lru_cache(maxsize=4096)
def runs(balance: Balance, length: int, num_ranks: int, rank: int) -> tuple[Run, ...]:
    """The tokens of a rank, of a sequence of `length` over `num_ranks`, which divide it (zigzag: twice them)."""
    share = length // num_ranks
    if balance == "striped":
        return (Run(rank, num_ranks, share, 0),)
    if balance == "zigzag" and num_ranks > 1:
        half = share // 2
        return Run(rank * half, 1, half, 0), Run((2 * num_ranks - 1 - rank) * half, 1, half, half)
    return (Run(rank * share, 1, share, 0),)


def positions(balance: Balance, length: int, num_ranks: int, rank: int) -> list[int]:
    """Where a rank's tokens stand in their sequence, ascending."""
    return [run.start + i * run.step for run in runs(balance, length, num_ranks, rank) for i in range(run.count)]


@lru_cache(maxsize=4096)
def pieces(
    balance: Balance, length: int, num_ranks: int, rank: int, source: int, ends: tuple[int, ...] | None = None
) -> tuple[Piece, ...]:
    """What the queries of `rank` see of the keys of `source`. No piece has a row without a key.

    Args:
        ends: where the sequence's documents end; None: one document.
    """
    ours, theirs = runs(balance, length, num_ranks, rank), runs(balance, length, num_ranks, source)
    found: list[Piece] = []
    start = 0
    for end in ends or (length,):
        queries = [run.within(start, end) for run in ours]
        if rank == source:  # in ascending order, so that the causal mask is that of the numbers
            found += _own(queries)
        else:
            keys = [run.within(start, end) for run in theirs]
            found += _merged(piece for q in queries for k in keys for piece in _seen(q, k))
        start = end
    return tuple(found)


def _own(queries: list[Run]) -> Iterator[Piece]:
    there = [run for run in queries if run.count]
    if there:
        span = there[0].first, there[-1].first + there[-1].count
        yield Piece(span, span, causal=True)


def _seen(q: Run, k: Run) -> Iterator[Piece]:
    """Key number j is seen by query number i where j ≤ i + shift."""
    shift = (q.start - k.start) // q.step
    first, num_keys = max(0, -shift), min(k.count, q.count + shift)
    if first >= q.count or num_keys <= 0:
        return
    queries = q.first + first, q.first + q.count
    full = min(num_keys, first + shift)  # keys that the first query sees beside its diagonal
    if full + 1 >= num_keys:
        yield Piece(queries, (k.first, k.first + num_keys), causal=False)
        return
    if full:
        yield Piece(queries, (k.first, k.first + full), causal=False)
    yield Piece(queries, (k.first + full, k.first + num_keys), causal=True)


def _merged(found: Iterator[Piece]) -> list[Piece]:
    """Rectangles beside each other become one."""
    merged: list[Piece] = []
    for piece in found:
        last = merged[-1] if merged else None
        if last is None or last.causal or piece.causal:
            merged.append(piece)
        elif last.queries == piece.queries and last.keys[1] == piece.keys[0]:
            merged[-1] = replace(last, keys=(last.keys[0], piece.keys[1]))
        elif last.keys == piece.keys and last.queries[1] == piece.queries[0]:
            merged[-1] = replace(last, queries=(last.queries[0], piece.queries[1]))
        else:
            merged.append(piece)
    return merged


def pairs_by_step(balance: Balance, length: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """Unmasked scores that a rank computes in each step of a ring: with its own keys, then with those of the ranks
    before it, one after the other."""
    sources = [(rank - step) % num_ranks for step in range(num_ranks)]
    return tuple(sum(p.pairs for p in pieces(balance, length, num_ranks, rank, source)) for source in sources)
