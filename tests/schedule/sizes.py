"""Sizes that schedules have timetables for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.core.program import Program
from meshwright.core.schedule import schedules
from meshwright.schedule.build import program

FREE_CHUNKS = (1, 2, 4)


class Table(NamedTuple):
    """A schedule and what its timetable is made for."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int = 1

    def build(self, reduce: bool = True) -> Program:
        return program(self.name, self.num_ranks, self.num_micro_batches, reduce, num_chunks=self.num_chunks)


def tables(
    ranks: Iterable[int], micro_batches: Iterable[int], names: Iterable[str] = (), chunks: Iterable[int] = FREE_CHUNKS
) -> Iterator[Table]:
    """All legal ones; of each schedule where no names are given."""
    known = schedules()
    for name in names or known:
        schedule = known[name]
        for num_ranks in ranks:
            for m in micro_batches:
                for v in chunks if schedule.chunks is None else (schedule.chunks,):
                    if not (schedule.fault and schedule.fault(schedule.size(num_ranks, m, v))):
                        yield Table(name, num_ranks, m, v)
