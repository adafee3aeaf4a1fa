"""The verifier: a table that passes here runs to its end, on any network, with every gradient complete.

Checks, in order: cells stand where they belong; each stage has F and either B or both I and W of each of its
micro-batches, exactly once; F before B or I, I before W; each tensor that crosses ranks is sent after it is made and
received before it is used, in the same order on both sides; gradients are reduced once, last; no deadlock even where
every send blocks until it is received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NoReturn

from meshwright.core.program import (
    COMPUTE_KINDS,
    INPUT_GRADIENT_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    WEIGHT_GRADIENT_KINDS,
    Action,
    Kind,
    Program,
)
from meshwright.schedule.draw import refused
from meshwright.schedule.edges import Edge, edges, edges_between_ranks
from meshwright.schedule.walk import Deadlock, walk

Place = tuple[int, int]
"""(rank, index into its row)."""


def verify(program: Program, backward: bool = True) -> None:
    """Prove that `program` can run.

    Args:
        backward: False for a forward-only program, in which every F stands once and nothing of a backward.

    Raises:
        ProgramError: the first fault found; one line, then the table with the cells in question marked.
    """
    places = verify_order(program, backward)
    crossing = tuple(edges_between_ranks(program))
    _check_transfers(program, places, crossing)
    for edge in crossing:
        _check_before(program, places, edge.producer, edge.send)
        _check_before(program, places, edge.recv, edge.consumer)
    _check_message_order(program, crossing)
    _check_reductions(program)
    try:
        walk(program, _Rendezvous(program))
    except Deadlock as deadlock:
        fault = f"{str(deadlock).removeprefix(f'{program.name}: ')} (sends block until received)"
        raise refused(program, fault, deadlock.waiting.items()) from None


def verify_order(program: Program, backward: bool = True) -> dict[Action, Place]:
    """Prove that the compute actions are those of one step, each behind what its own rank must have done before.

    Returns where each action stands. Raises ProgramError as :func:`verify` does.
    """
    _check_cells(program)
    places = _places(program)
    _check_compute(program, places, backward)
    for action in places:
        if action.kind in INPUT_GRADIENT_KINDS:
            _check_before(program, places, Action(Kind.F, action.stage, action.micro_batch), action)
        elif action.kind is Kind.W:
            _check_before(program, places, Action(Kind.I, action.stage, action.micro_batch), action)
    _check_updates(program, places)
    return places


def _check_cells(program: Program) -> None:
    """Every cell names a stage of its rank and, where its kind has one, a micro-batch of the step."""
    for stage, rank in enumerate(program.stage_ranks):
        if not 0 <= rank < program.num_ranks:
            _fail(program, f"stage {stage} stands on rank {rank}, but there are {program.num_ranks} ranks")
    for rank, row in enumerate(program.rows):
        for index, action in enumerate(row):
            fault = _cell_fault(program, rank, action)
            if fault:
                _fail(program, f"{action} on rank {rank}: {fault}", {(rank, index)})


def _cell_fault(program: Program, rank: int, action: Action) -> str | None:
    if not 0 <= action.stage < program.num_stages:
        return f"there are {program.num_stages} stages"
    if program.stage_ranks[action.stage] != rank:
        return f"stage {action.stage} stands on rank {program.stage_ranks[action.stage]}"
    if action.kind in (Kind.ARM, Kind.REDUCE):
        return None if action.micro_batch is None else f"{action.kind} is for all micro-batches"
    if action.micro_batch is None or not 0 <= action.micro_batch < program.num_micro_batches:
        return f"there are {program.num_micro_batches} micro-batches"
    passing = program.micro_batches(action.stage)
    if action.micro_batch not in passing:
        return f"micro-batches {passing.start} to {passing.stop - 1} go in the direction of stage {action.stage}"
    return None


def _places(program: Program) -> dict[Action, Place]:
    """Where each action stands; refuses one that stands twice."""
    places: dict[Action, Place] = {}
    for rank, row in enumerate(program.rows):
        for index, action in enumerate(row):
            if action in places:
                _fail(program, f"{action} stands twice on rank {rank}", {places[action], (rank, index)})
            places[action] = (rank, index)
    return places


def _check_compute(program: Program, places: dict[Action, Place], backward: bool) -> None:
    """F and one whole or split backward per stage and micro-batch that passes it."""
    needed: set[Action] = set()
    for stage in range(program.num_stages):
        for k in program.micro_batches(stage):
            needed.add(Action(Kind.F, stage, k))
            if backward:
                needed.update(_backward(program, places, stage, k))
    _check_same(program, needed, {a: place for a, place in places.items() if a.kind in COMPUTE_KINDS})


def _backward(program: Program, places: dict[Action, Place], stage: int, k: int) -> tuple[Action, ...]:
    """What a micro-batch needs on a stage: I and W where the table splits its backward, else B."""
    whole, *halves = (Action(kind, stage, k) for kind in (Kind.B, Kind.I, Kind.W))
    split = [half for half in halves if half in places]
    if whole in places and split:
        rank, marked = places[whole][0], {places[whole], *(places[half] for half in split)}
        _fail(program, f"{whole} and {split[0]} stand both on rank {rank}; a backward is whole or split", marked)
    return tuple(halves) if split else (whole,)


def _check_transfers(program: Program, places: dict[Action, Place], crossing: Iterable[Edge]) -> None:
    """One send and one receive per tensor that crosses ranks, and no others."""
    needed = {action for edge in crossing for action in (edge.send, edge.recv)}
    _check_same(program, needed, {a: p for a, p in places.items() if a.kind in (*SEND_KINDS, *RECV_KINDS)})


def _check_same(program: Program, needed: Collection[Action], places: dict[Action, Place]) -> None:
    missing = sorted((a for a in needed if a not in places), key=lambda a: (a.stage, a.kind, a.micro_batch or 0))
    if missing:
        rank = program.stage_ranks[missing[0].stage]
        _fail(program, f"{missing[0]} is missing on rank {rank} ({len(missing)} missing in all)")
    for action, place in places.items():
        if action not in needed:
            _fail(program, f"{action} on rank {place[0]} has no purpose in this step", {place})


def _check_before(program: Program, places: dict[Action, Place], first: Action, second: Action) -> None:
    """Of two actions of one rank."""
    if places[first][1] > places[second][1]:
        fault = f"{second} stands before {first} on rank {places[first][0]}, which it needs"
        _fail(program, fault, {places[first], places[second]})


def _check_updates(program: Program, places: dict[Action, Place]) -> None:
    """If any stage is updated, each is, after the same micro-batches and the last; with just their gradients in it."""
    updates: list[list[Action]] = [[] for _ in program.stage_ranks]
    for action in sorted((a for a in places if a.kind is Kind.UPDATE), key=lambda a: a.micro_batch or 0):
        updates[action.stage].append(action)
    everywhere = {update.micro_batch for of_stage in updates for update in of_stage}
    if not everywhere:
        return
    for stage, of_stage in enumerate(updates):
        needed = everywhere | {program.num_micro_batches - 1}
        for k in sorted(needed - {update.micro_batch for update in of_stage}, key=lambda k: k or 0):
            _fail(program, f"{Action(Kind.UPDATE, stage, k)} is missing on rank {program.stage_ranks[stage]}")
    for maker in (a for a in places if a.kind in WEIGHT_GRADIENT_KINDS):
        for update in updates[maker.stage]:
            takes_in = (maker.micro_batch or 0) <= (update.micro_batch or 0)
            _check_before(program, places, *((maker, update) if takes_in else (update, maker)))


def _check_message_order(program: Program, crossing: Iterable[Edge]) -> None:
    """Two ranks must agree on the order of the messages from one to the other, for networks without tags."""
    partner: dict[Action, Edge] = {edge.send: edge for edge in crossing}
    partner |= {edge.recv: edge for edge in partner.values()}
    sides: dict[tuple[int, int], tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
    for rank, row in enumerate(program.rows):
        for index, action in enumerate(row):
            if action in partner:
                edge = partner[action]
                pair = (program.stage_ranks[edge.send.stage], program.stage_ranks[edge.recv.stage])
                sides[pair][action.kind in RECV_KINDS].append((rank, index))
    for (source, target), (sends, receives) in sides.items():
        for sent, received in zip(sends, receives, strict=True):
            send, receive = program.rows[sent[0]][sent[1]], program.rows[received[0]][received[1]]
            if partner[send].recv != receive:
                fault = f"rank {source} sends {send} where rank {target} expects {receive}"
                _fail(program, fault, {sent, received})


def _check_reductions(program: Program) -> None:
    """If any stage is reduced, each is: ARM before its last B or W, REDUCE after all other work of the rank."""
    kinds = {action.kind for row in program.rows for action in row}
    reduced = bool(kinds & {Kind.ARM, Kind.REDUCE})
    if reduced and Kind.UPDATE in kinds:
        _fail(program, "ARM and REDUCE beside UPDATE, which reduces what it takes in; leave one or the other out")
    for rank, row in enumerate(program.rows if reduced else ()):
        end = next((index for index, action in enumerate(row) if action.kind is Kind.REDUCE), len(row))
        for index in range(end, len(row)):
            if row[index].kind is not Kind.REDUCE:
                _fail(program, f"{row[index]} on rank {rank} stands after {row[end]}", {(rank, end), (rank, index)})
        for stage in (s for s, where in enumerate(program.stage_ranks) if where == rank):
            _check_stage_reduction(program, rank, stage)


def _check_stage_reduction(program: Program, rank: int, stage: int) -> None:
    row = program.rows[rank]
    for kind in (Kind.ARM, Kind.REDUCE):
        if Action(kind, stage) not in row:
            _fail(program, f"{Action(kind, stage)} is missing on rank {rank}, though the program reduces gradients")
    armed = row.index(Action(Kind.ARM, stage))
    makes = [index for index, a in enumerate(row) if a.kind in WEIGHT_GRADIENT_KINDS and a.stage == stage]
    ahead_of = sum(index > armed for index in makes)
    if ahead_of != 1:
        fault = f"{row[armed]} on rank {rank} stands ahead of {ahead_of} backwards of its stage, not of the last alone"
        _fail(program, fault, {(rank, armed)})


class _Rendezvous:
    """The strictest network: a send and its receive happen only when both ranks stand at them."""

    def __init__(self, program: Program) -> None:
        ranks = program.stage_ranks
        self._peer: dict[Action, tuple[int, Action]] = {}
        self._needs: dict[Action, Action] = {}
        for edge in edges(program):
            source, target = ranks[edge.producer.stage], ranks[edge.consumer.stage]
            if source == target:
                self._needs[edge.consumer] = edge.producer
            else:
                self._peer[edge.send] = (target, edge.recv)
                self._peer[edge.recv] = (source, edge.send)
        self._done: set[Action] = set()
        self._standing: dict[int, Action] = {}

    def attempt(self, rank: int, action: Action) -> bool:
        self._standing[rank] = action
        if action not in self._done and not self._may_go(action):
            return False
        self._done.add(action)
        return True

    def _may_go(self, action: Action) -> bool:
        """Whichever of two partners comes second lets both go on."""
        if action in self._peer:
            peer, partner = self._peer[action]
            met = self._standing.get(peer) == partner
            if met:
                self._done.add(partner)
            return met
        return action not in self._needs or self._needs[action] in self._done


def _fail(program: Program, fault: str, places: Iterable[Place] = ()) -> NoReturn:
    raise refused(program, fault, places)
