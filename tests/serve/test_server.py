"""The server by the official client, and by clients that are none."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
import time
from typing import Any

import httpx2 as httpx
import openai
import pytest

from meshwright.core.errors import InputError, MeshwrightWarning
from meshwright.run.serving import Address, _ToldOnce, raise_file_limit
from meshwright.serve.request import SamplingParams
from tests.serve.conftest import Running, tiny_engine

GOOD = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def post(served: Running, path: str, body: Any, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{served.url}{path}", content=content, timeout=30, **more)


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def settles(served: Running, seconds: float = 5.0) -> bool:
    """Whether the engine comes to rest with no block held."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if served.engine.is_idle and served.engine.scheduler.blocks.num_held == 0:
            return True
        time.sleep(0.01)
    return False


def test_completions(served: Running, client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="ab", max_tokens=6, temperature=0, logprobs=2, seed=1)
    choice = answer.choices[0]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == 6
    same = client.completions.create(model="tiny", prompt="ab", max_tokens=6, temperature=0)
    assert same.choices[0].text == choice.text
    assert same.choices[0].logprobs is None
    several = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=6, seed=3)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == 4
    by_ids = client.completions.create(model="tiny", prompt=[served.engine.encode("ab")], max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == choice.text


def test_streams_are_the_whole_answer_in_pieces(client: openai.OpenAI):
    for seed in range(2):
        options: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 30, "seed": seed, "temperature": 2}
        whole = client.completions.create(**options)
        chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        *pieces, last = chunks
        assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert (last.choices, last.usage.completion_tokens) == ([], 30)


def test_stop_strings_in_streams(client: openai.OpenAI):
    options: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 5, "temperature": 2}
    text = client.completions.create(**options).choices[0].text
    stop = text[7:10]
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat(client: openai.OpenAI):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content) == 6
    assert answer.usage.prompt_tokens == 1 + len("system: S\nuser: hi\nassistant:")
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks].count("length") == 1


def test_echo_with_log_probabilities(client: openai.OpenAI):
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=1, temperature=0
    ).choices[0]
    assert answer.text == "abc"
    assert answer.logprobs.tokens == ["a", "b", "c"]
    assert answer.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in answer.logprobs.token_logprobs[1:])
    assert answer.logprobs.text_offset == [0, 1, 2]


def test_tokens_inside_a_character_are_told_apart_by_their_bytes(served: Running, client: openai.OpenAI):
    """Those who put characters together, and those who look whether a token was the likeliest, need no text for it."""
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 20}
    found = client.completions.create(**options, prompt="a漢é</s>b").choices[0].logprobs
    pieces = [rf"bytes:\x{byte:02x}" for byte in "漢é".encode()]
    assert found.tokens == ["a", *pieces, "</s>", "b"]
    assert found.text_offset == [0, 1, 1, 1, 2, 2, 3, 3]
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
        assert len(top) in (20, 21), "none hides another"
        assert top[token] == logprob
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 30,
        "seed": 3,
    }
    chat |= {"temperature": 3, "logprobs": True, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**chat).choices[0]
    specials = {b"<s>", b"</s>"}
    spelt = [name for one in answer.logprobs.content if (name := bytes(one.bytes)) not in specials]
    assert b"".join(spelt).decode(errors="replace") == answer.message.content
    chunks = client.completions.create(**options | {"prompt": "漢", "max_tokens": 3}, seed=1, stream=True)
    whole = client.completions.create(**options | {"prompt": "漢", "max_tokens": 3}, seed=1).choices[0].logprobs
    streamed = [at for chunk in chunks if chunk.choices[0].logprobs for at in chunk.choices[0].logprobs.text_offset]
    assert streamed == whole.text_offset


def test_answers_that_match_a_schema(served: Running, client: openai.OpenAI):
    schema = {
        "type": "object", "required": ["a", "b"], "additionalProperties": False,
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    }  # fmt: skip
    form = schema_form(schema)
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], seed=seed, temperature=2, response_format=form
        ).choices[0]
        found = json.loads(answer.message.content)
        assert (0 <= found["a"] <= 99, found["b"] in ("x", "yy"), answer.finish_reason) == (True, True, "stop")
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    answer = post(served, "/v1/completions", {**GOOD, "response_format": bad})
    assert answer.status_code == 400
    assert "response_format" in answer.json()["error"]["message"]
    assert post(served, "/v1/completions", GOOD).status_code == 200


