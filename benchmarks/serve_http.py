"""What a step takes beside the model when clients read streams over HTTP: scheduler, choice, text, event loop.

    python benchmarks/serve_http.py [--folder FOLDER] [--dtype bfloat16] [--loads 1 16 64] [--turns 3] [--threads 2]
                                    [--source OTHER_CHECKOUT/src]

The server runs in a process of its own, over the 134 million parameters of `serve.py`; so many clients at once read a
stream each, greedy, with prompts of 128 tokens. Only steps of decoding count. With `--source`, the package of another
checkout runs beside this one, in turns. It must have :meth:`Engine.begin_step`.

    engine     processor time of the engine's thread outside of the model, in each step: scheduling, choice, text
    loop       processor time of the event loop's thread, in each step: HTTP, JSON, server-sent events
    model      wall time of a step in the model
    share      (engine + loop) / processor time of the whole process: what does not hang on how busy the machine is
    of wall    (engine + loop) / wall time from step to step, as if nothing of it ran beside the model
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LENGTHS = {1: 96, 16: 48, 64: 32}
"""Requests at once → tokens of each answer."""
PROMPT = 128


class Server:
    """A server in a process of its own, that says what its threads took."""

    def __init__(self, source: str, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", str(folder), "--threads", str(threads)]
        environment = {**os.environ, "PYTHONPATH": source}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.port = int(self._read()["port"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def counts(self) -> dict[str, float]:
        """Of the steps that only decoded, since the last time."""
        assert self._process.stdin is not None
        self._process.stdin.write("counts\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


async def read(port: int, load: int, turn: int, num_tokens: int) -> int:
    """So many streams, to their ends; pieces that came."""

    async def one(at: int) -> int:
        prompt = [(7919 * (turn * load + at) + 31 * k) % 200 + 1 for k in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        found = await reader.read(-1)
        writer.close()
        assert b"data: [DONE]" in found, found[:300]
        return found.count(b"data: {")

    return sum(await asyncio.gather(*(one(at) for at in range(load))))


# --- the server's process ----------------------------------------------------------------------------------


class Counting:
    """Clocks around the steps of an engine."""

    def __init__(self, engine: Any) -> None:
        self._run, self._begin = engine.runner.run, engine.begin_step
        engine.runner.run, engine.begin_step = self.run, self.begin
        self.loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self.clear()

    def clear(self) -> None:
        self.num_steps = self.engine_s = self.loop_s = self.model_s = self.process_s = self.wall_s = 0.0
        self._before: tuple[float, ...] | None = None
        self._decodes = False

    def _now(self) -> tuple[float, ...]:
        return time.thread_time(), time.clock_gettime(self.loop_clock), time.process_time(), time.perf_counter()

    def run(self, batch: Any) -> Any:
        began_s, began_wall_s = time.thread_time(), time.perf_counter()
        logits = self._run(batch)
        self._inner = time.thread_time() - began_s, time.perf_counter() - began_wall_s
        self._decodes = batch.num_tokens == len(batch.counts)
        return logits

    def begin(self) -> None:
        """From the begin of one step to the begin of the next, of those that decode."""
        now = self._now()
        if self._before is not None and self._decodes:
            engine_s, loop_s, process_s, wall_s = (a - b for a, b in zip(now, self._before, strict=True))
            self.num_steps += 1
            self.engine_s += engine_s - self._inner[0]
            self.loop_s += loop_s
            self.process_s += process_s
            self.wall_s += wall_s
            self.model_s += self._inner[1]
        self._before = now
        self._begin()


def serve(folder: Path, threads: int) -> None:
    """Until the input ends."""

    import torch
    import uvicorn

    from meshwright.run.served import open_model
    from meshwright.run.serving import Address
    from meshwright.serve.app import make_app, make_service
    from meshwright.serve.options import ServeOptions

    torch.set_num_threads(threads)
    engine = open_model(folder).engine(options=ServeOptions(prefix_cache=False))
    counting = Counting(engine)
    bound = Address("127.0.0.1", 0).bind()
    bound.listen(128)
    server = uvicorn.Server(uvicorn.Config(make_app(make_service(engine, "m", None)), log_level="error", ws="none"))

    def listen() -> None:
        print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
        for _ in sys.stdin:
            names = ("num_steps", "engine_s", "loop_s", "model_s", "process_s", "wall_s")
            print(json.dumps({name: getattr(counting, name) for name in names}), flush=True)
            counting.clear()

    threading.Thread(target=listen, daemon=True).start()
    asyncio.run(server.serve(sockets=[bound]))


# --- both --------------------------------------------------------------------------------------------------


def show(name: str, load: int, found: list[dict[str, float]]) -> None:
    def median(of: Any) -> float:
        return statistics.median(of(counts) for counts in found)

    cells = [f"{1e6 * median(lambda c, n=n: c[n] / c['num_steps']):,.0f}" for n in ("engine_s", "loop_s", "model_s")]
    for below in ("process_s", "wall_s"):
        cells.append(f"{100 * median(lambda c, b=below: (c['engine_s'] + c['loop_s']) / c[b]):.1f} %")
    print("| " + " | ".join([name, str(load), *cells]) + " |", flush=True)


def compare(folder: Path, options: argparse.Namespace) -> None:
    sources = {"this": str(Path(__file__).parents[1] / "src"), **({"other": options.source} if options.source else {})}
    servers = {name: Server(source, folder, options.threads) for name, source in sources.items()}
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        for turn in range(options.turns + 1):
            for load in options.loads:
                for name, server in list(servers.items())[:: 1 if turn % 2 else -1]:
                    asyncio.run(read(server.port, load, turn, LENGTHS[load]))
                    counts = server.counts()
                    if turn:
                        found.setdefault((name, load), []).append(counts)
    finally:
        for server in servers.values():
            server.stop()
    print("| source | streams | engine µs | loop µs | model µs | share | of wall |\n|" + " --- |" * 7)
    for (name, load), counts in found.items():
        show(name, load, counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--loads", nargs="+", type=int, default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the model is kept; a temporary folder if not given")
    parser.add_argument("--source", help="`src` of another checkout")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    from serve import spec_of, write_model

    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)) / f"125m-{options.dtype}"
        if not folder.exists():
            write_model(folder, spec_of("125m"), options.dtype)
        compare(folder, options)


if __name__ == "__main__":
    main()
