"""Bodies of the OpenAI API: what a client may send, as SamplingParams, and what it gets back. Free of torch.

A field that changes the answer and is not there is refused; those that change nothing are accepted and passed over.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from meshwright.core.errors import InputError
from meshwright.core.values import first_error, shortened
from meshwright.serve.request import MAX_BIASES, SamplingParams
from meshwright.serve.sampler import Logprobs
from meshwright.serve.text import Spelling

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
CHAT, TEXT = "chat.completion", "text_completion"
MOST = {"lists and objects": (b"[{", 10_000), "fields": (b":", 20_000), "items": (b",", 1_000_000)}
"""What is in one body: the signs by which it is counted, and how often it may be there. Nobody means more, and each
costs far more than its bytes: all streams would wait while they are made, and looked at."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class _AtFirst(FailFast):
    """Millions of wrong items are one mistake, found at the first. Hashable, as parts of a union must be."""

    __hash__ = object.__hash__


Item = TypeVar("Item")
Many = Annotated[list[Item], _AtFirst()]


def _meant(what: str) -> WrapValidator:
    """One line for what is none of several forms, each of which has an error of its own."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"write {what} (got {shortened(ascii(value))})") from None

    return WrapValidator(check)


class _Body(BaseModel):
    """What a client sends. A field that is null is a field that is not there."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_Body):
    """How a stream is sent."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Common(_Body):
    """Fields of both kinds of request."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    seed: int | None = None
    n: int | None = None
    stop: Annotated[str | Many[str] | None, _meant("a text, or a list of texts")] = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Json | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    timeout: float | None = Field(default=None, gt=0, le=86400)
    """Seconds after which the answer ends as it is."""
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def _params(self, **more: Any) -> SamplingParams:
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "seed", "n",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams.parse(
            {
                **given, "stop": stop, "stop_token_ids": tuple(self.stop_token_ids or ()),
                "ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens,
                "logit_bias": _biases(self.logit_bias or {}), "grammar": grammar_of(self.response_format), **more,
            },
            "request",
        )  # fmt: skip

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Annotated[
        str | Many[str] | Many[int] | Many[Many[int]],
        _meant("a text or a list of token ids, or a list of either"),
    ]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None

    def params(self) -> SamplingParams:
        """Raises InputError."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InputError(f"best_of={self.best_of}: only n={self.n or 1} answers are made; leave it out")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        wants_prompt = self.echo and self.logprobs is not None
        return self._params(max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=wants_prompt)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids. Raises InputError where there is none."""
        given = self.prompt
        if not given:
            raise InputError("prompt: it is empty; give a text, token ids, or a list of them")
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [list(given)]
        return list(given)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Many[TextPart] | None,
        _meant('a text, or a list of parts {"type": "text", "text": ...}; pictures and sound cannot be read'),
    ] = None
    name: str | None = None
    refusal: str | None = None

    def for_template(self) -> Json:
        """What a chat template reads."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None

    def params(self) -> SamplingParams:
        """Raises InputError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs: it needs logprobs=true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        newer, older = self.max_completion_tokens, self.max_tokens
        return self._params(max_tokens=older if newer is None else newer, logprobs=logprobs)


class TokenizeBody(_Body):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Many[int]


def parse(kind: type[Body], text: bytes) -> Body:
    """A request's body. Raises InputError, in one line, whatever is wrong with it."""
    _check_size(text)
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InputError("the body is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError("the body is JSON, but no object: write {...}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(first_error(error, "request", kind)) from None


def _check_size(text: bytes) -> None:
    """Raises InputError where there is more of anything than :data:`MOST` says."""
    if all(sum(map(text.count, signs)) <= most for signs, most in MOST.values()):
        return
    plain = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    letters = np.frombuffer(plain, np.uint8)
    outside = letters[np.bitwise_xor.accumulate(letters == ord('"')) == 0].tobytes()  # of texts
    for what, (signs, most) in MOST.items():
        if (count := sum(map(outside.count, signs))) > most:
            raise InputError(f"the body holds {count:,} {what}; {most:,} may be in it")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _biases(given: dict[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise InputError(f"logit_bias: its keys are token ids, got {wrong[:40]!a}")
    return {int(token): bias for token, bias in given.items()}


def grammar_of(response_format: Json | None) -> str | None:
    """The JSON schema that an answer must match, as text; None: anything. Raises InputError."""
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return json.dumps({"type": "object"})
    if response_format.get("type") == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return json.dumps(schema)
        raise InputError("response_format: json_schema.schema is missing; it is a JSON schema")
    raise InputError(f"response_format: type {response_format.get('type')!r}; use text, json_object or json_schema")


# --- answers -----------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """What a request took."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Place:
    """Where the tokens of a text begin, in characters."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def past(self, text: bytes) -> int:
        """Where the next token begins, which adds this text: of one inside a character, where that begins."""
        at = self._at
        self._at += len(self._decoder.decode(text))
        return at


def chat_logprobs(found: Iterable[Logprobs], spelling: Spelling) -> Json:
    """Of a chat's answer."""

    def one(token: int, logprob: float) -> Json:
        name = spelling.name(token)
        return {"token": _shown(name), "logprob": _finite(logprob), "bytes": list(name)}

    content = [
        {**one(f.token, f.logprob), "top_logprobs": [one(token, logprob) for token, logprob in f.top]} for f in found
    ]
    return {"content": content, "refusal": None}


def text_logprobs(found: Iterable[Logprobs], spelling: Spelling, place: Place, first: int | None = None) -> Json:
    """Of a completion. The likeliest tokens have the chosen one with them, wherever it stands.

    Args:
        place: of the first of these tokens.
        first: the prompt's first token, which has none, where the prompt is echoed.
    """
    out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(token: int, logprob: float | None, top: Json | None) -> None:
        values = _shown(spelling.name(token)), logprob, top, place.past(spelling.text(token))
        for name, value in zip(out, values, strict=True):
            out[name].append(value)

    if first is not None:
        add(first, None, None)
    for f in found:
        top: Json = {}
        for token, logprob in (*f.top, (f.token, f.logprob)):
            top.setdefault(_shown(spelling.name(token)), _finite(logprob))  # the likeliest of those of one name
        add(f.token, _finite(f.logprob), top)
    return out


def _shown(name: bytes) -> str:
    """A token that is a part of a character is told from other parts by its bytes."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def error_body(message: str, kind: str, code: int | str | None = None, param: str | None = None) -> Json:
    """An error in the API's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
