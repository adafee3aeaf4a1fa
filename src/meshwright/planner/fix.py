"""What the user fixed: values of Strategy fields, read from text or from Python, each checked on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.core.errors import RuleError
from meshwright.core.schedule import find_schedule
from meshwright.core.strategy import Strategy
from meshwright.core.units import counted
from meshwright.core.values import Value
from meshwright.planner.named import NamedFields, checked, types_of

CLOSED = {"ranks_per_node": "a plan takes it from its cluster; name one with such nodes, for example 2x4xh100"}
"""Fields that are not for the user to fix, and why."""

FIXED = NamedFields("--fix", types_of(Strategy), "a strategy", "dp=2", CLOSED)


def parse_fix(texts: Iterable[str]) -> dict[str, Any]:
    """`dp=2`, `layers_per_stage=3,3,2`, ... to field values. A field may be named once.

    Raises InputError naming the text.
    """
    return check_named(FIXED.read(texts), FIXED.option)


def check_named(fix: Mapping[str, Any], option: str) -> dict[str, Any]:
    """:func:`check_fix` of what was named by an option; RuleError where it contradicts itself."""
    values = check_fix(fix, option)
    _check_chunks(values, option)
    return values


def check_fix(fix: Mapping[str, Any], option: str = "fix") -> dict[str, Any]:
    """The same values with their field's type. Raises InputError naming the field, its values and the near misses."""
    for name, value in fix.items():
        if name not in CLOSED or value is not None:
            FIXED.check_known(name, f"{option} {name}")
    return {name: checked(Strategy, name, value, f"{option} {name}") for name, value in fix.items()}


def _check_chunks(fix: Mapping[str, Any], option: str) -> None:
    """Raises RuleError where stages per rank are asked for beside a schedule that has a number of its own."""
    own = find_schedule(fix["schedule"]).chunks if "schedule" in fix else None
    if own is not None and fix.get("num_chunks", own) != own:
        raise RuleError(
            f"{option} {in_words(fix)}: schedule `{fix['schedule']}` puts {counted(own, 'stage')} on a rank, always; "
            "leave num_chunks out",
            "pp-chunks",
        )


def in_words(fix: Mapping[str, Any]) -> str:
    """`dp=2, zero=1`, and of several parts those that were named: `tensor=kind:2d`."""
    return ", ".join(f"{name}={_as_typed(value)}" for name, value in fix.items())


def _as_typed(value: Any) -> str:
    if not isinstance(value, Value):
        return str(value)
    return ",".join(
        f"{part}:{getattr(value, part)}" for part in type(value).model_fields if part in value.model_fields_set
    )
