"""The base of every frozen, validated value, and its text form: TOML both ways."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.core.errors import InputError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

MAX_SHOWN_CHARS = 80
"""Of a wrong value, in the line that refuses it."""

MAX_SIZE = 10**9
"""Of any size or count that is asked for: larger ones are slips of a finger, and take for ever to enumerate."""


_HASH = "_hash"
"""Where a value keeps it, once asked for."""


class _ValueType(ModelMetaclass):
    """What `Job(...)` in Python refuses, it refuses as a file does: in one line."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise InputError(first_error(error, cls.__name__, cast("type[BaseModel]", cls))) from None


class Value(BaseModel, metaclass=_ValueType):
    """A frozen value. Unknown keys are refused, so that a misspelt option is never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __eq__(self, other: object) -> bool:
        """By fields: cached properties are large, and follow from them."""
        if self is other or type(self) is not type(other):
            return self is other
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __hash__(self) -> int:
        """By fields too, once: a planner looks values up by the ten thousand."""
        known: int | None = self.__dict__.get(_HASH)
        if known is None:
            known = self.__dict__[_HASH] = hash(tuple(getattr(self, name) for name in type(self).__pydantic_fields__))
        return known

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields, which are taken as they are; without cached properties, as :meth:`__copy__`."""
        if deep or not update:
            return super().model_copy(update=update, deep=deep)
        copied, values, fields = object.__new__(type(self)), self.__dict__.copy(), type(self).__pydantic_fields__
        if len(values) > len(fields):
            for key in values.keys() - fields.keys():
                del values[key]
        values.update(update)
        object.__setattr__(copied, "__dict__", values)
        object.__setattr__(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__ | update.keys())
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    def __copy__(self) -> Self:
        """A copy without cached properties: :meth:`model_copy` with an update would carry stale ones over."""
        copied, fields = super().__copy__(), type(self).__pydantic_fields__
        if len(copied.__dict__) > len(fields):
            for key in copied.__dict__.keys() - fields.keys():
                del copied.__dict__[key]
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """What is pickled: fields alone, likewise."""
        state, fields = super().__getstate__(), type(self).__pydantic_fields__
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name in fields}}

    @classmethod
    def parse(cls, data: dict[str, Any], where: str) -> Self:
        """Build from plain data. Raises InputError naming `where` and the offending key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(first_error(error, where, cls)) from None

    def to_toml(self) -> str:
        """TOML text. Fields that are None are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, where: str = "toml") -> Self:
        """Inverse of :meth:`to_toml`. Raises InputError."""
        return cls.parse(parse_toml(text, where), where)


def known(name: str, names: Sequence[str]) -> str:
    """What may stand instead of `name`, the nearest first."""
    near = get_close_matches(name, names, n=1)
    return f"{f'did you mean `{near[0]}`? ' if near else ''}fields: {', '.join(names)}"


def _fields_at(kind: type[BaseModel], keys: Sequence[int | str]) -> tuple[str, ...]:
    """Fields of the value that lies at `keys` inside a value of that kind; none where it has no kind of its own."""
    for key in keys:
        field = kind.model_fields.get(str(key))
        choices = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = next((each for each in choices if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if inner is None:
            return ()
        kind = inner
    return tuple(kind.model_fields)


def first_error(error: ValidationError, where: str, kind: type[BaseModel]) -> str:
    """The first thing that is wrong with a value of that kind, in one line: where, key, what, and what was given."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "extra_forbidden" and (names := _fields_at(kind, first["loc"][:-1])):
        keys = ".".join(map(str, first["loc"]))
        return f"{where}: `{keys}`: no such field; {known(str(first['loc'][-1]), names)}"
    if first["type"] == "value_error" and not first["loc"]:  # of several fields together: it names them itself
        return f"{where}: {first['ctx']['error']}"
    key = f"`{'.'.join(str(part) for part in first['loc'])}`: " if first["loc"] else ""
    what = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    is_whole = first["type"] in ("missing", "value_error") or isinstance(first.get("input"), Mapping)
    found = "" if is_whole else f" (got {shortened(repr(first.get('input')))})"
    return f"{where}: {key}{what}{found}"


def shortened(text: str) -> str:
    """At most `MAX_SHOWN_CHARS` of it."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


def read_plan(path: Path | str) -> dict[str, Any]:
    """The content of a plan file of any kind. Raises InputError where it cannot be read, or is empty."""
    data = parse_toml(read_text(path), str(path))
    if not data:
        raise InputError(f"{path}: an empty file, and no plan; write one with `meshwright plan ... -o plan.toml`")
    return data


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """TOML text to plain data. Raises InputError."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not valid TOML: {_syntax(error)}") from None
    except RecursionError:
        raise InputError(f"{where}: not valid TOML: nested too deep") from None


def _syntax(error: ValueError) -> str:
    """What a reader says; of a number with thousands of digits it speaks to programmers only."""
    return "a number has thousands of digits" if "int_max_str_digits" in str(error) else str(error)


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The text of a JSON object to plain data. Raises InputError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "the file is empty" if not text.strip() else f"{error.msg} at line {error.lineno}"
        raise InputError(f"{where}: not valid JSON ({hint}); is it truncated?") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {_syntax(error)}") from None
    except RecursionError:
        raise InputError(f"{where}: not valid JSON: nested too deep") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: a JSON object was expected, found {type(data).__name__}")
    return data


def write_text(path: Path | str, text: str) -> None:
    """:func:`write_bytes` of a text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write all of a file or nothing: a reader, or a kill, never meets half of it.

    What is no file of its own (a link, a pipe, `/dev/stdout`) is written through.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Around what writes a file for the user: where that cannot be, InputError names the file and says why."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def make_ready(path: Path | str) -> None:
    """Before the work whose result will be written there: make the folders above it.

    Raises InputError where it cannot be written: the file is a folder, or may not be written.
    """
    path = Path(path)
    with writing(path):
        if path.parent.exists() and not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read_text(path: Path | str) -> str:
    """A file's text, without a byte-order mark. Raises InputError where it is missing or not text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file was expected") from None
    except PermissionError:
        raise InputError(f"{path}: permission denied") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file (UTF-8 was expected)") from None