def test_models_tokens_health_and_page(served: Running, client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{served.url}/health").status_code == 200
    found = post(served, "/tokenize", {"prompt": "añ"}).json()
    assert found["count"] == 3
    assert post(served, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "añ"}
    assert "<title>Meshwright</title>" in httpx.get(served.url).text


def test_metrics_have_the_names_that_dashboards_know(served: Running):
    post(served, "/v1/completions", {**GOOD, "max_tokens": 3})
    text = httpx.get(f"{served.url}/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
        "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_sum", "iteration_tokens_total_sum",
        "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "cache_config_info",
        "request_time_per_output_token_seconds_sum",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text, name


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[1]", 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", {}, 400),
        *(
            ("/v1/completions", {"prompt": prompt}, 400)
            for prompt in ("", [], [""], [[]], None, 5, [1, "a"], [-1], [9999], [2**63], "\ud800", "a" * 600, {"a": 1})
        ),
        *(
            ("/v1/completions", {**GOOD, **wrong}, 400)
            for wrong in (
                {"temperature": "1"}, {"temperature": -1}, {"temperature": 1e9}, {"top_p": 0}, {"top_p": 2}, {"n": 0},
                {"n": 10**6}, {"max_tokens": -1}, {"max_tokens": 2**63}, {"max_tokens": 1.5}, {"max_tokens": True},
                {"logprobs": 99}, {"logit_bias": {"x": 1}}, {"logit_bias": {"9999": 1}}, {"stop": [""]}, {"stop": 5},
                {"logit_bias": {"1_0": 1}}, {"logit_bias": {"\u0661": 1}}, {"logit_bias": {"1" * 5000: 1}},
                {"stop": "a" * 1001}, {"response_format": schema_form({"$ref": "#"})},
                {"response_format": schema_form({"type": "string", "pattern": "("})},
                {"response_format": schema_form({"$ref": "http://127.0.0.1:1/x"})},
                {"stop": ["a"] * 99}, {"seed": 2**63}, {"stream": "yes"}, {"best_of": 3}, {"nonsense": 1},
                {"response_format": {"type": "x"}}, {"stop_token_ids": [-5]}, {"timeout": 0}, {"min_tokens": 99},
                {"stream_options": 3}, {"suffix": "x"},
            )
        ),
        ("/v1/completions", {**GOOD, "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": []}, 400),
        ("/v1/nothing", {}, 404),
        ("/tokenize", {"prompt": "\udfff"}, 400),
        ("/detokenize", {"tokens": [2**70]}, 400),
    ],
)  # fmt: skip
def test_bad_requests(served: Running, path: str, body: Any, status: int):
    answer = post(served, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert not served.failures


def test_bodies_have_an_end(served: Running):
    assert post(served, "/v1/completions", b'{"prompt": "' + b"a" * 10 * 2**20 + b'"}').status_code == 413
    assert post(served, "/v1/completions", GOOD).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_with_it(served: Running, stream: bool):
    body = json.dumps({"prompt": "ab", "max_tokens": 500, "ignore_eos": True, "stream": stream, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head + body)
        if stream:
            assert connection.recv(100)
        until = time.monotonic() + 5
        while served.engine.is_idle and time.monotonic() < until:
            time.sleep(0.002)
    before = served.engine.scheduler.counts.finished.get("abort", 0)
    assert settles(served)
    assert served.engine.scheduler.counts.finished["abort"] > before
    assert post(served, "/v1/completions", GOOD).status_code == 200


def test_deadlines(client: openai.OpenAI):
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=400, extra_body={"timeout": 0.05, "ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 400


def test_a_full_queue_says_so(run_server):
    served = run_server(max_waiting=2, max_running=1)
    answer = post(served, "/v1/completions", {**GOOD, "n": 3})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "queue_full"
    assert post(served, "/v1/completions", {**GOOD, "n": 2}).status_code == 200


def test_the_key_is_asked_for(run_server):
    served = run_server(api_key="secret", template=None)
    for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert post(served, "/v1/completions", GOOD, headers=headers).status_code == status
    assert httpx.get(f"{served.url}/health").status_code == 200
    asked = {"messages": [{"role": "user", "content": "a"}]}
    answer = post(served, "/v1/chat/completions", asked, headers={"authorization": "Bearer secret"})
    assert "no chat template" in answer.json()["error"]["message"]


def test_a_server_that_ends_answers_what_is_under_way(run_server):
    served = run_server()
    body = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.server.should_exit = True
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    served.thread.join(10)
    assert not served.thread.is_alive()


def test_an_engine_that_fails_tells_everybody(run_server, monkeypatch: pytest.MonkeyPatch):
    served = run_server()

    def fail(batch: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(served.engine.runner, "run", fail)
    answer = post(served, "/v1/completions", GOOD)
    assert answer.status_code == 503
    assert "no such luck" in answer.json()["error"]["message"]
    assert httpx.get(f"{served.url}/health").status_code == 503
    assert post(served, "/v1/completions", GOOD).status_code == 503
    assert len(served.failures) == 1


def test_params_of_the_api_are_those_of_the_engine(client: openai.OpenAI):
    asked = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [3]}
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=9, seed=4, temperature=1.5, top_p=0.9, presence_penalty=0.5,
        frequency_penalty=0.5, logit_bias={"65": 3.0}, extra_body=asked,
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=9, seed=4, temperature=1.5, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={65: 3.0}, top_k=3, min_p=0.1, repetition_penalty=1.2, ignore_eos=True, stop_token_ids=(3,),
    )  # fmt: skip
    assert answer.choices[0].text == tiny_engine().generate(["abc"], params)[0][0].text


def test_an_answer_on_a_connection_that_is_kept_waits_for_no_acknowledgement() -> None:
    """A client that acknowledges late, as most do, would get each body 40 ms after its headers."""
    accepted: list[int] = []

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        server = await asyncio.start_server(take, sock=Address("127.0.0.1", 0).bind())
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await reader.read()
        writer.close()
        server.close()

    asyncio.run(connect())
    assert accepted == [1]


def test_connections_are_limited_by_the_system_alone_and_too_many_are_one_line() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    told, error = _ToldOnce(), OSError(errno.EMFILE, "Too many open files")
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "accept", None, (OSError, error, None))
    with pytest.warns(
        MeshwrightWarning, match=r"a connection waits .*: Too many open files .* raise `ulimit -n`"
    ) as seen:
        assert [told.filter(record), told.filter(record)] == [False, False]
    assert len(seen) == 1
    assert told.filter(logging.LogRecord("asyncio", logging.ERROR, "", 0, "another", None, None))


def test_an_address_that_is_taken_or_none_is_one_line() -> None:
    with Address("127.0.0.1", 0).bind() as taken:
        taken.listen()
        with pytest.raises(InputError, match=r"cannot listen there: .*try another --port"):
            Address("127.0.0.1", taken.getsockname()[1]).bind()
    with pytest.raises(InputError, match=r"--host bogus\.invalid: no such address"):
        Address("bogus.invalid", 8000).bind()
