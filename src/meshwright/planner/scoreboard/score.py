"""How far the forecasts of a table are from what was measured, and beside them the simplest model there is.

error     mean and worst of |forecast ÷ measured − 1|; bias is the mean with its sign
regret    of each search group: measured time of the row that the forecast puts first, over the best measured, less 1
constant  step time = FLOPs ÷ (peak × utilisation): one number, fitted on the table itself (the median of its `fit`
          rows, or of all where it has none), or borrowed: the median of the other tables' numbers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from meshwright.planner.scoreboard.published import PublishedRow, PublishedTable
from meshwright.planner.scoreboard.replay import NotReplayed, Replayed, replay

PICKED_WHAT_DOES_NOT_FIT = 1.0
"""Regret of a group whose forecast puts a run first that was out of memory."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Of several rows. All are shares, 0.05 for 5 %; None where there is no row."""

    count: int
    mean: float | None
    worst: float | None
    bias: float | None


@dataclass(frozen=True, slots=True)
class TableScore:
    """One table's board."""

    name: str
    num_rows: int
    num_expressed: int
    time: Errors
    memory: Errors
    false_fits: int
    false_refusals: int
    regrets: tuple[float, ...]
    own_constant: Errors
    borrowed_constant: Errors
    not_expressed: tuple[tuple[str, int], ...]
    """(reason, rows), most first."""
    replayed: tuple[Replayed, ...]


def errors(values: Iterable[float | None]) -> Errors:
    """Summary of signed relative errors."""
    known = [value for value in values if value is not None]
    if not known:
        return Errors(0, None, None, None)
    sizes = [abs(value) for value in known]
    return Errors(len(known), mean(sizes), max(sizes), mean(known))


def scoreboard(tables: Sequence[PublishedTable], use: str = "check") -> tuple[TableScore, ...]:
    """One score per table that has a row of that use.

    Args:
        tables: as from :func:`~meshwright.planner.scoreboard.published.read_tables`.
        use: `check`, `fit` or `all`: which rows are judged. Constants are fitted on `fit` rows, whatever is judged.
    """
    done = {table.name: replay(table.rows) for table in tables}
    constants = {name: constant for name, (rows, _) in done.items() if (constant := utilisation(rows)) is not None}
    scores = []
    for table in tables:
        judged = [row for row in table.rows if use in ("all", row.use)]
        if judged:
            replayed, passed_over = done[table.name]
            scores.append(_score(table.name, judged, replayed, passed_over, constants))
    return tuple(scores)


def utilisation(rows: Sequence[Replayed]) -> float | None:
    """The constant of a table: the median share of the peak that its runs reached; None without any time."""
    reached = [(r.row.use, r.ideal_s / r.row.step_s) for r in rows if r.row.step_s]
    tuned = [share for use, share in reached if use == "fit"]
    return median(tuned or [share for _, share in reached]) if reached else None


def _score(
    name: str,
    judged: Sequence[PublishedRow],
    replayed: Sequence[Replayed],
    passed_over: Sequence[NotReplayed],
    constants: Mapping[str, float],
) -> TableScore:
    ids = {row.id for row in judged}
    rows = [r for r in replayed if r.row.id in ids]
    others = [constant for of, constant in constants.items() if of != name]
    reasons = Counter(n.reason for n in passed_over if n.row.id in ids)
    return TableScore(
        name=name,
        num_rows=len(judged),
        num_expressed=len(rows),
        time=errors(r.time_error for r in rows),
        memory=errors(r.memory_error for r in rows),
        false_fits=sum(r.is_false_fit for r in rows),
        false_refusals=sum(r.is_false_refusal for r in rows),
        regrets=tuple(regrets(rows)),
        own_constant=_of_constant(rows, constants.get(name)),
        borrowed_constant=_of_constant(rows, median(others) if others else None),
        not_expressed=tuple(reasons.most_common()),
        replayed=tuple(rows),
    )


def _of_constant(rows: Sequence[Replayed], share: float | None) -> Errors:
    if share is None:
        return errors(())
    return errors(r.ideal_s / share / r.row.step_s - 1 for r in rows if r.row.step_s)


def regrets(rows: Sequence[Replayed]) -> list[float]:
    """One number per search group with two measured rows or more."""
    groups: dict[str, list[Replayed]] = defaultdict(list)
    for replayed in rows:
        if replayed.row.group and (replayed.row.step_s or replayed.row.ran_out_of_memory):
            groups[replayed.row.group].append(replayed)
    return [_regret(group) for group in groups.values() if sum(r.row.step_s is not None for r in group) > 1]


def _regret(group: Sequence[Replayed]) -> float:
    fitting = [r for r in group if r.fits] or group
    measured_s = min(fitting, key=lambda r: r.forecast_s).row.step_s
    if measured_s is None:
        return PICKED_WHAT_DOES_NOT_FIT
    return measured_s / min(r.row.step_s for r in group if r.row.step_s is not None) - 1
