"""The base of every frozen, validated value, and its text form: TOML both ways."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.core.errors import InputError

MAX_SHOWN_CHARS = 80
"""Of a wrong value, in the line that refuses it."""


class Value(BaseModel):
    """A frozen value. Unknown keys are refused, so that a misspelt option is never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __copy__(self) -> Self:
        """A copy without cached properties: :meth:`model_copy` with an update would carry stale ones over."""
        copied = super().__copy__()
        for key in [key for key in copied.__dict__ if key not in type(self).model_fields]:
            del copied.__dict__[key]
        return copied

    @classmethod
    def parse(cls, data: dict[str, Any], where: str) -> Self:
        """Build from plain data. Raises InputError naming `where` and the offending key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or cls.__name__
            found = "" if first["type"] == "missing" else f" (got {_shortened(repr(first.get('input')))})"
            raise InputError(f"{where}: `{key}`: {first['msg']}{found}") from None

    def to_toml(self) -> str:
        """TOML text. Fields that are None are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, where: str = "toml") -> Self:
        """Inverse of :meth:`to_toml`. Raises InputError."""
        return cls.parse(parse_toml(text, where), where)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """TOML text to plain data. Raises InputError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The text of a JSON object to plain data. Raises InputError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "the file is empty" if not text.strip() else f"{error.msg} at line {error.lineno}"
        raise InputError(f"{where}: not valid JSON ({hint}); is it truncated?") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: a JSON object was expected, found {type(data).__name__}")
    return data


def write_text(path: Path | str, text: str) -> None:
    """Write all of a file or nothing: a reader, or a kill, never meets half of it.

    What is no file of its own (a link, a pipe, `/dev/stdout`) is written through.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_text(path: Path | str) -> str:
    """A file's text. Raises InputError where it is missing or not text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file was expected") from None
    except PermissionError:
        raise InputError(f"{path}: permission denied") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file (UTF-8 was expected)") from None
