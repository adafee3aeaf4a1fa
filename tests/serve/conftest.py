"""A server over a tiny model, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn

from meshwright.run.serving import Address
from meshwright.serve.app import Service, make_app, make_service
from meshwright.serve.engine import Engine
from meshwright.serve.loop import EngineFailure
from meshwright.serve.options import ServeOptions
from meshwright.serve.template import ChatTemplate
from tests.models.tiny import SPECS, random_model
from tests.serve.test_text import byte_level

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@dataclass
class Running:
    """A server that runs."""

    url: str
    engine: Engine
    service: Service
    server: uvicorn.Server
    thread: threading.Thread
    failures: list[EngineFailure] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def tiny_engine(**change: object) -> Engine:
    """A Llama whose vocabulary covers all bytes."""
    spec = SPECS["llama"].model_copy(update={"vocab_size": 260, "max_positions": 512, "name": "tiny"})
    options = ServeOptions.model_validate({"block_size": 4, "num_blocks": 160, "step_tokens": 64, **change})
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    end = tokenizer.token_to_id("</s>")
    return Engine(random_model(spec), options=options, tokenizer=tokenizer, end_tokens=(end,))


def tiny_service(
    failures: list[EngineFailure], api_key: str | None = None, template: str | None = TEMPLATE, **change: object
) -> Service:
    """Around :func:`tiny_engine`."""
    chat = None if template is None else ChatTemplate(template, {"bos_token": "<s>"})
    return make_service(tiny_engine(**change), "tiny", chat, api_key, failures.append)


def start(api_key: str | None = None, template: str | None = TEMPLATE, **change: object) -> Running:
    """Serve :func:`tiny_engine`."""
    failures: list[EngineFailure] = []
    service = tiny_service(failures, api_key, template, **change)
    bound = Address("127.0.0.1", 0).bind()
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="error", timeout_graceful_shutdown=20))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    return Running(f"http://127.0.0.1:{bound.getsockname()[1]}", service.loop.engine, service, server, thread, failures)


@pytest.fixture
def run_server() -> Iterator[Callable[..., Running]]:
    """`run_server(**options)`: a server of one's own."""
    running: list[Running] = []

    def make(**change: object) -> Running:
        running.append(start(**change))
        return running[-1]

    yield make
    for one in running:
        one.server.should_exit = True
        one.thread.join(20)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server for all tests of a file."""
    running = start()
    yield running
    running.server.should_exit = True
    running.thread.join(20)
