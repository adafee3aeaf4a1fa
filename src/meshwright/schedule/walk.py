"""The one loop that reads a Program. The verifier, the clock and the runtime are machines that it drives.

walk:     rank 0  F0@0 ─ SEND_F0@0 ─ F1@0 ...      "may this action go?"  → machine
          rank 1  RECV_F0@1 ─ F0@1 ─ ...            yes: it is done, next; no: the rank waits
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from meshwright.core.errors import ProgramError
from meshwright.core.program import Action, Program

_RANKS_SHOWN = 8


class Machine(Protocol):
    """What carries out actions: a check, a clock, or a real rank."""

    def attempt(self, rank: int, action: Action) -> bool:
        """Do `action` on `rank` and return True, or return False where it must wait for another rank.

        A real rank, alone in its process, blocks instead and always returns True.
        """
        ...


class Deadlock(ProgramError):
    """No rank can go on. `waiting` gives each stuck rank's index into its row."""

    def __init__(self, program: Program, waiting: Mapping[int, int]) -> None:
        self.waiting = dict(waiting)
        places = [f"rank {rank} waits at {program.rows[rank][at]}" for rank, at in list(waiting.items())[:_RANKS_SHOWN]]
        more = len(waiting) - len(places)
        tail = f", and {more} more ranks wait" if more else ""
        super().__init__(f"{program.name}: deadlock: {', '.join(places)}{tail}")


def walk(program: Program, machine: Machine, ranks: Iterable[int] | None = None) -> None:
    """Carry out the rows of `ranks` (all by default), each in its order, as far ahead as the machine allows.

    Sweeps go up and down the ranks in turn, since activations travel up and gradients down.

    Raises:
        Deadlock: no rank of a whole sweep could move, and some are not at their end.
    """
    sweep = list(range(program.num_ranks) if ranks is None else ranks)
    at = dict.fromkeys(sweep, 0)
    moved = True
    while moved:
        moved = False
        for rank in sweep:
            reached = _advance(program.rows[rank], at[rank], rank, machine)
            moved = moved or reached > at[rank]
            at[rank] = reached
        sweep.reverse()
    waiting = {rank: index for rank, index in sorted(at.items()) if index < len(program.rows[rank])}
    if waiting:
        raise Deadlock(program, waiting)


def _advance(row: tuple[Action, ...], start: int, rank: int, machine: Machine) -> int:
    """Index of the first action from `start` on that must wait, or the row's length."""
    attempt = machine.attempt
    for index in range(start, len(row)):
        if not attempt(rank, row[index]):
            return index
    return len(row)
