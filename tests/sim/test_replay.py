"""A replay says what the clock says, whatever actions take."""

from __future__ import annotations

import random

import pytest

from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.schedule import schedules
from meshwright.schedule.build import program
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
    replayed = program(name, 4, 8)
    replay = Replay(replayed)
    for seed in range(4):
        costs = Costs(seed)
        rows = simulate(replayed, costs).events
        expected = [max(event.end_s for event in row if event.action.kind in COMPUTE_KINDS) for row in rows]
        assert replay.ends_s(costs) == expected
    assert replay.ends_s(Costs(0)) != replay.ends_s(Costs(1))
