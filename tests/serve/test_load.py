"""A load of clients of every kind: nothing is lost, nothing grows, nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from meshwright.core.serving import Layout, Requests, ServingPlan
from meshwright.core.sources import load_cluster
from meshwright.models.hf import export
from meshwright.train.tokenizer import save_tokenizer
from tests.end_to_end.shell import MESHWRIGHT, ranks_of, started
from tests.models.tiny import random_model
from tests.serve.conftest import tiny_engine
from tests.serve.storm import Storm, Tally
from tests.serve.test_server import settles

CONTEXT = 512
WAIT_S = 30.0
"""Longer than any answer may take, on a machine that does much else."""
MINUTES = float(os.environ.get("MESHWRIGHT_STORM_MINUTES", "10"))
"""Of one rank and two together."""
GROWTH = 1.05
"""Of the server's memory, from the first quarter of the load to the last."""


def test_a_short_storm(run_server):
    served = run_server(num_blocks=200)
    tally = Tally()
    scheduler, loop, metrics = served.engine.scheduler, served.service.loop, served.service.metrics

    def was_rough() -> bool:
        counts = scheduler.counts
        return sum(tally.kinds.values()) > 50 and counts.preemptions > 0 and counts.finished.get("abort", 0) > 0

    for turn in range(8):  # more than one on a machine that does much else
        asyncio.run(Storm(served.url, CONTEXT, seed=turn, tally=tally).run(2.0, num_clients=16))
        if was_rough():
            break
    assert was_rough()
    assert settles(served)
    assert not tally.wrong
    assert max(tally.whole_s) < WAIT_S
    scheduler.blocks.check([])
    scheduler.blocks.clear()
    assert len(scheduler.blocks._free) == scheduler.blocks.num_blocks
    time.sleep(0.1)
    held = (metrics._first, metrics._last, loop._open, loop._drivers[0].tickets, served.engine._outputs)
    assert [len(one) for one in held] == [0] * len(held)
    assert not served.failures


def test_a_storm_notices_what_is_wrong(run_server):
    """A greedy answer that is not the one before."""
    served = run_server()
    tally = Tally(texts={"what many prompts begin with; one": "another answer"})
    storm = Storm(served.url, CONTEXT * 99, seed=0, tally=tally)
    storm._rng.choice = lambda given: given[0]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=served.url) as storm.client:
            await storm.repeat()
            await storm.too_long()

    asyncio.run(run())
    assert len(tally.wrong) == 1
    assert "answered otherwise" in tally.wrong[0]


# --- ten minutes, on a server of its own --------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, num_ranks: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    engine = tiny_engine()
    spec = engine.spec.model_copy(update={"num_layers": 8})  # so that the smallest cache is full at times
    export(tmp_path / "model", spec, random_model(spec).stored())
    assert engine.tokenizer is not None
    save_tokenizer(engine.tokenizer, tmp_path / "model")
    options = ["--port", "0", "--cache-mib", "1", "--block-size", "4"]
    if num_ranks > 1:
        options = ["--port", "0"]
        layout = Layout(tp=num_ranks, precision="fp32", num_blocks=256, block_size=4)
        requests = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
        plan = ServingPlan(model=spec, cluster=load_cluster(f"local:{num_ranks}"), requests=requests, layout=layout)
        plan.save(tmp_path / "plan.toml")
        options += ["--plan", str(tmp_path / "plan.toml")]
    with started([*MESHWRIGHT, "serve", str(tmp_path / "model"), *options]) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert url
        yield process, url[0]


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])


def metric(url: str, name: str) -> float:
    """One of the server's counts, over all its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.mark.timed
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory in /proc")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_long_storm(server: tuple[subprocess.Popen[str], str], num_ranks: int):
    process, url = server
    tally, memory, duration_s = Tally(), [], 60 * MINUTES / 2
    until = time.monotonic() + duration_s
    for turn in range(10**6):
        asyncio.run(Storm(url, CONTEXT, seed=turn, tally=tally).run(duration_s / 40, num_clients=48))
        memory.append(sum(map(resident_bytes, [process.pid, *ranks_of(process.pid).values()])))
        if time.monotonic() >= until:
            break
    time.sleep(1)
    print(tally.line(), f"memory {memory[0] / 1e6:.1f} to {memory[-1] / 1e6:.1f} MB")
    assert not tally.wrong
    assert max(tally.whole_s) < WAIT_S
    assert metric(url, "num_preemptions_total") > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metric(url, name) == 0, name
    quarter = len(memory) // 4
    assert statistics.median(memory[-quarter:]) < GROWTH * statistics.median(memory[1 : quarter + 1])
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    if num_ranks == 1:
        assert (process.returncode, errors) == (0, "")
    else:  # who starts ranks says which signal ended them
        assert process.returncode == 128 + signal.SIGTERM
        assert errors.count("\n") == 1
