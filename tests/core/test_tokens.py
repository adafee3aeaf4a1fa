"""Who has which tokens, and who sees whom: pieces against the definition, score by score."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from meshwright.core.tokens import Piece, pairs_by_step, pieces, positions

BALANCES = ("contiguous", "zigzag", "striped")
SIZES = [(length, size) for size in (1, 2, 3, 4) for length in (2 * size, 6 * size)]


def _some_ends(length: int, rng: random.Random) -> tuple[int, ...]:
    inner = rng.sample(range(1, length), rng.randint(0, min(5, length - 1)))
    return (*sorted(inner), length)


def _seen(piece: Piece) -> set[tuple[int, int]]:
    """(query, key) numbers of a piece, by its own definition."""
    (first, last), (low, high) = piece.queries, piece.keys
    pairs = ((i, j) for i in range(first, last) for j in range(low, high))
    return {(i, j) for i, j in pairs if not piece.causal or j - low <= i - first}


@pytest.mark.parametrize("balance", BALANCES)
def test_every_token_is_on_one_rank(balance: Any) -> None:
    for length, size in SIZES:
        found = [positions(balance, length, size, rank) for rank in range(size)]
        assert all(one == sorted(one) and len(one) == length // size for one in found)
        assert sorted(at for one in found for at in one) == list(range(length))


@pytest.mark.parametrize("balance", BALANCES)
def test_pieces_are_the_mask(balance: Any) -> None:
    """Each unmasked score once, within documents too; and no row of a piece is without a key."""
    rng = random.Random(1)
    for (length, size), trial in product(SIZES, range(8)):
        ends = _some_ends(length, rng) if trial else None
        document = [sum(end <= at for end in ends or (length,)) for at in range(length)]
        where = [positions(balance, length, size, rank) for rank in range(size)]
        for rank, source in product(range(size), repeat=2):
            found = pieces(balance, length, size, rank, source, ends)
            seen = [pair for piece in found for pair in _seen(piece)]
            expected = {
                (i, j)
                for (i, query), (j, key) in product(enumerate(where[rank]), enumerate(where[source]))
                if key <= query and document[key] == document[query]
            }
            assert len(seen) == len(set(seen)) == sum(piece.pairs for piece in found)
            assert set(seen) == expected, (length, size, rank, source, ends)
            for piece in found:
                assert {i for i, _ in _seen(piece)} == set(range(*piece.queries))


def test_zigzag_gives_every_rank_the_same_work_in_every_step() -> None:
    """32 tokens on 4 ranks, as counted by hand: 132 scores each; contiguous 36 to 228, striped 120 to 144."""
    assert {pairs_by_step("zigzag", 32, 4, rank) for rank in range(4)} == {(36, 32, 32, 32)}
    assert [sum(pairs_by_step("striped", 32, 4, rank)) for rank in range(4)] == [120, 128, 136, 144]
    assert [sum(pairs_by_step("contiguous", 32, 4, rank)) for rank in range(4)] == [36, 100, 164, 228]
    assert max(max(pairs_by_step("contiguous", 32, 4, rank)) for rank in range(4)) == 64


def test_zigzag_blocks_are_one_rectangle_each() -> None:
    """An earlier rank's keys: all queries see their first half. A later one's: the second half of queries sees all."""
    assert pieces("zigzag", 32, 4, 2, 1) == (Piece((0, 8), (0, 4), causal=False),)
    assert pieces("zigzag", 32, 4, 1, 2) == (Piece((4, 8), (0, 8), causal=False),)
    assert pieces("zigzag", 32, 4, 1, 1) == (Piece((0, 8), (0, 8), causal=True),)


def test_stripes_of_later_ranks_leave_out_the_diagonal() -> None:
    assert pieces("striped", 8, 2, 1, 0) == (Piece((0, 4), (0, 4), causal=True),)
    assert pieces("striped", 8, 2, 0, 1) == (Piece((1, 4), (0, 3), causal=True),)


def test_a_block_of_other_documents_is_left_out() -> None:
    assert pieces("contiguous", 16, 2, 1, 0, (8, 16)) == ()
    assert pieces("contiguous", 16, 2, 1, 0, (6, 10, 16)) == (Piece((0, 2), (6, 8), causal=False),)
