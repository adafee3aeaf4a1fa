"""Adds SEND and RECV so that no order can deadlock, even where a send blocks until it is received.

All transfers get one global order, and every rank issues its transfers in that order. Of all that are not yet done,
both ranks of the first have nothing else to issue before it, so it happens; and so do all. The order is the time at
which the producer ends on the unit clock; of equal times, forwards go first, and of these the one nearest to the
pipeline's end (of backwards, its beginning), so that a rank rather sends than waits.

Within that order

- a send stands right after its producer (behind receives that come earlier in the global order), and
- a receive stands as late as it may: before its consumer, or before a send that comes later.

Source: the argument of ordered resource acquisition; NVIDIA/nccl issue 784 gives it for point-to-point calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.core.program import Action, Kind, Program
from meshwright.schedule.edges import Edge, Edges
from meshwright.schedule.unit_clock import unit_timeline


def add_transfers(program: Program) -> Program:
    """The program with a SEND and a RECV for each edge between two ranks; stages of one rank hand over without.

    Args:
        program: compute actions only.

    Raises:
        Deadlock: the order itself waits for something that comes later.
    """
    queues: list[list[Action]] = [[] for _ in program.rows]
    before: dict[Action, int] = {}
    after: dict[Action, int] = {}
    for source, target, edge in _in_global_order(program):
        queues[source].append(edge.send)
        after[edge.producer] = len(queues[source])
        queues[target].append(edge.recv)
        before[edge.consumer] = len(queues[target])
    rows = tuple(_merge(row, queue, before, after) for row, queue in zip(program.rows, queues, strict=True))
    return replace(program, rows=rows)


def _in_global_order(program: Program) -> list[tuple[int, int, Edge]]:
    """(sending rank, receiving rank, edge) of each edge between ranks."""
    found: list[tuple[tuple[float, bool, int], int, int, Edge]] = []
    by_producer = Edges(program)
    for rank, row in enumerate(unit_timeline(program).events):
        for _, end, action in row:
            edge = by_producer.out_of(action)
            if edge is not None and program.stage_ranks[edge.consumer.stage] != rank:
                backward = action.kind is not Kind.F
                key = (end, backward, action.stage if backward else -action.stage)
                found.append((key, rank, program.stage_ranks[edge.consumer.stage], edge))
    found.sort(key=lambda item: item[0])
    return [(source, target, edge) for _, source, target, edge in found]


def _merge(
    row: Sequence[Action], queue: Sequence[Action], before: Mapping[Action, int], after: Mapping[Action, int]
) -> tuple[Action, ...]:
    """The row with its transfers in between: up to `before[a]` of them ahead of action a, up to `after[a]` behind."""
    merged: list[Action] = []
    issued = 0
    for action in row:
        due = max(issued, before.get(action, 0))
        merged += queue[issued:due]
        merged.append(action)
        issued = max(due, after.get(action, 0))
        merged += queue[due:issued]
    return tuple(merged)
