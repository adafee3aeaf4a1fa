"""The server: routes of the OpenAI API over an engine's loop.

    body ─▶ parse ─▶ prompts as tokens ─▶ tickets, one per prompt ─▶ events ─▶ one answer, or a stream of chunks

A client that goes away takes its requests with it. Whatever a client sends, it gets an answer of the API's shape.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Ordered
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from time import time
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meshwright.core.errors import InputError
from meshwright.serve import api
from meshwright.serve.answering import Answering, Conversation
from meshwright.serve.engine import Engine, Event
from meshwright.serve.grammar import Grammars
from meshwright.serve.loop import EngineFailure, EngineLoop
from meshwright.serve.metrics import Metrics
from meshwright.serve.template import ChatTemplate

T = TypeVar("T")
MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 30.0
"""How long a client may take to send a body."""
READ = ["GET", "HEAD"]
GONE = 499
"""Status of an answer that nobody reads."""


class Refusal(Exception):
    """An answer other than 200: its status, and a line for the client."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = api.error_body(message, kind, code or status)


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes need."""

    loop: EngineLoop
    metrics: Metrics
    model_name: str
    template: ChatTemplate | None
    grammars: Grammars
    api_key: str | None = None

    def check_model(self, asked: str | None) -> None:
        """Refuse requests for another model."""
        if asked is not None and asked != self.model_name:
            shown = ascii(asked[:80])
            message = f"model {shown} is not served here; use {self.model_name!r}"
            raise Refusal(404, message, "not_found_error", "model_not_found")

    def check_room(self, count: int) -> None:
        """Refuse so many more sequences where the queue would be too long."""
        try:
            self.loop.check_room(count)
        except InputError as error:
            raise Refusal(429, str(error), "rate_limit_error", "queue_full") from None

    def check_key(self, request: Request) -> None:
        """Refuse who has not the key."""
        if self.api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Refusal(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")


def make_service(
    engine: Engine,
    model_name: str,
    template: ChatTemplate | None,
    api_key: str | None = None,
    on_failure: Callable[[EngineFailure], None] = lambda failure: None,
) -> Service:
    """What the routes need, around an engine; `on_failure` is called where the engine fails."""
    metrics = Metrics([replica.scheduler for replica in engine.replicas], model_name, engine.runner.block_bytes)

    def watch(events: Ordered[Event], num_tokens: int) -> None:
        if num_tokens:
            metrics.step(num_tokens)
        metrics.tokens(event.sequence for event in events if event.token is not None)
        for event in events:
            if event.finish is not None:
                metrics.end(event.sequence)

    grammars = Grammars(engine.tokenizer, engine.spec.vocab_size, engine.end_tokens)
    return Service(EngineLoop(engine, watch, on_failure), metrics, model_name, template, grammars, api_key)


class Json(Response):
    """JSON of any text, lone surrogates too."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()


