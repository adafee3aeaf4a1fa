"""A load generator: asks any OpenAI-compatible server as a workload says, and measures what clients see.

    planned ─(Poisson's times, or as clients are ready)─▶ streams ─▶ Record of each ─▶ Summary

Times are those of the client, from the moment a request was due: a generator that falls behind counts against the
server it asks, and says how far behind it was. Free of torch.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any

import httpx2 as httpx
import numpy as np

from meshwright.core.errors import InputError
from meshwright.core.values import shortened
from meshwright.serve.workload import PREFIX, TRIAL, Planned, Workload, words

PERCENTILES = (50, 95, 99)
_SHORT, _LONG = 8, 24
"""Words of the two requests by which a word's tokens are measured."""
_START_TIMEOUT_S = 60.0
MAX_SAID = 300
"""Characters of a server's own words for an error."""
MAX_PORT = 65535
PAUSE_S = 0.1
"""Of a client after an error, so that a server that is gone is not asked thousands of times a second."""


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Seconds count from the start of the load."""

    index: int
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    """The first piece of the answer."""
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between its pieces: of most servers, its tokens."""
    ended_s: float = 0.0
    num_pieces: int = 0
    prompt_tokens: int | None = None
    """By the server."""
    output_tokens: int | None = None
    """By the server; None where it does not say."""
    error: str | None = None
    """Its kind."""
    said: str | None = None
    """The server's own words for it."""

    def piece(self, now_s: float) -> None:
        """A piece of the answer came."""
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.num_pieces += 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; pieces where the server does not say."""
        return self.num_pieces if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """A load, measured."""

    url: str
    model: str
    duration_s: float
    """From the first request to the end of the last."""
    num_ok: int
    errors: dict[str, int]
    """Kind → how often."""
    said: dict[str, str]
    """Kind → what the server said the first time, where it said anything."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int | None
    """Of all that were answered; None where the server does not say."""
    output_tokens: int
    times_s: dict[str, dict[str, float]]
    """What → `mean`, `p50`, `p95`, `p99`, `max`; of what was answered."""
    lag_s: float
    """How late the generator sent a request at worst."""
    tokens_are_pieces: bool
    """Whether the server did not say how many tokens it gave, and pieces were counted."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summary_of(url: str, model: str, records: Sequence[Record]) -> Summary:
    """Percentiles interpolate linearly between the sorted values."""
    answered = [r for r in records if r.error is None]
    start_s = min((r.sent_s for r in records), default=0.0)
    duration_s = max((r.ended_s for r in records), default=0.0) - start_s
    times = {
        "first token": [r.first_s - r.due_s for r in answered if r.first_s is not None],
        "between tokens": [gap for r in answered for gap in r.gaps_s],
        "end to end": [r.ended_s - r.due_s for r in answered],
    }
    prompt = [r.prompt_tokens for r in answered if r.prompt_tokens is not None]
    output = sum(r.num_tokens for r in answered)
    return Summary(
        url=url,
        model=model,
        duration_s=duration_s,
        num_ok=len(answered),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        said={r.error: r.said for r in reversed(records) if r.error is not None and r.said},
        requests_per_s=len(answered) / duration_s if duration_s else 0.0,
        output_tokens_per_s=output / duration_s if duration_s else 0.0,
        prompt_tokens=sum(prompt) if prompt or not answered else None,
        output_tokens=output,
        times_s={what: _spread(values) for what, values in times.items() if values},
        lag_s=max((r.sent_s - r.due_s for r in records), default=0.0),
        tokens_are_pieces=any(r.output_tokens is None for r in answered),
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def _check_port(url: str) -> None:
    try:
        port = httpx.URL(url).port
    except (httpx.InvalidURL, ValueError):
        return  # the first request says what is wrong
    if port is not None and port > MAX_PORT:
        raise InputError(f"{url}: port {port} cannot be, the largest is {MAX_PORT}")


class Target:
    """A server, and how it is asked.

    Args:
        url: of the server, with `/v1` or without.
        workload: what is asked.
        api_key: sent with every request.
        model: as the server calls it; None: the first that it lists.

    Raises:
        InputError: the URL has a port that cannot be.
    """

    def __init__(self, url: str, workload: Workload, api_key: str | None, model: str | None) -> None:
        plain = url if "://" in url else f"http://{url}"
        self.url = plain.rstrip("/").removesuffix("/v1")
        _check_port(self.url)
        self.model = model or ""
        self._workload = workload
        self._tokens_per_word, self._tokens_around = 1.0, 0.0
        headers = {} if api_key is None else {b"authorization": f"Bearer {api_key}".encode(errors="surrogateescape")}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def prepare(self) -> None:
        """Find the model, and how many tokens a word is.

        Raises:
            InputError: the server cannot be reached, or refuses the first request.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.model = self.model or await self._first_model()
                short, long = [await self._measure(count) for count in (_SHORT, _LONG)]
        except TimeoutError:
            raise InputError(f"{self.url}: no answer to a first request within {_START_TIMEOUT_S:g} s") from None
        if short is not None and long is not None and long > short:
            self._tokens_per_word = (long - short) / (_LONG - _SHORT)
            self._tokens_around = short - _SHORT * self._tokens_per_word

    async def close(self) -> None:
        """Its connections."""
        await self._client.aclose()

    async def _first_model(self) -> str:
        answer = await self._reached(self._client.get(f"{self.url}/v1/models"))
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            asks_for_key = answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "give its --api-key" if asks_for_key else "is it an OpenAI-compatible server? --model names one"
            told = f"status {answer.status_code}: {shortened(answer.text)!r}"
            raise InputError(f"{self.url}/v1/models: no list of models ({told}); {hint}") from None

    async def _measure(self, num_words: int) -> int | None:
        """Tokens of a prompt of so many words; None where the server does not say."""
        body = self._body(words(self._workload.seed, TRIAL, num_words), 1) | {"stream": False}
        body.pop("stream_options")
        answer = await self._reached(self._client.post(self._path, json=body))
        if answer.status_code != 200:
            hint = "; try --no-ignore-eos" if "ignore_eos" in answer.text else ""
            kind, said = _error_of(answer.status_code, answer.content)
            raise InputError(f"{self.url}: the server refuses a first request: status {kind}: {said}{hint}")
        try:
            return int(answer.json()["usage"]["prompt_tokens"])
        except (ValueError, LookupError, TypeError):
            return None

    async def _reached(self, asking: Any) -> httpx.Response:
        try:
            answer: httpx.Response = await asking
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise InputError(
                f"{self.url}: the server cannot be reached: {str(error) or type(error).__name__}"
            ) from None
        return answer

    @property
    def _path(self) -> str:
        return f"{self.url}/v1/{'chat/' if self._workload.chat else ''}completions"

    def _body(self, text: str, output_tokens: int) -> dict[str, Any]:
        w = self._workload
        prompt = {"messages": [{"role": "user", "content": text}]} if w.chat else {"prompt": text}
        more = {"ignore_eos": True} if w.ignore_eos else {}
        return {
            "model": self.model, **prompt, "max_tokens": output_tokens, "temperature": w.temperature, "stream": True,
            "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip

    def text(self, planned: Planned) -> str:
        """A prompt of about the planned length: what all share, then its own words."""
        seed, per_word = self._workload.seed, self._tokens_per_word
        wanted = max(1, round((planned.prompt_tokens - self._tokens_around) / per_word))
        shared = min(wanted - 1, round(self._workload.prefix_tokens / per_word))
        parts = (words(seed, PREFIX, shared), words(seed, planned.index, wanted - shared))
        return " ".join(part for part in parts if part)

    async def ask(self, planned: Planned, record: Record, now: Callable[[], float]) -> None:
        """Ask, and write into the record what came."""
        body = self._body(self.text(planned), planned.output_tokens)
        record.sent_s = now()
        try:
            async with (
                asyncio.timeout(self._workload.timeout_s),
                self._client.stream("POST", self._path, json=body) as answer,
            ):
                if answer.status_code != 200:
                    record.error, record.said = _error_of(answer.status_code, await answer.aread())
                else:
                    record.error = await _read(answer, record, now)
        except TimeoutError:
            record.error = "timeout"
        except httpx.HTTPError as error:
            record.error = f"connection: {type(error).__name__}"
        record.ended_s = now()


async def _read(answer: httpx.Response, record: Record, now: Callable[[], float]) -> str | None:
    """A stream to its end; what is wrong with it, if anything."""
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            return None
        try:
            chunk = json.loads(content)
        except ValueError:
            return "stream: not JSON"
        if not isinstance(chunk, dict):
            return "stream: not JSON"
        if chunk.get("error"):
            return f"stream: {_code(chunk)}"
        if any(_has_text(choice) for choice in chunk.get("choices") or ()):
            record.piece(now())
        if usage := chunk.get("usage"):
            record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return "stream: ends early"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _error_of(status: int, content: bytes) -> tuple[str, str]:
    """(its kind, such as `429 queue_full`; the server's own words, in one line)."""
    try:
        said = json.loads(content)
    except ValueError:
        said = content.decode(errors="replace")
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    code, line = _code(said), " ".join(str(message or said).split())
    return f"{status}" if code in ("", str(status)) else f"{status} {code}", line[:MAX_SAID]


def _code(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return shortened(str(error.get("code") or error.get("type") or "")) if isinstance(error, dict) else ""


async def run_load(
    target: Target,
    workload: Workload,
    requests: Iterator[Planned],
    watch: Callable[[float, Record], None] = lambda now_s, record: None,
) -> list[Record]:
    """Ask all of it; one record for each request, in the order in which they were due.

    Args:
        watch: called after each answer.
    """
    began = perf_counter()
    records: list[Record] = []

    def now() -> float:
        return perf_counter() - began

    def is_over(at_s: float) -> bool:
        return workload.duration_s is not None and at_s >= workload.duration_s

    async def one(planned: Planned, due_s: float) -> Record:
        record = Record(planned.index, due_s)
        records.append(record)
        await target.ask(planned, record, now)
        watch(now(), record)
        return record

    async def client() -> None:
        while not is_over(due_s := now()) and (planned := next(requests, None)) is not None:
            if (await one(planned, due_s)).error is not None:
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        if workload.concurrency is not None:
            for _ in range(workload.concurrency):
                group.create_task(client())
        else:
            due_s = 0.0
            while (planned := next(requests, None)) is not None and not is_over(due_s := due_s + planned.gap_s):
                await asyncio.sleep(max(0.0, due_s - now()))
                group.create_task(one(planned, due_s))
    return records
