"""Constraints on a plan: `tp<=8`, `pp>1`, `zero=1`, each a comparison of a strategy's number with another; and a limit
on the memory that a rank may fill."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError, RuleError
from meshwright.core.strategy import Strategy
from meshwright.core.units import counted
from meshwright.core.values import known

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
FIELDS = ("dp", "tp", "pp", "cp", "zero", "num_chunks", "micro_batch_size", "num_micro_batches", "tile", "prefetch")
"""What may be compared: whole numbers of a strategy."""

FROM_ZERO = ("zero", "prefetch")
"""Those of them that may be 0."""

UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_LIMIT = re.compile(r"\s*(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b|%)\s*", re.IGNORECASE)
_FORM = re.compile(r"\s*(?P<name>\w+)\s*(?P<sign><=|>=|!=|==|=|<|>)\s*(?P<value>\d+)\s*")


@dataclass(frozen=True, slots=True)
class Must:
    """One constraint."""

    field: str
    sign: str
    value: int

    def holds(self, strategy: Strategy) -> bool:
        return COMPARISONS[self.sign](getattr(strategy, self.field), self.value)

    def __str__(self) -> str:
        return f"{self.field}{self.sign}{self.value}"


def parse_must(texts: Iterable[str]) -> tuple[Must, ...]:
    """Raises InputError naming the text, and what may stand there, or constraints that no number keeps together."""
    musts = tuple(map(_parsed, texts))
    for field in dict.fromkeys(must.field for must in musts):
        of_field = [must for must in musts if must.field == field]
        pairs = [list(pair) for pair in combinations(of_field, 2)]
        for few in ([must] for must in of_field), pairs, [of_field]:
            against = next((some for some in few if not _is_possible(some)), None)
            if against is not None:
                raise InputError(_impossible(against))
    return musts


def _is_possible(musts: Sequence[Must]) -> bool:
    """Whether a number keeps all: if one does, so does one next to those that are compared with, or the least."""
    near = {must.value + step for must in musts for step in range(-len(musts), len(musts) + 1)}
    least = 0 if musts[0].field in FROM_ZERO else 1
    return any(
        all(COMPARISONS[must.sign](value, must.value) for must in musts) for value in near | {least} if value >= least
    )


def _impossible(musts: Sequence[Must]) -> str:
    field, wish = musts[0].field, " and ".join(map(str, musts))
    if len(musts) == 1:
        return f"--must {wish}: {field} is {0 if field in FROM_ZERO else 1} or more"
    all_of_them = "both" if len(musts) == 2 else "them all"
    return f"--must {wish}: they contradict each other, no {field} keeps {all_of_them}; leave one of them out"


def _parsed(text: str) -> Must:
    found = _FORM.fullmatch(text)
    if found is None:
        raise InputError(
            f"--must {text}: write FIELD, a comparison ({' '.join(COMPARISONS)}) and a whole number: tp<=8"
        )
    if found["name"] not in FIELDS:
        raise InputError(f"--must {text}: `{found['name']}` cannot be compared; {known(found['name'], FIELDS)}")
    return Must(found["name"], found["sign"], int(found["value"]))


def broken(musts: Sequence[Must], strategy: Strategy) -> Must | None:
    """The first constraint that a strategy breaks."""
    return next((must for must in musts if not must.holds(strategy)), None)


def kept(musts: Sequence[Must], legal: Sequence[Strategy], fixed: str = "") -> tuple[Strategy, ...]:
    """The strategies that keep all constraints.

    Args:
        legal: those to choose from.
        fixed: what else they all agree with, in words.

    Raises RuleError (rule `must`) where none does: the constraint that refuses most, what there is, and the smallest
    change of its number that leaves something.
    """
    left = tuple(strategy for strategy in legal if broken(musts, strategy) is None)
    if left or not legal:
        return left
    tightest = max(musts, key=lambda must: sum(not must.holds(strategy) for strategy in legal))
    others = tuple(must for must in musts if must is not tightest)
    open_to = [strategy for strategy in legal if broken(others, strategy) is None]
    wish = ", ".join(map(str, musts))
    if not open_to:
        raise RuleError(f"--must {wish}: each can be kept, but not together; leave one of them out", "must")
    there = sorted({getattr(strategy, tightest.field) for strategy in open_to})
    nearest = min(there, key=lambda value: abs(value - tightest.value))
    number = counted(len(legal), "legal strategy", "legal strategies") + (f" with {fixed}" if fixed else "")
    what = f"none of {number} has {tightest}"
    where = "here"
    if any(tightest.holds(strategy) for strategy in legal):
        what, where = f"none of {number} keeps all of it", f"with {', '.join(map(str, others))}"
    raise RuleError(
        f"--must {wish}: {what}; {tightest.field} can be {_listed(there)} {where}; {tightest.field}={nearest} comes "
        "closest",
        "must",
    )


def _listed(values: Sequence[int]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def limited(cluster: ClusterSpec, text: str) -> ClusterSpec:
    """The cluster whose ranks may fill so much: `60GB`, `56GiB`, or `75%` of a device's memory.

    Raises InputError where it is no size, nothing, or more than the device has.
    """
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise InputError(f"--memory-limit {text}: write a size, 60GB or 56GiB, or a share of the device's memory, 75%")
    has, unit = cluster.device.memory_bytes, found["unit"].lower()
    share = float(found["size"]) * (0.01 if unit == "%" else UNITS.get(unit, 1) / has)
    if not 0 < share <= 1:
        raise InputError(
            f"--memory-limit {text}: more than 0, and at most the {has / 1e9:.1f}GB of `{cluster.device.name}`"
        )
    return cluster.model_copy(update={"usable_memory_fraction": share})