def make_app(service: Service) -> FastAPI:
    """The server's routes; the engine's loop runs while it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        if service.loop.failure is None:
            await service.loop.stop()

    app = FastAPI(title="Meshwright", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(InputError, _bad_input)
    app.add_exception_handler(EngineFailure, _failed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _nobody_reads)
    app.add_exception_handler(Exception, _unexpected)
    _add_information(app, service)
    _add_answers(app, service)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return Json(error.body, status_code=error.status, headers=headers)


async def _bad_input(_: Request, error: Exception) -> Response:
    return Json(api.error_body(str(error), "invalid_request_error", 400), status_code=400)


async def _failed(_: Request, error: Exception) -> Response:
    return Json(api.error_body(str(error), "server_error", 503), status_code=503)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = ascii(f"{request.method} {request.url.path[:80]}")[1:-1]
    allowed = " or ".join(sorted(Headers(error.headers).get("allow", "").split(", ")))
    messages = {
        HTTPStatus.NOT_FOUND: f"{asked} is not served here; there are {', '.join(_paths(request.app))}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{asked}: use {allowed}",
    }
    message = messages.get(HTTPStatus(error.status_code), str(error.detail))
    return Json(api.error_body(message, "invalid_request_error", error.status_code), error.status_code, error.headers)


def _paths(app: FastAPI) -> list[str]:
    """What is served."""
    return sorted({route.path_format for route in app.routes if isinstance(route, Route)})


async def _nobody_reads(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)


async def _unexpected(_: Request, error: Exception) -> Response:
    return Json(api.error_body(f"{type(error).__name__}: {error}", "server_error", 500), status_code=500)


def _add_information(app: FastAPI, service: Service) -> None:
    started_s = int(time())
    engine = service.loop.engine
    card = {"id": service.model_name, "object": "model", "created": started_s, "owned_by": "meshwright",
            "max_model_len": engine.max_length}  # fmt: skip

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        failure = service.loop.failure
        if failure is not None:
            return Json(api.error_body(str(failure), "server_error", 503), status_code=503)
        return Json({"status": "ok"})

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.api_route("/v1/models", methods=READ)
    async def models(request: Request) -> Response:
        service.check_key(request)
        return Json({"object": "list", "data": [card]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str, request: Request) -> Response:
        service.check_key(request)
        service.check_model(name)
        return Json(card)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        service.check_key(request)
        body = api.parse(api.TokenizeBody, await read_body(request))
        service.check_model(body.model)
        tokens = await asyncio.to_thread(engine.encode, body.prompt, body.add_special_tokens)
        return Json({"count": len(tokens), "max_model_len": engine.max_length, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        service.check_key(request)
        body = api.parse(api.DetokenizeBody, await read_body(request))
        service.check_model(body.model)
        return Json({"prompt": await asyncio.to_thread(engine.decode, body.tokens)})

    @app.api_route("/", methods=READ)
    async def page() -> Response:
        return HTMLResponse((resources.files("meshwright.serve") / "page.html").read_text(encoding="utf-8"))


def _add_answers(app: FastAPI, service: Service) -> None:
    engine = service.loop.engine

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        service.check_key(request)
        body = api.parse(api.CompletionBody, await read_body(request))
        service.check_model(body.model)
        params, given = body.params(), body.prompts()
        service.check_room(len(given) * params.n)
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        encoded = iter(await asyncio.to_thread(lambda: [engine.encode(text) for text in texts]))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        talk = Conversation(body, params, prompts, service.model_name, api.TEXT, echo=body.echo)
        return await _answer(request, service, talk)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        service.check_key(request)
        body = api.parse(api.ChatBody, await read_body(request))
        service.check_model(body.model)
        params = body.params()
        service.check_room(params.n)
        if service.template is None:
            raise InputError("this model has no chat template: ask /v1/completions")
        messages = [message.for_template() for message in body.messages]
        text = await asyncio.to_thread(service.template.render, messages)
        prompt = await asyncio.to_thread(engine.encode, text, False)
        return await _answer(request, service, Conversation(body, params, [prompt], service.model_name, api.CHAT))


async def _answer(request: Request, service: Service, talk: Conversation) -> Response:
    matchers = None if talk.params.grammar is None else await service.grammars.make(talk.params.grammar)
    service.check_room(talk.params.n * len(talk.prompts))  # once more: others may have come meanwhile
    answering = Answering(service.loop, talk, matchers)
    if talk.body.stream:
        return _Stream(answering)
    whole = await unless_gone(request, answering.whole())
    if whole is None:
        return Response(status_code=GONE)
    return Json(whole)


class _Stream(StreamingResponse):
    """An answer as a stream; its request ends with it, even where the client left before the first piece."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering.stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.close()


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` gives; None where the client left before, and the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """A body of bounded size, in bounded time.

    Raises:
        Refusal: it is too large, encoded, or comes too slowly.
        ClientDisconnect: the client left before its end.
    """
    too_large = Refusal(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", code="body_too_large")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Refusal(415, f"content-encoding {encoding[:40]!a}: bodies are read as they are; send it without one")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
    return bytes(body)
