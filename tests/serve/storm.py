"""Clients of every kind at once: some read, some leave at any moment, some ask what cannot be answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
SHARED = "what many prompts begin with; "


@dataclass
class Tally:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What none of them should see."""
    first_s: list[float] = field(default_factory=list)
    """To the first piece, of streams that were read."""
    whole_s: list[float] = field(default_factory=list)
    """To the end, of answers that were read."""
    num_tokens: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    """Prompt → its greedy answer, the same each time."""

    def line(self) -> str:
        """All of it, for a person."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        first, whole = (sorted(times) or [0.0] for times in (self.first_s, self.whole_s))
        return (
            f"{sum(self.kinds.values())} requests ({kinds}), {self.num_tokens} tokens read; first piece "
            f"p50 {first[len(first) // 2]:.2f} s, worst {first[-1]:.2f} s; whole answer worst {whole[-1]:.2f} s; "
            f"{len(self.wrong)} wrong"
        )


class Storm:
    """Some clients that ask until the time is up.

    Args:
        url: of the server.
        context: tokens that the model holds.
        tally: to add to.
    """

    def __init__(self, url: str, context: int, seed: int, tally: Tally) -> None:
        self.url = url
        self._context = context
        self._rng = random.Random(seed)
        self.tally = tally
        self._kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.read, 4), (self.stream, 4), (self.repeat, 2), (self.leave, 3), (self.vanish, 2), (self.half, 1),
            (self.too_long, 1), (self.nonsense, 1), (self.schema, 1), (self.late, 1), (self.look, 1),
        ]  # fmt: skip

    async def run(self, duration_s: float, num_clients: int) -> None:
        """All clients, until none has an open request."""
        until = time.monotonic() + duration_s
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits, verify=False) as self.client:

            async def ask() -> None:
                asks, weights = zip(*self._kinds, strict=True)
                while time.monotonic() < until:
                    kind = self._rng.choices(asks, weights)[0]
                    self.tally.kinds[kind.__name__] += 1
                    try:
                        await kind()
                    except Exception as error:
                        self.tally.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

            await asyncio.gather(*(ask() for _ in range(num_clients)))

    def _body(self, **change: Any) -> dict[str, Any]:
        rng = self._rng
        prompt = rng.choice(["", SHARED, SHARED * 3]) + "".join(rng.choices("abc def", k=rng.randint(1, 90)))
        body = {
            "prompt": prompt, "max_tokens": rng.randint(1, 60), "temperature": rng.choice([0, 0.7, 1.5]),
            "n": rng.choice([1, 1, 1, 2, 3]), "seed": rng.randint(0, 99), "ignore_eos": rng.random() < 0.7,
            "priority": rng.randint(-2, 2),
        }  # fmt: skip
        extras = [{"logprobs": 2}, {"stop": ["zz", "a"]}, {"top_p": 0.9, "top_k": 20}, {"presence_penalty": 1.0}, {}]
        return {**body, **rng.choice(extras), **change}

    def _expect(self, is_so: bool, what: str, answer: httpx.Response | None = None) -> None:
        if not is_so:
            self.tally.wrong.append(f"{what}: {answer.status_code} {answer.text[:200]}" if answer is not None else what)

    # --- those who read -------------------------------------------------------------------------------------

    async def read(self) -> None:
        """A whole answer."""
        began, body = time.monotonic(), self._body()
        answer = await self.client.post("/v1/completions", json=body)
        self._expect(answer.status_code == 200, "read", answer)
        choices = answer.json()["choices"]
        self._expect([c["finish_reason"] in ("stop", "length") for c in choices] == [True] * body["n"], "read: ends")
        self.tally.num_tokens += answer.json()["usage"]["completion_tokens"]
        self.tally.whole_s.append(time.monotonic() - began)

    async def stream(self) -> None:
        """A stream to its end."""
        began, body = time.monotonic(), self._body(stream=True, stream_options={"include_usage": True})
        lines: list[str] = []
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            self._expect(answer.status_code == 200, "stream: status")
            async for line in answer.aiter_lines():
                if line and not lines:
                    self.tally.first_s.append(time.monotonic() - began)
                lines += [line] if line else []
        ends = sum('"finish_reason": "' in line for line in lines)
        self._expect(lines[-1:] == ["data: [DONE]"] and ends == body["n"], f"stream: {lines[-2:]}")
        self.tally.num_tokens += json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"]
        self.tally.whole_s.append(time.monotonic() - began)

    async def repeat(self) -> None:
        """A greedy answer that was given before."""
        prompt = SHARED + self._rng.choice(["one", "two", "three", "four"])
        answer = await self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0})
        text = answer.json()["choices"][0]["text"]
        self._expect(self.tally.texts.setdefault(prompt, text) == text, f"repeat: {prompt!r} answered otherwise")

    async def schema(self) -> None:
        """An answer that matches."""
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        body = self._body(max_tokens=60, n=1, response_format=form, logprobs=None, stop=None)
        answer = await self.client.post("/v1/completions", json=body)
        self._expect(json.loads(answer.json()["choices"][0]["text"])["a"] in ("x", "yy"), "schema", answer)

    async def late(self) -> None:
        """An answer whose time is short."""
        answer = await self.client.post("/v1/completions", json=self._body(timeout=0.05, max_tokens=300))
        self._expect(answer.status_code == 200, "late", answer)

    async def look(self) -> None:
        """Health and metrics."""
        for path in ("/health", "/metrics", "/v1/models"):
            answer = await self.client.get(path)
            self._expect(answer.status_code == 200, path, answer)

    # --- those who leave ------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """After a few pieces."""
        body = self._body(stream=True, max_tokens=300, ignore_eos=True)
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            num_lines, most = 0, self._rng.randint(0, 12)
            async for _ in answer.aiter_lines():
                num_lines += 1
                if num_lines > most:
                    break

    async def vanish(self) -> None:
        """Without a word, while queued or computed."""
        await self._send(self._body(max_tokens=300, stream=self._rng.random() < 0.5), 1.0)

    async def half(self) -> None:
        """In the middle of a body."""
        await self._send(self._body(), self._rng.random() * 0.9)

    async def _send(self, body: dict[str, Any], share: float) -> None:
        parts = urlsplit(self.url)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head + content[: round(len(content) * share)])
        await writer.drain()
        await asyncio.sleep(self._rng.random() * 0.2)
        writer.close()

    # --- those who ask what cannot be answered --------------------------------------------------------------

    async def too_long(self) -> None:
        """A prompt beyond the context, or a body beyond all bounds."""
        is_huge = self._rng.random() < 0.1
        prompt = "a" * (9 * 2**20 if is_huge else self._context + self._rng.randint(0, 5000))
        answer = await self.client.post("/v1/completions", json={"prompt": prompt})
        self._expect(answer.status_code == (413 if is_huge else 400), "too long", answer)

    async def nonsense(self) -> None:
        """No request at all."""
        wrong = [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud800"}']
        answer = await self.client.post("/v1/completions", content=self._rng.choice(wrong))
        self._expect(answer.status_code == 400, "nonsense", answer)
