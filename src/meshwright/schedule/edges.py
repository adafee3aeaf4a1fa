"""What depends on what: the data that flows between stages.

F k@s ──activation──> F k@s+1              carried by SEND_F k@s, RECV_F k@s+1
B or I k@s ──gradient──> B or I k@s−1      carried by SEND_B k@s, RECV_B k@s−1

Two stages on one rank hand over without SEND and RECV. Directions have no edge between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.program import INPUT_GRADIENT_KINDS, Action, Kind, Program


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor that a stage makes and a neighbour needs, with the two actions that carry it between ranks."""

    producer: Action
    send: Action
    recv: Action
    consumer: Action


class Edges:
    """The edges of one program, by the action that they start from."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._split = {(a.stage, a.micro_batch) for row in program.rows for a in row if a.kind is Kind.I}

    def out_of(self, producer: Action) -> Edge | None:
        """The edge out of an action; None where its result leaves the pipeline or stays on the stage."""
        stage, k = producer.stage, producer.micro_batch
        if producer.kind is Kind.F:
            to = self._program.next_stage(stage)
            if to is not None:
                return Edge(producer, Action(Kind.SEND_F, stage, k), Action(Kind.RECV_F, to, k), Action(Kind.F, to, k))
        elif producer.kind in INPUT_GRADIENT_KINDS:
            to = self._program.previous_stage(stage)
            if to is not None:
                taken_by = Kind.I if (to, k) in self._split else Kind.B
                return Edge(
                    producer, Action(Kind.SEND_B, stage, k), Action(Kind.RECV_B, to, k), Action(taken_by, to, k)
                )
        return None


def edges(program: Program) -> Iterator[Edge]:
    """Every edge out of the program's compute actions, row by row."""
    found = Edges(program)
    return (edge for row in program.rows for action in row if (edge := found.out_of(action)) is not None)


def edges_between_ranks(program: Program) -> Iterator[Edge]:
    """The edges whose two stages stand on different ranks; these need a SEND and a RECV."""
    ranks = program.stage_ranks
    return (edge for edge in edges(program) if ranks[edge.producer.stage] != ranks[edge.consumer.stage])
