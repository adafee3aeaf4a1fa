"""Tokens as text, piece by piece, and the texts that end an answer. Free of torch.

What was given out is never taken back: a character whose bytes are not all there is held, and so is the beginning of
what may become a stop string. All pieces together are what decoding all tokens at once gives.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import partial

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from meshwright.core.errors import InputError

UNKNOWN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte: a decoder looks at the whole run of them before it writes any."""

WINDOW = 4
"""Tokens after which a window moves on, each time by one decoding more."""


def _byte_letters() -> dict[str, int]:
    """Letters by which byte-level tokenizers write bytes: printable ones stand for themselves, others for what follows
    all bytes (Radford et al. 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


def encode(tokenizer: Tokenizer | None, text: str, special: bool) -> list[int]:
    """Token ids of a text. Raises InputError where it is none, or there is no tokenizer.

    Args:
        special: with the tokenizer's own beginning.
    """
    if tokenizer is None:
        raise InputError("this model has no tokenizer: give prompts as token ids")
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise InputError("the prompt is not valid UTF-8 text: it holds a lone surrogate")
    # a batch lets other threads run meanwhile, a single text does not: a long prompt would stop all streams
    return list(tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)


class TokenBytes:
    """What each token of a byte-level tokenizer stands for, whatever stands before it.

    Tokens that are special stand for nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._found: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._found.get(token)
        if found is None:
            found = self._found[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> bytes:
        name = None if token in self._special else self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes(map(_BYTE_OF.__getitem__, name))
        except KeyError:  # a token that was added as it is written
            return name.encode()


class Spelling:
    """What a report of log probabilities says of each token by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None

    def text(self, token: int) -> bytes:
        """What it adds to an answer's text: nothing, where it is special."""
        name = self._tokenizer.id_to_token(token)
        if self._bytes is not None or name is None:
            return b"" if self._bytes is None else self._bytes[token]
        if _BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()

    def name(self, token: int) -> bytes:
        """What tells it from others: its text, of a special one the name."""
        return self.text(token) or (self._tokenizer.id_to_token(token) or "").encode()


class ByteDetokenizer:
    """The text of one answer of a byte-level tokenizer: bytes follow one another, and each is looked at once."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """One more token; the text that is certain now and was not before."""
        return self._decoder.decode(self._bytes[token])

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """The text of one answer of any tokenizer.

    A window of the newest tokens is decoded each time, from one place where the text stood firm to the end; text that
    depends on the token before it, as a leading space does, is right because the window begins one such place earlier.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        """First token of the window."""
        self._firm = 0
        """First token after a place where the text stood firm."""
        self._given = 0
        """Characters of the window's text that were given out."""

    def push(self, token: int) -> str:
        """One more token; the text that is certain now and was not before."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        is_byte = self._is_byte(token)
        certain = self._given if is_byte else len(text) - text.endswith(UNKNOWN)
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text) and not is_byte and len(self._ids) - self._firm >= WINDOW:
            self._start, self._firm = self._firm, len(self._ids)
            self._given = len(self._decode(self._ids[self._start :]))
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come."""
        text = self._decode(self._ids[self._start :])
        piece, self._given = text[self._given :], len(text)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.id_to_token(token)
        return name is not None and _BYTE.fullmatch(name) is not None


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""The text of one answer, token by token."""


def detokenizers(tokenizer: Tokenizer) -> Callable[[], Detokenizer]:
    """Makes one for each answer."""
    if isinstance(tokenizer.decoder, ByteLevel):
        return partial(ByteDetokenizer, TokenBytes(tokenizer))
    return partial(WindowDetokenizer, tokenizer)


class StopFinder:
    """Finds the first of several stop strings in a text that comes in pieces; nothing of it is given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was met."""

    def push(self, piece: str) -> str:
        """One more piece; the text that certainly comes before any stop string."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        places = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, shorter than `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
