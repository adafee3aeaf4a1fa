"""What users of other servers met: clients that leave at bad moments, queues that race, schemas without an end."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from llguidance import LLMatcher
from pydantic import ValidationError

from meshwright.core.errors import InputError
from meshwright.serve import api, grammar
from meshwright.serve.answering import Answering
from meshwright.serve.api import ChatBody, CompletionBody, DetokenizeBody
from meshwright.serve.app import make_app
from meshwright.serve.engine import Event
from meshwright.serve.request import SamplingParams
from tests.serve.conftest import Running, tiny_engine, tiny_service
from tests.serve.test_server import GOOD, post, schema_form, settles

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"],
                    "additionalProperties": False}},
    "$ref": "#/$defs/n",
}  # fmt: skip


def test_no_tokens_are_no_tokens_under_either_name(served: Running):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = post(served, "/v1/chat/completions", {"messages": MESSAGES, name: 0}).json()
        assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("", 0)


def test_null_is_as_good_as_nothing(served: Running):
    body = {**GOOD, "tools": None, "seed": None, "min_tokens": None, "echo": None, "ignore_eos": None, "stop": None}
    assert post(served, "/v1/completions", body).status_code == 200
    message = {"role": "assistant", "content": None, "tool_calls": None, "audio": None}
    body = {"messages": [message], "max_tokens": 1, "functions": None, "tool_choice": None}
    assert post(served, "/v1/chat/completions", body).status_code == 200
    assert post(served, "/v1/completions", {**GOOD, "prompt": None}).status_code == 400


def test_a_schema_without_an_end_fails_its_own_request(served: Running):
    body = {**GOOD, "max_tokens": 50, "response_format": schema_form(ENDLESS)}
    answer = post(served, "/v1/completions", body)
    assert answer.status_code == 400
    assert "response_format: parser error: Too many items" in answer.json()["error"]["message"]
    last = [line for line in post(served, "/v1/completions", {**body, "stream": True}).text.split("\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    assert post(served, "/v1/completions", GOOD).status_code == 200
    assert settles(served)


def test_a_schema_is_made_once_whatever_the_number_of_answers(served: Running, monkeypatch: pytest.MonkeyPatch):
    """And not in the thread of the engine, where all streams would wait for it."""
    made: list[str] = []

    def watched(*given: Any, **more: Any) -> LLMatcher:
        made.append(threading.current_thread().name)
        return LLMatcher(*given, **more)

    watched.grammar_from_json_schema, watched.validate_grammar = LLMatcher.grammar_from_json_schema, lambda *_: ""
    monkeypatch.setattr(grammar, "LLMatcher", watched)
    form = schema_form({"enum": ["one", "two", "three"]})
    body = {"prompt": ["a", "b"], "n": 4, "temperature": 5, "max_tokens": 40, "response_format": form}
    texts = [choice["text"] for choice in post(served, "/v1/completions", body).json()["choices"]]
    assert {*texts} <= {'"one"', '"two"', '"three"'}
    assert len({*texts}) > 1, "answers are followed one by one"
    assert [name.partition("_")[0] for name in made] == ["grammar"]


def test_methods(served: Running):
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"):
        answer = httpx.head(f"{served.url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    for method, path in (("GET", "/v1/completions"), ("OPTIONS", "/v1/completions"), ("PUT", "/health")):
        answer = httpx.request(method, f"{served.url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405)
        assert answer.headers["allow"]


def test_a_body_that_is_announced_too_large_is_not_waited_for(served: Running):
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_keys_are_compared_as_bytes(run_server):
    served = run_server(api_key="schlüssel")
    for given, status in (("Bearer schlüssel", 200), ("bearer schlüssel", 200), ("schlüssel", 401), ("Bearer x", 401)):
        answer = post(served, "/v1/completions", GOOD, headers={"authorization": given.encode()})
        assert answer.status_code == status, given


def test_lists_beyond_count_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch):
    many = b'{"prompt": "x", "metadata": {"a": [' + b",".join([b"[]"] * 1_000_000) + b"]}}"
    with monkeypatch.context() as patch:
        patch.setattr(api.json, "loads", lambda *_args, **_kwargs: pytest.fail("the lists were made"))
        with pytest.raises(InputError, match="the body holds 1,000,003 lists and objects; 10,000 may be in it"):
            api.parse(api.CompletionBody, many)
    with pytest.raises(InputError, match="50,002 lists"):
        api.parse(api.CompletionBody, b'{"prompt": "x", "metadata": ' + b"[" * 50_001)
    for text in ("[{" * 20_000, r"\\" * 3 + r"\"[" * 20_000, "\n"):
        body = json.dumps({"prompt": text}).encode()
        assert api.parse(api.CompletionBody, body).prompt == text, "what stands in a text counts for nothing"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "x", "metadata": {"a": [' + b"1," * 1_000_001 + b"1]}}", "holds 1,000,002 items; 1,000,000 may"),
        (b'{"prompt": "x", "metadata": {' + b'"a": 1,' * 20_001 + b'"b": 1}}', "holds 20,004 fields; 20,000 may"),
        (b'{"prompt": "x", ' + b'"a": 1,' * 20_001 + b'"b": 1}', "holds 20,003 fields; 20,000 may"),
    ],
)  # fmt: skip
def test_bodies_that_would_hold_all_streams_are_refused_before_they_are_made(body: bytes, says: str, monkeypatch):
    monkeypatch.setattr(api.json, "loads", lambda *_args, **_kwargs: pytest.fail("the body was made"))
    with pytest.raises(InputError, match=says):
        api.parse(api.CompletionBody, body)


def test_millions_of_wrong_items_are_one_mistake():
    ones = [1] * 1000
    for kind, body in (
        (CompletionBody, {"prompt": [1.5] * 1000}),
        (CompletionBody, {"prompt": "a", "stop": ones}),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(2000)), 1.0)}),
        (ChatBody, {"messages": ones}),
        (ChatBody, {"messages": [{"role": "user", "content": ones}]}),
        (DetokenizeBody, {"tokens": ["a"] * 1000}),
    ):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": [[1], "a"]}, "`prompt`: write a text or a list of token ids, or a list"),
        ("/v1/completions", {**GOOD, "stop": 5}, r"`stop`: write a text, or a list of texts \(got 5\)"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "`messages.0.content`: write a text, or a list of parts .*; pictures and sound cannot be read"),
        ("/v1/embeddings", {}, "POST /v1/embeddings is not served here; there are /, /detokenize, /health"),
        ("/health", {}, "POST /health: use GET or HEAD"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_as_one(served: Running, path: str, body: Any, says: str):
    answer = post(served, path, body)
    assert re.search(says, answer.json()["error"]["message"]), answer.text


def test_what_changes_nothing_is_passed_over(served: Running):
    assert post(served, "/v1/completions", {**GOOD, "suffix": ""}).status_code == 200
    more = {"tool_choice": "none", "modalities": ["text"]}
    assert post(served, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **more}).status_code == 200


def test_a_body_that_is_encoded_is_refused_as_such(served: Running):
    body = gzip.compress(json.dumps(GOOD).encode())
    answer = post(served, "/v1/completions", body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["message"][:23]) == (415, "content-encoding 'gzip'")
    assert post(served, "/v1/completions", GOOD, headers={"content-encoding": "identity"}).status_code == 200


def test_prompts_that_find_no_room_are_not_made_tokens_first(run_server, monkeypatch: pytest.MonkeyPatch):
    served = run_server(max_waiting=2)
    monkeypatch.setattr(served.engine, "encode", lambda *_: pytest.fail("a prompt became tokens"))
    assert post(served, "/v1/completions", {**GOOD, "prompt": ["a"] * 3}).status_code == 429
    messages = {"messages": MESSAGES, "n": 3}
    assert post(served, "/v1/chat/completions", messages).status_code == 429


def test_long_texts_become_tokens_without_stopping_other_threads():
    engine, ended, gaps = tiny_engine(), threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    tokens = engine.encode("x y " * 60_000)
    took_s = time.perf_counter() - began
    ended.set()
    thread.join()
    assert len(tokens) == 240_000
    assert max(gaps) < took_s / 2


# --- the loop, held still ------------------------------------------------------------------------------------


def test_the_queue_has_room_for_what_it_says(run_server):
    """Requests that the engine has not looked at yet count, each of their answers once."""
    served = run_server(max_waiting=3, max_running=1)
    loop, params, free = served.service.loop, SamplingParams(max_tokens=2, n=2), threading.Event()
    loop._drivers[0].ask(lambda: bool(free.wait(20)))
    seen: list[str] = []

    async def fill() -> None:
        loop.submit([5], params)
        loop.check_room(1)
        with pytest.raises(InputError, match="2 sequences wait already, and 3 may: there is no room for 2 more"):
            loop.check_room(2)
        ticket = loop.submit([5], SamplingParams(max_tokens=2))
        with pytest.raises(InputError, match="3 sequences wait"):
            loop.check_room(1)
        loop.cancel(ticket)
        loop.check_room(1)
        seen.append("all")

    asyncio.run_coroutine_threadsafe(fill(), loop._loop).result(20)
    free.set()
    assert seen
    assert settles(served)
    assert post(served, "/v1/completions", {**GOOD, "n": 3}).status_code == 200
    assert not served.failures


def call(served_app: Any, body: bytes, receive: Any, send: Any) -> Any:
    """One request, at the application itself."""
    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "headers": headers,
             "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
             "scheme": "http", "http_version": "1.1", "client": ("x", 1), "server": ("x", 1)}  # fmt: skip
    return served_app(scope, receive, send)


def test_a_client_that_leaves_before_its_body_ends_is_no_error():
    service = tiny_service([])

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: dict[str, Any]) -> None:
        pass

    asyncio.run(call(make_app(service), b"{}", receive, send))


def test_a_client_that_leaves_before_the_first_piece_takes_its_request_with_it():
    service = tiny_service([])
    engine = service.loop.engine
    body = json.dumps({"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    parts = iter([{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(parts)

    async def send(_: dict[str, Any]) -> None:
        await asyncio.sleep(30)

    async def run() -> None:
        service.loop.start()
        await asyncio.wait_for(call(make_app(service), body, receive, send), 10)
        await service.loop.stop()

    asyncio.run(run())
    assert engine.is_idle
    assert not service.loop._open


def test_requests_that_were_left_are_forgotten(served: Running):
    """By the metrics, the loop and the engine: nothing grows by them."""
    body = {**GOOD, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    assert settles(served)
    time.sleep(0.1)
    loop, metrics = served.service.loop, served.service.metrics
    held = (metrics._first, metrics._last, loop._open, loop._drivers[0].tickets, served.engine._outputs)
    assert [len(one) for one in held] == [0] * len(held)


def test_what_a_step_brings_comes_together_and_before_the_next_one_computes(run_server):
    """One wake-up for all answers of a request, while the model runs: never a step later, and none is lost."""
    served = run_server()
    loop, runs, handed = served.service.loop, [], []
    run, deliver = served.engine.runner.run, loop._deliver

    def watched_run(batch):
        assert not loop._drivers[0]._ready, "events of the step before are with the event loop"
        runs.append(1)
        return run(batch)

    def watched_deliver(pairs):
        handed.append((len(pairs), len(runs)))
        deliver(pairs)

    served.engine.runner.run, loop._deliver = watched_run, watched_deliver
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 6, "ignore_eos": True}
    answer = post(served, "/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert sum(count for count, _ in handed) == 24
    assert len(handed) < len(runs) + 1
    assert max(count for count, _ in handed) == 4
    assert settles(served)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_piece_that_is_written_by_hand_is_what_json_writes(served: Running, monkeypatch, path: str):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "ignore_eos": True,
            "temperature": 2, "seed": 5, "stream": True, "n": 2}  # fmt: skip
    body.pop("messages" if path == "/v1/completions" else "prompt")

    def pieces() -> list[list[dict]]:
        """Of each choice, without what differs from answer to answer."""
        found: list[list[dict]] = [[], []]
        for line in post(served, path, body).text.splitlines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                assert line == f"data: {json.dumps(piece)}"
                del piece["id"], piece["created"]
                found[piece["choices"][0]["index"]].append(piece)
        return found

    by_hand = pieces()

    def slowly(self: Answering, index: int, text: str) -> str:
        calls.append(text)
        return self._chunk(self._piece(index, Event(None, text), True))

    calls: list[str] = []
    monkeypatch.setattr(Answering, "_plain_chunk", slowly)
    assert pieces() == by_hand
    assert any(not text.isascii() or '"' in text or "\\" in text or text < " " for text in calls)


def test_log_probabilities_of_a_long_prompt_take_the_logits_of_one_chunk_at_a_time():
    engine = tiny_engine(step_tokens=16)
    run, rows = engine.runner.run, []

    def watched(batch):
        logits = run(batch)
        rows.append(0 if logits is None else len(logits))
        return logits

    engine.runner.run = watched
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)
    ((answer,),) = engine.generate([list(range(5, 105))], params)
    assert len(answer.prompt_logprobs) == 99
    assert sum(rows) >= 100
    assert max(rows) == 16
