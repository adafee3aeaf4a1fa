"""The transfer pass: safe for any order, and no send later than it must be."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.program import RECV_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.core.schedule import Rows
from meshwright.schedule.build import program
from meshwright.schedule.edges import edges_between_ranks
from meshwright.schedule.passes.transfers import add_transfers
from meshwright.schedule.verify import verify
from meshwright.schedule.walk import Deadlock


def random_order(placement: list[int], num_micro_batches: int, seed: int) -> Rows:
    """A legal order: repeatedly any rank does any action whose inputs exist."""
    pick = random.Random(seed)
    num_stages = len(placement)
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done: set[Action] = set()
    waiting = {
        Action(kind, s, k) for kind in (Kind.F, Kind.B) for s in range(num_stages) for k in range(num_micro_batches)
    }

    def may_go(action: Action) -> bool:
        stage, k = action.stage, action.micro_batch
        if action.kind is Kind.F:
            return stage == 0 or Action(Kind.F, stage - 1, k) in done
        own = Action(Kind.F, stage, k) in done
        return own and (stage == num_stages - 1 or Action(Kind.B, stage + 1, k) in done)

    while waiting:
        action = pick.choice(sorted((a for a in waiting if may_go(a)), key=str))
        waiting.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return tuple(tuple(row) for row in rows)


@settings(max_examples=60, deadline=None)
@given(
    placement=st.sampled_from([[0], [0, 1], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 0, 1]]),
    num_micro_batches=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_any_legal_order_becomes_a_program_that_verifies(
    placement: list[int], num_micro_batches: int, seed: int
) -> None:
    bare = Program.from_rows("random", random_order(placement, num_micro_batches, seed))
    built = add_transfers(bare)
    verify(built)
    compute = tuple(tuple(a for a in row if a.kind in (Kind.F, Kind.B)) for row in built.rows)
    assert compute == bare.rows, "the pass must not move compute"


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_a_send_waits_behind_its_producer_for_receives_only(name: str) -> None:
    built = program(name, 4, 8)
    between_ranks = {edge.producer: edge for edge in edges_between_ranks(built)}
    for row in built.rows:
        for index, action in enumerate(row):
            edge = between_ranks.get(action)
            if edge is None:
                continue
            between = row[index + 1 : row.index(edge.send)]
            assert all(other.kind in RECV_KINDS for other in between)


def test_no_send_waits_in_gpipe() -> None:
    """Every transfer of GPipe goes one way at a time, so each send can follow its producer at once."""
    built = program("gpipe", 4, 6)
    for edge in edges_between_ranks(built):
        row = built.rows[built.stage_ranks[edge.producer.stage]]
        assert row.index(edge.send) == row.index(edge.producer) + 1


def test_a_receive_stands_right_before_its_consumer_or_before_a_send() -> None:
    built = program("1f1b", 4, 8, reduce=False)
    for row in built.rows:
        for action, after in itertools.pairwise(row):
            if action.kind in RECV_KINDS:
                consumer = Action(Kind.F if action.kind is Kind.RECV_F else Kind.B, action.stage, action.micro_batch)
                assert after == consumer or after.kind in (*SEND_KINDS, *RECV_KINDS)


def test_message_count() -> None:
    """Per inner boundary one activation and one gradient per micro-batch."""
    for name in ("naive", "gpipe", "1f1b"):
        built = program(name, 4, 5)
        assert sum(a.kind in SEND_KINDS for row in built.rows for a in row) == 3 * 2 * 5


def test_golden_rows() -> None:
    rows = program("1f1b", 2, 3).to_csv().splitlines()
    assert rows == [
        "F0@0,SEND_F0@0,F1@0,SEND_F1@0,RECV_B0@0,B0@0,F2@0,SEND_F2@0,RECV_B1@0,B1@0,RECV_B2@0,ARM@0,B2@0,REDUCE@0",
        "RECV_F0@1,F0@1,B0@1,RECV_F1@1,SEND_B0@1,F1@1,B1@1,RECV_F2@1,SEND_B1@1,F2@1,ARM@1,B2@1,SEND_B2@1,REDUCE@1",
    ]


def test_an_order_that_waits_for_itself_is_refused() -> None:
    rows = (
        (Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),
        (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)),
    )
    with pytest.raises(Deadlock, match="rank 0 waits at B0@0, rank 1 waits at F0@1"):
        add_transfers(Program.from_rows("crossed", rows))
