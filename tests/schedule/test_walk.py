"""The loop: order within a row, one rank alone, the deadlock report."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from meshwright.core.program import Action
from meshwright.schedule.build import program
from meshwright.schedule.walk import Deadlock, walk


@dataclass
class Recorder:
    """Does everything, except what is in `never`."""

    never: frozenset[str] = frozenset()
    seen: list[tuple[int, Action]] = field(default_factory=list)

    def attempt(self, rank: int, action: Action) -> bool:
        if str(action) in self.never:
            return False
        self.seen.append((rank, action))
        return True


def test_each_row_is_done_in_its_order() -> None:
    built = program("1f1b", 3, 4)
    machine = Recorder()
    walk(built, machine)
    for rank, row in enumerate(built.rows):
        assert tuple(action for where, action in machine.seen if where == rank) == row


def test_one_rank_reads_just_its_row() -> None:
    built = program("1f1b", 3, 4)
    machine = Recorder()
    walk(built, machine, ranks=[1])
    assert machine.seen == [(1, action) for action in built.rows[1]]


def test_deadlock_names_where_each_rank_waits_and_how_many_more() -> None:
    built = program("gpipe", 12, 1)
    with pytest.raises(Deadlock) as caught:
        walk(built, Recorder(never=frozenset(f"F0@{stage}" for stage in range(1, 12))))
    assert "rank 1 waits at F0@1" in str(caught.value)
    assert "and 3 more ranks wait" in str(caught.value)
    assert caught.value.waiting == dict.fromkeys(range(1, 12), 1)
