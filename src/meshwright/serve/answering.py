"""From the events of a request's sequences to the API's answers: one object, or chunks of a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any

from meshwright.core.errors import InputError
from meshwright.serve import api
from meshwright.serve.api import Json
from meshwright.serve.engine import Answer, Event
from meshwright.serve.loop import EngineFailure, EngineLoop, Mailbox, Ticket
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
        self._mailbox = Mailbox()
        self._tickets: list[Ticket] = []
        self._answers = [Answer(tuple(prompt)) for prompt in talk.prompts for _ in range(talk.params.n)]
        """By the choice's index."""
        self._places: dict[int, api.Place] = {}
        self._started: set[int] = set()
        """Choices of which a piece was sent."""
        body = talk.body
        for prompt in talk.prompts:
            loop.engine.check(prompt, talk.params)
        for prompt in talk.prompts:
            self._tickets.append(loop.submit(prompt, talk.params, body.priority, body.timeout, matchers, self._mailbox))

    async def whole(self) -> Json:
        """The answer at once.

        Raises:
            EngineFailure: the engine has failed, or the model's output is not finite.
            InputError: a schema that no text can match to its end.
        """
        talk = self._talk
        async for _ in self._batches():
            pass
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return {**talk.envelope(choices), "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events. An engine that fails ends it with an error."""
        talk = self._talk
        try:
            if talk.is_chat:
                for index in range(talk.params.n):
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                       "finish_reason": None})  # fmt: skip
            async for batch in self._batches():
                chunks = [self._chunk_of(index, event) for index, event in batch]
                if any(chunks):
                    yield "".join(chunks)
            if talk.body.wants_usage:
                yield _sent({**talk.envelope([], chunk=True), "usage": self._usage()})
        except EngineFailure as failure:
            yield _sent(api.error_body(str(failure), "server_error", 503))
            return
        except InputError as error:
            yield _sent(api.error_body(str(error), "invalid_request_error", 400))
            return
        yield "data: [DONE]\n\n"

    async def _batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """(choice, event) of all that came at once, until all have ended; the requests end with the reader."""
        per_prompt, waiting = self._talk.params.n, len(self._tickets) * self._talk.params.n
        places = {ticket: at * per_prompt for at, ticket in enumerate(self._tickets)}
        try:
            while waiting:
                batch: list[tuple[int, Event]] = []
                fault: Exception | None = None
                for found in await self._mailbox.take():
                    fault = found if isinstance(found, EngineFailure) else _fault(found[1])
                    if isinstance(found, EngineFailure) or fault is not None:
                        break
                    ticket, event = found
                    index = places[ticket] + ticket.index(event.sequence)
                    self._answers[index].add(event)
                    waiting -= event.finish is not None
                    batch.append((index, event))
                yield batch
                if fault is not None:
                    raise fault
        finally:
            self.close()

    def close(self) -> None:
        """Nobody reads the rest of the answer."""
        for ticket in self._tickets:
            self._loop.cancel(ticket)

    # --- shapes --------------------------------------------------------------------------------------------

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._talk.prompts)
        cached = sum(ticket.sequences[0].num_cached for ticket in self._tickets if ticket.sequences)
        return api.usage(prompt, sum(len(answer.tokens) for answer in self._answers), cached)

    def _prompt_text(self, answer: Answer) -> str:
        return self._loop.engine.decode(answer.prompt)

    def _choice(self, index: int, answer: Answer) -> Json:
        finish = FINISH[answer.finish or "stop"]
        if self._talk.is_chat:
            wants = self._talk.params.logprobs is not None
            logprobs = api.chat_logprobs(answer.logprobs, self._loop.engine.spelling) if wants else None
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        before = self._prompt_text(answer) if self._talk.echo else ""
        return {"index": index, "text": before + answer.text, "logprobs": self._logprobs(answer),
                "finish_reason": finish}  # fmt: skip

    def _logprobs(self, answer: Answer) -> Json | None:
        """Of a completion, with those of its prompt where it is echoed."""
        if self._talk.params.logprobs is None:
            return None
        found, first = answer.logprobs, None
        if self._talk.echo:
            found, first = answer.prompt_logprobs + answer.logprobs, answer.prompt[0]
        return api.text_logprobs(found, self._loop.engine.spelling, api.Place(), first)

    def _chunk_of(self, index: int, event: Event) -> str:
        """What a client gets of an event; empty where that is nothing."""
        is_first = index not in self._started
        if event.text and event.finish is None and self._talk.params.logprobs is None and not self._talk.echo:
            return self._plain_chunk(index, event.text)
        choice = self._piece(index, event, is_first)
        if choice is None:
            return ""
        self._started.add(index)
        return self._chunk(choice)

    def _piece(self, index: int, event: Event, is_first: bool) -> Json | None:
        """A chunk's choice; None where the event brings the client nothing."""
        if self._talk.is_chat:
            found = [event.logprobs] if event.logprobs else []
            if not event.text and not found and event.finish is None:
                return None
            logprobs = api.chat_logprobs(found, self._loop.engine.spelling) if found else None
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
        place = self._places.setdefault(index, api.Place())
        return api.text_logprobs(found, self._loop.engine.spelling, place, first)

    def _chunk(self, choice: Json) -> str:
        """What stands around the choice is the same each time."""
        before, after = self._around
        return f"{before}{json.dumps(choice)}{after}"

    def _plain_chunk(self, index: int, text: str) -> str:
        """As :meth:`_chunk`, of a piece that is text and nothing else; that is nearly every one."""
        before, after = self._around
        name = f'"delta": {{"content": {json.dumps(text)}}}' if self._talk.is_chat else f'"text": {json.dumps(text)}'
        return f'{before}{{"index": {index}, {name}, "logprobs": null, "finish_reason": null}}{after}'

    @cached_property
    def _around(self) -> tuple[str, str]:
        before = json.dumps(self._talk.envelope([], chunk=True)).removesuffix("]}")
        after = ', "usage": null' if self._talk.body.wants_usage else ""
        return f"data: {before}", f"]{after}}}\n\n"


def _fault(event: Event) -> EngineFailure | InputError | None:
    """Why an answer cannot go on; None where it can."""
    if event.finish != "error":
        return None
    matcher = event.sequence.matcher
    if matcher is not None and matcher.fault is not None:
        return InputError(matcher.fault)
    return EngineFailure("the model's output is not finite: its weights are spoilt")


def _finish(event: Event) -> str | None:
    return None if event.finish is None else FINISH[event.finish]


def _sent(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"
