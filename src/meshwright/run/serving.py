"""A server over a model: rank 0 answers clients, the other ranks follow its engine.

SIGTERM or Ctrl-C: no new connections; what is under way is answered, then all ranks end. A rank that is lost: open
requests get an error at once, `/health` turns red, and the server ends with one line.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from meshwright.core.axes import WORLD
from meshwright.core.errors import InputError, MeshwrightError, MeshwrightWarning
from meshwright.core.plan import Plan
from meshwright.core.serving import ServingPlan
from meshwright.core.units import counted
from meshwright.run.served import open_model
from meshwright.serve import native
from meshwright.serve.app import Service, make_app, make_service
from meshwright.serve.engine import Engine
from meshwright.serve.loop import EngineFailure
from meshwright.serve.options import ServeOptions
from meshwright.serve.template import ChatTemplate

RED_S = 2.0
"""How long a server whose engine has failed still answers, so that clients and watchers see it; and how long it waits
after SIGTERM for such a failure to show: who starts the ranks stops them all when one is lost."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
DRAIN_S = 60
"""How long answers under way may take after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens, and who may ask."""

    host: str
    port: int
    api_key: str | None = None

    def bind(self) -> socket.socket:
        """A socket there. Raises InputError where it cannot be had."""
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        except OSError as error:
            raise InputError(f"--host {self.host}: no such address: {error.strerror}") from None
        try:
            # by the protocol asyncio knows whose answers must not wait for the client to acknowledge their headers
            bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, self.port))
        except OSError as error:
            raise InputError(
                f"{self.host}:{self.port}: cannot listen there: {error.strerror}; try another --port, or --host"
            ) from None
        return bound


def serve(
    path: Path,
    plan: Plan | ServingPlan | None,
    options: ServeOptions,
    address: Address,
    name: str | None,
    replicas: int | None = None,
) -> None:
    """Serve until told to end. Every rank calls it.

    Args:
        path: a Hugging Face folder, or a training run.
        plan: how the model is divided; None: one rank.
        name: what clients call the model; None: the name of its folder.
        replicas: instead of the plan's.

    Raises:
        MeshwrightError: what cannot be served, or a rank that was lost.
    """
    served = open_model(path)
    bound = address.bind()
    engine = served.engine(plan, options, replicas)
    if engine.mesh.rank:
        for ended in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when
            signal.signal(ended, signal.SIG_IGN)
        bound.close()
        engine.follow()
        return
    model_name = name or path.resolve().name
    template = None if served.template is None else ChatTemplate(served.template, served.special)
    failures: list[EngineFailure] = []
    service = make_service(engine, model_name, template, address.api_key, failures.append)
    _run(service, bound, _greeting(engine, model_name, bound) + _others(plan, engine) + _plainly(engine))
    if failures:
        raise failures[0].__cause__ if isinstance(failures[0].__cause__, MeshwrightError) else failures[0]


def _greeting(engine: Engine, name: str, bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    blocks, several = engine.scheduler.blocks, len(engine.replicas)
    cached = blocks.num_blocks * blocks.block_size
    where = f", on each of {several} replicas" if several > 1 else ""
    requests, mib = counted(cached // engine.max_length, "request"), engine.runner.cache_bytes / 2**20
    return (
        f"serving {name} at http://{host}:{port}{where}: cache of {cached:,} tokens ({mib:,.0f} MiB on each "
        f"rank), {requests} of {engine.max_length:,} tokens at once"
    )


def _others(plan: Plan | ServingPlan | None, engine: Engine) -> str:
    """What the plan has besides this server."""
    others = plan.layout.replicas - len(engine.replicas) if isinstance(plan, ServingPlan) else 0
    if others < 1:
        return ""
    return (
        f"; the plan has {counted(others, 'further replica')}: start each with the same command and a --port of its own"
    )


def _plainly(engine: Engine) -> str:
    """What makes steps on a CPU slower than they could be."""
    why = native.why_plain() if engine.mesh.device.type == "cpu" and engine.runner.dtype in native.NAMES else None
    return f"\nnote: serving without compiled kernels, which is slower: {why}" if why else ""


def _run(service: Service, bound: socket.socket, greeting: str) -> None:
    config = uvicorn.Config(
        make_app(service), log_level="error", access_log=False, timeout_graceful_shutdown=DRAIN_S, ws="none"
    )
    logging.getLogger("uvicorn.error").addFilter(_WithoutCancellations())
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that has gone
    logging.getLogger("asyncio").addFilter(_ToldOnce())
    raise_file_limit()
    server = _Server(config, patience_s=RED_S if service.loop.engine.mesh[WORLD].size > 1 else 0.0)
    # the server's own handlers end it in order, and then raise the signal again: SIGTERM was obeyed by then
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def run() -> None:
        watching = asyncio.ensure_future(_end_when_failed(service, server))
        bound.listen(BACKLOG)  # who reads the greeting may connect, and is answered when all is up
        print(greeting, flush=True)
        await server.serve(sockets=[bound])
        watching.cancel()

    gc.collect()
    gc.freeze()  # what is there now stays: no step waits while it is looked through
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGTERM, before)


class _WithoutCancellations(logging.Filter):
    """Answers that a second Ctrl-C or the end of the drain cuts off are no errors, and need no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is not asyncio.CancelledError and "CancelledError" not in record.getMessage()


class _ToldOnce(logging.Filter):
    """A connection that cannot be accepted is tried again each second: that there are too many is one line, once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return True
        if not self._is_told:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            warnings.warn(
                f"a connection waits until another ends: {error.strerror} (this process may have {limit:,}); raise "
                "`ulimit -n`",
                MeshwrightWarning,
                stacklevel=1,
            )
        self._is_told = True
        return False


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Server(uvicorn.Server):
    """Ends `patience_s` after SIGTERM, and at once after Ctrl-C."""

    def __init__(self, config: uvicorn.Config, patience_s: float) -> None:
        super().__init__(config)
        self._patience_s = patience_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal."""
        if sig != signal.SIGTERM or not self._patience_s:
            super().handle_exit(sig, frame)
            return
        ending = threading.Timer(self._patience_s, super().handle_exit, (sig, frame))
        ending.daemon = True
        ending.start()


async def _end_when_failed(service: Service, server: uvicorn.Server) -> None:
    while service.loop.failure is None:
        await asyncio.sleep(0.1)
    await asyncio.sleep(RED_S)
    server.should_exit = True
