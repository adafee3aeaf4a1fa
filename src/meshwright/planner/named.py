"""FIELD=VALUE, as options of commands take it: a field is known, and named once.

dp=2                                    a number, or a word
layers_per_stage=3,3,2                  a list
offload=optimizer:disk,path:/scratch    a value of several parts
recompute_layers=none                   nothing, where a field may be left empty
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from meshwright.core.errors import InputError
from meshwright.core.values import Value, known, shortened


class NamedFields:
    """The fields that an option may name."""

    def __init__(
        self,
        option: str,
        types: Mapping[str, Any],
        of: str,
        example: str,
        closed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        option: as it is typed, for example `--fix`.
        types: field → its type, of what may be named; those of values, :func:`types_of` finds.
        of: the same in words, for example `a strategy`.
        example: a text of the right form.
        closed: fields that may not be named, and why.
        """
        self.option, self.of, self.example, self._closed = option, of, example, closed
        self._types = {name: annotation for name, annotation in types.items() if name not in closed}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(self._types)

    def read(self, texts: Iterable[str]) -> dict[str, Any]:
        """Field → what was named, cut into its parts; whether the field can have it, :func:`checked` says.

        Raises InputError naming the text: another form, no such field or part, or one that was named before.
        """
        found: dict[str, str] = {}
        for text in texts:
            name, equals, value = (part.strip() for part in text.partition("="))
            if not equals or not value:
                raise InputError(
                    f"{self.option} {text}: write FIELD=VALUE, for example {self.option} {self.example}; fields: "
                    f"{', '.join(self.names)}"
                )
            if name in found:
                both = _joined(found[name], value)
                both = f"; name all parts at once: {self.option} {name}={both}" if both else ""
                raise InputError(f"{self.option} {text}: `{name}` is already {found[name]}{both}")
            self.check_known(name, f"{self.option} {text}")
            found[name] = value
        return {name: _read(self._types[name], text, f"{self.option} {name}") for name, text in found.items()}

    def check_known(self, name: str, where: str) -> None:
        """Raises InputError, beginning with `where`, where there is no such field: what may stand instead."""
        if name not in self._types:
            raise InputError(f"{where}: {self._closed.get(name) or self._unknown(name)}")

    def _unknown(self, name: str) -> str:
        whole, dot, part = name.partition(".")
        kind = _kind_of_parts(self._types.get(whole))
        if dot and kind is not None:
            return f"write parts behind colons, {whole}={part}:VALUE; {_example(kind, f'{self.option} {whole}')}"
        return f"not a field of {self.of}; {known(name, self.names)}"


def types_of(*kinds: type[Value]) -> dict[str, Any]:
    """Field → its type, over all these kinds of values."""
    return {name: field.annotation for kind in kinds for name, field in kind.model_fields.items()}


def checked(kind: type[Value], name: str, value: Any, where: str) -> Any:
    """The same value with its field's type, of a kind all of whose fields have defaults.

    Raises InputError naming `where`.
    """
    try:
        return getattr(kind.model_validate({name: value}), name)
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']} (got {shortened(repr(value))})") from None


def _joined(first: str, second: str) -> str:
    """Parts of a field that were named one by one, as they are named at once; empty where one was named twice."""
    named = [part.partition(":")[0].strip() for part in (*first.split(","), *second.split(","))]
    return f"{first},{second}" if ":" in first and ":" in second and len(set(named)) == len(named) else ""


def _read(annotation: Any, text: str, where: str) -> Any:
    """A text by the type of its field."""
    types = (annotation, *get_args(annotation))
    kind = _kind_of_parts(annotation)
    if kind is not None:
        return _parts(kind, text, where)
    if type(None) in types and text == "none":
        return None
    if any(get_origin(one) is tuple for one in types):
        return text.split(",")
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if str(choice) == text), text)
    return text


def _kind_of_parts(annotation: Any) -> type[Value] | None:
    """The kind of value that a field of several parts has."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Value) else None


def _parts(kind: type[Value], text: str, where: str) -> dict[str, Any]:
    """Part → its value. Raises InputError where a part is not one of the field's, or is named twice."""
    found: dict[str, str] = {}
    for named in text.split(","):
        part, _, value = (word.strip() for word in named.partition(":"))
        if part not in kind.model_fields or not value:
            raise InputError(f"{where}={text}: {named} names no part of it; write PART:VALUE; {_example(kind, where)}")
        if part in found:
            raise InputError(f"{where}={text}: `{part}` is already {found[part]}")
        found[part] = value
    return {part: _read(kind.model_fields[part].annotation, value, where) for part, value in found.items()}


def _example(kind: type[Value], field: str) -> str:
    """How several parts of a `field` (`--fix expert`) are named at once, and which there are."""
    parts = tuple(kind.model_fields)
    several = ",".join(f"{part}:VALUE" for part in parts[:2])
    return f"several at once are {field}={several}; parts: {', '.join(parts)}"
