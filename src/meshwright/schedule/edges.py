"""What depends on what: the data that flows between stages.

F k@s ──activation──> F k@s+1        carried by SEND_F k@s, RECV_F k@s+1
B k@s ──gradient────> B k@s−1        carried by SEND_B k@s, RECV_B k@s−1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.program import Action, Kind, Program


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor that a stage makes and a neighbour needs, with the two actions that carry it between ranks."""

    producer: Action
    send: Action
    recv: Action
    consumer: Action


def edge_from(producer: Action, num_stages: int) -> Edge | None:
    """The edge out of a compute action; None where its result leaves the pipeline or the action computes nothing."""
    stage, k = producer.stage, producer.micro_batch
    if producer.kind is Kind.F and stage + 1 < num_stages:
        to = stage + 1
        return Edge(producer, Action(Kind.SEND_F, stage, k), Action(Kind.RECV_F, to, k), Action(Kind.F, to, k))
    if producer.kind is Kind.B and stage > 0:
        to = stage - 1
        return Edge(producer, Action(Kind.SEND_B, stage, k), Action(Kind.RECV_B, to, k), Action(Kind.B, to, k))
    return None


def edges(program: Program) -> Iterator[Edge]:
    """Every edge out of the program's compute actions, row by row."""
    for row in program.rows:
        for action in row:
            edge = edge_from(action, program.num_stages)
            if edge is not None:
                yield edge


def edges_between_ranks(program: Program) -> Iterator[Edge]:
    """The edges whose two stages stand on different ranks; these need a SEND and a RECV."""
    ranks = program.stage_ranks
    return (edge for edge in edges(program) if ranks[edge.producer.stage] != ranks[edge.consumer.stage])
