"""What the user fixed: values of Strategy fields, read from text or from Python, each checked on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from meshwright.core.errors import InputError, RuleError
from meshwright.core.schedule import find_schedule
from meshwright.core.strategy import Strategy
from meshwright.core.units import counted
from meshwright.core.values import Value, shortened

FIELDS = tuple(name for name in Strategy.model_fields if name != "ranks_per_node")
NESTED = ("offload", "tensor", "context", "expert")
"""Fields that are values of several parts."""


def parse_fix(texts: Iterable[str]) -> dict[str, Any]:
    """`dp=2`, `layers_per_stage=3,3,2`, ... to field values. A field may be named once.

    Raises InputError naming the text.
    """
    checked = check_fix({name: _parsed(name, value) for name, value in named_values(texts, FIELDS, "--fix", "dp=2")})
    _check_chunks(checked)
    return checked


def named_values(texts: Iterable[str], fields: Sequence[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    """(field, value) of each `FIELD=VALUE`, as text; whether there is such a field is looked at by the caller.

    Args:
        texts: what was given to `option`.
        fields: what may be named; said where a text has another form.
        option: as it is typed, for example `--fix`.
        example: a text of the right form.

    Raises InputError naming the text: another form, or a field that was named before.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(
                f"{option} {text}: write FIELD=VALUE, for example {option} {example}; fields: {', '.join(fields)}"
            )
        if name in found:
            both = _joined(found[name], value)
            both = f"; name all parts at once: {option} {name}={both}" if both else ""
            raise InputError(f"{option} {text}: `{name}` is already fixed to {found[name]}{both}")
        found[name] = value
        yield name, value


def _joined(first: str, second: str) -> str:
    """Parts of a field that were named one by one, as they are named at once; empty where one was named twice."""
    named = [part.partition(":")[0].strip() for part in (*first.split(","), *second.split(","))]
    return f"{first},{second}" if ":" in first and ":" in second and len(set(named)) == len(named) else ""


def _check_chunks(fix: Mapping[str, Any]) -> None:
    """Raises RuleError where stages per rank are asked for beside a schedule that has a number of its own."""
    own = find_schedule(fix["schedule"]).chunks if "schedule" in fix else None
    if own is not None and fix.get("num_chunks", own) != own:
        raise RuleError(
            f"--fix {in_words(fix)}: schedule `{fix['schedule']}` puts {counted(own, 'stage')} on a rank, always; "
            "leave num_chunks out",
            "pp-chunks",
        )


def _parsed(name: str, text: str) -> Any:
    """Lists with commas; values of several parts as `optimizer:disk,path:/scratch`."""
    if name == "layers_per_stage":
        return text.split(",")
    if name in NESTED:
        return _parts(name, text)
    return text


def _parts(name: str, text: str) -> dict[str, str]:
    """Part → text of its value. Raises InputError where a part is not one of the field's."""
    parts = _part_names(name)
    found: dict[str, str] = {}
    for named in text.split(","):
        part, _, value = (word.strip() for word in named.partition(":"))
        if part not in parts or not value:
            raise InputError(f"fix `{name}`: {named} names no part of it; write PART:VALUE; {_example(name)}")
        if part in found:
            raise InputError(f"fix `{name}`: `{part}` is already fixed to {found[part]}, and {value} comes too")
        found[part] = value
    return found


def _part_names(name: str) -> tuple[str, ...]:
    return tuple(type(getattr(Strategy(), name)).model_fields)


def _example(name: str) -> str:
    """How several parts are fixed at once, and which there are."""
    parts = _part_names(name)
    several = ",".join(f"{part}:VALUE" for part in parts[:2])
    return f"several at once are --fix {name}={several}; parts: {', '.join(parts)}"


def check_fix(fix: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with their field's type. Raises InputError naming the field, its values and the near misses."""
    return {name: _field_value(name, value) for name, value in fix.items()}


def in_words(fix: Mapping[str, Any]) -> str:
    """`dp=2, zero=1`, and of several parts those that were named: `tensor=kind:2d`."""
    return ", ".join(f"{name}={_as_typed(value)}" for name, value in fix.items())


def _as_typed(value: Any) -> str:
    if not isinstance(value, Value):
        return str(value)
    return ",".join(
        f"{part}:{getattr(value, part)}" for part in type(value).model_fields if part in value.model_fields_set
    )


def known(name: str, fields: Sequence[str]) -> str:
    """What may stand instead of `name`."""
    near = get_close_matches(name, fields, n=1)
    return f"{f'did you mean `{near[0]}`? ' if near else ''}fields: {', '.join(fields)}"


def _field_value(name: str, value: Any) -> Any:
    field, dot, part = name.partition(".")
    if dot and field in NESTED:
        raise InputError(f"fix `{name}`: write parts behind colons, --fix {field}={part}:VALUE; {_example(field)}")
    if name not in Strategy.model_fields:
        raise InputError(f"fix `{name}`: not a field of a strategy; {known(name, FIELDS)}")
    if name == "ranks_per_node" and value is not None:
        raise InputError(
            "fix `ranks_per_node`: a plan takes it from its cluster; name one with such nodes, for example 2x4xh100"
        )
    if name == "zero" and isinstance(value, str) and value.isdecimal():
        value = int(value)
    try:
        return getattr(Strategy.model_validate({name: value}), name)
    except ValidationError as error:
        raise InputError(f"fix `{name}`: {error.errors()[0]['msg']} (got {shortened(repr(value))})") from None
