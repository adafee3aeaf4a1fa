"""A replay says what the clock says, whatever actions take."""

from __future__ import annotations

import random

import pytest

from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.schedule import schedules
from meshwright.core.strategy import Strategy
from meshwright.schedule.build import build_program, program, timed_program
from meshwright.sim.clock import simulate
from meshwright.sim.replay import Replay


class Costs:
    """Random seconds for each kind and stage, some of them nothing."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known: dict[tuple[Kind, int], float] = {}

    def duration_s(self, kind: Kind, stage: int) -> float:
        if kind in (Kind.ARM, Kind.REDUCE, Kind.UPDATE):
            return 0.0
        return self._known.setdefault((kind, stage), self._random.choice((0.0, self._random.random())))


@pytest.mark.parametrize("name", [name for name, schedule in schedules().items() if not schedule.is_asynchronous])
def test_a_replay_ends_when_the_clock_does(name: str) -> None:
    whole, strategy = program(name, 4, 8), Strategy(pp=4, num_micro_batches=8, schedule=name)
    replay, of_whole = Replay(timed_program(strategy)), Replay(whole)
    for seed in range(4):
        costs = Costs(seed)
        rows = simulate(whole, costs).events
        expected = [max(event.end_s for event in row if event.action.kind in COMPUTE_KINDS) for row in rows]
        assert replay.ends_s(costs) == of_whole.ends_s(costs) == expected
    assert replay.ends_s(Costs(0)) != replay.ends_s(Costs(1))


@pytest.mark.parametrize("name", [name for name, schedule in schedules().items() if schedule.is_asynchronous])
def test_what_a_table_without_an_end_sends_goes_right_behind_what_it_makes(name: str) -> None:
    strategy = Strategy(pp=4, num_micro_batches=4, schedule=name)
    replay, of_whole = Replay(timed_program(strategy)), Replay(build_program(strategy))
    for seed in range(4):
        costs = Costs(seed)
        assert replay.ends_s(costs) == of_whole.ends_s(costs)
    assert replay.ends_s(Costs(0)) != replay.ends_s(Costs(1))
