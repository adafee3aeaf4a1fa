"""Typed access to a Hugging Face `config.json`, and what one architecture's reader and writer are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.model import ModelSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Hugging Face activation name → ours."""

HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_ABSENT = object()


class Reader:
    """Typed access to a configuration; every error names the model and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def raw(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> tuple[str, Any]:
        """(key, value) of the first key that is there; a key may have several spellings."""
        names = (keys,) if isinstance(keys, str) else keys
        for key in names:
            if key in self.data:
                return key, self.data[key]
        if default is _ABSENT:
            raise InputError(f"{self.where}: key `{names[0]}` is missing; it is needed to know the model's shape")
        return names[0], default

    def size(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> int:
        """A whole number above 0."""
        key, value = self.raw(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.where}: `{key}` is {value!r}; a whole number above 0 was expected")
        return value

    def optional_size(self, keys: str | tuple[str, ...], default: int | None = None) -> int | None:
        """A size, or None where the key is null."""
        _, value = self.raw(keys, default)
        return None if value is None else self.size(keys, default)

    def number(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> float:
        key, value = self.raw(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.where}: `{key}` is {value!r}; a number was expected")
        return float(value)

    def positive(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> float:
        """A number above 0, and finite."""
        value = self.number(keys, default)
        if not 0 < value < inf:
            raise InputError(
                f"{self.where}: `{self.raw(keys, default)[0]}` is {value:g}; a number above 0 was expected"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        _, value = self.raw(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: `{key}` is {value!r}; true or false was expected")
        return value

    def activation(self, key: str, default: str) -> str:
        _, value = self.raw(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedError(f"{self.where}: activation `{key}` = {value!r} is not built; known: {known}")
        return ACTIVATIONS[value]

    def refuse(self, key: str, allowed: tuple[Any, ...], what: str) -> None:
        """Raise UnsupportedError where a key asks for something the decoder does not do."""
        value = self.data.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(f"{self.where}: `{key}` = {value!r}: {what}")


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `model_type`: reader and writer of what is not the same everywhere."""

    hf_class: str
    read: Callable[[Reader], Fields]
    write: Callable[[ModelSpec], Fields]


def head_dim_of(c: Reader, hidden: int, heads: int) -> int:
    """Hidden size over heads."""
    if hidden % heads:
        raise InputError(f"{c.where}: {heads} attention heads do not divide the hidden size {hidden}")
    return hidden // heads
