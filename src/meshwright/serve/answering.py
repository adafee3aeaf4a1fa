"""From the events of a request's sequences to the API's answers: one object, or chunks of a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import time
from typing import Any

from meshwright.core.errors import InputError
from meshwright.serve import api
from meshwright.serve.api import Json
from meshwright.serve.engine import Answer, Event
from meshwright.serve.loop import EngineFailure, EngineLoop, Ticket
from meshwright.serve.request import SamplingParams

FINISH = {"stop": "stop", "length": "length", "deadline": "length", "abort": "stop"}
"""How the API calls an end. An answer whose time was up is cut short, as one whose tokens were."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request that was understood."""

    body: api.CompletionBody | api.ChatBody
    params: SamplingParams
    prompts: list[list[int]]
    model_name: str
    kind: str
    """`chat.completion` or `text_completion`."""
    echo: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created_s: int = field(default_factory=lambda: int(time()))

    @property
    def is_chat(self) -> bool:
        return self.kind == api.CHAT

    def envelope(self, choices: list[Json], chunk: bool = False) -> Json:
        """An answer, or one chunk of it."""
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        kind = "chat.completion.chunk" if chunk and self.is_chat else self.kind
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model_name,
            "choices": choices,
        }


class Answering:
    """Answers one request.

    Args:
        loop: the engine's.
        talk: the request.
        matchers: makes what follows its grammar.
    """

    def __init__(self, loop: EngineLoop, talk: Conversation, matchers: Callable[[], Any] | None) -> None:
        self._loop = loop
        self._talk = talk
        self._tickets: list[Ticket] = []
        self._answers: dict[int, Answer] = {}
        """By the choice's index."""
        self._texts: dict[int, str] = {}
        self._before = ""
        """Of every chunk's text, up to its choice."""
        body = talk.body
        for prompt in talk.prompts:
            loop.engine.check(prompt, talk.params)
        for prompt in talk.prompts:
            self._tickets.append(loop.submit(prompt, talk.params, body.priority, body.timeout, matchers))

    async def whole(self) -> Json:
        """The answer at once.

        Raises:
            EngineFailure: the engine has failed, or the model's output is not finite.
            InputError: a schema that no text can match to its end.
        """
        talk = self._talk
        async for _, _ in self._events():
            pass
        choices = [self._choice(index, self._answers[index]) for index in sorted(self._answers)]
        return {**talk.envelope(choices), "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events. An engine that fails ends it with an error."""
        talk = self._talk
        try:
            if talk.is_chat:
                for index in range(talk.params.n):
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                       "finish_reason": None})  # fmt: skip
            started: set[int] = set()
            async for index, event in self._events():
                if (choice := self._piece(index, event, index not in started)) is not None:
                    started.add(index)
                    yield self._chunk(choice)
            if talk.body.wants_usage:
                yield _sent({**talk.envelope([], chunk=True), "usage": self._usage()})
        except EngineFailure as failure:
            yield _sent(api.error_body(str(failure), "server_error", 503))
            return
        except InputError as error:
            yield _sent(api.error_body(str(error), "invalid_request_error", 400))
            return
        yield "data: [DONE]\n\n"

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) until all sequences have ended; the requests end with the reader."""
        per_prompt, waiting = self._talk.params.n, len(self._tickets) * self._talk.params.n
        merged = self._tickets[0].events if len(self._tickets) == 1 else asyncio.Queue()
        pumps = [asyncio.ensure_future(_pump(t, merged)) for t in self._tickets] if len(self._tickets) > 1 else []
        places = {id(ticket): at for at, ticket in enumerate(self._tickets)}
        try:
            while waiting:
                found = await merged.get()
                ticket, event = found if isinstance(found, tuple) else (self._tickets[0], found)
                if isinstance(event, EngineFailure):
                    raise event
                if event.finish == "error":
                    raise _fault(event)
                index = places[id(ticket)] * per_prompt + ticket.index(event.sequence)
                self._answers.setdefault(index, Answer(event.sequence.prompt)).add(event)
                waiting -= event.finish is not None
                yield index, event
        finally:
            for pump in pumps:
                pump.cancel()
            self.close()

    def close(self) -> None:
        """Nobody reads the rest of the answer."""
        for ticket in self._tickets:
            self._loop.cancel(ticket)

    # --- shapes --------------------------------------------------------------------------------------------

    def _text_of(self, token: int) -> str:
        return self._loop.engine.decode([token], special=True)

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._talk.prompts)
        cached = sum(ticket.sequences[0].num_cached for ticket in self._tickets if ticket.sequences)
        return api.usage(prompt, sum(len(answer.tokens) for answer in self._answers.values()), cached)

    def _prompt_text(self, answer: Answer) -> str:
        return self._loop.engine.decode(answer.prompt)

    def _choice(self, index: int, answer: Answer) -> Json:
        finish = FINISH[answer.finish or "stop"]
        if self._talk.is_chat:
            wants = self._talk.params.logprobs is not None
            logprobs = api.chat_logprobs(answer.logprobs, self._text_of) if wants else None
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        before = self._prompt_text(answer) if self._talk.echo else ""
        return {"index": index, "text": before + answer.text, "logprobs": self._logprobs(answer, before),
                "finish_reason": finish}  # fmt: skip

    def _logprobs(self, answer: Answer, before: str) -> Json | None:
        """Of a completion, with those of its prompt where it is echoed."""
        if self._talk.params.logprobs is None:
            return None
        found, first, offset = answer.logprobs, None, len(before)
        if self._talk.echo:
            found, first, offset = answer.prompt_logprobs + answer.logprobs, answer.prompt[0], 0
        return api.text_logprobs(found, self._text_of, first, offset)

    def _piece(self, index: int, event: Event, is_first: bool) -> Json | None:
        """A chunk's choice; None where the event brings the client nothing."""
        if self._talk.is_chat:
            found = [event.logprobs] if event.logprobs else []
            if not event.text and not found and event.finish is None:
                return None
            logprobs = api.chat_logprobs(found, self._text_of) if found else None
            delta = {"content": event.text} if event.text or found else {}
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": _finish(event)}
        is_empty = not (event.text or event.logprobs or event.prompt_logprobs)
        if is_empty and event.finish is None and not (is_first and self._talk.echo):
            return None
        before = self._loop.engine.decode(event.sequence.prompt) if self._talk.echo and is_first else ""
        return {"index": index, "text": before + event.text, "logprobs": self._piece_logprobs(index, event, is_first),
                "finish_reason": _finish(event)}  # fmt: skip

    def _piece_logprobs(self, index: int, event: Event, is_first: bool) -> Json | None:
        if self._talk.params.logprobs is None:
            return None
        piece = Answer(event.sequence.prompt)
        piece.add(event)
        found = piece.prompt_logprobs + piece.logprobs if self._talk.echo else piece.logprobs
        first = piece.prompt[0] if self._talk.echo and is_first else None
        offset = len(self._texts.get(index, ""))
        out = api.text_logprobs(found, self._text_of, first, offset)
        self._texts[index] = self._texts.get(index, "") + "".join(out["tokens"])
        return out

    def _chunk(self, choice: Json) -> str:
        """What stands around the choice is the same each time."""
        before = self._before = self._before or json.dumps(self._talk.envelope([], chunk=True)).removesuffix("]}")
        after = ', "usage": null' if self._talk.body.wants_usage else ""
        return f"data: {before}{json.dumps(choice)}]{after}}}\n\n"


def _fault(event: Event) -> EngineFailure | InputError:
    """Why an answer cannot go on."""
    matcher = event.sequence.matcher
    if matcher is not None and matcher.fault is not None:
        return InputError(matcher.fault)
    return EngineFailure("the model's output is not finite: its weights are spoilt")


def _finish(event: Event) -> str | None:
    return None if event.finish is None else FINISH[event.finish]


async def _pump(ticket: Ticket, into: asyncio.Queue[Any]) -> None:
    """Events of one prompt of several, with the prompt."""
    while True:
        into.put_nowait((ticket, await ticket.events.get()))


def _sent(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"
