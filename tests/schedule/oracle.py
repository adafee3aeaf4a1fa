"""What makes a table legal, written a second time without the verifier's code; and ways to spoil one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from meshwright.core.program import Action, Kind, Program

Cell = tuple[str, int, str]
"""(kind, stage, micro-batch as text; empty for all)."""


def is_legal(table: Program) -> bool:
    """Whether the table computes all of one step and runs to its end, even where every send blocks."""
    oracle = _Oracle(table)
    counted = oracle.cells_belong() and oracle.all_is_computed_once()
    return counted and oracle.reduces_last() and oracle.updates_with_its_own() and oracle.runs()


class _Oracle:
    def __init__(self, table: Program) -> None:
        self.rows: list[list[Cell]] = [[_cell(action) for action in row] for row in table.rows]
        self.table = table
        self.parts = table.num_stages // table.num_directions
        self.share = table.num_micro_batches // table.num_directions

    def is_first(self, stage: int) -> bool:
        return stage % self.parts == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.parts == self.parts - 1

    def cells_belong(self) -> bool:
        return all(
            0 <= stage < self.table.num_stages
            and self.table.stage_ranks[stage] == rank
            and (kind in ("ARM", "REDUCE")) == (k == "")
            for rank, row in enumerate(self.rows)
            for kind, stage, k in row
        )

    def all_is_computed_once(self) -> bool:
        """Compute actions and transfers, as a multiset."""
        have = Counter(cell for row in self.rows for cell in row if cell[0] not in ("ARM", "REDUCE", "UPDATE"))
        want: Counter[Cell] = Counter()
        ranks = self.table.stage_ranks
        for stage in range(self.table.num_stages):
            start = stage // self.parts * self.share
            for k in map(str, range(start, start + self.share)):
                want[("F", stage, k)] += 1
                want.update([("I", stage, k), ("W", stage, k)] if ("I", stage, k) in have else [("B", stage, k)])
                if not self.is_last(stage) and ranks[stage] != ranks[stage + 1]:
                    want.update([("SEND_F", stage, k), ("RECV_F", stage + 1, k)])
                    want.update([("SEND_B", stage + 1, k), ("RECV_B", stage, k)])
        return have == want

    def reduces_last(self) -> bool:
        """ARM ahead of just one action that makes weight gradients, REDUCE last, of all stages or of none."""
        kinds = Counter((kind, stage) for row in self.rows for kind, stage, _ in row if kind in ("ARM", "REDUCE"))
        if kinds and kinds != Counter((kind, s) for kind in ("ARM", "REDUCE") for s in range(self.table.num_stages)):
            return False
        for row in self.rows:
            for at, (kind, stage, _) in enumerate(row):
                behind = row[at + 1 :]
                if kind == "ARM" and sum(k in ("B", "W") and s == stage for k, s, _ in behind) != 1:
                    return False
                if kind == "REDUCE" and any(k != "REDUCE" for k, _, _ in behind):
                    return False
        return True

    def updates_with_its_own(self) -> bool:
        """Each update once, of all stages alike, behind its own micro-batches and ahead of later ones."""
        numbers = []
        for stage, rank in enumerate(self.table.stage_ranks):
            row = self.rows[rank]
            updates = [(int(k), at) for at, (kind, s, k) in enumerate(row) if (kind, s) == ("UPDATE", stage)]
            makers = [(int(k), at) for at, (kind, s, k) in enumerate(row) if kind in ("B", "W") and s == stage]
            if any((k <= number) != (at < place) for number, place in updates for k, at in makers):
                return False
            numbers.append(sorted(number for number, _ in updates))
        if not any(numbers):
            return True
        if any(kind in ("ARM", "REDUCE") for row in self.rows for kind, _, _ in row):
            return False
        once = sorted({*numbers[0], self.table.num_micro_batches - 1})
        return all(of_stage == once for of_stage in numbers)

    def runs(self, blocking: bool = True) -> bool:
        """Row by row as far as data allows; a transfer happens when both ranks stand at it, or when it is sent."""
        self.blocking = blocking
        self.have: set[Cell] = set()
        self.at = [0] * len(self.rows)
        while any(self._step(rank) for rank in range(len(self.rows))):
            pass
        return all(at == len(row) for at, row in zip(self.at, self.rows, strict=True))

    def _head(self, rank: int) -> Cell | None:
        return self.rows[rank][self.at[rank]] if self.at[rank] < len(self.rows[rank]) else None

    def _step(self, rank: int) -> bool:
        head = self._head(rank)
        if head is None or (self.blocking and head[0].startswith("RECV")):
            return False  # a receive is moved by its sender
        kind, stage, k = head
        if not self._needs(kind, stage, k) <= self.have:
            return False
        if kind.startswith("SEND"):
            to = stage + (1 if kind == "SEND_F" else -1)
            peer = self.table.stage_ranks[to]
            if self.blocking and self._head(peer) != (kind.replace("SEND", "RECV"), to, k):
                return False
            self.have.add(("input" if kind == "SEND_F" else "gradient", to, k))
            self.at[peer] += self.blocking
        self._gives(kind, stage, k)
        self.at[rank] += 1
        return True

    def _needs(self, kind: str, stage: int, k: str) -> set[Cell]:
        match kind:
            case "F":
                return set() if self.is_first(stage) else {("input", stage, k)}
            case "B" | "I":
                return {("F", stage, k)} | (set() if self.is_last(stage) else {("gradient", stage, k)})
            case "W":
                return {("I", stage, k)}
            case "SEND_F":
                return {("F", stage, k)}
            case "SEND_B":
                return {("back", stage, k)}
            case "RECV_F" | "RECV_B":
                return {("input" if kind == "RECV_F" else "gradient", stage, k)}
        return set()

    def _gives(self, kind: str, stage: int, k: str) -> None:
        ranks = self.table.stage_ranks
        self.have.add((kind, stage, k))
        if kind == "F" and not self.is_last(stage) and ranks[stage] == ranks[stage + 1]:
            self.have.add(("input", stage + 1, k))
        if kind in ("B", "I"):
            self.have.add(("back", stage, k))
            if not self.is_first(stage) and ranks[stage] == ranks[stage - 1]:
                self.have.add(("gradient", stage - 1, k))


def _cell(action: Action) -> Cell:
    text, stage = str(action).split("@")
    kind = text.rstrip("0123456789")
    return kind, int(stage), text[len(kind) :]


def with_row(table: Program, rank: int, row: list[Action]) -> Program:
    """The table with one row replaced."""
    return replace(table, rows=(*table.rows[:rank], tuple(row), *table.rows[rank + 1 :]))


def spoilt(table: Program, how: str, pick: random.Random) -> Program:
    """The table with one action, drawn by chance, dropped, doubled, swapped, moved, split, joined or renumbered."""
    rank = pick.randrange(table.num_ranks)
    row = list(table.rows[rank])
    i, j = pick.sample(range(len(row)), 2)
    match how:
        case "drop":
            del row[i]
        case "double":
            row.insert(j, row[i])
        case "swap":
            row[i], row[j] = row[j], row[i]
        case "nudge":
            at = min(i, len(row) - 2)
            row[at], row[at + 1] = row[at + 1], row[at]
        case "move":
            row.insert(j, row.pop(i))
        case "split" | "split wrongly":
            at = _one(pick, row, Kind.B)
            parts = [replace(row[at], kind=kind) for kind in (Kind.I, Kind.W)]
            row[at : at + 1] = parts if how == "split" else parts[::-1]
        case "join":
            at = _one(pick, row, Kind.I)
            row[at] = replace(row[at], kind=Kind.B)
        case "renumber":
            row[i] = replace(row[i], micro_batch=pick.randrange(table.num_micro_batches + 1))
        case "other rank":
            other = (rank + 1) % table.num_ranks
            action = row.pop(i)
            table = with_row(table, other, [*table.rows[other], action])
    return with_row(table, rank, row)


def _one(pick: random.Random, row: list[Action], kind: Kind) -> int:
    """Place of an action of that kind, or of any where the row has none."""
    return pick.choice([at for at, action in enumerate(row) if action.kind is kind] or range(len(row)))


WAYS = ("drop", "double", "swap", "nudge", "move", "split", "split wrongly", "join", "renumber", "other rank")


def runs_to_its_end(table: Program) -> bool:
    """Whether all rows are carried out, whatever they hold, where sends don't block."""
    return _Oracle(table).runs(blocking=False)
